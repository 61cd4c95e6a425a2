// The official Anthropic client: typed results, values drawn at run time, sessions that change their dialect.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { check, finish, metric, pick, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const options = { baseURL: server.url, apiKey: 'none', maxRetries: 0 };
const client = new Anthropic(options);
const ask = (content, more = {}) => ({ model: 'nano', max_tokens: 200, temperature: 0, messages: [{ role: 'user', content }], ...more });
const city = () => pick(['Oslo', 'Lisbon', 'Nairobi', 'Quito', 'Tallinn', 'Hobart', 'Porto']);
const { name, description, parameters } = weatherTool.function;
const weather = { name, description, input_schema: parameters };
const adaptive = { type: 'adaptive' }, enabled = { type: 'enabled', budget_tokens: 1024 };
const prompt = (usage) => usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
const results = (message, text) => ({
  role: 'user',
  content: message.content.filter((b) => b.type === 'tool_use').map((b) => ({ type: 'tool_result', tool_use_id: b.id, content: text })),
});

await check('anthropic: a message has its typed fields, usage and request id', async () => {
  const { data, response, request_id } = await client.messages.create(ask(`hello, I am ${word()}!`)).withResponse();
  assert.match(data.id, /^msg_/);
  assert.equal(data.type, 'message');
  assert.equal(data.role, 'assistant');
  assert.equal(data.model, 'nano');
  assert.ok(data.content.some((b) => b.type === 'text' && b.text.length > 0));
  assert.ok(!data.content.some((b) => b.type === 'thinking'), 'thinking is off unless asked for');
  assert.equal(data.stop_reason, 'end_turn');
  assert.equal(data.stop_sequence, null);
  assert.ok(prompt(data.usage) > 0 && data.usage.output_tokens > 0);
  assert.match(request_id, /^req_/);
  assert.equal(response.headers.get('request-id'), request_id);
});

await check('anthropic: streamed equals whole: thinking, text, calls, reason and totals', async () => {
  for (const more of [{}, { tools: [weather] }, { tools: [weather], thinking: enabled }, { thinking: adaptive }]) {
    const body = ask(`What's the weather in ${city()}? (${word()})`, more);
    const whole = await client.messages.create(body);
    const stream = client.messages.stream(body);
    const final = await stream.finalMessage();
    const plain = (m) => m.content.map((b) => (b.type === 'text' ? ['text', b.text] : b.type === 'thinking' ? ['thinking', b.thinking] : [b.name, b.input]));
    assert.deepEqual(plain(final), plain(whole));
    assert.equal(final.stop_reason, whole.stop_reason);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
    assert.equal(prompt(final.usage), prompt(whole.usage));
    for (const b of final.content) if (b.type === 'thinking') assert.match(b.signature, /^[A-Za-z0-9+/]{60}$/);
  }
});

await check('anthropic: events come in order, blocks never interleave, the cache is true in message_start', async () => {
  const body = ask(`What's the weather in ${city()}? ${word()}`, { tools: [weather], thinking: enabled });
  await client.messages.create(body);
  let open = -1, next = 0, last, start, delta, signatures = 0;
  for await (const e of await client.messages.create({ ...body, stream: true })) {
    if (e.type === 'message_start') { assert.equal(last, undefined); start = e.message.usage; }
    if (e.type === 'content_block_start') { assert.equal(open, -1); assert.equal(e.index, next); open = next++; }
    if (e.type === 'content_block_delta') { assert.equal(e.index, open); signatures += e.delta.type === 'signature_delta'; }
    if (e.type === 'content_block_stop') { assert.equal(e.index, open); open = -1; }
    if (e.type === 'message_delta') { assert.equal(open, -1); delta = e; }
    last = e.type;
  }
  assert.equal(last, 'message_stop');
  assert.equal(signatures, 1);
  assert.ok(start.cache_read_input_tokens > 0);
  assert.ok(start.input_tokens <= 1, `all but at most one token was cached: ${start.input_tokens}`);
  assert.equal(delta.usage.cache_read_input_tokens, start.cache_read_input_tokens);
});

await check('anthropic: a tool loop of five turns; the whole previous turn is cached each time', async () => {
  const messages = [];
  let before = 0;
  for (let turn = 0; turn < 5; turn++) {
    messages.push({ role: 'user', content: `What's the weather in ${city()}? ${word()}` });
    for (const choice of [{ type: 'any' }, { type: 'none' }]) {
      const r = await client.messages.create({ ...ask(''), messages, tools: [weather], tool_choice: choice, thinking: adaptive,
        system: [{ type: 'text', text: `x-anthropic-billing-header: cch=${word()};` }, { type: 'text', text: 'Be brief.', cache_control: { type: 'ephemeral' } }] });
      if (before) assert.ok(r.usage.cache_read_input_tokens >= before - 1, `${before} then ${r.usage.cache_read_input_tokens}`);
      before = prompt(r.usage) + r.usage.output_tokens;
      messages.push({ role: 'assistant', content: r.content.length ? r.content : '' });
      if (choice.type === 'none') continue;
      assert.equal(r.stop_reason, 'tool_use');
      const calls = r.content.filter((b) => b.type === 'tool_use');
      assert.ok(calls.length > 0);
      for (const c of calls) {
        assert.match(c.id, /^toolu_[0-9a-f]{32}$/);
        assert.equal(typeof c.input, 'object');
      }
      messages.push(results(r, JSON.stringify({ temperature: 4, condition: pick(['rain', 'snow', 'fog']) })));
    }
  }
});

