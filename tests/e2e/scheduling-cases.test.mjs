// The shared cases of scheduling (tests/gateway/cases/scheduling.json) through the front door, each under its number.
import assert from 'node:assert/strict';
import http from 'node:http';
import http2 from 'node:http2';
import net from 'node:net';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { check, connect, finish, metric, post, root, sleep, startServer, word } from './lib.mjs';

const cases = new Map(JSON.parse(readFileSync(join(root, 'tests/gateway/cases/scheduling.json'))).map((c) => [c.id, c]));
const test = (id, fn) => check(`${id} ${cases.get(id).title}`, () => fn(cases.get(id)));
const words = (n) => Array.from({ length: n }, () => word(2)).join(' ');
const chat = (content, max_tokens, more) => ({ model: 'nano', ignore_eos: true, temperature: 0, max_tokens, messages: [{ role: 'user', content }], ...more });
const ask = (server, body, path = '/v1/chat/completions') => post(server.url, path, body);
const textOf = ({ message: m }) => (m.reasoning_content ?? '') + (m.content ?? '');
async function until(what, condition, ms = 10000) {
  const start = Date.now();
  while (!(await condition())) {
    if (Date.now() - start > ms) throw new Error(`${what}: not within ${ms} ms`);
    await sleep(5);
  }
  return Date.now() - start;
}
const gauge = (server, name) => metric(server.admin, `whimbrel_${name}`);
const pagesKept = async (server) => (await gauge(server, 'pages')) === (await gauge(server, 'pages_free')) + (await gauge(server, 'index_pages'));

/** A streamed chat: its text so far, when each piece came, comments, and its end. */
function stream(server, body) {
  const s = { text: '', at: [], comments: 0, finish: null, usage: null };
  s.done = new Promise((resolve, reject) => {
    const request = http.request(`${server.url}/v1/chat/completions`, { method: 'POST', agent: false, headers: { 'content-type': 'application/json' } }, (response) => {
      let rest = '';
      response.setEncoding('utf8');
      response.on('data', (chunk) => {
        rest += chunk;
        for (let end; (end = rest.indexOf('\n\n')) >= 0; rest = rest.slice(end + 2)) {
          const record = rest.slice(0, end);
          if (record.startsWith(':')) s.comments++;
          if (!record.startsWith('data: {')) continue;
          const { choices: [choice], usage, error } = JSON.parse(record.slice(6));
          if (error) reject(new Error(error.message));
          const piece = (choice?.delta.reasoning_content ?? '') + (choice?.delta.content ?? '');
          if (piece) { s.text += piece; s.at.push(performance.now()); }
          s.finish = choice?.finish_reason ?? s.finish;
          s.usage = usage ?? s.usage;
        }
      }).on('end', () => resolve(s)).on('error', reject);
    });
    s.leave = () => { s.done.catch(() => {}); request.destroy(); };
    request.on('error', reject).end(JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }));
  });
  return s;
}

// ---- clients that leave ----

const SLOTS = 2, STEP_MS = 20;
const slow = await startServer({ set: { 'engine.slow_step_us': STEP_MS * 1000, 'engine.sequences_max': SLOTS, 'engine.step_rows_max': 32, 'engine.prefill_chunk_tokens': 32, 'engine.draft': 'off' } });

/** Sends a body, and hands back how to leave as the mode says. */
const leavers = {
  'HTTP/2 RST_STREAM': async (text) => {
    const session = await connect(slow.url), s = session.request({ ':method': 'POST', ':path': '/v1/chat/completions', 'content-type': 'application/json' });
    s.on('error', () => {}).on('data', () => {}).end(text);
    return () => { s.close(http2.constants.NGHTTP2_CANCEL); setTimeout(() => session.close(), 50); };
  },
  ...Object.fromEntries([['TCP close', 'destroy'], ['TCP reset', 'resetAndDestroy']].map(([name, leave]) => [name, (text) => new Promise((resolve) => {
    const { hostname, port } = new URL(slow.url), socket = net.connect(port, hostname, () => {
      socket.write(`POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(text)}\r\n\r\n${text}`);
      resolve(() => socket[leave]());
    }).on('error', () => {}).on('data', () => {});
  })])),
};
await test('B117', async ({ expect }) => {
  const phases = { decode: () => word(), prefill: () => words(1500) };
  for (const how of expect.modes.filter((m) => leavers[m])) for (const streamed of [true, false]) for (const [phase, content] of Object.entries(phases)) {
    // Twice as many as run: half of them leave while queued.
    const leave = await Promise.all(Array.from({ length: 2 * SLOTS }, () => leavers[how](JSON.stringify(chat(content(), 4000, { stream: streamed })))));
    await until('all are there', async () => (await gauge(slow, 'running')) === SLOTS && (await gauge(slow, 'queued')) === SLOTS);
    await sleep(phase === 'decode' ? 200 : 0);
    leave.forEach((go) => go());
    const ms = await until(`${how}, ${phase}`, async () => (await gauge(slow, 'running')) + (await gauge(slow, 'queued')) === 0, 2000);
    console.log(`  ${how}, stream ${streamed}, ${phase}: gone after ${ms} ms`);
    assert.equal((await ask(slow, chat(word(), 1))).status, 200);
  }
  assert.ok(await pagesKept(slow));
});
await slow.stop();

