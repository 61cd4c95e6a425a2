// The shared cases (tests/engine/cases) that only the front door can decide, each a check under its number, and the wire's part of those that the
// codec's own test decodes. The model's words do not matter: what a request asks for is made certain by schemas, forced tools or ignore_eos.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { check, finish, metric, post, root, startServer, word } from './lib.mjs';

const cases = new Map(['tool-parsing', 'reasoning', 'chat-template', 'streaming', 'tokenizer']
  .flatMap((file) => JSON.parse(readFileSync(join(root, `tests/engine/cases/${file}.json`))).map((c) => [c.id, c])));
const server = await startServer();
const MARKER = ']<]minimax[>[';
/** The body of a case's request, for the served model. */
const bodyOf = (id, more) => ({ ...structuredClone(cases.get(id).request.body), model: 'nano', ...more });
const test = (id, fn) => check(`${id} ${cases.get(id).title}`, () => fn(cases.get(id)));

async function ask(path, body, status = 200) {
  const r = await post(server.url, path, body);
  assert.equal(r.status, status, r.text.slice(0, 400));
  return r.json;
}

/** A streamed answer's records: {event, data}; the terminator's data is "[DONE]". */
async function stream(path, body, url = server.url) {
  const r = await fetch(url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ ...body, stream: true }) });
  assert.equal(r.status, 200);
  return (await r.text()).split('\n\n').filter((record) => record && !record.startsWith(':')).map((record) => {
    const lines = record.split('\n'), data = lines.find((l) => l.startsWith('data: ')).slice(6);
    return { event: lines.find((l) => l.startsWith('event: '))?.slice(7), data: data === '[DONE]' ? data : JSON.parse(data) };
  });
}
const chunksOf = (records) => { assert.equal(records.at(-1).data, '[DONE]'); return records.slice(0, -1).map((r) => r.data); };

/** What a client makes of a chat stream: the choices as they would be whole. */
function gather(chunks) {
  const choices = [];
  for (const chunk of chunks) for (const { index, delta, finish_reason, logprobs } of chunk.choices) {
    const c = (choices[index] ??= { content: '', reasoning: '', calls: [], logprobs: [], roles: 0, finishes: [] });
    if (delta.role) c.roles++;
    c.content += delta.content ?? '';
    c.reasoning += delta.reasoning_content ?? '';
    for (const call of delta.tool_calls ?? []) {
      if (call.id) c.calls[call.index] = { name: call.function.name, arguments: '' };
      c.calls[call.index].arguments += call.function.arguments;
    }
    c.logprobs.push(...logprobs?.content ?? []);
    if (finish_reason) c.finishes.push(finish_reason);
  }
  return choices;
}
const wholeChoice = ({ message: m, finish_reason, logprobs }) => ({
  content: m.content ?? '', reasoning: m.reasoning_content ?? '', logprobs: logprobs?.content ?? [], finishes: [finish_reason],
  calls: (m.tool_calls ?? []).map((c) => ({ name: c.function.name, arguments: c.function.arguments })),
});
/** An answer that its schema makes longer than any limit here. */
const endless = { output_config: { format: { type: 'json_schema', schema: { type: 'array', minItems: 500, items: { enum: [1, 2] } } } } };
const comparable = ({ roles, ...rest }) => rest;

// ---- calls ----

await test('B024', async ({ expect }) => {
  // Listed values: the call ends by the schema, whatever the model would say.
  const body = bodyOf('B024', { max_tokens: 200, parallel_tool_calls: false });
  body.tools[0].function.parameters.properties = { city: { type: 'string', enum: ['Oslo', 'Bergen'] } };
  for (const tool_choice of ['required', expect.named.tool_choice]) {
    const whole = await ask('/v1/chat/completions', { ...body, tool_choice });
    const [streamed] = gather(chunksOf(await stream('/v1/chat/completions', { ...body, tool_choice })));
    assert.equal(whole.choices[0].finish_reason, 'tool_calls');
    assert.deepEqual(streamed.finishes, ['tool_calls']);
    assert.deepEqual(comparable(streamed), wholeChoice(whole.choices[0]));
  }
});

