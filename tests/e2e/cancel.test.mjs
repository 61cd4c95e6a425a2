// A client that leaves is noticed within 500 ms: on HTTP/1.1, h2c and TLS, in the queue, in prefill and in decode.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, connect, finish, metric, sleep, startServer, word } from './lib.mjs';

const dir = mkdtempSync(join(tmpdir(), 'whimbrel-tls-'));
execFileSync('openssl', ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2', '-subj', '/CN=localhost',
  '-keyout', join(dir, 'key.pem'), '-out', join(dir, 'cert.pem')], { stdio: 'ignore' });
// Steps of 20 ms make each phase long enough to leave in.
const server = await startServer({ set: {
  'engine.slow_step_us': 20000, 'engine.sequences_max': 1, 'engine.step_rows_max': 32, 'engine.prefill_chunk_tokens': 32, 'engine.draft': 'off',
  'server.tls_listen': '127.0.0.1:0', 'server.tls_cert': join(dir, 'cert.pem'), 'server.tls_key': join(dir, 'key.pem') } });
const long = (n) => Array.from({ length: n }, () => word(2)).join(' ');
const body = (content) => JSON.stringify({ model: 'nano', stream: true, ignore_eos: true, max_tokens: 4000, temperature: 0, messages: [{ role: 'user', content }] });

/** Starts a request; resolves to { leave, first } where first resolves with the first output record. */
const clients = {
  h1: async (content) => {
    let seen;
    const first = new Promise((resolve) => (seen = resolve));
    const request = http.request(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, agent: false });
    request.on('response', (r) => r.on('data', (d) => /"content":"[^"]|reasoning_content/.test(d) && seen()).on('error', () => {}));
    request.on('error', () => {});
    request.end(body(content));
    return { first, leave: () => request.destroy() };
  },
  ...Object.fromEntries([['h2c', server.url, {}], ['tls', server.tls, { rejectUnauthorized: false }]].map(([name, url, options]) => [name, async (content) => {
    let seen;
    const first = new Promise((resolve) => (seen = resolve));
    const session = await connect(url, options);
    const stream = session.request({ ':method': 'POST', ':path': '/v1/chat/completions', 'content-type': 'application/json' });
    stream.on('data', (d) => /"content":"[^"]|reasoning_content/.test(d) && seen());
    stream.on('error', () => {});
    stream.end(body(content));
    return { first, leave: () => { stream.close(8); setTimeout(() => session.close(), 100); } };
  }])),
};

const gauge = (name) => metric(server.admin, name);
async function until(what, condition, ms) {
  const start = Date.now();
  while (!(await condition())) {
    if (Date.now() - start > ms) throw new Error(`${what}: not within ${ms} ms`);
    await sleep(10);
  }
  return Date.now() - start;
}
const idle = async () => (await gauge('whimbrel_running')) === 0 && (await gauge('whimbrel_queued')) === 0;

for (const [name, start] of Object.entries(clients)) {
  await check(`${name}: leaving in decode is noticed within 500 ms`, async () => {
    const client = await start(`hello ${word()}`);
    await client.first;
    assert.equal(await gauge('whimbrel_running'), 1);
    client.leave();
    console.log(`  ${await until('decode', idle, 500)} ms`);
  });
  await check(`${name}: leaving in prefill is noticed within 500 ms`, async () => {
    const client = await start(long(3000));
    await until('start', async () => (await gauge('whimbrel_running')) === 1, 5000);
    client.leave();
    console.log(`  ${await until('prefill', idle, 500)} ms`);
  });
  await check(`${name}: leaving in the queue is noticed within 500 ms`, async () => {
    const first = await start(`hello ${word()}`);
    await first.first;
    const second = await start(`hello ${word()}`);
    await until('queued', async () => (await gauge('whimbrel_queued')) === 1, 5000);
    second.leave();
    console.log(`  ${await until('queue', async () => (await gauge('whimbrel_queued')) === 0, 500)} ms`);
    assert.equal(await gauge('whimbrel_running'), 1, 'the other one goes on');
    first.leave();
    await until('end', idle, 500);
  });
}
await server.stop();
finish();
