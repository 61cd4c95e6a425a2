// The official OpenAI client over HTTP/1.1: typed results, values drawn at run time.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, metric, pick, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const ask = (content, more = {}) => ({ model: 'nano', messages: [{ role: 'user', content }], temperature: 0, max_completion_tokens: 200, ...more });
const city = () => pick(['Oslo', 'Lisbon', 'Nairobi', 'Quito', 'Tallinn', 'Hobart', 'Porto']);

await check('openai: a completion has its typed fields and usage', async () => {
  const r = await client.chat.completions.create(ask(`hello, I am ${word()}!`));
  assert.match(r.id, /^chatcmpl-/);
  assert.equal(r.object, 'chat.completion');
  assert.equal(r.model, 'nano');
  assert.ok(Math.abs(r.created - Date.now() / 1000) < 60);
  const [choice] = r.choices;
  assert.equal(choice.message.role, 'assistant');
  assert.equal(choice.message.refusal, null);
  assert.ok(choice.message.content.length > 0);
  assert.ok(!('tool_calls' in choice.message));
  assert.equal(choice.finish_reason, 'stop');
  assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
  assert.ok(r.usage.prompt_tokens_details.cached_tokens <= r.usage.prompt_tokens);
  assert.ok(r.usage.completion_tokens_details.reasoning_tokens <= r.usage.completion_tokens);
  assert.ok(r._request_id.startsWith('req_'));
});

await check('openai: streamed equals whole, text, calls, reasoning, reason and totals', async () => {
  for (const more of [{}, { tools: [weatherTool] }, { tools: [weatherTool], reasoning_effort: 'high', chat_template_kwargs: { thinking_mode: 'enabled' } }]) {
    const body = ask(`What's the weather in ${city()}? (${word()})`, more);
    const whole = await client.chat.completions.create(body);
    const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
    const final = await stream.finalChatCompletion();
    const [a] = whole.choices, [b] = final.choices;
    assert.equal(a.finish_reason, b.finish_reason);
    assert.equal(a.message.content, b.message.content || null);
    const calls = (m) => (m.tool_calls ?? []).map((c) => [c.function.name, c.function.arguments]);
    assert.deepEqual(calls(a.message), calls(b.message));
    assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
    assert.equal(final.usage.prompt_tokens, whole.usage.prompt_tokens);
  }
});

await check('openai: a tool loop of two round trips; the cache grows and ids fit', async () => {
  const messages = [];
  let cached = -1, before = 0;
  for (let turn = 0; turn < 2; turn++) {
    const place = city(), sky = pick(['rain', 'snow', 'fog', 'sunny']);
    messages.push({ role: 'user', content: `What's the weather in ${place}?` });
    const first = await client.chat.completions.create({ ...ask(''), messages, tools: [weatherTool], tool_choice: 'required' });
    const [choice] = first.choices;
    assert.equal(choice.finish_reason, 'tool_calls');
    for (const call of choice.message.tool_calls) {
      assert.match(call.id, /^call_[0-9a-zA-Z]{22,}$/);
      assert.equal(call.type, 'function');
      assert.equal(call.function.name, 'get_weather');
      JSON.parse(call.function.arguments);
    }
    messages.push(choice.message);
    for (const call of choice.message.tool_calls)
      messages.push({ role: 'tool', tool_call_id: call.id, content: JSON.stringify({ temperature: 4, condition: sky }) });
    const second = await client.chat.completions.create({ ...ask(''), messages, tools: [weatherTool] });
    messages.push(second.choices[0].message);
    for (const r of [first, second]) {
      const now = r.usage.prompt_tokens_details.cached_tokens;
      assert.ok(now > cached, `cached ${cached} then ${now}`);
      if (before) assert.ok(now >= before - 1, `the whole previous turn of ${before} tokens is cached, less at most one: ${now}`);
      cached = now;
      before = r.usage.prompt_tokens + r.usage.completion_tokens;
    }
  }
});

await check('openai: a client that drops the reasoning keeps its cache', async () => {
  const messages = [{ role: 'user', content: `What's the weather in ${city()}? ${word()}` }];
  const body = { ...ask(''), tools: [weatherTool], chat_template_kwargs: { thinking_mode: 'enabled' }, messages };
  const first = await client.chat.completions.create(body);
  assert.ok(first.usage.completion_tokens_details.reasoning_tokens > 0);
  const { reasoning_content, ...kept } = first.choices[0].message;
  assert.ok(reasoning_content.length > 0);
  messages.push(kept);
  for (const call of kept.tool_calls ?? []) messages.push({ role: 'tool', tool_call_id: call.id, content: '{"condition":"rain"}' });
  if (!kept.tool_calls) messages.push({ role: 'user', content: 'Thanks!' });
  const second = await client.chat.completions.create(body);
  const whole = first.usage.prompt_tokens + first.usage.completion_tokens;
  assert.ok(second.usage.prompt_tokens_details.cached_tokens >= whole - 1,
    `${second.usage.prompt_tokens_details.cached_tokens} of ${whole}`);
});

