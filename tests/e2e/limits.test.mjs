// A tenant's rates as the vendors' clients see them: what is left in the headers of answers, streams and refusals; RateLimitError past them; and a
// client that waits as it is told comes through. Nothing here depends on how fast anything is: rates are so low that no bucket fills meanwhile.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { check, finish, post, startServer, word } from './lib.mjs';

const server = await startServer({ set: { 'server.cors_origins': 'https://page.example' } });
const mint = async (body, key) => (await post(server.admin, '/admin/v1/keys', body, key ? { 'x-api-key': key } : {})).json.key;
const root = await mint({ scopes: ['admin'] });

/** A tenant of its own with these limits: its key, and how to change them. */
async function tenant(limits) {
  const name = `t-${word()}`, key = await mint({ tenant: name, scopes: ['inference'] }, root);
  const limit = async (change) => assert.equal((await fetch(`${server.admin}/admin/v1/tenants/${name}`, {
    method: 'PATCH', headers: { 'x-api-key': root, 'content-type': 'application/json' }, body: JSON.stringify({ limits: change }) })).status, 200);
  await limit(limits);
  return { name, key, limit };
}

const said = [{ role: 'user', content: 'hello!' }];
const calls = {
  '/v1/chat/completions': { messages: said, max_completion_tokens: 2 },
  '/v1/completions': { prompt: 'hello', max_tokens: 2 },
  '/v1/responses': { input: 'hello!', max_output_tokens: 2 },
  '/v1/messages': { messages: said, max_tokens: 2 },
};
const ask = (path, key, more, headers) => post(server.url, path, { model: 'nano', ...calls[path], ...more }, { 'x-api-key': key, ...headers });
const openaiNames = (kind) => ['limit', 'remaining', 'reset'].map((w) => `x-ratelimit-${w}-${kind}`);
const anthropicNames = (kind) => ['limit', 'remaining', 'reset'].map((w) => `anthropic-ratelimit-${kind}-${w}`);

/** What the headers say, as numbers; the bucket's reset as milliseconds from now. */
function read(headers, kind, messages) {
  const [limit, remaining, reset] = (messages ? anthropicNames : openaiNames)(kind).map((name) => headers.get(name));
  for (const name of (messages ? openaiNames : anthropicNames)(kind)) assert.equal(headers.get(name), null, 'the other vendor’s names are not there');
  assert.match(reset, messages ? /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$/ : /^\d+\.\d{3}s$/);
  return { limit: Number(limit), remaining: Number(remaining), reset: messages ? Date.parse(reset) - Date.now() : parseFloat(reset) * 1000 };
}

for (const path of Object.keys(calls)) {
  const messages = path === '/v1/messages';
  await check(`${path}: what is left, with whole answers, streams and refusals`, async () => {
    const t = await tenant({ requests_per_minute: 3, tokens_per_minute: 1000000 });
    const whole = await ask(path, t.key), stream = await ask(path, t.key, { stream: true }), wrong = await ask(path, t.key, { temperature: 9 });
    assert.deepEqual([whole.status, stream.status, wrong.status], [200, 200, 400]);
    assert.match(stream.headers.get('content-type'), /event-stream/);
    for (const r of [whole, stream, wrong]) {
      const requests = read(r.headers, 'requests', messages), tokens = read(r.headers, 'tokens', messages);
      assert.equal(requests.limit, 3);
      assert.ok(requests.remaining >= 0 && requests.remaining <= 2, requests.remaining);
      assert.ok(requests.reset > 0 && requests.reset <= 61000, requests.reset);
      assert.equal(tokens.limit, 1000000);
      assert.ok(tokens.remaining > 900000 && tokens.remaining <= 1000000, tokens.remaining);
    }
    assert.equal(read(whole.headers, 'requests', messages).remaining, 2);
    await t.limit({ requests_per_minute: null, tokens_per_minute: 1 });
    assert.equal((await ask(path, t.key)).status, 200, 'a bucket that holds anything lets one in');
    const refused = await ask(path, t.key, { stream: true }), tokens = read(refused.headers, 'tokens', messages);
    assert.equal(refused.status, 429, 'what it used is known, and was more');
    assert.deepEqual([tokens.limit, tokens.remaining], [1, 0]);
    assert.equal(refused.headers.get(messages ? 'anthropic-ratelimit-requests-limit' : 'x-ratelimit-limit-requests'), null, 'not bounded');
    await t.limit({ tokens_per_minute: null });
    const free = await ask(path, t.key);
    assert.equal(free.status, 200);
    assert.ok(![...free.headers.keys()].some((name) => name.includes('ratelimit')));
  });
}

