// Three times what the machine can do, from three tenants that are equal but in how hard they knock: nobody who was let in is timed out, each gets
// its third, and the wait is what was told. On the null engine, with work drawn anew each time. WHIMBREL_LONG: a minute.
import assert from 'node:assert/strict';
import http from 'node:http';
import { randomInt } from 'node:crypto';
import { check, finish, sleep, startServer, word } from './lib.mjs';

const SECONDS = process.env.WHIMBREL_LONG ? 60 : 12, WARM_SECONDS = 4, SLOTS = 4, STEP_US = 4000, ROW_NS = 100000;
const TIMEOUT_MS = 8000, WORK = { tokens: [8, 40], words: [10, 120] };
const server = await startServer({ set: {
  'engine.null': true, 'engine.slow_step_us': STEP_US, 'engine.slow_row_ns': ROW_NS, 'engine.sequences_max': SLOTS, 'admission.queue_ms_max': 3000 } });
const agent = new http.Agent({ keepAlive: true, maxSockets: 512 });

const call = async (method, path, body, key) => (await fetch(`${server.admin}/admin/v1/${path}`, { method, headers: { 'content-type': 'application/json', ...(key && { authorization: `Bearer ${key}` }) }, body: JSON.stringify(body) })).json();
const { key: admin } = await call('POST', 'keys', { tenant: 'ops', scopes: ['admin'] });
const tenants = ['one', 'two', 'three'], keys = {};
for (const tenant of tenants) keys[tenant] = (await call('POST', 'keys', { tenant, scopes: ['inference'] }, admin)).key;

function ask(tenant, { tokens, words }) {
  const text = JSON.stringify({ model: 'nano', ignore_eos: true, max_tokens: tokens, messages: [{ role: 'user', content: Array.from({ length: words }, () => word(2)).join(' ') }] });
  return new Promise((resolve) => {
    const request = http.request(`${server.url}/v1/chat/completions`, { method: 'POST', agent, headers: { 'content-type': 'application/json', authorization: `Bearer ${keys[tenant]}`, 'x-request-timeout-ms': TIMEOUT_MS } }, (response) => {
      let body = '';
      response.on('data', (bytes) => (body += bytes)).on('end', () => resolve({ status: response.statusCode, headers: response.headers, json: JSON.parse(body) }));
    });
    request.on('error', (error) => resolve({ status: 0, error }));
    request.end(text);
  });
}
const draw = () => ({ tokens: randomInt(...WORK.tokens), words: randomInt(...WORK.words) });
const quantile = (list, q) => [...list].sort((a, b) => a - b)[Math.floor((list.length - 1) * q)];
const jain = (x) => x.reduce((a, b) => a + b) ** 2 / (x.length * x.reduce((a, b) => a + b * b, 0));

await check(`overload: ${SECONDS} s of three times the capacity`, async () => {
  // What it can do: as many at once as run, for a while.
  let served = 0;
  const began = Date.now();
  await Promise.all(Array.from({ length: 2 * SLOTS }, async () => { while (Date.now() < began + WARM_SECONDS * 1000) { await ask('one', draw()); served++; } }));
  const capacity = served / ((Date.now() - began) / 1000), share = { one: 0.5, two: 1, three: 1.5 };
  const results = [], all = [], start = Date.now();
  for (const tenant of tenants) all.push((async () => {
    let sent = 0;
    const rate = capacity * share[tenant];
    for (;;) {
      const elapsed = (Date.now() - start) / 1000;
      if (elapsed >= SECONDS) return;
      for (; sent < elapsed * rate; sent++) {
        const work = draw(), at = Date.now();
        all.push(ask(tenant, work).then((r) => results.push({ ...r, tenant, work, at, ms: Date.now() - at })));
      }
      await sleep(5);
    }
  })());
  for (let i = 0; i < all.length; i++) await all[i]; // it grows meanwhile
  const ok = results.filter((r) => r.status === 200), refused = results.filter((r) => [429, 503].includes(r.status) || r.json?.error?.code === 'deadline_unreachable');
  const late = results.filter((r) => r.json?.error?.code === 'timeout');
  // Once the queue has filled, and while all of them still knock.
  const steady = ok.filter((r) => r.at > start + 3000), told = steady.map((r) => r.json.usage.whimbrel).filter((u) => u.queue_ms >= 10);
  const errors = told.map((u) => Math.abs(u.forecast_ms - u.queue_ms) / u.queue_ms);
  const got = tenants.map((t) => steady.filter((r) => r.tenant === t).reduce((n, r) => n + r.json.usage.completion_tokens, 0));
  console.log(`  capacity ${capacity.toFixed(0)}/s, offered ${(results.length / SECONDS).toFixed(0)}/s: ${ok.length} answered, ${refused.length} refused, ${late.length} let in and timed out`);
  console.log(`  wait p50 ${quantile(told.map((u) => u.queue_ms), 0.5).toFixed(0)} ms, predicted wrong by p50 ${(100 * quantile(errors, 0.5)).toFixed(0)} %, p90 ${(100 * quantile(errors, 0.9)).toFixed(0)} % (of ${errors.length})`);
  console.log(`  tokens by tenant ${got.join(' ')}: Jain ${jain(got).toFixed(3)}; refused after p50 ${quantile(refused.map((r) => r.ms), 0.5)} ms`);
  assert.equal(ok.length + refused.length, results.length, `something else: ${JSON.stringify(results.find((r) => !ok.includes(r) && !refused.includes(r))?.json ?? {})}`);
  assert.equal(late.length, 0);
  assert.ok(refused.length > ok.length / 2, 'it was an overload');
  for (const r of refused) if (r.status !== 408) assert.ok(Number(r.headers['retry-after-ms']) > 0);
  assert.ok(jain(got) >= 0.95, `Jain ${jain(got)}`);
});
agent.destroy();
await server.stop();
finish();
