// /metrics: its format, its bounds, and the shared cases of metrics by their numbers. What the numbers must be: counters.test.mjs.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { check, finish, post, root, sleep, startServer, word } from './lib.mjs';
import { parse, seriesOf, valueOf } from './prometheus.mjs';

const cases = new Map(JSON.parse(readFileSync(join(root, 'tests/gateway/cases/metrics-admin.json'))).map((c) => [c.id, c]));
const test = (id, fn) => check(`${id} ${cases.get(id).title}`, () => fn(cases.get(id)));
const long = Boolean(process.env.WHIMBREL_LONG);
const page = async (server) => {
  const r = await fetch(`${server.admin}/metrics`);
  assert.equal(r.headers.get('content-type'), 'text/plain; version=0.0.4; charset=utf-8');
  return r.text();
};
const read = async (server) => parse(await page(server));
const chat = (server, more) => post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 6, messages: [{ role: 'user', content: word() }], ...more });
async function until(what, done) {
  for (let i = 0; i < 1000; i++, await sleep(10)) if (await done()) return;
  throw new Error(`never: ${what}`);
}

await check('the parser sees what is wrong', () => {
  const good = '# HELP a_total x\n# TYPE a_total counter\na_total{b="\\"\\\\\\n"} 1\n';
  parse(good);
  for (const bad of [good.slice(0, -1), good + good, good + 'a_total 1\n' + good, good.replace('counter', 'gauge'), good.replace('# HELP a_total x\n', ''), good.replace('\\n"', '\n"'), good + 'a_total{b="\\"\\\\\\n"} 2\n', good.replace(' 1\n', ' one\n'),
    good.replaceAll('a_total', 'a_ms_total'), '# HELP h x\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1\n', '# HELP h x\n# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\nh_count 1\n'])
    assert.throws(() => parse(bad), undefined, bad);
});

const server = await startServer({ set: { 'engine.draft': 'off' } });
await check('the whole page is well formed, before and after requests; every histogram of the list is there', async () => {
  await read(server);
  await chat(server);
  await chat(server, { model: 'no-such' });
  const families = await read(server);
  for (const name of ['ttft_seconds', 'itl_seconds', 'queue_seconds', 'prefill_seconds', 'uncached_tokens', 'accepted_length_tokens', 'e2e_seconds', 'commit_seconds', 'prompt_tokens', 'output_tokens']) {
    assert.equal(families.get(`whimbrel_${name}`)?.type, 'histogram', name);
    assert.ok(valueOf(families, `whimbrel_${name}_count`) > 0, name);
  }
  for (const name of ['process_resident_memory_bytes', 'process_cpu_seconds_total', 'process_open_fds']) assert.ok(valueOf(families, name) > 0, name);
  assert.ok(![...families.keys()].some((name) => name.startsWith('vllm:')));
});

await check('the Grafana dashboard names nothing that is not there', async () => {
  const families = await read(server), known = new Set([...families.values()].flatMap((f) => [f.name, ...f.samples.map((s) => s.name)]));
  const text = readFileSync(join(root, 'config/grafana.json'), 'utf8');
  const names = new Set(JSON.parse(text).panels.flatMap((p) => p.targets ?? []).flatMap((t) => t.expr.match(/\b(whimbrel|process)_\w+/g)));
  assert.ok(names.size > 20, `${names.size}`);
  for (const name of names) assert.ok(known.has(name), name);
});