await check('openai: 429 rate_limit_exceeded is RateLimitError, with the wait in headers and words', async () => {
  const t = await tenant({ requests_per_minute: 1 });
  const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: t.key, maxRetries: 0 });
  const body = { model: 'nano', messages: said, max_completion_tokens: 2 };
  const { response } = await client.chat.completions.create(body).withResponse();
  assert.equal(response.headers.get('x-ratelimit-remaining-requests'), '0');
  for (const call of [() => client.chat.completions.create(body), () => client.chat.completions.create({ ...body, stream: true }),
    () => client.responses.create({ model: 'nano', input: 'hello!', stream: true }), () => client.post('/sessions/sess_none/turns', { body: { items: said } })]) {
    const e = await call().then(() => assert.fail('nothing was thrown'), (error) => error);
    assert.ok(e instanceof OpenAI.RateLimitError, e.constructor.name);
    assert.deepEqual([e.status, e.type, e.code, e.param], [429, 'rate_limit_error', 'rate_limit_exceeded', null]);
    const ms = Number(e.headers.get('retry-after-ms'));
    assert.ok(ms > 0 && ms < 60000 && Number(e.headers.get('retry-after')) === Math.ceil(ms / 1000), `retry-after-ms ${ms}`);
    assert.equal(e.headers.get('x-should-retry'), 'true');
    assert.deepEqual(openaiNames('requests').slice(0, 2).map((name) => e.headers.get(name)), ['1', '0']);
    // Codex takes the wait from here.
    assert.equal(Number(e.message.match(/requests_per_minute.* try again in (\d+\.\d{3})s/)[1]), ms / 1000);
  }
});

await check('anthropic: 429 is RateLimitError, and says when', async () => {
  const t = await tenant({ requests_per_minute: 1 });
  const client = new Anthropic({ baseURL: server.url, apiKey: t.key, maxRetries: 0 }), body = { model: 'nano', messages: said, max_tokens: 2 };
  assert.equal((await client.messages.create(body)).type, 'message');
  assert.ok((await client.messages.countTokens({ model: 'nano', messages: said })).input_tokens > 0, 'counting takes nothing');
  for (const call of [() => client.messages.create(body), () => client.messages.stream(body).finalMessage()]) {
    const e = await call().then(() => assert.fail('nothing was thrown'), (error) => error);
    assert.ok(e instanceof Anthropic.RateLimitError, e.constructor.name);
    assert.deepEqual([e.status, e.error.type, e.error.error.type], [429, 'error', 'rate_limit_error']);
    const ms = Number(e.headers.get('retry-after-ms'));
    assert.ok(ms > 0 && ms < 60000 && Number(e.headers.get('retry-after')) === Math.ceil(ms / 1000), `retry-after-ms ${ms}`);
    assert.deepEqual(anthropicNames('requests').slice(0, 2).map((name) => e.headers.get(name)), ['1', '0']);
  }
});

// Refusals of a body cost a request too, so a bucket is soon empty.
for (const [name, make] of [
  ['openai', (key, fetch) => new OpenAI({ baseURL: `${server.url}/v1`, apiKey: key, maxRetries: 8, fetch }).chat.completions.create({ model: 'nano', messages: said, max_completion_tokens: 2 })],
  ['anthropic', (key, fetch) => new Anthropic({ baseURL: server.url, apiKey: key, maxRetries: 8, fetch }).messages.create({ model: 'nano', messages: said, max_tokens: 2 })],
]) await check(`${name}: who waits as long as told comes through`, async () => {
  const t = await tenant({ requests_per_minute: 60 }); // one a second
  for (let tries = 0; tries < 5; tries++) {
    const statuses = [];
    for (let i = 0; i < 1000 && (await ask('/v1/chat/completions', t.key, { messages: 5 })).status !== 429; i++);
    await make(t.key, async (...args) => { const r = await fetch(...args); statuses.push(r.status); return r; });
    assert.equal(statuses.at(-1), 200);
    if (statuses[0] === 429) return;
  }
  assert.fail('it was never refused');
});

await check('a page may read them', async () => {
  const t = await tenant({ requests_per_minute: 5 });
  const r = await ask('/v1/chat/completions', t.key, {}, { origin: 'https://page.example' });
  const shown = r.headers.get('access-control-expose-headers').split(', ');
  for (const kind of ['requests', 'tokens']) for (const name of [...openaiNames(kind), ...anthropicNames(kind)]) assert.ok(shown.includes(name), name);
});

await server.stop();
finish();
