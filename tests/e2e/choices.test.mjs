// Several answers to one request: the prompt is run once, every answer is a turn of its own.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, connect, finish, h2stream, metric, post, sleep, startServer, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const filler = (n) => Array.from({ length: n }, () => word(2)).join(' ');
const chat = (content, more) => ({ model: 'nano', messages: [{ role: 'user', content }], max_tokens: 24, ignore_eos: true, enable_thinking: false, ...more });
const texts = (r) => r.choices.map((c) => c.message.content);

await check('the prompt of four answers is prefilled once, usage says so and sums what was made', async () => {
  const before = await Promise.all(['whimbrel_engine_prompt_tokens_total', 'whimbrel_engine_cached_tokens_total'].map((n) => metric(server.admin, n)));
  const r = await client.chat.completions.create(chat(filler(150), { n: 4, seed: 5 }));
  assert.deepEqual(r.choices.map((c) => c.index), [0, 1, 2, 3]);
  const { prompt_tokens: prompt, completion_tokens: made, whimbrel } = r.usage;
  assert.equal(made, 4 * 24);
  assert.equal(r.usage.total_tokens, prompt + made);
  assert.equal(r.usage.prompt_tokens_details.cached_tokens, whimbrel.choices[0].cached_tokens);
  assert.deepEqual(whimbrel.choices.slice(1).map((c) => c.cached_tokens), [prompt - 1, prompt - 1, prompt - 1]);
  const after = await Promise.all(['whimbrel_engine_prompt_tokens_total', 'whimbrel_engine_cached_tokens_total'].map((n) => metric(server.admin, n)));
  const ran = after[0] - before[0] - (after[1] - before[1]);
  assert.equal(ran, prompt - whimbrel.choices[0].cached_tokens + 3, 'all of it once, its last token again for each');
});

await check('a seed gives the same answers again, cached or not, and the first is that of the seed alone', async () => {
  const content = `${word()} tells`, seed = Math.floor(Math.random() * 2 ** 40);
  const first = texts(await client.chat.completions.create(chat(content, { n: 3, seed })));
  assert.deepEqual(texts(await client.chat.completions.create(chat(content, { n: 3, seed }))), first);
  assert.deepEqual(texts(await client.chat.completions.create(chat(content, { n: 3, seed, cache_salt: word() }))), first);
  assert.deepEqual(texts(await client.chat.completions.create(chat(content, { seed }))), first.slice(0, 1));
});

await check('whichever answer the client goes on from, its whole turn is cached', async () => {
  const body = chat(filler(20), { n: 3 });
  const r = await client.chat.completions.create(body);
  for (const { index, message } of r.choices) {
    const next = await client.chat.completions.create({ ...body, n: 1, messages: [...body.messages, message, { role: 'user', content: word() }] });
    const cached = next.usage.prompt_tokens_details.cached_tokens;
    assert.ok(cached >= r.usage.prompt_tokens + 24 - 1, `choice ${index}: ${cached} of ${r.usage.prompt_tokens} + 24`);
  }
});

await check('a stream interleaves its answers, each has one role and one end, and [DONE] comes once', async () => {
  const session = await connect(server.url);
  const { records } = await h2stream(session, '/v1/chat/completions', chat(word(), { n: 3, stream: true, max_tokens: 60, stream_options: { include_usage: true } }));
  session.close();
  assert.equal(records.filter((r) => r === '[DONE]').length, 1);
  assert.equal(records.at(-1), '[DONE]');
  assert.equal(records.at(-2).usage.completion_tokens, 180);
  const chunks = records.slice(0, -2);
  assert.equal(new Set(chunks.map((c) => c.id)).size, 1);
  for (const index of [0, 1, 2]) {
    const own = chunks.filter((c) => c.choices[0].index === index);
    assert.equal(own[0].choices[0].delta.role, 'assistant');
    assert.equal(own.filter((c) => c.choices[0].delta.role).length, 1);
    assert.deepEqual(own.map((c) => c.choices[0].finish_reason).filter(Boolean), ['length']);
    assert.equal(own.at(-1).choices[0].finish_reason, 'length');
  }
  const at = (index, test) => chunks.findIndex((c) => c.choices[0].index === index && test(c.choices[0]));
  for (const index of [1, 2]) assert.ok(at(index, (c) => c.delta.content) < at(0, (c) => c.finish_reason), 'they run together');
});

