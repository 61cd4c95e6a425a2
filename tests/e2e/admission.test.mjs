// Admission by predicted work, through the front door and on the null engine: refusals before headers with the wait that is worth it, clients'
// deadlines, parts of the queue, weights and priorities.
import assert from 'node:assert/strict';
import { check, finish, metric, post, sleep, startServer, word } from './lib.mjs';

const STEP_MS = 5;
const start = (set) => startServer({ set: { 'engine.null': true, 'engine.slow_step_us': STEP_MS * 1000, 'engine.sequences_max': 1, ...set } });
const chat = (tokens, more) => ({ model: 'nano', ignore_eos: true, max_tokens: tokens, messages: [{ role: 'user', content: word() }], ...more });
const ask = (server, body, headers, path = '/v1/chat/completions') => post(server.url, path, body, headers);
const refused = (server, reason) => fetch(`${server.admin}/metrics`).then((r) => r.text()).then((t) => Number(t.match(new RegExp(`whimbrel_admission_refused_total\\{reason="${reason}"\\} (\\d+)`))[1]));
async function until(condition) { for (let i = 0; i < 500 && !(await condition()); i++) await sleep(10); }
const running = (server) => until(async () => (await metric(server.admin, 'whimbrel_running')) > 0);

const server = await start({});
await check('the null engine says what it is', async () => {
  assert.match(server.line, /backend=null/);
  const { json } = await ask(server, chat(100, { ignore_eos: false }));
  assert.match(json.choices[0].message.content ?? json.choices[0].message.reasoning_content, /script/);
  assert.equal(json.usage.whimbrel.backend, 'null');
});

for (let i = 0; i < 5; i++) await ask(server, chat(40)); // steps are known now

await check('a deadline that cannot be met: 408 at once, 504 on messages, and no retry where none helps', async () => {
  const began = Date.now(), before = await metric(server.admin, 'whimbrel_steps_total');
  const r = await ask(server, chat(400), { 'x-request-timeout-ms': '300' });
  console.log(`  refused after ${Date.now() - began} ms`);
  assert.deepEqual([r.status, r.json.error.type, r.json.error.code, r.headers.get('x-should-retry')], [408, 'timeout', 'deadline_unreachable', 'false'], r.text);
  assert.match(r.json.error.message, /about [\d.]+ s.*deadline leaves 0\.\d s/);
  const messages = await ask(server, { model: 'nano', max_tokens: 400, messages: [{ role: 'user', content: 'x' }] }, { 'x-request-timeout-ms': '10' }, '/v1/messages');
  assert.deepEqual([messages.status, messages.json.error.type], [504, 'timeout_error'], messages.text);
  for (const header of ['x-stainless-timeout', 'x-stainless-read-timeout']) { // seconds of the SDKs; a stream is told at once, so theirs is met
    assert.equal((await ask(server, chat(400), { [header]: '1' })).status, 408, header);
    assert.equal((await ask(server, chat(20), { [header]: '20.0' })).status, 200, header);
    assert.equal((await ask(server, chat(20), { [header]: 'soon' })).status, 200, header);
  }
  assert.equal((await ask(server, chat(240, { stream: true }), { 'x-stainless-timeout': '1' })).status, 200);
  assert.equal(await refused(server, 'deadline'), 4);
  assert.equal((await ask(server, chat(20), { 'x-request-timeout-ms': '20000' })).status, 200);
  assert.ok((await metric(server.admin, 'whimbrel_steps_total')) - before < 400 + 8 * 25, 'what was refused ran no step');
  for (const wrong of ['0', '-1', '1.5', 'x', '86400001']) {
    const bad = await ask(server, chat(4), { 'x-request-timeout-ms': wrong });
    assert.deepEqual([bad.status, bad.json.error.param], [400, 'x-request-timeout-ms']);
  }
});

await check('a wait past the bound: 503 and 529 with the time that it is over, and then it is', async () => {
  const strict = await start({ 'admission.queue_ms_max': 500 });
  for (let i = 0; i < 5; i++) await ask(strict, chat(20));
  const long = ask(strict, chat(400)); // 2 s, more on a busy machine
  await running(strict);
  const r = await ask(strict, chat(4));
  assert.deepEqual([r.status, r.json.error.code], [503, 'overloaded'], r.text);
  const ms = Number(r.headers.get('retry-after-ms'));
  console.log(`  told to come back in ${ms} ms`);
  assert.ok(ms > 100 && ms < 60000, `${ms} ms`);
  assert.equal(Number(r.headers.get('retry-after')), Math.ceil(ms / 1000));
  assert.match(r.json.error.message, /admission\.queue_ms_max/);
  assert.equal((await ask(strict, { model: 'nano', max_tokens: 4, messages: [{ role: 'user', content: 'x' }] }, {}, '/v1/messages')).status, 529);
  assert.equal(await refused(strict, 'queue_time'), 2);
  let again, wait = ms, tries = 0;
  do { // once, but for a machine that becomes slower meanwhile
    await sleep(wait);
    again = await ask(strict, chat(4));
    wait = Number(again.headers.get('retry-after-ms') ?? 0);
  } while (again.status === 503 && ++tries < 5);
  assert.equal(again.status, 200, 'after the wait that was told');
  assert.equal((await long).status, 200);
  await strict.stop();
});