await test('B118', async () => {
  const server = await startServer({ set: { 'engine.sequences_max': 1, 'engine.slow_step_us': 2000, 'engine.draft': 'off' } });
  const body = chat(`hello ${word()}`, 300), alone = (await ask(server, body)).json;
  const a = stream(server, body);
  await until('A runs', async () => a.at.length > 0);
  const b = stream(server, chat(word(), 300));
  await until('B waits', async () => (await gauge(server, 'queued')) === 1);
  b.leave();
  await until('B is gone', async () => (await gauge(server, 'queued')) === 0, 1000);
  assert.equal(await gauge(server, 'running'), 1);
  await a.done;
  assert.equal(a.text, textOf(alone.choices[0]));
  assert.equal(a.usage.completion_tokens, 300);
  await server.stop();
});

// ---- long prompts beside streams ----

await test('B120', async ({ expect }) => {
  // 150,000 tokens are past this model's window; what fits it takes hundreds of steps, too.
  const server = await startServer({ set: { 'server.keepalive_ms': 100, 'limits.request_timeout_ms': 0, 'engine.draft': 'off' } });
  const a = stream(server, chat(word(), 600));
  await until('A runs', async () => a.at.length >= 100, 60000);
  const b = stream(server, chat(words(5000), 4)), from = a.at.length;
  await b.done;
  const to = a.at.length, gaps = (first, last) => a.at.slice(first, last).map((t, i, all) => t - (all[i - 1] ?? t)).slice(1).sort((x, y) => x - y);
  await a.done;
  const at = (list, q) => list[Math.floor((list.length - 1) * q)];
  const alone = gaps(0, from), beside = gaps(from, to);
  console.log(`  ${b.usage.prompt_tokens} prompt tokens beside a stream: gap p50 ${at(beside, 0.5)?.toFixed(2)} p99 ${at(beside, 0.99)?.toFixed(2)} max ${beside.at(-1)?.toFixed(2)} ms; alone p50 ${at(alone, 0.5).toFixed(2)} p99 ${at(alone, 0.99).toFixed(2)} ms (${expect.max_gap_between_tokens_of_A})`);
  assert.equal(a.usage.completion_tokens, 600);
  assert.ok(b.usage.prompt_tokens > 8000, `${b.usage.prompt_tokens}`);
  assert.ok(to - from > 20, 'A goes on while B is read');
  assert.ok(b.comments > 0, 'B is told that it is alive');
  assert.equal(b.usage.completion_tokens, 4);
  await server.stop();
});

// ---- preemption ----

