// Text as clients have it: halves of characters, NUL, characters of many bytes that tokens split, and numbers that no double holds.
import assert from 'node:assert/strict';
import { check, finish, post, startServer, word } from './lib.mjs';

const server = await startServer();
const HALF = '\\ud83d', NUL = '\\u0000'; // as they stand in JSON

async function ask(path, body, status = 200) {
  const r = await post(server.url, path, body);
  assert.equal(r.status, status, r.text.slice(0, 300));
  return r;
}
const quoted = (text) => JSON.stringify(text);
/** The JSON of `value` in which each "@@" stands for `text`, as it is; "%%" for the same inside a string that is JSON itself, as a client's encoder
 * would write it; and "##" for it without NUL, which labels must not hold. */
const json = (value, text) => JSON.stringify(value).replaceAll('@@', text).replaceAll('%%', text.replaceAll('\\', '\\\\')).replaceAll('##', text.replaceAll(NUL, ''));
const chatTool = (name, parameters, description = 'A tool.') => ({ type: 'function', function: { name, description, parameters } });
const object = (properties) => ({ type: 'object', properties, required: Object.keys(properties), additionalProperties: false });
const render = async (body) => (await ask('/v1/chat/completions/render', body)).json;

// ---- halves and NUL ----

const limits = { model: 'nano', temperature: 0 };
const call = { id: 'call_1', type: 'function', function: { name: 'f', arguments: '{"x":"%%"}' } };
const bodies = {
  chat: ['/v1/chat/completions', { ...limits, max_tokens: 4, tools: [chatTool('f', object({ x: { type: 'string', description: 'd @@' } }), 'd @@')], user: '##', metadata: { k: '##' },
    messages: [{ role: 'system', content: 's @@' }, { role: 'user', content: [{ type: 'text', text: 'u @@' }] }, { role: 'assistant', content: 'a @@', reasoning_content: 'r @@', tool_calls: [call] },
      { role: 'tool', tool_call_id: 'call_1', content: 't @@' }, { role: 'user', content: '@@' }] }],
  completions: ['/v1/completions', { ...limits, max_tokens: 4, prompt: 'p @@' }],
  responses: ['/v1/responses', { ...limits, max_output_tokens: 4, instructions: 'i @@', metadata: { k: '##' }, input: [{ role: 'user', content: [{ type: 'input_text', text: 'u @@' }] }, { type: 'message', role: 'assistant', content: [{ type: 'output_text', text: 'a @@', annotations: [] }] },
    { type: 'function_call', call_id: 'c', name: 'f', arguments: '{"x":"%%"}' }, { type: 'function_call_output', call_id: 'c', output: 't @@' }] }],
  messages: ['/v1/messages', { ...limits, max_tokens: 4, system: [{ type: 'text', text: 's @@' }], tools: [{ name: 'f', description: 'd @@', input_schema: object({ x: { type: 'string' } }) }], metadata: { user_id: '##' },
    messages: [{ role: 'user', content: 'u @@' }, { role: 'assistant', content: [{ type: 'thinking', thinking: 'r @@', signature: '' }, { type: 'text', text: 'a @@' }, { type: 'tool_use', id: 'c', name: 'f', input: { x: '@@' } }] },
      { role: 'user', content: [{ type: 'tool_result', tool_use_id: 'c', content: [{ type: 'text', text: 't @@' }] }] }] }],
};

for (const [dialect, [path, body]] of Object.entries(bodies)) {
  await check(`${dialect}: half a character and NUL in any text do not end a turn, whole or streamed, and the same again is known again`, async () => {
    for (const odd of [HALF, NUL, `${HALF}${NUL}\\ude00${HALF}`]) {
      const first = await ask(path, json(body, odd));
      const again = (await ask(path, json(body, odd))).json.usage;
      const cached = again.prompt_tokens_details?.cached_tokens ?? again.input_tokens_details?.cached_tokens ?? again.cache_read_input_tokens;
      const prompt = again.prompt_tokens ?? (dialect === 'messages' ? again.input_tokens + again.cache_read_input_tokens + again.cache_creation_input_tokens : again.input_tokens);
      assert.ok(cached >= prompt - 1, `${cached} of ${prompt}`);
      new TextDecoder('utf-8', { fatal: true }).decode(Buffer.from(first.text));
      assert.equal((await ask(path, json({ ...body, stream: true }, odd))).text.includes('"error":{'), false);
    }
  });
}

