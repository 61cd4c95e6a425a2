// Completions without a template, tokens and texts, and what a chat body renders to.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, metric, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const tokenize = async (prompt) => (await post(server.url, '/tokenize', { prompt })).json.tokens;
const detokenize = async (tokens) => (await post(server.url, '/detokenize', { tokens })).json.prompt;

await check('a completion of text, of its token ids, streamed and echoed is the same', async () => {
  const prompt = `The ${word()} is a kind of`;
  const body = { model: 'nano', prompt, max_tokens: 12, temperature: 0 };
  const whole = await client.completions.create(body);
  assert.match(whole.id, /^cmpl-/);
  assert.equal(whole.object, 'text_completion');
  assert.equal(whole.choices[0].logprobs, null);
  const { text } = whole.choices[0];
  const ids = await tokenize(prompt);
  assert.equal(whole.usage.prompt_tokens, ids.length);
  for (const same of [ids, [prompt], [ids]]) assert.equal((await client.completions.create({ ...body, prompt: same })).choices[0].text, text);
  for (const same of [prompt, ids]) assert.equal((await client.completions.create({ ...body, prompt: same, echo: true })).choices[0].text, prompt + text);
  for (const echo of [false, true]) {
    let streamed = '', reason, usage;
    for await (const record of await client.completions.create({ ...body, echo, stream: true, stream_options: { include_usage: true } })) {
      streamed += record.choices[0]?.text ?? '';
      reason = record.choices[0]?.finish_reason ?? reason;
      usage = record.usage ?? usage;
    }
    assert.equal(streamed, (echo ? prompt : '') + text);
    assert.equal(reason, whole.choices[0].finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  }
});

await check('logprobs have one entry a token, whole and streamed, and offsets into the text', async () => {
  const body = { model: 'nano', prompt: `Once ${word()}`, max_tokens: 10, temperature: 0, logprobs: 3 };
  const [choice] = (await client.completions.create(body)).choices;
  const lists = choice.logprobs;
  assert.equal(lists.tokens.join(''), choice.text);
  for (const key of ['token_logprobs', 'top_logprobs', 'text_offset']) assert.equal(lists[key].length, lists.tokens.length);
  lists.tokens.forEach((token, i) => {
    assert.ok(lists.token_logprobs[i] <= 0);
    assert.equal(Object.keys(lists.top_logprobs[i]).length, 3);
    assert.equal(lists.top_logprobs[i][token], lists.token_logprobs[i]);
    assert.ok(choice.text.slice(lists.text_offset[i]).startsWith(token));
  });
  const streamed = [];
  for await (const record of await client.completions.create({ ...body, stream: true })) streamed.push(...(record.choices[0].logprobs?.tokens ?? []));
  assert.deepEqual(streamed, lists.tokens);
});

await check('completions refuse by name', async () => {
  const body = { model: 'nano', prompt: 'a', max_tokens: 2 };
  for (const [more, param] of [[{ prompt: '' }, 'prompt'], [{ prompt: [] }, 'prompt'], [{ prompt: [1, 'x'] }, 'prompt[1]'],
    [{ prompt: [99999999] }, 'prompt[0]'], [{ prompt: undefined }, 'prompt'], [{ suffix: 'x' }, 'suffix'], [{ n: 99 }, 'n'], [{ best_of: 2 }, 'best_of'],
    [{ logprobs: 6 }, 'logprobs'], [{ logprobs: true }, 'logprobs'], [{ echo: true, logprobs: 1 }, 'logprobs'], [{ echo: 1 }, 'echo'], [{ max_tokens: 0 }, 'max_tokens'], [{ model: undefined }, 'model']])
    await assert.rejects(client.completions.create({ ...body, ...more }), (e) => e instanceof OpenAI.BadRequestError && e.param === param, JSON.stringify(more));
  const long = Array.from({ length: 40000 }, () => word(1)).join(' ');
  await assert.rejects(client.completions.create({ ...body, prompt: long }), (e) => e.code === 'context_length_exceeded' && e.param === 'prompt');
});

await check('tokenize and detokenize are each other\'s inverse; text is never a special token', async () => {
  for (const text of ['', word(), 'h\u00e9llo \ud83c\udf0d\n\t  x', ']~b]user <mm:think>', JSON.stringify({ a: [1, 2.5] })]) {
    const r = (await post(server.url, '/tokenize', { prompt: text, return_token_strs: true })).json;
    assert.equal(r.count, r.tokens.length);
    assert.equal(r.token_strs.length, r.count);
    assert.equal(r.max_model_len, 32768);
    assert.equal(await detokenize(r.tokens), text);
  }
  assert.equal((await post(server.url, '/tokenize', { prompt: 'x' })).json.token_strs, null);
  assert.ok((await tokenize(']~b]')).length > 1);
  for (const [path, body, param] of [['/tokenize', {}, 'prompt'], ['/tokenize', { prompt: 3 }, 'prompt'], ['/detokenize', {}, 'tokens'], ['/detokenize', { tokens: 'x' }, 'tokens'],
    ['/detokenize', { tokens: [-1] }, 'tokens[0]'], ['/detokenize', { tokens: [1, 1e9] }, 'tokens[1]'], ['/tokenize', { messages: 3 }, 'messages'], ['/tokenize', { prompt: 'x', return_token_strs: 1 }, 'return_token_strs']]) {
    const r = await post(server.url, path, body);
    assert.equal(r.status, 400, r.text);
    assert.equal(r.json.error.param, param);
  }
});

await check('render and tokenize give the very prompt of a chat, and say what is known and cached of it', async () => {
  const body = { model: 'nano', messages: [{ role: 'user', content: `What's the weather in ${word()}?` }], tools: [weatherTool], temperature: 0, max_completion_tokens: 100 };
  const output = await metric(server.admin, 'whimbrel_output_tokens_total');
  const before = (await post(server.url, '/v1/chat/completions/render', body)).json;
  assert.equal(await metric(server.admin, 'whimbrel_output_tokens_total'), output);
  assert.ok(before.prompt.includes(body.messages[0].content));
  assert.equal(before.known_items, 0);
  const { messages, tools } = body;
  assert.deepEqual((await post(server.url, '/tokenize', { messages, tools, add_generation_prompt: true })).json.tokens, before.tokens);
  assert.ok((await post(server.url, '/tokenize', { messages, tools, add_generation_prompt: false })).json.count < before.tokens.length);
  const r = await client.chat.completions.create(body);
  assert.equal(r.usage.prompt_tokens, before.tokens.length);
  const { reasoning_content, ...said } = r.choices[0].message;
  const next = [...messages, said, ...(said.tool_calls ?? []).map((c) => ({ role: 'tool', tool_call_id: c.id, content: 'rain' })), { role: 'user', content: 'Thanks!' }];
  const after = (await post(server.url, '/v1/chat/completions/render', { ...body, messages: next })).json;
  assert.equal(after.known_items, 1);
  assert.ok(after.cached_tokens >= r.usage.total_tokens - 1, `${after.cached_tokens} of ${r.usage.total_tokens}`);
  assert.equal(await detokenize(after.tokens), after.prompt);
});

await check('special token ids in a prompt need the scope raw', async () => {
  const special = (await post(server.url, '/v1/chat/completions/render', { model: 'nano', messages: [{ role: 'user', content: 'x' }] })).json.tokens[0];
  const plain = await tokenize(']~!b[ x');
  const body = { model: 'nano', max_tokens: 2 };
  assert.equal((await post(server.url, '/v1/completions', { ...body, prompt: [special, ...plain] })).status, 200, 'without keys everyone here has every scope');
  const key = async (scopes, headers) => {
    const r = await post(server.admin, '/admin/v1/keys', { tenant: 'default', scopes }, headers);
    assert.ok(r.json.key, r.text);
    return r.json.key;
  };
  const raw = await key(['inference', 'raw', 'admin']);
  const bare = await key(['inference'], { authorization: `Bearer ${raw}` });
  const ask = (prompt, k) => post(server.url, '/v1/completions', { ...body, prompt }, { authorization: `Bearer ${k}` });
  assert.equal((await ask([special, ...plain], raw)).status, 200);
  const refused = await ask([...plain, special], bare);
  assert.equal(refused.status, 403, refused.text);
  assert.equal(refused.json.error.type, 'permission_error');
  assert.equal((await ask(plain, bare)).status, 200, 'its text in plain tokens is text');
});

await server.stop();
finish();
