// The official OpenAI client's Responses API: typed results, values drawn at run time.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, pick, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const ask = (input, more = {}) => ({ model: 'nano', input, temperature: 0, max_output_tokens: 200, ...more });
const city = () => pick(['Oslo', 'Lisbon', 'Nairobi', 'Quito', 'Tallinn', 'Hobart', 'Porto']);
const tool = { type: 'function', strict: null, ...weatherTool.function };
const shape = (r) => r.output.map((o) => [o.type, o.status, o.name, o.arguments, (o.content ?? []).map((c) => c.text).join('')]);

await check('responses: a response has its typed fields and usage', async () => {
  const key = word();
  const r = await client.responses.create(ask(`hello, I am ${word()}!`, { metadata: { key } }));
  assert.match(r.id, /^resp_/);
  assert.equal(r.object, 'response');
  assert.equal(r.status, 'completed');
  assert.equal(r.metadata.key, key);
  assert.ok(Math.abs(r.created_at - Date.now() / 1000) < 60);
  assert.ok(r.output_text.length > 0);
  assert.equal(r.usage.total_tokens, r.usage.input_tokens + r.usage.output_tokens);
  assert.ok(r.usage.output_tokens_details.reasoning_tokens <= r.usage.output_tokens);
  assert.ok(r._request_id.startsWith('req_'));
});

await check('responses: streamed equals whole; numbers have no gap; created first, completed last', async () => {
  for (const more of [{}, { tools: [tool] }, { tools: [tool], reasoning: { effort: 'high', summary: 'auto' } }, { max_output_tokens: 3 }]) {
    const body = ask(`What's the weather in ${city()}? (${word()})`, more);
    const whole = await client.responses.create(body);
    const events = [];
    const stream = client.responses.stream(body);
    for await (const event of stream) events.push(event);
    const final = await stream.finalResponse();
    assert.deepEqual(shape(final), shape(whole));
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
    assert.equal(final.status, whole.status);
    assert.equal(final.status, more.max_output_tokens ? 'incomplete' : 'completed');
    events.forEach((event, i) => assert.equal(event.sequence_number, i));
    assert.equal(events[0].type, 'response.created');
    assert.equal(events.at(-1).type, `response.${whole.status}`);
    const text = events.filter((e) => e.type === 'response.output_text.delta').map((e) => e.delta).join('');
    assert.equal(text, final.output_text);
  }
});

await check('responses: a tool loop of three round trips on items sent back; the cache grows', async () => {
  const input = [];
  let before = 0;
  for (let turn = 0; turn < 3; turn++) {
    input.push({ role: 'user', content: `What's the weather in ${city()}?` });
    for (const choice of ['required', 'auto']) {
      const r = await client.responses.create(ask(input, { tools: [tool], tool_choice: choice, store: false }));
      assert.ok(r.usage.input_tokens_details.cached_tokens >= before - 1,
        `the whole previous turn of ${before} tokens is cached, less at most one: ${r.usage.input_tokens_details.cached_tokens}`);
      before = r.usage.total_tokens;
      input.push(...r.output);
      const calls = r.output.filter((o) => o.type === 'function_call');
      if (choice === 'required') assert.ok(calls.length > 0);
      for (const call of calls) {
        assert.equal(call.name, 'get_weather');
        JSON.parse(call.arguments);
        input.push({ type: 'function_call_output', call_id: call.call_id, output: JSON.stringify({ temperature: 4, condition: pick(['rain', 'fog']) }) });
      }
    }
  }
});

await check('responses: a session begun on chat goes on with its whole cache', async () => {
  const question = `What's the weather in ${city()}? ${word()}`;
  const chat = await client.chat.completions.create({ model: 'nano', temperature: 0, max_completion_tokens: 200, tools: [weatherTool], tool_choice: 'required', messages: [{ role: 'user', content: question }] });
  const [choice] = chat.choices;
  const input = [{ role: 'user', content: question }];
  if (choice.message.content) input.push({ role: 'assistant', content: choice.message.content });
  for (const call of choice.message.tool_calls) input.push({ type: 'function_call', call_id: call.id, name: call.function.name, arguments: call.function.arguments });
  for (const call of choice.message.tool_calls) input.push({ type: 'function_call_output', call_id: call.id, output: '{"condition":"rain"}' });
  const r = await client.responses.create(ask(input, { tools: [tool] }));
  const whole = chat.usage.prompt_tokens + chat.usage.completion_tokens;
  assert.ok(r.usage.input_tokens_details.cached_tokens >= whole - 1, `${r.usage.input_tokens_details.cached_tokens} of ${whole}`);
});

await check('responses: what is not offered and what is wrong are named', async () => {
  const refused = (more, param) => assert.rejects(client.responses.create(ask('hi', more)), (e) => e instanceof OpenAI.BadRequestError && e.param === param);
  await refused({ background: true, store: false }, 'background');
  await refused({ text: { format: 5 } }, 'text.format');
  await refused({ input: 5 }, 'input');
  await assert.rejects(client.responses.create(ask('hi', { model: word() })), OpenAI.NotFoundError);
});