await check('half a character is U+FFFD in every field of the prompt; NUL stays what it is', async () => {
  const [, body] = bodies.chat;
  const { prompt } = await render(json(body, `${HALF}x`));
  for (const head of ['s ', 'u ', 'a ', 'r ', 't ', 'd ']) assert.ok(prompt.includes(`${head}\ufffdx`), `${head}: ${quoted(prompt)}`);
  assert.ok(!/[\ud800-\udfff]/.test(prompt));
  assert.ok((await render(json(body, `${NUL}x`))).prompt.includes('t \0x'));
  // A pair is one character; a half before a pair is one U+FFFD.
  assert.ok((await render(json(body, `${HALF}\\ud83d\\ude42`))).prompt.includes('t \ufffd\u{1f642}'));
});

await check('what is stored is told as it was read', async () => {
  const odd = `${HALF}x${NUL}y`, read = '\ufffdx\0y';
  const { json: made } = await ask('/v1/responses', json(bodies.responses[1], odd));
  const items = await (await fetch(`${server.url}/v1/responses/${made.id}/input_items?order=asc`)).json();
  assert.equal(items.data[0].content[0].text, `u ${read}`);
  assert.equal(items.data.at(-1).output, `t ${read}`);
  assert.equal(made.metadata.k, '\ufffdxy');
  const { json: next } = await ask('/v1/responses', { ...limits, max_output_tokens: 4, previous_response_id: made.id, input: 'and?' });
  assert.ok(next.usage.input_tokens_details.cached_tokens > 0);
});

await check('native sessions: turns and appended results with half characters and NUL', async () => {
  const { id } = (await ask('/v1/sessions', json({ model: 'nano', system: 's @@', metadata: { k: '@@' }, tools: [chatTool('f', object({ x: { enum: ['a'] } }), 'd @@')] }, HALF))).json;
  const one = (await ask(`/v1/sessions/${id}/turns`, json({ items: [{ role: 'user', content: 'u @@' }], temperature: 0, max_tokens: 60, tool_choice: 'required', parallel_tool_calls: false }, `${HALF}${NUL}`))).json;
  assert.equal(one.items.find((item) => item.role === 'user').content, 'u \ufffd\0');
  const [made] = one.items.at(-1).tool_calls;
  // A streamed body is bytes: what is no UTF-8 is refused, NUL is text.
  const append = (bytes, done) => fetch(`${server.url}/v1/sessions/${id}/append?call_id=${made.id}&done=${done}`, { method: 'POST', headers: { 'content-type': 'text/plain' }, body: bytes });
  const emoji = Buffer.from('a\0b \u{1f642}');
  assert.equal((await append(emoji.subarray(0, 6), false)).status, 200, 'a piece may end inside a character');
  assert.equal((await append(emoji.subarray(6), true)).status, 200);
  const two = (await ask(`/v1/sessions/${id}/turns`, { items: [{ role: 'tool', tool_call_id: made.id }], temperature: 0, max_tokens: 4 })).json;
  assert.equal(two.items[0].content, 'a\0b \u{1f642}');
  assert.ok(two.usage.prompt_tokens_details.cached_tokens >= one.usage.total_tokens - 1);
});

// ---- deltas ----

const TEXT = '\u{1f642}\u{1f469}\u200d\u{1f680} na\u00efve \ube44\ube54\ubc25 \u{20bb7} e\u0301\u0000';
// One half is known beforehand, the other the model's choice, character by character.
const schema = object({ t: { const: TEXT }, u: { type: 'string', pattern: '^[\u{1f642}\u{1f680}\ube44\u00ef]{12}$' } });
const streams = {
  chat: ['/v1/chat/completions', { messages: [{ role: 'user', content: 'Go.' }], response_format: { type: 'json_schema', json_schema: { name: 'o', strict: true, schema } } }, 'max_tokens', (d) => d.choices?.[0]?.delta.content, (r) => r.choices[0].message.content],
  responses: ['/v1/responses', { input: 'Go.', text: { format: { type: 'json_schema', name: 'o', strict: true, schema } } }, 'max_output_tokens', (d) => (d.type === 'response.output_text.delta' ? d.delta : ''), (r) => r.output.filter((o) => o.type === 'message').flatMap((o) => o.content).map((c) => c.text).join('')],
  messages: ['/v1/messages', { messages: [{ role: 'user', content: 'Go.' }], output_config: { format: { type: 'json_schema', schema } } }, 'max_tokens', (d) => d.delta?.text, (r) => r.content.map((b) => b.text).join('')],
};