await check('anthropic: hidden thinking comes back by its signature, dropped thinking by its call', async () => {
  for (const keep of ['omitted', 'dropped', 'foreign']) {
    const thinking = keep === 'omitted' ? { ...enabled, display: 'omitted' } : enabled;
    const body = ask(`What's the weather in ${city()}? ${word()}`, { tools: [weather], tool_choice: { type: 'any' }, thinking });
    const first = await client.messages.create(body);
    assert.ok(first.usage.output_tokens_details.thinking_tokens > 0);
    const [block] = first.content;
    assert.equal(block.type, 'thinking');
    assert.equal(block.thinking === '', keep === 'omitted');
    const content = keep === 'dropped' ? first.content.slice(1) : keep === 'foreign' ? [{ ...block, signature: 'EuYBCkQYAiJA' }, ...first.content.slice(1)] : first.content;
    const second = await client.messages.create({ ...body, tool_choice: { type: 'auto' },
      messages: [...body.messages, { role: 'assistant', content }, results(first, '{"condition":"rain"}')] });
    const whole = prompt(first.usage) + first.usage.output_tokens;
    assert.ok(second.usage.cache_read_input_tokens >= whole - 1, `${keep}: ${second.usage.cache_read_input_tokens} of ${whole}`);
  }
});

await check('a session goes from chat to messages and back with a full cache hit', async () => {
  const openai = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
  const first = `What's the weather in ${city()}? ${word()}`, result = `{"condition":"${word()}"}`;
  const kwargs = { chat_template_kwargs: { thinking_mode: 'enabled' }, temperature: 0, max_completion_tokens: 200, model: 'nano', tools: [weatherTool] };
  const messages = [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: first }];
  const one = await openai.chat.completions.create({ ...kwargs, messages, tool_choice: 'required' });
  const calls = one.choices[0].message.tool_calls;
  const said = [{ role: 'user', content: first },
    { role: 'assistant', content: calls.map((c) => ({ type: 'tool_use', id: c.id, name: c.function.name, input: JSON.parse(c.function.arguments) })) },
    { role: 'user', content: calls.map((c) => ({ type: 'tool_result', tool_use_id: c.id, content: result })) }];
  const two = await client.messages.create({ ...ask(''), system: 'Be brief.', messages: said, tools: [weather], thinking: enabled });
  const whole = one.usage.prompt_tokens + one.usage.completion_tokens;
  assert.ok(two.usage.cache_read_input_tokens >= whole - 1, `${two.usage.cache_read_input_tokens} of ${whole}`);
  const text = two.content.filter((b) => b.type === 'text').map((b) => b.text).join('');
  const back = two.content.filter((b) => b.type === 'tool_use');
  const three = await openai.chat.completions.create({ ...kwargs, messages: [...messages, one.choices[0].message,
    ...calls.map((c) => ({ role: 'tool', tool_call_id: c.id, content: result })),
    { role: 'assistant', content: text, ...(back.length ? { tool_calls: back.map((b) => ({ id: b.id, type: 'function', function: { name: b.name, arguments: JSON.stringify(b.input) } })) } : {}) },
    ...back.map((b) => ({ role: 'tool', tool_call_id: b.id, content: 'x' })), { role: 'user', content: 'Thanks!' }] });
  const total = prompt(two.usage) + two.usage.output_tokens;
  assert.ok(three.usage.prompt_tokens_details.cached_tokens >= total - 1, `${three.usage.prompt_tokens_details.cached_tokens} of ${total}`);
});

await check('anthropic: stop sequences, max_tokens, a forced tool, no tool', async () => {
  const body = ask(`hello, ${word()}!`);
  const [full] = (await client.messages.create(body)).content;
  const stop = full.text.slice(4, 7);
  const cut = await client.messages.create({ ...body, stop_sequences: [word(8), stop] });
  assert.equal(cut.stop_reason, 'stop_sequence');
  assert.equal(cut.stop_sequence, stop);
  assert.equal(cut.content[0].text, full.text.slice(0, full.text.indexOf(stop)));
  const short = await client.messages.create({ ...body, max_tokens: 2 });
  assert.equal(short.stop_reason, 'max_tokens');
  assert.equal(short.usage.output_tokens, 2);
  const other = { name: `note_${word(2)}`, description: 'Save a note.', input_schema: { type: 'object', properties: { text: { type: 'string' } } } };
  const named = await client.messages.create(ask('hello', { tools: [weather, other], tool_choice: { type: 'tool', name: other.name } }));
  assert.equal(named.content.find((b) => b.type === 'tool_use').name, other.name);
  const one = await client.messages.create(ask(`What's the weather in Oslo and in ${city()}?`, { tools: [weather], tool_choice: { type: 'any', disable_parallel_tool_use: true } }));
  assert.equal(one.content.filter((b) => b.type === 'tool_use').length, 1);
  assert.equal(one.stop_reason, 'tool_use');
  const none = await client.messages.create(ask(`What's the weather in Oslo?`, { tools: [weather], tool_choice: { type: 'none' } }));
  assert.ok(!none.content.some((b) => b.type === 'tool_use'));
});