await check('logprobs and token ids of each answer are its own', async () => {
  const r = await client.chat.completions.create(chat(word(), { n: 2, logprobs: true, return_token_ids: true, temperature: 1.5 }));
  for (const c of r.choices) {
    assert.equal(Buffer.from(c.logprobs.content.flatMap((e) => e.bytes)).toString(), c.message.content);
    assert.equal(c.token_ids.length, 24);
  }
});

await check('a client that leaves ends all answers', async () => {
  const cancelled = await metric(server.admin, 'whimbrel_engine_cancelled_total');
  const session = await connect(server.url);
  const stream = session.request({ ':method': 'POST', ':path': '/v1/chat/completions', 'content-type': 'application/json' });
  stream.on('error', () => {});
  const some = new Promise((resolve) => stream.on('data', (d) => /"index":2,"delta":\{"content":"[^"]/.test(d) && resolve()));
  stream.end(JSON.stringify(chat(word(), { n: 3, stream: true, max_tokens: 20000 })));
  await some;
  assert.equal(await metric(server.admin, 'whimbrel_running'), 3);
  stream.close(8);
  for (let i = 0; i < 500 && (await metric(server.admin, 'whimbrel_running')) > 0; i++) await sleep(10);
  session.close();
  assert.equal(await metric(server.admin, 'whimbrel_running'), 0);
  assert.equal(await metric(server.admin, 'whimbrel_engine_cancelled_total'), cancelled + 3);
});

await check('completions: several prompts, each with its answers, in order, as they are alone', async () => {
  const prompts = [`The ${word()} is`, `A ${word()} and a`, `One ${word()}`];
  const ids = await Promise.all(prompts.map(async (prompt) => (await post(server.url, '/tokenize', { prompt })).json.tokens));
  const body = { model: 'nano', max_tokens: 8, temperature: 1, seed: 3, ignore_eos: true };
  const alone = [];
  for (const prompt of prompts) alone.push(...(await client.completions.create({ ...body, prompt, n: 2 })).choices.map((c) => c.text));
  for (const prompt of [prompts, ids]) {
    const r = await client.completions.create({ ...body, prompt, n: 2 });
    assert.deepEqual(r.choices.map((c) => c.index), [0, 1, 2, 3, 4, 5]);
    assert.deepEqual(r.choices.map((c) => c.text), alone);
    assert.equal(r.usage.prompt_tokens, ids.flat().length);
    assert.equal(r.usage.completion_tokens, 48);
  }
  const streamed = Array(6).fill('');
  for await (const record of await client.completions.create({ ...body, prompt: ids, n: 2, echo: true, stream: true }))
    for (const c of record.choices) streamed[c.index] += c.text;
  assert.deepEqual(streamed, alone.map((text, i) => prompts[i >> 1] + text));
});

await check('too many are refused by name', async () => {
  for (const more of [{ n: 9 }, { n: 0 }, { n: 1.5 }])
    await assert.rejects(client.chat.completions.create(chat('a', more)), (e) => e instanceof OpenAI.BadRequestError && e.param === 'n', JSON.stringify(more));
  const body = { model: 'nano', prompt: 'a', max_tokens: 2 };
  for (const [more, param] of [[{ n: 9 }, 'n'], [{ n: 2, best_of: 3 }, 'best_of'], [{ prompt: Array(129).fill('a') }, 'prompt'], [{ prompt: Array(65).fill('a'), n: 2 }, 'prompt'],
    [{ prompt: ['a', ''] }, 'prompt[1]'], [{ prompt: ['a', 3] }, 'prompt[1]'], [{ prompt: [[1], [1, 'x']] }, 'prompt[1][1]']])
    await assert.rejects(client.completions.create({ ...body, ...more }), (e) => e instanceof OpenAI.BadRequestError && e.param === param, JSON.stringify(more));
});

await server.stop();
finish();