await test('B157', async ({ input, expect }) => {
  const before = await read(server);
  for (let i = 0; i < 5; i++) {
    const r = await fetch(`${server.url}/v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ model: 'nano', prompt: `${word()} ${word()}`, max_tokens: 3500, ignore_eos: true, stream: true }) });
    const reader = r.body.getReader();
    await reader.read();
    await reader.cancel();
  }
  const quiet = (f) => valueOf(f, 'whimbrel_requests_live') === 0;
  let after;
  await until('quiet', async () => quiet(after = await read(server)));
  const added = (name, labels) => valueOf(after, name, labels) - valueOf(before, name, labels);
  assert.equal(added('whimbrel_turns_total', { finish: 'abort' }), 5, expect['requests_total{finish="abort"}']);
  assert.equal(added('whimbrel_requests_total', { status: '499' }), 5);
  assert.equal(added('whimbrel_e2e_seconds_count'), 5);
  assert.equal(added('whimbrel_prompt_tokens_total'), added('whimbrel_prompt_tokens_sum'), 'the total is the sum of the requests');
  assert.ok(added('whimbrel_prompt_tokens_total') > 0);
  assert.equal(valueOf(after, 'whimbrel_turns_total'), valueOf(after, 'whimbrel_engine_requests_total'), 'finished by reason = accepted, at a quiet moment');
  assert.equal(input.steps.length, 3);
});

await test('B159', async () => {
  await chat(server, { model: 'warm' });
  const before = seriesOf(await read(server));
  const names = [...Array.from({ length: 1000 }, (_, i) => `m-${i}`), 'a"b\nc'];
  for (let at = 0; at < names.length; at += 50) await Promise.all(names.slice(at, at + 50).map(async (model) => assert.equal((await chat(server, { model })).status, 404)));
  const text = await page(server), after = seriesOf(parse(text));
  assert.ok(after - before <= 1, `${before} to ${after} series`);
  assert.ok(!/m-\d|a\\"b/.test(text), 'no name of a client');
});

await check(`labels and sessions of clients make no series: ${long ? 10000 : 1000} sessions`, async () => {
  await post(server.url, '/v1/sessions', { model: 'nano' });
  await post(server.url, '/v1/chat/completions/render', { model: 'nano', messages: [{ role: 'user', content: 'x' }] });
  const before = await page(server);
  for (let at = 0; at < (long ? 10000 : 1000); at += 50)
    await Promise.all(Array.from({ length: 50 }, (_, i) => (at + i) % 10
      ? post(server.url, '/v1/chat/completions/render', { model: 'nano', messages: [{ role: 'user', content: 'x' }] }, { 'x-session-id': word(5) })
      : post(server.url, '/v1/sessions', { model: 'nano', metadata: { name: word(5) } })));
  for (let i = 0; i < (long ? 500 : 20); i++) await post(server.url, `/v1/chat/completions/${word()}`, {}, { 'x-session-id': word() });
  const after = await page(server), limit = seriesOf(parse(after));
  console.log(`  ${limit} series, ${after.length} bytes`);
  assert.ok(limit - seriesOf(parse(before)) <= 3, 'a status or two that was not there');
  assert.ok(limit < 1000);
});
await server.stop();

await test('B160', async () => {
  const slow = await startServer({ set: { 'engine.slow_step_us': 1000000, 'engine.draft': 'off', 'health.stalled_ms': 100 } });
  const ready = async () => (await fetch(`${slow.url}/health/ready`)).status;
  assert.equal(await ready(), 200);
  const running = Array.from({ length: 3 }, () => chat(slow, { max_tokens: 3, ignore_eos: true }));
  await until('503', async () => (await ready()) === 503);
  assert.equal((await fetch(`${slow.url}/health`)).status, 200, 'live all the while');
  assert.deepEqual((await Promise.all(running)).map((r) => r.status), [200, 200, 200]);
  assert.equal(await ready(), 200, 'recovered');
  await slow.stop();
});

await test('B162', async () => {
  // Two long ones that do not fit together: one is preempted, its rows are computed again.
  const small = await startServer({ set: { 'engine.context_max_tokens': 1024, 'engine.kv_bytes_max': 3500000, 'engine.draft': 'off', 'cache.disk': false } });
  const usages = (await Promise.all(Array.from({ length: 6 }, () => chat(small, { messages: [{ role: 'user', content: Array.from({ length: 150 }, () => word()).join(' ') }], max_tokens: 60, ignore_eos: true })))).map((r) => r.json.usage);
  const f = await read(small), sum = (of) => usages.reduce((all, u) => all + of(u), 0);
  assert.equal(valueOf(f, 'whimbrel_prompt_tokens_total'), sum((u) => u.prompt_tokens));
  assert.equal(valueOf(f, 'whimbrel_output_tokens_total'), sum((u) => u.completion_tokens));
  assert.equal(valueOf(f, 'whimbrel_cached_tokens_total'), sum((u) => u.prompt_tokens_details.cached_tokens));
  await small.stop();
});

await check('vLLM\'s names, if they are wanted: the same numbers', async () => {
  const both = await startServer({ set: { 'metrics.vllm_names': true } });
  await chat(both);
  const f = await read(both), same = (a, b) => assert.equal(valueOf(f, a), valueOf(f, b), a);
  same('vllm:prompt_tokens_total', 'whimbrel_prompt_tokens_total');
  same('vllm:generation_tokens_total', 'whimbrel_output_tokens_total');
  same('vllm:time_to_first_token_seconds_count', 'whimbrel_ttft_seconds_count');
  same('vllm:request_success_total', 'whimbrel_turns_total');
  assert.equal(f.get('vllm:num_requests_running').samples[0].labels.model_name, 'nano');
  await both.stop();
});
finish();