await check('priority: an integer of small bounds, smaller first', async () => {
  for (const priority of [11, -11, 1.5, 'high']) {
    const r = await ask(server, chat(4, { priority }));
    assert.deepEqual([r.status, r.json.error.param], [400, 'priority'], r.text);
  }
  const order = [], hold = ask(server, chat(80));
  await running(server);
  const run = (name, priority) => ask(server, chat(4, { priority })).then((r) => { assert.equal(r.status, 200); order.push(name); });
  const all = [];
  for (const [name, priority] of [['later', 5], ['plain', 0], ['urgent', -5]]) {
    all.push(run(name, priority));
    await until(async () => (await metric(server.admin, 'whimbrel_queued')) === all.length);
  }
  await Promise.all([hold, ...all]);
  assert.deepEqual(order, ['urgent', 'plain', 'later']);
});

await check('the wait was told before, in usage and in metrics', async () => {
  const hold = ask(server, chat(100));
  await running(server);
  const { json } = await ask(server, chat(4)), { queue_ms, forecast_ms } = json.usage.whimbrel;
  await hold;
  console.log(`  predicted ${forecast_ms.toFixed(0)} ms, waited ${queue_ms.toFixed(0)} ms`);
  assert.ok(forecast_ms > 0 && queue_ms > 0);
  for (const name of ['admission_forecast_seconds_count', 'admission_forecast_error_ratio_count', 'admission_admitted_total'])
    assert.ok((await metric(server.admin, `whimbrel_${name}`)) > 0, name);
  assert.equal(await metric(server.admin, 'whimbrel_admission_queued_seconds'), 0);
});
await server.stop();

// ---- tenants ----

const shared = await start({ 'engine.queue_max': 20, 'admission.tenant_percent_max': 50, 'admission.queue_ms_max': 0 });
await check('a tenant fills its part of the queue alone (429), and machine time goes by weight', async () => {
  const keys = {};
  let admin;
  const call = async (method, path, body) => {
    const r = await fetch(`${shared.admin}/admin/v1/${path}`, { method, headers: { 'content-type': 'application/json', ...(admin && { authorization: `Bearer ${admin}` }) }, body: JSON.stringify(body) });
    assert.ok(r.ok, await r.clone().text());
    return r.json();
  };
  admin = (await call('POST', 'keys', { tenant: 'ops', scopes: ['admin'] })).key;
  for (const tenant of ['light', 'heavy']) keys[tenant] = (await call('POST', 'keys', { tenant, scopes: ['inference'] })).key;
  assert.equal((await call('PATCH', 'tenants/heavy', { limits: { weight: 3 } })).limits.weight, 3);
  const as = (tenant, tokens) => ask(shared, chat(tokens), { authorization: `Bearer ${keys[tenant]}` });
  await as('light', 40);
  const hold = as('light', 400);
  await running(shared);
  const flood = await Promise.all(Array.from({ length: 14 }, () => as('light', 4)));
  const counts = flood.reduce((n, r) => ({ ...n, [r.status]: (n[r.status] ?? 0) + 1 }), {});
  assert.deepEqual(counts, { 200: 10, 429: 4 });
  const no = flood.find((r) => r.status === 429);
  assert.deepEqual([no.json.error.type, no.json.error.code, no.headers.get('x-should-retry')], ['rate_limit_error', 'queue_share_full', 'true']);
  assert.ok(Number(no.headers.get('retry-after-ms')) > 0);
  await hold;
  // Both always have something waiting; what each got when the first 40 are over.
  const done = { light: 0, heavy: 0 };
  let total = 0;
  const worker = async (tenant) => { while (total < 40) { if ((await as(tenant, 20)).status === 200 && ++total <= 40) done[tenant]++; } };
  await Promise.all(['light', 'heavy'].flatMap((tenant) => Array.from({ length: 8 }, () => worker(tenant))));
  console.log(`  weight 1: ${done.light}, weight 3: ${done.heavy}`);
  assert.ok(done.heavy >= 2 * done.light, JSON.stringify(done));
});
await shared.stop();
finish();