await test('B025', async () => {
  const body = bodyOf('B025');
  for (const c of [wholeChoice((await ask('/v1/chat/completions', body)).choices[0]), gather(chunksOf(await stream('/v1/chat/completions', body)))[0]]) {
    assert.deepEqual(c.calls, []);
    assert.match(c.finishes[0], /^(stop|length)$/);
    assert.ok(!c.content.includes(MARKER));
  }
  assert.ok(!('tool_calls' in (await ask('/v1/chat/completions', body)).choices[0].message), 'no such key');
});

await test('B081', async ({ input }) => {
  const tools = input.tools.map((t) => ({ ...t, function: { ...t.function, parameters: { type: 'object', properties: { path: { enum: ['a', 'b'] } }, required: ['path'] } } }));
  const chunks = chunksOf(await stream('/v1/chat/completions', { model: 'nano', max_tokens: 200, temperature: 0, tools, tool_choice: 'required', messages: [{ role: 'user', content: 'Read a and b.' }] }));
  const entries = chunks.flatMap((c) => c.choices[0]?.delta.tool_calls ?? []), heads = [];
  for (const entry of entries) {
    assert.ok(Number.isInteger(entry.index));
    if (entry.index === heads.length) {
      assert.match(entry.id, /./);
      assert.deepEqual([entry.type, entry.function.name, typeof entry.function.arguments], ['function', 'read_file', 'string']);
      heads.push(entry.id);
    } else {
      assert.deepEqual([Object.keys(entry).sort(), Object.keys(entry.function)], [['function', 'index'], ['arguments']]);
    }
  }
  assert.ok(heads.length > 0);
  assert.equal(new Set(heads).size, heads.length);
});

// ---- thinking ----

await test('B036', async ({ expect }) => {
  const render = (more) => ask('/v1/chat/completions/render', { model: 'nano', messages: [{ role: 'user', content: 'What is 2+2?' }], ...more });
  const mode = (thinking_mode) => render({ chat_template_kwargs: { thinking_mode } });
  const prompts = { on: await mode('enabled'), off: await mode('disabled'), adaptive: await mode('adaptive') };
  assert.ok(prompts.on.prompt.endsWith('<mm:think>') && !prompts.on.prompt.endsWith('</mm:think>'));
  assert.ok(prompts.off.prompt.endsWith('</mm:think>'));
  assert.ok(!prompts.adaptive.prompt.endsWith('think>'));
  for (const { api, mode, ...row } of expect.rows) {
    if (api === 'chat') {
      assert.equal((await render(row)).prompt, prompts[mode].prompt, JSON.stringify(row));
      const body = { model: 'nano', max_tokens: 64, messages: [{ role: 'user', content: 'What is 2+2?' }], ...row };
      for (const c of [wholeChoice((await ask('/v1/chat/completions', body)).choices[0]), gather(chunksOf(await stream('/v1/chat/completions', body)))[0]])
        if (mode !== 'adaptive') assert.equal(c.reasoning !== '', mode === 'on', JSON.stringify(row));
    } else {
      const body = bodyOf('B036');
      delete body.thinking;
      if (row.thinking !== 'absent') body.thinking = row.thinking;
      const { max_tokens, ...counted } = body;
      assert.equal((await ask('/v1/messages/count_tokens', counted)).input_tokens, prompts[mode].tokens.length, JSON.stringify(row));
      const whole = await ask('/v1/messages', body), events = await stream('/v1/messages', body);
      if (mode !== 'off') continue;
      assert.ok(!whole.content.some((b) => b.type === 'thinking'));
      assert.ok(!events.some((e) => e.data.content_block?.type === 'thinking'));
    }
  }
});

await test('B083', async ({ expect }) => {
  const body = { model: 'nano', max_tokens: 200, thinking: { type: 'enabled', budget_tokens: 1024 }, messages: [{ role: 'user', content: `Think of ${word()}.` }] };
  const events = (await stream('/v1/messages', body)).map((e) => e.data).filter((e) => e.type !== 'ping');
  const { usage } = events[0].message;
  assert.equal(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens,
    (await ask('/v1/messages/count_tokens', { model: 'nano', thinking: body.thinking, messages: body.messages })).input_tokens);
  const order = events.map((e) => [e.type, e.index, e.content_block?.type, e.delta?.type].filter((x) => x !== undefined).join(' ')).filter((e, i, all) => e !== all[i - 1]);
  const wanted = expect.events.slice(0, 5).map((e) => e.replace(/ \(.*\)| stop_reason.*/, ''));
  assert.deepEqual(order.slice(0, 5), [wanted[0], wanted[1], 'content_block_delta 0 thinking_delta', 'content_block_delta 0 signature_delta', wanted[4]]);
  assert.deepEqual(order.slice(-2), ['message_delta', 'message_stop']);
  assert.ok(events.at(-2).usage.output_tokens > 0);
  const thinking = events.filter((e) => e.delta?.type === 'thinking_delta').map((e) => e.delta.thinking).join('');
  const { signature } = events.find((e) => e.delta?.type === 'signature_delta').delta;
  const text = events.filter((e) => e.delta?.type === 'text_delta').map((e) => e.delta.text).join('') || 'Well.';
  const next = await ask('/v1/messages', { ...body, messages: [...body.messages, { role: 'assistant', content: [{ type: 'thinking', thinking, signature }, { type: 'text', text }] }, { role: 'user', content: 'And?' }] });
  assert.equal(next.type, 'message');
});