/** The deltas of a stream; each record's bytes are UTF-8 by themselves, and no delta holds half of a pair. */
async function deltas(path, body, piece, url = server.url) {
  const r = await fetch(url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ ...body, stream: true }) });
  const bytes = Buffer.from(await r.arrayBuffer()), list = [];
  assert.equal(r.status, 200, bytes.toString());
  for (let from = 0, end; (end = bytes.indexOf('\n\n', from)) >= 0; from = end + 2) {
    const record = new TextDecoder('utf-8', { fatal: true }).decode(bytes.subarray(from, end)), data = record.slice(record.indexOf('data: ') + 6);
    if (!record.includes('data: ') || data === '[DONE]') continue;
    const text = piece(JSON.parse(data)) ?? '';
    assert.ok(text.isWellFormed(), quoted(text));
    list.push(text);
  }
  return list;
}

for (const [dialect, [path, more, limit, piece, whole]] of Object.entries(streams)) {
  await check(`${dialect}: no delta splits a character, and an answer cut inside one is the same streamed and whole`, async () => {
    const body = { ...limits, ...more, [limit]: 200 };
    const list = await deltas(path, body, piece);
    const { t, u } = JSON.parse(list.join(''));
    assert.equal(t, TEXT);
    assert.match(u, /^[\u{1f642}\u{1f680}\ube44\u00ef]{12}$/u);
    assert.ok(list.filter(Boolean).length > 3, 'in several deltas');
    assert.equal(list.join(''), whole((await ask(path, body)).json));
    for (let tokens = 1; tokens < 24; tokens += 3) {
      const cut = { ...body, [limit]: tokens }, said = whole((await ask(path, cut)).json);
      assert.equal((await deltas(path, cut, piece)).join(''), said, `${tokens} tokens`);
      assert.ok(said.isWellFormed());
      assert.ok(list.join('').startsWith(said.replace(/\ufffd$/, '')), `${tokens} tokens: ${quoted(said)}`);
    }
  });
}

await check('arguments of calls: no fragment splits a character, on every dialect', async () => {
  const parameters = object({ t: { enum: [TEXT] } }), want = { t: TEXT }, messages = [{ role: 'user', content: 'Go.' }];
  const chat = { ...limits, max_tokens: 200, messages, tools: [chatTool('f', parameters)], tool_choice: 'required', parallel_tool_calls: false };
  assert.deepEqual(JSON.parse((await deltas('/v1/chat/completions', chat, (d) => d.choices?.[0]?.delta.tool_calls?.[0].function.arguments)).join('')), want);
  const responses = { ...limits, max_output_tokens: 200, input: 'Go.', tools: [{ type: 'function', name: 'f', parameters }], tool_choice: 'required', parallel_tool_calls: false };
  assert.deepEqual(JSON.parse((await deltas('/v1/responses', responses, (d) => (d.type === 'response.function_call_arguments.delta' ? d.delta : ''))).join('')), want);
  const message = { ...limits, max_tokens: 200, messages, tools: [{ name: 'f', input_schema: parameters }], tool_choice: { type: 'any', disable_parallel_tool_use: true } };
  assert.deepEqual(JSON.parse((await deltas('/v1/messages', message, (d) => d.delta?.partial_json)).join('')), want);
});

// ---- numbers ----

const NUMBERS = ['123456789012345678901234567890', '0.1', '1.0', '-0', '1e400', '0.30000000000000000001', '18446744073709551616'];

await check('numbers of schemas keep their text in the prompt, on every dialect', async () => {
  const list = `[${NUMBERS.join(',')}]`, parameters = `{"type":"object","properties":{"n":{"enum":${list}},"m":{"type":"integer","maximum":${NUMBERS[0]},"multipleOf":0.1}}}`;
  const fn = `{"name":"f","description":"d","parameters":${parameters}}`;
  const chat = await render(`{"model":"nano","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":${fn}}],"reasoning_effort":"none"}`);
  assert.ok(chat.prompt.includes(list.slice(1, -1)) || NUMBERS.every((n) => chat.prompt.includes(n)), chat.prompt);
  assert.ok(chat.prompt.includes(`"maximum":${NUMBERS[0]}`) || chat.prompt.includes(`"maximum": ${NUMBERS[0]}`));
  const count = async (path, body) => (await ask(path, body)).json.input_tokens;
  assert.equal(await count('/v1/messages/count_tokens', `{"model":"nano","messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","description":"d","input_schema":${parameters}}]}`), chat.tokens.length);
  assert.equal(await count('/v1/responses/input_tokens', `{"model":"nano","input":"x","reasoning":{"effort":"none"},"tools":[{"type":"function","name":"f","description":"d","parameters":${parameters}}]}`), chat.tokens.length);
});

