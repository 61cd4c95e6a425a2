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

await check('echo with logprobs scores a text: the numbers that its tokens had when they were generated', async () => {
  const prompt = `The ${word()} of ${word()} said h\u00e9llo to`, ask = { model: 'nano', temperature: 0, logprobs: 2 };
  const { json: { choices: [made] } } = await post(server.url, '/v1/completions', { ...ask, prompt, max_tokens: 24, return_token_ids: true });
  const ids = await tokenize(prompt), tokens = [...made.prompt_token_ids, ...made.token_ids];
  assert.deepEqual(made.prompt_token_ids, ids);
  assert.equal(made.token_ids.length, made.logprobs.tokens.length);
  const score = async (more) => (await client.completions.create({ ...ask, echo: true, max_tokens: 1, prompt: tokens, ...more })).choices;
  const [one] = await score(), lists = one.logprobs;
  for (const key of Object.keys(lists)) assert.equal(lists[key].length, tokens.length + 1, `${key}: the prompt's and one more`);
  assert.deepEqual([lists.token_logprobs[0], lists.top_logprobs[0], lists.text_offset[0]], [null, null, 0]);
  for (const key of ['tokens', 'token_logprobs', 'top_logprobs']) assert.deepEqual(lists[key].slice(ids.length, tokens.length), made.logprobs[key]);
  assert.equal(one.text.slice(0, prompt.length), prompt);
  lists.text_offset.slice(0, -1).forEach((at, i) => assert.equal(at, [...lists.tokens.slice(0, i).join('')].length));
  // Nothing but the prompt; as text; others behind it; streamed; several answers and prompts. Always the same numbers, cached or not.
  const [none] = await score({ max_tokens: 0 });
  assert.deepEqual([none.finish_reason, none.text], ['length', await detokenize(tokens)]);
  const scored = Object.fromEntries(Object.entries(lists).map(([key, list]) => [key, list.slice(0, tokens.length)]));
  assert.deepEqual(none.logprobs, scored);
  const half = tokens.slice(0, ids.length), many = await score({ prompt: [tokens, half], n: 2, max_tokens: 3, ignore_eos: true, seed: 5, temperature: 1 });
  assert.equal(many.length, 4);
  many.forEach(({ logprobs, text }, i) => {
    const length = i < 2 ? tokens.length : half.length;
    for (const key of Object.keys(scored)) assert.deepEqual(logprobs[key].slice(0, length), scored[key].slice(0, length), `${key} of answer ${i}`);
    assert.equal(logprobs.tokens.length, length + 3);
    assert.equal(logprobs.text_offset[length], [...(i < 2 ? none.text : prompt)].length);
    assert.ok(text.startsWith(prompt));
  });
  const streamed = { tokens: [], token_logprobs: [], top_logprobs: [], text_offset: [] };
  let text = '', records = 0, usage;
  for await (const { choices: [choice], usage: last } of await client.completions.create({ ...ask, echo: true, max_tokens: 1, prompt: tokens, stream: true, stream_options: { include_usage: true } })) {
    usage = last ?? usage;
    if (!choice) continue;
    text += choice.text;
    records++;
    for (const key of Object.keys(streamed)) streamed[key].push(...choice.logprobs?.[key] ?? []);
  }
  assert.deepEqual([text, streamed], [one.text, lists]);
  assert.ok(records >= 2 && usage.prompt_tokens === tokens.length && usage.completion_tokens === 1);
  const [single] = await score({ prompt: [tokens[0]], max_tokens: 0 });
  assert.deepEqual(single.logprobs.token_logprobs, [null]);
});

await check('a text that the harness for language models scores: likelihoods of two endings, and which one the model prefers', async () => {
  // As lm-evaluation-harness asks and reads: one token more than wanted, dropped unread.
  const score = async (context, ending) => {
    const { choices: [{ logprobs }] } = await client.completions.create({ model: 'nano', prompt: [...context, ...ending], temperature: 0, max_tokens: 1, logprobs: 1, seed: 1234, echo: true });
    const values = logprobs.token_logprobs.slice(context.length, -1), tops = logprobs.top_logprobs.slice(context.length, -1);
    assert.equal(values.length, ending.length);
    return { sum: values.reduce((a, b) => a + b, 0), greedy: values.every((value, i) => value === Math.max(...Object.values(tops[i]))) };
  };
  const context = await tokenize(`Once there was a ${word()}`);
  const { json: { choices: [made] } } = await post(server.url, '/v1/completions', { model: 'nano', prompt: context, temperature: 0, max_tokens: 5, return_token_ids: true });
  const own = await score(context, made.token_ids), other = await score(context, await tokenize(word(4)));
  assert.ok(own.greedy && own.sum < 0 && other.sum < 0);
  assert.equal((await score(context, made.token_ids)).sum, own.sum, 'the second time, all of it cached, too');
});

await check('a stream of token ids: the prompt\'s first, then its own, each once', async () => {
  const prompt = await tokenize(`A ${word()}`), body = { model: 'nano', prompt, temperature: 0, max_tokens: 12, return_token_ids: true };
  const { json: { choices: [whole] } } = await post(server.url, '/v1/completions', body), made = [];
  let seen;
  for await (const { choices: [choice] } of await client.completions.create({ ...body, stream: true })) {
    assert.equal(choice.prompt_token_ids !== undefined, seen === undefined);
    seen ??= choice.prompt_token_ids;
    made.push(...choice.token_ids ?? []);
  }
  assert.deepEqual([seen, made], [prompt, whole.token_ids]);
});

await check('completions refuse by name', async () => {
  const body = { model: 'nano', prompt: 'a', max_tokens: 2 };
  for (const [more, param] of [[{ prompt: '' }, 'prompt'], [{ prompt: [] }, 'prompt'], [{ prompt: [1, 'x'] }, 'prompt[1]'],
    [{ prompt: [99999999] }, 'prompt[0]'], [{ prompt: undefined }, 'prompt'], [{ suffix: 'x' }, 'suffix'], [{ n: 99 }, 'n'], [{ best_of: 2 }, 'best_of'],
    [{ logprobs: 6 }, 'logprobs'], [{ logprobs: true }, 'logprobs'], [{ echo: 1 }, 'echo'], [{ max_tokens: -1 }, 'max_tokens'], [{ model: undefined }, 'model']])
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