// ---- what the prompt becomes, dialect by dialect; tests/engine renders the same bodies ----

const rendered = (body, status) => ask('/v1/chat/completions/render', body, status);
/** A request of another dialect, run, leaves in the cache what the chat body would ask for: the same tokens. */
async function sameTokens(path, body, chat) {
  await ask(path, body);
  const { tokens, cached_tokens } = await rendered({ ...chat, chat_template_kwargs: { thinking_mode: 'disabled' } });
  assert.ok(cached_tokens >= tokens.length - 1, `${cached_tokens} of ${tokens.length}`);
}

await test('B038', async () => {
  const body = bodyOf('B038'), prompts = new Set();
  for (const content of [null, '', undefined]) {
    body.messages[1].content = content;
    prompts.add((await rendered(body)).prompt);
    await ask('/v1/chat/completions', body);
  }
  assert.equal(prompts.size, 1);
  assert.match([...prompts][0], /<invoke name="ls">.*a\.txt/s);
});

await test('B039', async ({ expect }) => {
  for (const { arguments: text, status } of expect.rows) {
    const body = bodyOf('B039');
    body.messages[1].tool_calls[0].function.arguments = text;
    const r = await post(server.url, '/v1/chat/completions', body);
    assert.equal(r.status, status === 200 ? 200 : 400, text);
    if (r.status === 400) assert.equal(r.json.error.param, 'messages[1].tool_calls[0].function.arguments');
  }
});

await test('B040', async ({ expect }) => {
  const body = bodyOf('B040'), [first, ...rest] = body.messages;
  const as = (role) => ({ ...body, messages: [{ ...first, role }, ...rest] });
  assert.ok((await rendered(body)).prompt.includes(expect.rendered_contains));
  assert.deepEqual((await rendered(as('system'))).tokens, (await rendered(body)).tokens);
  assert.equal((await ask('/v1/chat/completions', as('wizard'), 400)).error.param, 'messages[0].role');
});

await test('B041', async () => {
  const body = bodyOf('B041');
  await sameTokens('/v1/messages', body, { model: 'nano', messages: [{ role: 'system', content: body.system }, ...body.messages] });
});

await test('B042', async () => {
  const body = bodyOf('B042'), [one, two, user] = body.messages;
  for (const [a, b] of [['system', 'developer'], ['developer', 'system'], ['system', 'system']])
    assert.match((await rendered({ ...body, messages: [{ ...one, role: a }, { ...two, role: b }, user] })).prompt, /RULE-ONE.*RULE-TWO/s);
  await sameTokens('/v1/responses', { model: 'nano', max_output_tokens: 8, reasoning: { effort: 'none' }, instructions: one.content, input: [{ ...two, type: 'message' }, { ...user, type: 'message' }] }, body);
});

await test('B043', async () => {
  const body = bodyOf('B043'), text = 'part onepart two';
  const chat = { model: 'nano', tools: [{ type: 'function', function: { name: 'run', parameters: { type: 'object', properties: {} } } }], messages: [{ role: 'user', content: 'Run it.' },
    { role: 'assistant', content: null, tool_calls: [{ id: 'tu_1', type: 'function', function: { name: 'run', arguments: '{}' } }] }, { role: 'tool', tool_call_id: 'tu_1', content: text }] };
  await sameTokens('/v1/messages', body, chat);
  assert.ok((await rendered(chat)).prompt.includes(`<response>${text}</response>`));
});

