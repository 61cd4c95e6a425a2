// Mixed requests of every dialect, streamed and not: the sums of the usage objects that clients got are those of /metrics, the ledger and the
// operator's reports, exactly. A few dozen; 1,000 of them with WHIMBREL_LONG.
import assert from 'node:assert/strict';
import { check, finish, ledger, pick, post, startServer, weatherTool, word } from './lib.mjs';
import { parse, valueOf } from './prometheus.mjs';

const COUNT = process.env.WHIMBREL_LONG ? 1000 : 48, AT_ONCE = 4;
const server = await startServer({ set: { 'engine.sequences_max': 4 } });
const names = ['prompt_tokens', 'cached_tokens', 'restored_tokens', 'output_tokens', 'reasoning_tokens', 'drafted_tokens', 'accepted_tokens'];
const sum = Object.fromEntries(names.map((n) => [n, 0])), kinds = {};

/** Every dialect's numbers as the same few. */
const read = {
  chat: (u) => [u.prompt_tokens, u.prompt_tokens_details.cached_tokens, u.completion_tokens, u.completion_tokens_details.reasoning_tokens],
  responses: (u) => [u.input_tokens, u.input_tokens_details.cached_tokens, u.output_tokens, u.output_tokens_details.reasoning_tokens],
  messages: (u) => [u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens, u.cache_read_input_tokens, u.output_tokens, u.output_tokens_details?.thinking_tokens],
};
function count(kind, usage) {
  assert.ok(usage, `${kind} has a usage object`);
  const [prompt, cached, output, reasoning] = read[kind](usage), own = usage.whimbrel;
  sum.prompt_tokens += prompt;
  sum.cached_tokens += cached;
  sum.output_tokens += output;
  sum.reasoning_tokens += reasoning ?? 0;
  sum.restored_tokens += own.restored_tokens;
  sum.drafted_tokens += own.drafted;
  sum.accepted_tokens += own.accepted;
}
async function call(path, body) {
  const r = await fetch(server.url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ model: 'nano', ...body }) });
  const text = await r.text();
  assert.equal(r.status, 200, `${path}: ${text.slice(0, 300)}`);
  return body.stream ? text.split('\n').filter((l) => l.startsWith('data: {')).map((l) => JSON.parse(l.slice(6))) : JSON.parse(text);
}
const said = Array.from({ length: 6 }, () => Array.from({ length: 30 }, () => word()).join(' '));
const user = () => ({ role: 'user', content: Math.random() < 0.5 ? pick(said) : `${pick(said)} ${word()}` });
const cut = () => ({ max_tokens: 3 + Math.floor(Math.random() * 20) });
const result = () => [user(), { role: 'assistant', content: null, tool_calls: [{ id: 'call_1', type: 'function', function: { name: pick(['get_weather', 'search']), arguments: '{}' } }] }, { role: 'tool', tool_call_id: 'call_1', content: word() }];
const sessions = [];
const requests = {
  chat: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], ...cut() })).usage),
  chatStream: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], stream: true, stream_options: { include_usage: true }, ...cut() })).at(-1).usage),
  choices: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], n: 3, ...cut() })).usage),
  thinking: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], enable_thinking: true, max_tokens: 30 })).usage),
  tool: async () => count('chat', (await call('/v1/chat/completions', { messages: result(), tools: [weatherTool], ...cut() })).usage),
  unstored: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], store: false, ...cut() })).usage),
  kept: async () => count('chat', (await call('/v1/chat/completions', { messages: [user()], store: true, ...cut() })).usage),
  completions: async () => count('chat', (await call('/v1/completions', { prompt: pick(said), ...cut() })).usage),
  prompts: async () => count('chat', (await call('/v1/completions', { prompt: [pick(said), word()], n: 2, ...cut() })).usage),
  responses: async () => count('responses', (await call('/v1/responses', { input: user().content, max_output_tokens: 12 })).usage),
  responsesStream: async () => count('responses', (await call('/v1/responses', { input: user().content, max_output_tokens: 12, stream: true })).findLast((e) => e.response?.usage).response.usage),
  messages: async () => count('messages', (await call('/v1/messages', { messages: [user()], ...cut() })).usage),
  messagesStream: async () => count('messages', (await call('/v1/messages', { messages: [user()], stream: true, ...cut() })).findLast((e) => e.usage).usage),
  session: async () => {
    const s = sessions.pop() ?? (await call('/v1/sessions', {})).id;
    count('chat', (await call(`/v1/sessions/${s}/turns`, { items: [user()], ...cut() })).usage);
    sessions.push(s);
  },
  counted: async () => call('/v1/messages/count_tokens', { messages: [user()] }), /* no turn, no count */
};