await check('anthropic: count_tokens agrees with usage, runs nothing and leaves the cache as it is', async () => {
  const body = ask(`What's the weather in ${city()}? ${word()}`, { tools: [weather], system: 'Be brief.', thinking: adaptive });
  const { max_tokens, temperature, ...counted } = body;
  const requests = await metric(server.admin, 'whimbrel_output_tokens_total');
  const counts = await Promise.all(Array.from({ length: 30 }, () => client.messages.countTokens(counted)));
  assert.equal(await metric(server.admin, 'whimbrel_output_tokens_total'), requests);
  const r = await client.messages.create(body);
  for (const c of counts) assert.equal(c.input_tokens, prompt(r.usage));
});

await check('anthropic: models in the dialect\'s shape', async () => {
  const list = await client.models.list();
  assert.equal(list.data[0].id, 'nano');
  assert.equal(list.data[0].type, 'model');
  assert.equal(list.has_more, false);
  assert.equal((await client.models.retrieve('nano')).display_name, 'nano');
});

await check('anthropic: every refusal is the SDK\'s own class with the dialect\'s type', async () => {
  const type = (t) => (e) => e.error?.type === 'error' && e.error.error.type === t && /^req_/.test(e.requestID ?? e.request_id ?? '');
  const fails = (promise, kind, t, words) => assert.rejects(promise, (e) => {
    assert.ok(e instanceof kind, `${e.constructor.name}: ${e.message}`);
    assert.ok(type(t)(e), JSON.stringify(e.error));
    if (words) assert.match(e.message, words);
    return true;
  });
  await fails(client.messages.create(ask('hi', { model: word() })), Anthropic.NotFoundError, 'not_found_error');
  await fails(client.messages.create(ask('hi', { max_tokens: 'x' })), Anthropic.BadRequestError, 'invalid_request_error', /max_tokens/);
  await fails(client.messages.create(ask([{ type: 'image', source: { type: 'base64', media_type: 'image/png', data: 'AA==' } }])), Anthropic.BadRequestError, 'invalid_request_error', /image/);
  const long = Array.from({ length: 40000 }, () => word(1)).join(' ');
  await fails(client.messages.create(ask(long)), Anthropic.BadRequestError, 'invalid_request_error', /prompt is too long: \d{5,} tokens > 32768 maximum/);
  const counted = await client.messages.countTokens({ model: 'nano', messages: [{ role: 'user', content: long }] });
  assert.ok(counted.input_tokens > 32768);
  const unsupported = await fetch(`${server.url}/v1/messages`, { method: 'POST', headers: { 'content-type': 'text/plain' }, body: '{}' });
  assert.equal(unsupported.status, 415);
  assert.equal((await unsupported.json()).error.type, 'invalid_request_error');
  assert.equal((await post(server.url, '/v1/messages/batches', {})).json.error.type, 'not_found_error');
});

await check('anthropic: a client that leaves cancels its turn', async () => {
  const gone = await metric(server.admin, 'whimbrel_client_gone_total').catch(() => 0);
  const stream = client.messages.stream(ask(`Tell me about ${word()}.`, { max_tokens: 4000, temperature: 1, stop_sequences: [word(9)] }));
  stream.on('streamEvent', () => stream.abort());
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
  for (let i = 0; i < 50 && (await metric(server.admin, 'whimbrel_client_gone_total').catch(() => 1)) <= gone; i++) await new Promise((r) => setTimeout(r, 20));
  assert.equal((await client.messages.create(ask('hello!'))).stop_reason, 'end_turn');
});

await server.stop();

const busy = await startServer({ set: { 'engine.queue_max': 1, 'engine.sequences_max': 1, 'engine.slow_step_us': 20000 } });
await check('anthropic: a full queue is 529 overloaded_error with retry headers, and the SDK retries it', async () => {
  const one = new Anthropic({ ...options, baseURL: busy.url });
  const all = await Promise.allSettled(Array.from({ length: 8 }, () => one.messages.create(ask(`hello ${word()}`))));
  const refused = all.filter((r) => r.status === 'rejected').map((r) => r.reason);
  assert.ok(refused.length > 0 && refused.length < 8, `${refused.length} refused`);
  for (const e of refused) {
    assert.equal(e.status, 529);
    assert.ok(e instanceof Anthropic.InternalServerError);
    assert.equal(e.error.error.type, 'overloaded_error');
    assert.ok(Number(e.headers.get('retry-after-ms')) > 0);
  }
  const patient = new Anthropic({ ...options, baseURL: busy.url, maxRetries: 10 });
  const again = await Promise.all(Array.from({ length: 4 }, () => patient.messages.create(ask(`hello ${word()}`))));
  for (const r of again) assert.equal(r.stop_reason, 'end_turn');
});
await busy.stop();
finish();