await test('B046', async () => {
  const body = bodyOf('B046'), content = (parts) => ({ ...body, messages: [{ role: 'user', content: parts }] });
  assert.match((await rendered(body)).prompt, /AAA BBB/);
  assert.ok([200, 400].includes((await post(server.url, '/v1/chat/completions', content([]))).status));
  assert.equal((await ask('/v1/chat/completions', content([{ type: 'input_blob' }]), 400)).error.param, 'messages[0].content[0].type');
  const { error } = await ask('/v1/chat/completions', content([{ type: 'image_url', image_url: { url: 'data:image/png;base64,AA==' } }]), 400);
  assert.match(error.message, /image/);
});

// ---- bytes ----

await test('B069', async ({ expect }) => {
  const [bytes, lone, pair, bom] = expect.rows;
  const refused = await post(server.url, '/v1/chat/completions', new Uint8Array(Buffer.from(bytes.body_bytes, 'hex')));
  assert.equal(refused.status, bytes.status);
  assert.deepEqual(Object.keys(refused.json.error).sort(), ['code', 'message', 'param', 'type']);
  const text = lone.body.replace('MODEL', 'nano');
  // One rule for every field: what is no character is U+FFFD (see unicode.test.mjs for the other fields and dialects).
  assert.equal((await post(server.url, '/v1/chat/completions', text)).status, 200);
  assert.ok((await post(server.url, '/v1/chat/completions/render', text)).json.prompt.includes('\ufffd'));
  assert.equal(pair.status, (await post(server.url, '/v1/chat/completions', text.replace('\\ud800', '\\ud83d\\ude00'))).status);
  assert.match(bom.body_bytes_prefix, /^efbbbf/);
  const marked = await post(server.url, '/v1/chat/completions', new Uint8Array(Buffer.concat([Buffer.from('efbbbf', 'hex'), Buffer.from(text)])));
  assert.equal(marked.status, 400, 'a byte order mark is refused');
  assert.ok(marked.json.error.message);
});

// ---- streams ----

await test('B071', async () => {
  const chunks = chunksOf(await stream('/v1/chat/completions', bodyOf('B071')));
  const { usage, choices } = chunks.at(-1);
  assert.deepEqual(choices, []);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  for (const chunk of chunks.slice(0, -1)) assert.ok(chunk.usage === null && chunk.choices.length === 1);
  for (const chunk of chunks) {
    assert.deepEqual([chunk.object, chunk.id, chunk.model, chunk.created], ['chat.completion.chunk', chunks[0].id, 'nano', chunks[0].created]);
    assert.ok(chunk.id && chunk.created > 0);
  }
});

await test('B072', async () => {
  const chunks = chunksOf(await stream('/v1/chat/completions', bodyOf('B072')));
  for (const chunk of chunks) assert.ok(chunk.choices.length === 1 && !('usage' in chunk));
  assert.deepEqual(chunks[0].choices[0].delta, { role: 'assistant', content: '' });
  const { delta, finish_reason } = chunks.at(-1).choices[0];
  assert.deepEqual(delta, {});
  assert.match(finish_reason, /^(stop|length)$/);
});

await test('B077', async ({ expect }) => {
  const real = 'a real one';
  for (const { stop, status } of expect.rows) {
    if (stop === real) continue;
    const r = await post(server.url, '/v1/chat/completions', bodyOf('B077', { stop }));
    assert.equal(r.status, typeof status === 'number' ? status : 400, JSON.stringify(stop));
    if (r.status === 400) assert.match(r.json.error.param, /^stop/);
  }
  // A real one, on every route and in both modes: text that goes on, and a piece out of its middle.
  const free = { model: 'nano', max_tokens: 48, temperature: 0, ignore_eos: true }, messages = [{ role: 'user', content: 'Say hi.' }], prompt = 'Say hi.';
  const routes = {
    '/v1/chat/completions': { body: { messages, tool_choice: 'none' }, whole: (r) => r.choices[0].message.content ?? '', piece: (d) => d.choices?.[0]?.delta.content, stop: 'stop', ends: (r) => r.choices[0].finish_reason === 'stop' },
    '/v1/completions': { body: { prompt }, whole: (r) => r.choices[0].text, piece: (d) => d.choices?.[0]?.text, stop: 'stop', ends: (r) => r.choices[0].finish_reason === 'stop' },
    '/v1/messages': { body: { messages, ...endless }, whole: (r) => r.content.filter((b) => b.type === 'text').map((b) => b.text).join(''), piece: (d) => d.delta?.text, stop: 'stop_sequences', ends: (r, stop) => r.stop_sequence === stop },
  };
  for (const [path, { body, whole, piece, stop: key, ends }] of Object.entries(routes)) {
    const full = whole(await ask(path, { ...free, ...body }));
    assert.ok(full.length > 8, `${path}: ${JSON.stringify(full)}`); // 48 tokens that are no end of turn
    const at = full.length >> 1, stop = full.slice(at, at + 3), until = full.slice(0, full.indexOf(stop));
    const cut = { ...free, ...body, [key]: [stop] }, answer = await ask(path, cut);
    assert.equal(whole(answer), until, path);
    assert.ok(ends(answer, stop), path);
    assert.equal((await stream(path, cut)).map((r) => piece(r.data) ?? '').join(''), until, `${path} streamed`);
  }
});