await check('responses: input_tokens counts what a response then uses', async () => {
  const input = `hello ${word()}`;
  const counted = await post(server.url, '/v1/responses/input_tokens', { model: 'nano', input });
  const r = await client.responses.create(ask(input));
  assert.equal(counted.json.input_tokens, r.usage.input_tokens);
});

await check('responses: previous_response_id continues, forks and keeps the cache; retrieve equals; deleted is gone', async () => {
  const first = await client.responses.create(ask(`What's the weather in ${city()}? ${word()}`, { tools: [tool], tool_choice: 'required' }));
  const output = first.output.filter((o) => o.type === 'function_call')
    .map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: JSON.stringify({ condition: pick(['rain', 'fog']) }) }));
  assert.deepEqual((await client.responses.retrieve(first.id)).output, first.output);
  for (let fork = 0; fork < 2; fork++) {
    const next = await client.responses.create(ask(output, { tools: [tool], previous_response_id: first.id }));
    assert.equal(next.previous_response_id, first.id);
    const cached = next.usage.input_tokens_details.cached_tokens;
    assert.ok(cached >= first.usage.total_tokens - 1, `${cached} of ${first.usage.total_tokens}`);
    const third = await client.responses.create(ask(`Thanks, ${word()}!`, { tools: [tool], previous_response_id: next.id }));
    assert.ok(third.usage.input_tokens_details.cached_tokens >= next.usage.total_tokens - 1);
  }
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), (e) => e instanceof OpenAI.NotFoundError && e.code === 'response_not_found');
  await assert.rejects(client.responses.create(ask(output, { previous_response_id: first.id })), (e) => e instanceof OpenAI.BadRequestError && e.code === 'previous_response_not_found');
});

await check('responses: hints are taken and told again, wrong types are named', async () => {
  const hints = { user: word(), safety_identifier: word(), prompt_cache_key: word(), max_tool_calls: 3, truncation: 'disabled', metadata: { a: word() } };
  const r = await client.responses.create(ask('hi', { ...hints, max_output_tokens: 4, service_tier: 'priority', prompt_cache_retention: '24h', prompt_cache_options: { mode: 'implicit' },
    context_management: [{ type: 'compaction', compact_threshold: 1000 }], include: ['web_search_call.action.sources'], text: { verbosity: 'low' }, moderation: {}, no_such_field: [1],
    tools: [{ type: 'web_search' }, { type: 'namespace', name: 'ns', description: 'd', tools: [tool] }, { type: 'mcp', server_label: 'x' }, { type: 'no_such_kind' }, tool] }));
  for (const [name, value] of Object.entries(hints)) assert.deepEqual(r[name], value, name);
  assert.equal(r.service_tier, 'default', 'what was used');
  assert.equal(r.tools.length, 5, 'as they were sent');
  const kinds = ['local_shell_call', 'shell_call', 'apply_patch_call', 'web_search_call', 'mcp_call', 'image_generation_call', 'additional_tools', 'program', 'no_such_kind'];
  await client.responses.create(ask([...kinds.map((type) => ({ type, id: word(), status: 'completed' })), { role: 'user', content: 'hi' }], { max_output_tokens: 4 }));
  for (const [name, value] of Object.entries({ user: 5, safety_identifier: {}, prompt_cache_key: [], max_tool_calls: 'x', truncation: 1, service_tier: [], prompt_cache_options: 'x',
    context_management: {}, include: 'x', metadata: [], store: 'x', background: 1, instructions: 5, stream_options: 'x', parallel_tool_calls: 'x' }))
    await assert.rejects(client.responses.create(ask('hi', { [name]: value })), (e) => e instanceof OpenAI.BadRequestError && e.param === name, name);
});

await check('responses: truncation auto drops the oldest exchanges where a refusal would be the answer', async () => {
  const { max_model_len: window } = await client.models.retrieve('nano');
  const filler = Array.from({ length: 400 }, () => word()).join(' ');
  const one = (await client.responses.inputTokens.count({ model: 'nano', input: filler })).input_tokens;
  const exchanges = Math.ceil((1.2 * window) / one);
  const input = Array.from({ length: exchanges }, () => [{ role: 'user', content: filler }, { role: 'assistant', content: 'Yes.' }]).flat();
  const body = ask([...input, { role: 'user', content: 'hi' }], { instructions: 'Be brief.', max_output_tokens: 4, store: false });
  await assert.rejects(client.responses.create(body), (e) => e instanceof OpenAI.BadRequestError && e.code === 'context_length_exceeded' && /maximum context length/.test(e.message));
  const r = await client.responses.create({ ...body, truncation: 'auto' });
  assert.equal(r.truncation, 'auto');
  assert.ok(r.usage.input_tokens < window && r.usage.input_tokens > window / 2, `${r.usage.input_tokens} of ${window}`);
  // One exchange alone that is too long has nothing before it to drop.
  const alone = ask(Array.from({ length: exchanges }, () => filler).join(' '), { max_output_tokens: 4, store: false, truncation: 'auto' });
  await assert.rejects(client.responses.create(alone), (e) => e.code === 'context_length_exceeded');
});

const { code } = await server.stop();
await check('SIGTERM ends the server with status 0', () => assert.equal(code, 0));
finish();
