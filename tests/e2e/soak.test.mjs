// Requests of every shape on the null engine, one in ten reset, one in twenty read slowly: nothing stays behind, and the process stays as it is.
// About as many as fit 25 s; with WHIMBREL_LONG 1,000,000 against the null engine, and 2,000 against the model.
import assert from 'node:assert/strict';
import http from 'node:http';
import http2 from 'node:http2';
import { randomInt } from 'node:crypto';
import { readFileSync, readdirSync } from 'node:fs';
import { check, finish, metric, pick, sleep, startServer, word } from './lib.mjs';

const LONG = Boolean(process.env.WHIMBREL_LONG), CLIENTS = 32, PREFIX_WORDS = 60;
const prefixes = Array.from({ length: 50 }, () => Array.from({ length: PREFIX_WORDS }, () => word(2)).join(' '));
const question = () => `${pick(prefixes)} ${word()}`;
const shapes = [
  (n) => ['/v1/chat/completions', { messages: [{ role: 'user', content: question() }], max_tokens: n }],
  (n) => ['/v1/chat/completions', { messages: [{ role: 'system', content: word() }, { role: 'user', content: question() }, { role: 'assistant', content: word() }, { role: 'user', content: word() }], max_tokens: n, n: 2 }],
  (n) => ['/v1/messages', { messages: [{ role: 'user', content: question() }], max_tokens: n }],
  (n) => ['/v1/completions', { prompt: question(), max_tokens: n }],
  (n) => ['/v1/responses', { input: question(), max_output_tokens: n, store: false }],
  (n) => ['/v1/chat/completions', { messages: [{ role: 'user', content: word() }], max_tokens: n, tools: [{ type: 'function', function: { name: word(), parameters: { type: 'object', properties: { a: { type: 'string' } } } } }] }],
];

function overHttp1(server, path, body, { reset, slow }) {
  return new Promise((resolve) => {
    const request = http.request(server.url + path, { method: 'POST', agent: server.agent, headers: { 'content-type': 'application/json' } }, (response) => {
      if (slow) { response.pause(); setTimeout(() => response.resume(), 150); }
      response.on('data', () => {}).on('end', () => resolve(response.statusCode)).on('error', () => resolve(0));
    });
    request.on('error', () => resolve(0)).end(body);
    if (reset) setTimeout(() => request.destroy(), randomInt(15));
  });
}
/** Each client has a connection of its own; the server ends one on which too many streams were reset. */
function sessionOf(server, client) {
  const own = server.sessions[client];
  if (own && !own.closed && !own.destroyed) return own;
  server.connections++;
  return (server.sessions[client] = http2.connect(server.url).on('error', () => {}));
}
function overHttp2(server, path, body, { reset, slow, client }) {
  return new Promise((resolve) => {
    const stream = sessionOf(server, client).request({ ':method': 'POST', ':path': path, 'content-type': 'application/json' });
    let status = 0;
    stream.on('response', (h) => { status = h[':status']; }).on('data', () => {}).on('error', () => {}).on('close', () => resolve(status));
    if (slow) { stream.pause(); setTimeout(() => stream.resume(), 150); }
    stream.end(body);
    if (reset) setTimeout(() => stream.close(http2.constants.NGHTTP2_CANCEL), randomInt(15));
  });
}

const rss = (pid) => Number(readFileSync(`/proc/${pid}/status`, 'utf8').match(/VmRSS:\s+(\d+)/)[1]) / 1024;
const descriptors = (pid) => readdirSync(`/proc/${pid}/fd`).length;