await test('B078', async () => {
  const body = bodyOf('B078'), { stream: _, ...still } = body;
  const whole = await ask('/v1/chat/completions', { ...still, stream: false }), list = whole.choices[0].logprobs.content;
  const chunks = chunksOf(await stream('/v1/chat/completions', body)), [c] = gather(chunks);
  assert.deepEqual(c.logprobs, list);
  for (const entry of list) {
    assert.equal(entry.top_logprobs.length, 2);
    assert.ok(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob);
    assert.deepEqual([entry.top_logprobs[0].token, entry.top_logprobs[0].logprob], [entry.token, entry.logprob], 'its own position: greedy takes the likeliest');
  }
  assert.equal(Buffer.from(list.flatMap((e) => e.bytes ?? [])).toString(), whole.choices[0].message.content);
});

await test('B080', async ({ expect }) => {
  const body = bodyOf('B080');
  const refused = await post(server.url, '/v1/chat/completions', body);
  if (refused.status === 400) {
    assert.equal(refused.json.error.param, 'n', expect.or);
    return console.log('[skip] B080 n above 1 is not offered by this build, and refused by name');
  }
  const chunks = chunksOf(await stream('/v1/chat/completions', body));
  const choices = gather(chunks), { usage } = chunks.at(-1);
  assert.equal(choices.length, 2);
  for (const c of choices) assert.deepEqual([c.roles, c.finishes.length], [1, 1]);
  const whole = await ask('/v1/chat/completions', { ...body, stream: false, stream_options: undefined });
  assert.deepEqual(choices.map(comparable), whole.choices.map(wholeChoice), 'the same draws by the seed');
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  // Each runs into its limit: both are counted.
  const both = await ask('/v1/chat/completions', { ...body, stream: false, stream_options: undefined, ignore_eos: true, min_tokens: 8 });
  assert.equal(both.usage.completion_tokens, 16);
});

await test('B085', async () => {
  const body = bodyOf('B085', { max_output_tokens: 200 });
  body.tools[0].parameters.properties.path = { enum: ['a.txt'] };
  const events = (await stream('/v1/responses', body)).filter((e) => e.data.type !== 'keepalive').map(({ event, data }) => { assert.equal(event, data.type); return data; });
  events.forEach((e, i) => assert.equal(e.sequence_number, i));
  const { response: created } = events[0], { response: completed, type } = events.at(-1);
  assert.deepEqual([events[0].type, created.object, created.model, created.status, type], ['response.created', 'response', 'nano', 'in_progress', 'response.completed']);
  assert.equal(created.id, completed.id);
  const of = (kind) => events.filter((e) => e.type === kind);
  const added = of('response.output_item.added'), done = of('response.output_item.done');
  assert.deepEqual(done.map((e) => e.item), completed.output);
  assert.deepEqual(added.map((e) => [e.output_index, e.item.id, e.item.call_id]), completed.output.map((item, i) => [i, item.id, item.call_id]));
  for (const e of events) if (e.item_id) assert.equal(e.item_id, completed.output[e.output_index].id);
  const calls = completed.output.filter((item) => item.type === 'function_call');
  assert.ok(calls.length > 0);
  for (const call of calls) {
    const ends = of('response.function_call_arguments.done').filter((e) => e.item_id === call.id);
    assert.deepEqual(ends.map((e) => e.arguments), [call.arguments]);
    assert.equal(of('response.function_call_arguments.delta').filter((e) => e.item_id === call.id).map((e) => e.delta).join(''), call.arguments);
  }
  for (const e of of('response.output_text.delta')) assert.ok(Number.isInteger(e.content_index) && !e.delta.includes(MARKER));
});

