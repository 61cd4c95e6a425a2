// What counts as the same item (the table of gateway/ledger_item.c), a check a line, by the tokens of the next prompt:
// what is the same goes on from the tokens that were generated, what is not is taken as the client has it.
import assert from 'node:assert/strict';
import { check, finish, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const bookTool = {
  type: 'function',
  function: { name: 'book_table', description: 'Book a table at a restaurant.', parameters: { type: 'object', required: ['city', 'people'], properties: { city: { type: 'string' }, people: { type: 'integer' } } } },
};
const pingTool = { type: 'function', function: { name: 'ping', description: 'Look whether the line is up.', parameters: { type: 'object', properties: {} } } };
const start = () => ({
  model: 'nano', temperature: 0, max_tokens: 80, return_token_ids: true, tools: [weatherTool, bookTool, pingTool], thinking: { type: 'enabled' },
  messages: [{ role: 'system', content: `You help ${word()}.` }, { role: 'user', content: 'Book a table for 4 people in Oslo.' }],
});
async function run(body) {
  const { status, json, text } = await post(server.url, '/v1/chat/completions', body);
  assert.equal(status, 200, text);
  return { message: json.choices[0].message, prompt: json.prompt_token_ids, output: json.choices[0].token_ids, cached: json.usage.prompt_tokens_details.cached_tokens, cache: json.usage.whimbrel.cache };
}
const startsWith = (all, head) => head.every((id, i) => all[i] === id);
const result = (message) => message.tool_calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: '{"sky":"rain"}' }));

// One conversation: a question, a call, its result, an answer, a call without arguments, its result.
const whole = start();
const called = await run({ ...whole, tool_choice: { type: 'function', function: { name: 'book_table' } }, parallel_tool_calls: false });
assert.equal(called.message.tool_calls?.length, 1, JSON.stringify(called.message));
whole.messages.push(called.message, ...result(called.message));
const answered = await run(whole);
assert.ok(answered.message.content.length > 8);
whole.messages.push(answered.message, { role: 'user', content: 'Ping the line.' });
const pinged = await run({ ...whole, tool_choice: { type: 'function', function: { name: 'ping' } } });
assert.equal(pinged.message.tool_calls[0].function.arguments, '{}');
whole.messages.push(pinged.message, ...result(pinged.message));
const known = [...pinged.prompt, ...pinged.output];
const [CALL, ANSWER, PING] = [2, 4, 6];

const args = (at, change) => (m) => { m[at].tool_calls[0].function.arguments = change(m[at].tool_calls[0].function.arguments); };
const rows = [
  ['nothing', true, () => {}],
  ['blanks at the ends of a text', true, (m) => { m[ANSWER].content = `\n ${m[ANSWER].content}\t\r\n`; }],
  ['text "" for null', true, (m) => { m[CALL].content = ''; }],
  ['text absent for null', true, (m) => { delete m[CALL].content; }],
  ['content in parts', true, (m) => { m[ANSWER].content = [...m[ANSWER].content].map((text) => ({ type: 'text', text })); }],
  ['call ids regenerated', true, (m) => { for (const at of [CALL, PING]) m[at].tool_calls[0].id = m[at + 1].tool_call_id = `own-${at}`; }],
  ['arguments reordered', true, args(CALL, (a) => JSON.stringify(Object.fromEntries(Object.entries(JSON.parse(a)).reverse())))],
  ['arguments spaced', true, args(CALL, (a) => JSON.stringify(JSON.parse(a), null, 4))],
  ['arguments with escapes', true, args(CALL, (a) => a.replace(/Oslo/, '\\u004fsl\\u006f'))],
  ['arguments: 4.0 for 4', true, args(CALL, (a) => a.replace(/("people": ?-?\d+)/, '$1.0'))],
  ['arguments: 4e0 for 4', true, args(CALL, (a) => a.replace(/("people": ?-?\d+)/, '$1e0'))],
  ['arguments "" for {}', true, args(PING, () => '')],
  ['arguments null for {}', true, args(PING, () => 'null')],
  ['reasoning absent', true, (m) => { for (const at of [CALL, ANSWER, PING]) delete m[at].reasoning_content; }],
  ['reasoning ""', true, (m) => { m[ANSWER].reasoning_content = ''; }],
  ['reasoning with other white space at its ends', true, (m) => { m[ANSWER].reasoning_content = `  ${m[ANSWER].reasoning_content}\n`; }],
  ['developer for system', true, (m) => { m[0].role = 'developer'; }],
  ['marks of caching', true, (m) => { for (const item of m) item.cache_control = { type: 'ephemeral' }; }],
  ['model, sampling, max_tokens', true, (m, body) => { Object.assign(body, { temperature: 0.7, seed: 4, top_p: 0.9, max_tokens: 2 }); }],
  ['arguments of another value', false, args(CALL, (a) => a.replace(/("people": ?-?\d+)/, '$11'))],
  ['arguments of another member', false, args(PING, () => '{"a":1}')],
  ['another name of a call', false, (m) => { m[CALL].tool_calls[0].function.name = 'get_weather'; }],
  ['a call more', false, (m) => { m[CALL].tool_calls.push({ id: 'own-1', type: 'function', function: { name: 'ping', arguments: '{}' } }); }],
  ['another character of a text', false, (m) => { m[ANSWER].content = m[ANSWER].content.replace(/.$/, '!'); }],
  ['a blank inside a text', false, (m) => { m[ANSWER].content = m[ANSWER].content.replace(' ', '  '); }],
  ['other reasoning', false, (m) => { m[ANSWER].reasoning_content = `${word()}.`; }],
];

