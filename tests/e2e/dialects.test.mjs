// One session over every dialect in turn: request k on chat, k+1 on responses, k+2 on messages, k+3 as a native session. Each finds the whole request
// before it in the cache, as it would on one dialect alone.
import assert from 'node:assert/strict';
import { randomInt } from 'node:crypto';
import { check, finish, pick, post, startServer, word } from './lib.mjs';

const ROUNDS = 4; // of a question, a call, its result and an answer: two requests
const server = await startServer();

/* A history in no dialect's words: {user}, {text, calls, reasoning?} of the assistant, {results}. */
const tool = { name: 'get_weather', description: 'Get the current weather for a city.',
  // Listed values, and one call at a time: a call ends by its schema, and is never cut by the limit.
  parameters: { type: 'object', properties: { city: { type: 'string', enum: ['Oslo', 'Quito', 'Kyoto'] } }, required: ['city'] } };
const system = 'Be brief.';
const functions = [{ type: 'function', function: tool }];

const messagesOf = (history) => history.flatMap((h) => (h.user !== undefined ? [{ role: 'user', content: h.user }] : h.results ? h.results.map((r) => ({ role: 'tool', tool_call_id: r.id, content: r.text }))
  : [{ role: 'assistant', content: h.text, ...(h.calls.length ? { tool_calls: h.calls.map((c) => ({ id: c.id, type: 'function', function: { name: c.name, arguments: c.arguments } })) } : {}) }]));
const chatUsage = (u) => ({ prompt: u.prompt_tokens, cached: u.prompt_tokens_details.cached_tokens, output: u.completion_tokens });
const chatSaid = (m) => ({ text: m.content ?? '', calls: (m.tool_calls ?? []).map((c) => ({ id: c.id, name: c.function.name, arguments: c.function.arguments })) });
const mode = (thinks) => ({ chat_template_kwargs: { thinking_mode: thinks ? 'enabled' : 'disabled' } });
const limits = { temperature: 0, model: 'nano' };

async function ask(path, body) {
  const r = await post(server.url, path, body);
  assert.equal(r.status, 200, r.text.slice(0, 300));
  return r.json;
}

const dialects = {
  async chat(history, { call, thinks }) {
    const r = await ask('/v1/chat/completions', { ...limits, max_completion_tokens: 120, tools: functions, tool_choice: call ? 'required' : 'none', parallel_tool_calls: false, ...mode(thinks),
      messages: [{ role: 'system', content: system }, ...messagesOf(history)] });
    return { ...chatSaid(r.choices[0].message), usage: chatUsage(r.usage) };
  },
  async responses(history, { call }) {
    const input = history.flatMap((h) => (h.user !== undefined ? [{ role: 'user', content: h.user }] : h.results ? h.results.map((r) => ({ type: 'function_call_output', call_id: r.id, output: r.text }))
      : [...(h.text ? [{ role: 'assistant', content: h.text }] : []), ...h.calls.map((c) => ({ type: 'function_call', call_id: c.id, name: c.name, arguments: c.arguments }))]));
    const r = await ask('/v1/responses', { ...limits, max_output_tokens: 120, instructions: system, input, tools: [{ type: 'function', ...tool }], tool_choice: call ? 'required' : 'none', parallel_tool_calls: false, reasoning: { effort: 'none' } });
    return { text: r.output.flatMap((o) => (o.type === 'message' ? o.content : [])).map((c) => c.text).join(''),
      calls: r.output.filter((o) => o.type === 'function_call').map((o) => ({ id: o.call_id, name: o.name, arguments: o.arguments })),
      usage: { prompt: r.usage.input_tokens, cached: r.usage.input_tokens_details.cached_tokens, output: r.usage.output_tokens } };
  },
  async messages(history, { call, thinks }) {
    const list = history.map((h) => (h.user !== undefined ? { role: 'user', content: h.user } : h.results ? { role: 'user', content: h.results.map((r) => ({ type: 'tool_result', tool_use_id: r.id, content: r.text })) }
      : { role: 'assistant', content: [...(h.text ? [{ type: 'text', text: h.text }] : []), ...h.calls.map((c) => ({ type: 'tool_use', id: c.id, name: c.name, input: JSON.parse(c.arguments) }))] }));
    const { name, description, parameters } = tool;
    const r = await ask('/v1/messages', { ...limits, max_tokens: 120, system, messages: list, tools: [{ name, description, input_schema: parameters }], tool_choice: call ? { type: 'any', disable_parallel_tool_use: true } : { type: 'none' },
      thinking: thinks ? { type: 'enabled', budget_tokens: 1024 } : { type: 'disabled' } });
    const u = r.usage;
    return { text: r.content.filter((b) => b.type === 'text').map((b) => b.text).join(''),
      calls: r.content.filter((b) => b.type === 'tool_use').map((b) => ({ id: b.id, name: b.name, arguments: JSON.stringify(b.input) })),
      usage: { prompt: u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens, cached: u.cache_read_input_tokens, output: u.output_tokens } };
  },
  /** A new session each time: it brings the whole history in its first turn. */
  async native(history, { call, thinks }) {
    const { id } = await ask('/v1/sessions', { model: 'nano', system, tools: functions });
    const r = await ask(`/v1/sessions/${id}/turns`, { ...limits, max_tokens: 120, items: messagesOf(history), tool_choice: call ? 'required' : 'none', parallel_tool_calls: false, ...mode(thinks) });
    return { ...chatSaid(r.items.at(-1)), usage: chatUsage(r.usage) };
  },
};

/** Plays the rounds with the dialects in that order; the cached share of each request. */
async function play(order, thinks) {
  const history = [], shares = [];
  let before = 0, k = 0;
  const next = async (name, call) => {
    const { text, calls, usage } = await dialects[name](history, { call, thinks });
    assert.ok(usage.cached >= before - 1, `${name}: ${usage.cached} cached of the ${before} tokens of the request before`);
    assert.equal(calls.length > 0, call, name);
    before = usage.prompt + usage.output;
    shares.push(usage.cached / usage.prompt);
    history.push({ text, calls });
    return calls;
  };
  for (let round = 0; round < ROUNDS; round++) {
    history.push({ user: `What's the weather in ${pick(['Oslo', 'Quito', 'Kyoto'])}, ${word()}?` });
    const calls = await next(order[k++ % order.length], true);
    history.push({ results: calls.map(({ id }) => ({ id, text: JSON.stringify({ temperature: randomInt(-20, 35), station: word() }) })) });
    await next(order[k++ % order.length], false);
  }
  return shares;
}
const shown = (shares) => shares.map((s) => s.toFixed(2)).join(' ');

const names = Object.keys(dialects);
const rotations = (list) => list.map((_, i) => [...list.slice(i), ...list.slice(0, i)]);
async function compare(list, thinks) {
  console.log(`  chat alone: ${shown(await play(['chat'], thinks))}`);
  for (const order of rotations(list)) console.log(`  ${order.join(', ')}: ${shown(await play(order, thinks))}`);
}

await check('one session over chat, responses, messages and native sessions: cached as on one dialect', () => compare(names, false));
// Of the Responses API thinking is asked for by an effort alone, which leaves it to the model whether it thinks; a native session that is brought
// a history does not find the reasoning of an answer without calls.
await check('one session with reasoning that no client sends back, over chat and messages: cached as on one dialect', () => compare(['chat', 'messages'], true));

await server.stop();
finish();