await test('B121', async ({ input }) => {
  assert.match(input.load, /12 requests of 2,000 prompt \+ 500 output tokens, pool for 6/);
  // A third of it, for time: 12 requests, pages for 6.
  const OUTPUT = 160, context = { 'engine.context_max_tokens': 1024 }, probe = await startServer({ set: context });
  const pageBytes = await gauge(probe, 'page_bytes'), bodies = Array.from({ length: 12 }, () => chat(words(250), OUTPUT)), solo = [];
  for (const body of bodies) solo.push((await ask(probe, body)).json);
  await probe.stop();
  const each = Math.ceil((solo[0].usage.prompt_tokens + OUTPUT) / 128);
  const server = await startServer({ set: { ...context, 'cache.disk': false, 'model.draft': 'off', 'log.level': 'debug', 'engine.kv_bytes_max': pageBytes * 6 * each } });
  const pages = await gauge(server, 'pages'), all = await Promise.all(bodies.map((body) => stream(server, body).done));
  all.forEach((s, i) => {
    assert.equal(s.text, textOf(solo[i].choices[0]), `request ${i}: append-only, nothing missing, nothing twice`);
    assert.equal(s.usage.completion_tokens, solo[i].usage.completion_tokens);
    assert.equal(s.finish, 'length');
  });
  const preempted = server.log().match(/seq_preempted/g)?.length ?? 0;
  console.log(`  ${solo[0].usage.prompt_tokens} + ${OUTPUT} tokens each, pages ${pages} for 12 x ${each}; preempted ${preempted} times`);
  assert.ok(preempted > 0);
  assert.ok(await pagesKept(server));
  await server.stop();
});

// ---- bounds ----

const server = await startServer({ set: { 'engine.context_max_tokens': 1024 } });
await test('B123', async ({ expect }) => {
  const window = 1024, lengths = {
    chat: async (text) => (await ask(server, chat(text, 1), '/v1/chat/completions/render')).json.tokens.length,
    responses: async (input) => (await ask(server, { model: 'nano', input }, '/v1/responses/input_tokens')).json.input_tokens,
    messages: async (content) => (await ask(server, { model: 'nano', messages: [{ role: 'user', content }] }, '/v1/messages/count_tokens')).json.input_tokens,
  };
  const count = async (api, tokens) => { // a message whose prompt has so many
    let text = 'a';
    for (let n = await lengths[api](text); n !== tokens; n = await lengths[api](text)) text = n < tokens ? text + ' a'.repeat(tokens - n) : text.slice(0, -2 * (n - tokens));
    return text;
  };
  const apis = {
    chat: (content, max) => ask(server, { ...chat(content, max), ...(max === undefined && { max_tokens: undefined }) }),
    responses: (input, max_output_tokens) => ask(server, { model: 'nano', input, max_output_tokens, ignore_eos: true, temperature: 0 }, '/v1/responses'),
    messages: (content, max) => ask(server, { model: 'nano', messages: [{ role: 'user', content }], max_tokens: max ?? 100, ignore_eos: true }, '/v1/messages'),
  };
  for (const [api, send] of Object.entries(apis)) for (const [over, wanted] of [[1, 400], [0, 400]]) {
    const r = await send(await count(api, window + over), 100);
    assert.equal(r.status, wanted, `${api}, window + ${over}: ${r.text.slice(0, 300)}`);
    if (api === 'messages') assert.match(r.json.error.message, /prompt is too long: \d+ tokens > 1024 maximum/);
    else assert.deepEqual([r.json.error.code, /1024/.test(r.json.error.message), new RegExp(`${window + over}`).test(r.json.error.message)], [expect.rows[0]['error.code'], true, true], r.text);
  }
  for (const [api, send] of Object.entries(apis)) for (const max of [100, undefined]) {
    const r = await send(await count(api, window - 10), max);
    assert.equal(r.status, 200, `${api}, window - 10: ${r.text.slice(0, 300)}`);
    const { usage } = r.json, made = usage.completion_tokens ?? usage.output_tokens;
    assert.ok(made >= 1 && made <= 12, `${api}: ${made} tokens`);
    if (api === 'chat') assert.deepEqual([r.json.choices[0].finish_reason, made, usage.prompt_tokens], ['length', 10, window - 10]);
  }
});

await test('B125', async ({ request, expect }) => {
  const base = { ...request.body, model: 'nano' };
  delete base.logit_bias;
  for (const { status, ...row } of expect.rows) {
    const r = await ask(server, { ...base, ...row }), [name] = Object.keys(row);
    if (typeof status === 'number') assert.equal(r.status, status, `${JSON.stringify(row)}: ${r.text.slice(0, 200)}`);
    else assert.ok([200, 400].includes(r.status), r.text);
    if (r.status === 400) assert.ok(`${r.json.error.param} ${r.json.error.message}`.includes(name), `${JSON.stringify(row)}: ${r.text}`);
    assert.equal((await ask(server, base)).status, 200, 'a normal request behind it');
  }
});
await server.stop();
assert.deepEqual([...cases.keys()], ['B117', 'B118', 'B120', 'B121', 'B123', 'B125'], 'every case is here');
finish();