for (const [what, same, change] of rows)
  await check(`${what}: ${same ? 'the same' : 'not the same'}`, async () => {
    const body = { ...whole, max_tokens: 1, messages: structuredClone(whole.messages) };
    change(body.messages, body);
    const t = await run(body);
    assert.equal(startsWith(t.prompt, known), same);
    if (same) {
      assert.ok(t.cached >= known.length - 1, `${t.cached} of ${known.length}`);
      assert.equal(t.cache.lost, 0);
    } else {
      assert.equal(t.cache.reason, 'edited history');
      assert.ok(t.cached >= called.prompt.length - 1, 'all before it is cached');
      // An edit of the newest answer costs nothing of the turn before it.
      const newest = startsWith(t.prompt, [...answered.prompt, ...answered.output]);
      assert.equal(t.cache.lost > 0, !newest);
      assert.equal(t.cache.first_diff?.token, newest ? undefined : known.findIndex((id, i) => t.prompt[i] !== id));
    }
  });

await check('arguments that are not JSON: refused, for nobody generated them', async () => {
  const body = { ...whole, messages: structuredClone(whole.messages) };
  args(CALL, (a) => a.slice(0, -1))(body.messages);
  const { status, json } = await post(server.url, '/v1/chat/completions', body);
  assert.equal(status, 400);
  assert.match(json.error.param, /^messages\[2\]\.tool_calls\[0\]/);
});

await check('a question that ends in blanks: its own tokens, and told so', async () => {
  const body = { ...whole, max_tokens: 1, messages: structuredClone(whole.messages) };
  body.messages[1].content += '  ';
  const t = await run(body);
  assert.equal(t.cache.reason, 'edited history');
  assert.ok(t.cache.first_diff.item <= 2);
  for (const one of [called, answered, pinged])
    assert.ok(t.prompt.join().includes(one.output.join()), 'the answers keep their tokens');
});

await check('messages: marks of caching that move and billing lines that change are no change', async () => {
  const line = (n) => ({ type: 'text', text: `x-anthropic-billing-header: cc_version=2.1; cch=${n};` });
  const body = {
    model: 'nano', max_tokens: 60, temperature: 0,
    system: [line(1), { type: 'text', text: `You help ${word()}.`, cache_control: { type: 'ephemeral' } }],
    messages: [{ role: 'user', content: [{ type: 'text', text: `Who are you, ${word()}?`, cache_control: { type: 'ephemeral' } }] }],
  };
  const total = (u) => u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens;
  const first = (await post(server.url, '/v1/messages', body)).json;
  body.system[0] = line(2);
  delete body.messages[0].content[0].cache_control;
  body.messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: [{ type: 'text', text: 'Go on.', cache_control: { type: 'ephemeral' } }] });
  const second = (await post(server.url, '/v1/messages', body)).json;
  assert.ok(second.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1, JSON.stringify(second.usage));
  assert.equal(second.usage.whimbrel.cache.lost, 0);
});

await check('restore: a request may ask for less; an unknown word is 400', async () => {
  const body = { ...whole, max_tokens: 1, messages: whole.messages.map(({ reasoning_content, ...rest }) => rest) };
  const hidden = async (more) => { const t = await run({ ...body, ...more }); return [called, answered, pinged].map((one) => t.prompt.join().includes(one.output.join())); };
  assert.deepEqual(await hidden({ restore: 'auto' }), [true, true, true]);
  assert.deepEqual(await hidden({ restore: 'linked' }), [true, true, true], 'minted ids link');
  assert.deepEqual(await hidden({ restore: 'off' }), [false, false, false]);
  body.messages = structuredClone(body.messages);
  for (const at of [CALL, PING]) body.messages[at].tool_calls[0].id = body.messages[at + 1].tool_call_id = `own-${at}`;
  assert.deepEqual(await hidden({ whimbrel: { restore: 'linked' } }), [false, false, false]);
  assert.deepEqual(await hidden({}), [true, true, true]);
  const bad = await post(server.url, '/v1/chat/completions', { ...body, restore: 'all' });
  assert.equal(bad.status, 400);
  assert.equal(bad.json.error.param, 'restore');
});

await server.stop();
finish();