await check('numbers of arguments in a history keep their text', async () => {
  const args = `{"a":${NUMBERS[0]},"b":[${NUMBERS.slice(1).join(',')}],"c":{"d":${NUMBERS[5]}}}`;
  const chat = (text) => ({ ...limits, messages: [{ role: 'user', content: 'x' }, { role: 'assistant', content: null, tool_calls: [{ id: 'c', type: 'function', function: { name: 'f', arguments: text } }] }, { role: 'tool', tool_call_id: 'c', content: 'y' }], reasoning_effort: 'none' });
  const { prompt, tokens } = await render(chat(args));
  for (const n of NUMBERS) assert.ok(prompt.includes(`>${n}]<]minimax`), `${n} in ${prompt}`);
  // The same object as an input of the Messages dialect: the same tokens.
  const message = `{"model":"nano","messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":${args}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"y"}]}]}`;
  assert.equal((await ask('/v1/messages/count_tokens', message)).json.input_tokens, tokens.length);
});

await check('numbers that a call makes keep their text, in each dialect, and come back to their own tokens', async () => {
  const [big, tenth] = NUMBERS;
  const schema = `{"type":"object","properties":{"n":{"const":${big}},"x":{"const":${tenth}}},"required":["n","x"],"additionalProperties":false}`, name = `f_${word()}`;
  const numbers = (text) => assert.equal(text, `{"n":${big},"x":${tenth}}`);
  const goesOn = (usage, before) => assert.ok(usage >= before - 1, `${usage} of ${before}`);

  const chat = (messages, choice) => `{"model":"nano","temperature":0,"max_tokens":200,"tool_choice":"${choice}","parallel_tool_calls":false,"tools":[{"type":"function","function":{"name":"${name}","parameters":${schema}}}],"messages":${messages}}`;
  const one = (await ask('/v1/chat/completions', chat('[{"role":"user","content":"Go."}]', 'required'))).json, [made] = one.choices[0].message.tool_calls;
  numbers(made.function.arguments);
  const two = (await ask('/v1/chat/completions', chat(JSON.stringify([{ role: 'user', content: 'Go.' }, one.choices[0].message, { role: 'tool', tool_call_id: made.id, content: 'ok' }]), 'none'))).json;
  goesOn(two.usage.prompt_tokens_details.cached_tokens, one.usage.total_tokens);

  const responses = (input, choice) => `{"model":"nano","temperature":0,"max_output_tokens":200,"tool_choice":"${choice}","parallel_tool_calls":false,"tools":[{"type":"function","name":"${name}","parameters":${schema}}],"input":${input}}`;
  const r1 = (await ask('/v1/responses', responses('"Go."', 'required'))).json, item = r1.output.find((o) => o.type === 'function_call');
  numbers(item.arguments);
  const r2 = (await ask('/v1/responses', responses(JSON.stringify([{ role: 'user', content: 'Go.' }, ...r1.output, { type: 'function_call_output', call_id: item.call_id, output: 'ok' }]), 'none'))).json;
  goesOn(r2.usage.input_tokens_details.cached_tokens, r1.usage.total_tokens);

  // An input is an object on the wire here: its text is what must keep the digits.
  const messages = (list, choice) => `{"model":"nano","temperature":0,"max_tokens":200,"tool_choice":${choice},"tools":[{"name":"${name}","input_schema":${schema}}],"messages":${list}}`;
  const m1 = await ask('/v1/messages', messages('[{"role":"user","content":"Go."}]', '{"type":"any","disable_parallel_tool_use":true}'));
  const input = m1.text.match(/"input":(\{[^}]*\})/)[1], block = m1.json.content.find((b) => b.type === 'tool_use');
  numbers(input);
  const m2 = (await ask('/v1/messages', messages(`[{"role":"user","content":"Go."},{"role":"assistant","content":[{"type":"tool_use","id":"${block.id}","name":"${name}","input":${input}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"${block.id}","content":"ok"}]}]`, '{"type":"none"}'))).json;
  const u = m1.json.usage;
  goesOn(m2.usage.cache_read_input_tokens, u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens + u.output_tokens);

  const { id } = (await ask('/v1/sessions', `{"model":"nano","tools":[{"type":"function","function":{"name":"${name}","parameters":${schema}}}]}`)).json;
  const s1 = (await ask(`/v1/sessions/${id}/turns`, { items: [{ role: 'user', content: 'Go.' }], temperature: 0, max_tokens: 200, tool_choice: 'required', parallel_tool_calls: false })).json, [c] = s1.items.at(-1).tool_calls;
  numbers(c.function.arguments);
  const s2 = (await ask(`/v1/sessions/${id}/turns`, { items: [{ role: 'tool', tool_call_id: c.id, content: 'ok' }], temperature: 0, max_tokens: 4 })).json;
  goesOn(s2.usage.prompt_tokens_details.cached_tokens, s1.usage.total_tokens);
});