await check(`${COUNT} requests of ${Object.keys(requests).length} kinds are answered`, async () => {
  const list = Object.keys(requests);
  let next = 0;
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    while (next < COUNT) {
      const kind = list[next < list.length ? next : Math.floor(Math.random() * list.length)];
      next++;
      await requests[kind]();
      kinds[kind] = (kinds[kind] ?? 0) + 1;
    }
  }));
  console.log(`  ${JSON.stringify(sum)}`);
  assert.ok(sum.cached_tokens > 0 && sum.cached_tokens < sum.prompt_tokens && sum.drafted_tokens >= sum.accepted_tokens);
});
const turns = () => COUNT - (kinds.counted ?? 0);
const get = async (path) => (await fetch(server.admin + path)).json();

await check('/metrics says the same', async () => {
  const f = parse(await (await fetch(`${server.admin}/metrics`)).text());
  for (const name of names) assert.equal(valueOf(f, `whimbrel_${name}_total`), sum[name], name);
  assert.equal(valueOf(f, 'whimbrel_turns_total'), turns());
  assert.equal(valueOf(f, 'whimbrel_e2e_seconds_count'), turns());
});

await check('the overview, the cache and the report since the start say the same', async () => {
  const overview = await get('/admin/v1/overview'), usage = await get('/admin/v1/usage'), cache = await get('/admin/v1/cache');
  for (const name of names) {
    assert.equal(overview.totals[name], sum[name], name);
    assert.equal(usage.totals[name], sum[name], name);
    assert.equal(usage.data.reduce((all, row) => all + row[name], 0), sum[name], name);
  }
  assert.equal(usage.totals.turns, turns());
  for (const name of ['prompt_tokens', 'cached_tokens', 'restored_tokens']) assert.equal(cache[name], sum[name], name);
});

await check('the ledger says the same: its rows, and the reports made of it', async () => {
  const columns = { ...Object.fromEntries(names.map((n) => [n, n])), drafted_tokens: 'drafted', accepted_tokens: 'accepted' }, shared = ['prompt_tokens', 'cached_tokens', 'restored_tokens'];
  const [rows] = ledger(server.data, `select ${names.map((n) => `sum(${shared.includes(n) ? `iif(extra=2,0,${n})` : columns[n]}) ${n}`)}, sum(extra is null) turns from turns`);
  const [days] = ledger(server.data, `select ${names.map((n) => `sum(${columns[n]}) ${n}`)}, sum(turns) turns from usage`);
  for (const what of [rows, days]) assert.deepEqual(what, { ...sum, turns: turns() });
  for (const by of ['day', 'tenant', 'tool', 'day,tenant,tool']) {
    const report = await get(`/admin/v1/usage?by=${by}`);
    for (const name of names) {
      assert.equal(report.totals[name], sum[name], `${name} by ${by}`);
      assert.equal(report.data.reduce((all, row) => all + row[name], 0), sum[name], `${name} by ${by}`);
    }
  }
  const tools = (await get('/admin/v1/usage?by=tool')).data.map((r) => r.tool);
  assert.ok(tools.includes(null) && tools.every((t) => [null, 'get_weather', 'search'].includes(t)), JSON.stringify(tools));
});

await server.stop();
finish();