await test('B086', async () => {
  const body = bodyOf('B086', { logprobs: true });
  const whole = await ask('/v1/chat/completions', body), chunks = chunksOf(await stream('/v1/chat/completions', { ...body, stream_options: { include_usage: true } }));
  assert.deepEqual(gather(chunks).map(comparable), whole.choices.map(wholeChoice));
  const totals = ({ prompt_tokens, completion_tokens, total_tokens, completion_tokens_details: d }) => [prompt_tokens, completion_tokens, total_tokens, d.reasoning_tokens];
  assert.deepEqual(totals(chunks.at(-1).usage), totals(whole.usage));

  const message = { model: 'nano', max_tokens: 128, temperature: 0, messages: body.messages, thinking: { type: 'enabled', budget_tokens: 1024 } };
  const events = (await stream('/v1/messages', message)).map((e) => e.data), still = await ask('/v1/messages', message), blocks = [];
  for (const e of events) {
    if (e.type === 'content_block_start') blocks.push({ type: e.content_block.type, text: '' });
    if (e.type === 'content_block_delta') blocks[e.index].text += e.delta.thinking ?? e.delta.text ?? e.delta.partial_json ?? '';
  }
  assert.deepEqual(blocks, still.content.map((b) => ({ type: b.type, text: b.thinking ?? b.text ?? JSON.stringify(b.input) })));
  const last = events.find((e) => e.type === 'message_delta');
  assert.deepEqual([last.delta.stop_reason, last.usage.output_tokens], [still.stop_reason, still.usage.output_tokens]);

  const input = { model: 'nano', max_output_tokens: 128, temperature: 0, input: body.messages[0].content, reasoning: { effort: 'high', summary: 'auto' } };
  const end = (await stream('/v1/responses', input)).at(-1).data.response, answer = await ask('/v1/responses', input);
  const plain = (r) => r.output.map(({ id, call_id, encrypted_content, ...item }) => item);
  assert.deepEqual(plain(end), plain(answer));
  assert.deepEqual([end.status, end.usage.output_tokens, end.usage.output_tokens_details], [answer.status, answer.usage.output_tokens, answer.usage.output_tokens_details]);
});
await server.stop();

// The scripted engine of tests/gateway fails after a given token; here the deadline is what fails, in a real one.
const slow = await startServer({ set: { 'engine.slow_step_us': 100000, 'engine.draft': 'off', 'limits.request_timeout_ms': 1500 } });
await test('B082', async ({ input }) => {
  const { request } = input, before = await metric(slow.admin, 'whimbrel_streams_failed_total');
  const more = { model: 'nano', ignore_eos: true };
  const chat = (await stream('/v1/chat/completions', { ...request, ...more, max_tokens: 400 }, slow.url)).map((r) => r.data);
  const failures = chat.filter((d) => d.error);
  assert.equal(failures.length, 1);
  assert.deepEqual(Object.keys(failures[0].error).sort(), ['code', 'message', 'param', 'type']);
  assert.ok(!chat.some((d) => d.choices?.[0]?.finish_reason));
  assert.ok(chat.indexOf(failures[0]) >= chat.length - 2, 'nothing but [DONE] may follow');

  const events = await stream('/v1/messages', { ...more, ...endless, messages: request.messages, max_tokens: 400 }, slow.url);
  assert.deepEqual([events.at(-1).event, events.at(-1).data.type, typeof events.at(-1).data.error.message], ['error', 'error', 'string']);
  assert.ok(!events.some((e) => ['message_stop', 'message_delta'].includes(e.event)));

  const failed = (await stream('/v1/responses', { ...more, input: request.messages[0].content, max_output_tokens: 400 }, slow.url)).map((r) => r.data);
  assert.equal(failed.at(-1).type, 'response.failed');
  assert.ok(failed.at(-1).response.error.message && failed.at(-1).response.status === 'failed');
  assert.ok(!failed.some((e) => e.type === 'response.completed'));
  assert.equal(await metric(slow.admin, 'whimbrel_streams_failed_total') - before, 3);
  assert.equal(slow.log().match(/ turn_over .*error=timeout/g)?.length, 3, 'and in the log');
});
await slow.stop();
finish();