await check('openai: tool_choice none, named, required, and one call with parallel_tool_calls false', async () => {
  const other = { type: 'function', function: { name: `note_${word(2)}`, description: 'Save a note.', parameters: { type: 'object', properties: { text: { type: 'string' } }, required: ['text'] } } };
  const body = ask(`What's the weather in Oslo and in ${city()}?`, { tools: [weatherTool, other] });
  const none = await client.chat.completions.create({ ...body, tool_choice: 'none' });
  assert.ok(!none.choices[0].message.tool_calls);
  const named = await client.chat.completions.create({ ...body, tool_choice: { type: 'function', function: { name: other.function.name } } });
  assert.equal(named.choices[0].message.tool_calls[0].function.name, other.function.name);
  const one = await client.chat.completions.create({ ...body, tool_choice: 'required', parallel_tool_calls: false });
  assert.equal(one.choices[0].message.tool_calls.length, 1);
  assert.equal(one.choices[0].finish_reason, 'tool_calls');
  // What was forced is in the cache too.
  const [call] = one.choices[0].message.tool_calls;
  const next = await client.chat.completions.create({ ...body, messages: [...body.messages, one.choices[0].message, { role: 'tool', tool_call_id: call.id, content: '{}' }] });
  assert.ok(next.usage.prompt_tokens_details.cached_tokens >= one.usage.total_tokens - 1, `${next.usage.prompt_tokens_details.cached_tokens} of ${one.usage.total_tokens}`);
});

await check('openai: a seed fixes the draw, its absence does not; stop strings, max_tokens, logprobs', async () => {
  const body = ask(`Tell me about ${word()}.`, { temperature: 2, seed: 77, max_completion_tokens: 40 });
  const text = async (b) => (await client.chat.completions.create(b)).choices[0].message.content;
  assert.equal(await text(body), await text(body));
  // The model is sure of its first sentence; what it says past its end of turn is anybody's guess.
  const { seed, ...free } = { ...body, ignore_eos: true, max_completion_tokens: 120 };
  const drawn = new Set();
  for (let i = 0; i < 8; i++) drawn.add(await text(free));
  assert.ok(drawn.size > 1);
  const full = (await text({ ...body, temperature: 0 })) ?? '';
  if (full.length > 8) {
    const stop = full.slice(4, 7);
    const cut = await client.chat.completions.create({ ...body, temperature: 0, stop });
    assert.equal(cut.choices[0].message.content ?? '', full.slice(0, full.indexOf(stop)));
    assert.equal(cut.choices[0].finish_reason, 'stop');
  }
  const short = await client.chat.completions.create({ ...body, temperature: 0, max_completion_tokens: 3, logprobs: true, top_logprobs: 5 });
  assert.equal(short.choices[0].finish_reason, 'length');
  assert.equal(short.usage.completion_tokens, 3);
  for (const entry of short.choices[0].logprobs.content) {
    assert.ok(entry.logprob <= 0);
    assert.equal(entry.top_logprobs.length, 5);
    assert.equal(entry.top_logprobs[0].token, entry.token, 'greedy takes the likeliest');
  }
});

await check('openai: models list, one model, and an unknown one', async () => {
  const list = await client.models.list();
  assert.deepEqual(list.data.map((m) => m.id).slice(0, 1), ['nano']);
  assert.equal((await client.models.retrieve('nano')).id, 'nano');
  const name = word();
  await assert.rejects(client.models.retrieve(name), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...ask('hi'), model: name }), (e) => e instanceof OpenAI.NotFoundError && e.code === 'model_not_found');
});

await check('openai: an over-long prompt is BadRequestError with both numbers; max_tokens past the window is clamped', async () => {
  const long = Array.from({ length: 40000 }, () => word(1)).join(' ');
  await assert.rejects(client.chat.completions.create(ask(long)),
    (e) => e instanceof OpenAI.BadRequestError && e.code === 'context_length_exceeded' && /maximum context length is 32768 tokens.*\d{5,}/.test(e.message));
  const r = await client.chat.completions.create(ask('hello!', { max_completion_tokens: 10000000 }));
  assert.equal(r.choices[0].finish_reason, 'stop');
});

await check('metrics agree with usage', async () => {
  const before = await metric(server.admin, 'whimbrel_output_tokens_total');
  const r = await client.chat.completions.create(ask(`hello ${word()}`));
  assert.equal(await metric(server.admin, 'whimbrel_output_tokens_total') - before, r.usage.completion_tokens);
});

const { code } = await server.stop();
await check('SIGTERM ends the server with status 0', () => assert.equal(code, 0));
finish();