await check('numbers of what is kept keep their text: responses and their streams, completions, exports; those of formats are held to', async () => {
  const list = `[${NUMBERS.join(',')}]`, parameters = `{"type":"object","properties":{"n":{"enum":${list}},"m":{"type":"integer","maximum":${NUMBERS[0]}}}}`;
  const schema = `{"type":"object","properties":{"n":{"const":${NUMBERS[0]}}},"required":["n"],"additionalProperties":false}`, said = `{"n":${NUMBERS[0]}}`;
  const get = async (path) => (await fetch(server.url + path)).text();
  const tools = `[{"type":"function","name":"f","parameters":${parameters}}]`, format = `{"format":{"type":"json_schema","name":"s","strict":true,"schema":${schema}}}`;
  // Written over many lines: a record of a stream is one.
  const body = (stream) => `{"model":"nano","input":"x","max_output_tokens":100,"reasoning":{"effort":"none"},"tool_choice":"none","stream":${stream},\n "tools": ${tools.replaceAll(',', ' ,\n\t')},\n "text": ${format}}`;
  const made = await ask('/v1/responses', body(false)), { id } = made.json;
  assert.equal(made.json.output.find((i) => i.type === 'message').content[0].text.replace(/\s/g, ''), said);
  for (const text of [made.text, await get(`/v1/responses/${id}`), await get(`/v1/responses/${id}?stream=true`), (await ask('/v1/responses', body(true))).text]) {
    assert.ok(text.includes(`"tools":${tools}`) && text.includes(`"text":${format}`), text);
    for (const record of text.split('\n\n').filter((r) => r.startsWith('event:'))) assert.equal(record.split('\n').length, 2);
  }
  const functions = `[{"type":"function","function":{"name":"f","parameters":${parameters}}}]`, shape = `{"type":"json_schema","json_schema":{"name":"s","strict":true,"schema":${schema}}}`;
  for (const n of [1, 2]) {
    const chat = (await ask('/v1/chat/completions', `{"model":"nano","store":true,"n":${n},"max_tokens":100,"reasoning_effort":"none","tool_choice":"none","messages":[{"role":"user","content":"x"}],"tools":${functions},"response_format":${shape}}`)).json;
    for (const c of chat.choices) assert.equal(c.message.content.replace(/\s/g, ''), said);
    const kept = await get(`/v1/chat/completions/${chat.id}`);
    assert.ok(kept.includes(`"tools":${functions}`) && kept.includes(`"response_format":${shape}`), kept);
    assert.equal(JSON.parse(kept).choices.length, n);
    assert.ok((await get('/v1/chat/completions?model=nano&limit=1')).includes(functions));
    assert.ok(!JSON.parse(await (await fetch(`${server.url}/v1/chat/completions/${chat.id}`, { method: 'DELETE' })).text()).error);
  }
  const session = (await ask('/v1/sessions', `{"model":"nano","tools":${functions}}`)).json;
  await ask(`/v1/sessions/${session.id}/turns`, { items: [{ role: 'user', content: 'x' }], max_tokens: 4 });
  const document = await get(`/v1/sessions/${session.id}/export`);
  assert.ok(document.includes(functions));
  assert.equal((await ask('/v1/sessions/import', document)).json.imported.tokens, true);
});

await server.stop();
finish();