async function soak(server, { requests, seconds, tokens }) {
  const { pid } = server.child;
  server.agent = new http.Agent({ keepAlive: true, maxSockets: CLIENTS });
  server.sessions = [];
  server.connections = 0;
  const seen = {}, marks = [], start = Date.now();
  let sent = 0;
  const gauge = (name) => metric(server.admin, `whimbrel_${name}`);
  // What is kept on purpose, each with a bound of its own: recent runs and parsed elements of bodies.
  const kept = async () => ((await gauge('ledger_memory_bytes')) + (await gauge('slice_bytes'))) / 2 ** 20;
  const mark = async () => { const m = { sent, rss: rss(pid), fds: descriptors(pid) }; marks.push(m); m.kept = await kept(); };
  const enough = () => sent >= requests || Date.now() > start + seconds * 1000;
  const part = () => (requests === Infinity ? (Date.now() - start) / (seconds * 1000) : sent / requests);
  await Promise.all(Array.from({ length: CLIENTS }, async (_, client) => {
    while (!enough()) {
      sent++;
      if (marks.length < Math.floor(part() * 8)) mark();
      const [path, body] = pick(shapes)(randomInt(...tokens)), fate = randomInt(100), stream = randomInt(2) === 0;
      const text = JSON.stringify({ model: 'nano', ...body, ...(stream && { stream }) });
      const status = await (client % 2 ? overHttp1 : overHttp2)(server, path, text, { client, reset: fate < 10, slow: fate >= 95 });
      seen[status] = (seen[status] ?? 0) + 1;
    }
  }));
  server.agent.destroy();
  server.sessions.forEach((session) => session.close());
  for (let i = 0; i < 500 && (await gauge('running')) + (await gauge('queued')) + (await gauge('open_exchanges')) > 1; i++) await sleep(10); // /metrics itself is open
  await mark();
  const took = (Date.now() - start) / 1000;
  console.log(`  ${sent} requests in ${took.toFixed(0)} s (${(sent / took).toFixed(0)}/s): ${JSON.stringify(seen)}, ${server.connections} connections of HTTP/2`);
  for (const m of marks) console.log(`  after ${m.sent}: ${m.rss.toFixed(1)} MB, ${m.kept.toFixed(1)} of them kept on purpose, ${m.fds} descriptors`);
  assert.deepEqual(Object.keys(seen).filter((s) => !['0', '200', '503'].includes(s)), [], 'only answers, resets and refusals');
  assert.ok(seen[200] > 0.8 * sent && (seen[503] ?? 0) < 0.05 * sent);
  for (const name of ['running', 'queued', 'prefilling', 'admission_queued_seconds', 'admission_queued_tenants', 'turns_waiting']) assert.equal(await gauge(name), 0, name);
  // No page but those of the prefix tree; and none when that is emptied.
  assert.equal((await gauge('pages_free')) + (await gauge('index_pages')), await gauge('pages'));
  const flush = await fetch(`${server.admin}/admin/v1/cache/flush`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: '{"all":true}' });
  assert.equal(flush.status, 200, await flush.text());
  assert.equal(await gauge('pages_free'), await gauge('pages'));
  assert.equal(await gauge('index_nodes'), 0);
  const warm = marks.find((m) => m.sent > sent / 4), last = marks.at(-1);
  assert.ok(descriptors(pid) <= marks[0].fds + 4, 'descriptors stay');
  // Kept things take a third more than they count, for the allocator; what is beyond that would be a leak.
  const beyond = last.rss - warm.rss - 1.35 * Math.max(0, last.kept - warm.kept);
  console.log(`  ${(last.rss - warm.rss).toFixed(1)} MB more than after a quarter, ${(last.kept - warm.kept).toFixed(1)} MB of them kept`);
  assert.ok(beyond <= 6, `${beyond.toFixed(1)} MB beyond what is kept`);
}

const small = { 'engine.kv_bytes_max': 64 << 20, 'engine.context_max_tokens': 4096 };
await check('the null engine', async () => {
  const server = await startServer({ set: { ...small, 'engine.null': true } });
  await fetch(`${server.admin}/admin/v1/config`, { method: 'PATCH', headers: { 'content-type': 'application/json' }, body: '{"log.level":"warn"}' });
  await soak(server, LONG ? { requests: 1e6, seconds: 7200, tokens: [1, 24] } : { requests: Infinity, seconds: 25, tokens: [1, 24] });
  assert.equal((await server.stop()).code, 0);
});
if (LONG) await check('the model', async () => {
  const server = await startServer({ set: small });
  await fetch(`${server.admin}/admin/v1/config`, { method: 'PATCH', headers: { 'content-type': 'application/json' }, body: '{"log.level":"warn"}' });
  await soak(server, { requests: 2000, seconds: 1200, tokens: [1, 17] });
  assert.equal((await server.stop()).code, 0);
});
finish();
