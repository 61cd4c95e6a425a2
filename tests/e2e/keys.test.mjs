// Keys and tenants: both header styles, 401 and 403, and nothing shared between tenants.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, post, startServer, word } from './lib.mjs';

const server = await startServer();
const admin = (path, body, headers = {}) => post(server.admin, path, body, headers);
const make = async (body, key) => (await admin('/admin/v1/keys', body, key ? { authorization: `Bearer ${key}` } : {})).json;
const ask = (content) => ({ model: 'nano', temperature: 0, max_tokens: 10, messages: [{ role: 'user', content }] });

await check('without keys anybody on loopback is the tenant "default"', async () => {
  assert.equal((await post(server.url, '/v1/chat/completions', ask('hi'))).status, 200);
});

const root = await make({ label: 'root', scopes: ['admin'] });
const a = await make({ tenant: `t-${word()}`, scopes: ['inference'] }, root.key);
const b = await make({ tenant: `t-${word()}`, scopes: ['inference'] }, root.key);

await check('with keys: none is 401, a wrong one is 401, either header style is taken', async () => {
  for (const headers of [{}, { authorization: `Bearer ${word()}` }, { 'x-api-key': word() }]) {
    const r = await post(server.url, '/v1/chat/completions', ask('hi'), headers);
    assert.equal(r.status, 401);
    assert.equal(r.json.error.code, 'invalid_api_key');
  }
  for (const headers of [{ authorization: `Bearer ${a.key}` }, { 'x-api-key': a.key }])
    assert.equal((await post(server.url, '/v1/chat/completions', ask('hi'), headers)).status, 200);
  await assert.rejects(new OpenAI({ baseURL: `${server.url}/v1`, apiKey: word(), maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
});

await check('a key without the scope is 403', async () => {
  const r = await post(server.url, '/v1/chat/completions', ask('hi'), { 'x-api-key': root.key });
  assert.equal(r.status, 403);
  assert.equal((await admin('/admin/v1/keys', {}, { authorization: `Bearer ${a.key}` })).status, 403);
});

await check('tenants share no cached token, one tenant does', async () => {
  const body = ask(`Remember ${word()} ${word()} ${word()}.`);
  const cached = async (key) => (await post(server.url, '/v1/chat/completions', body, { 'x-api-key': key })).json.usage.prompt_tokens_details.cached_tokens;
  await cached(a.key);
  assert.ok(await cached(a.key) > 100);
  assert.equal(await cached(b.key), 0);
});

await check('a key has its own rule for hidden reasoning; a request may ask for less, never for more', async () => {
  const off = await make({ tenant: a.tenant, scopes: ['inference'], label: 'off', restore: 'off' }, root.key);
  const bad = await admin('/admin/v1/keys', { restore: 'all' }, { authorization: `Bearer ${root.key}` });
  assert.equal(bad.status, 400);
  assert.equal(bad.json.error.param, 'restore');
  const list = await (await fetch(`${server.admin}/admin/v1/keys`, { headers: { authorization: `Bearer ${root.key}` } })).json();
  assert.equal(list.data.find((k) => k.label === 'off').restore, 'off');
  assert.ok(!('restore' in list.data.find((k) => k.label === 'root')));
  const body = { ...ask(`Who are you, ${word()}?`), max_tokens: 60, return_token_ids: true, thinking: { type: 'enabled' } };
  const run = async (key, more) => (await post(server.url, '/v1/chat/completions', { ...body, ...more }, { 'x-api-key': key })).json;
  const first = (await run(a.key)).choices[0];
  assert.ok(first.message.reasoning_content);
  body.messages.push({ role: 'assistant', content: first.message.content }, { role: 'user', content: 'Go on.' });
  const restored = async (key, more) => (await run(key, more)).prompt_token_ids.join().includes(first.token_ids.join());
  assert.equal(await restored(a.key), true);
  assert.equal(await restored(a.key, { restore: 'off' }), false);
  assert.equal(await restored(off.key), false);
  assert.equal(await restored(off.key, { restore: 'auto' }), false);
});

await check('a revoked key is 401 at once', async () => {
  const list = await (await fetch(`${server.admin}/admin/v1/keys`, { headers: { authorization: `Bearer ${root.key}` } })).json();
  const row = list.data.find((k) => k.tenant === b.tenant);
  const gone = await fetch(`${server.admin}/admin/v1/keys/${row.id}`, { method: 'DELETE', headers: { authorization: `Bearer ${root.key}` } });
  assert.equal(gone.status, 200);
  assert.equal((await post(server.url, '/v1/chat/completions', ask('hi'), { 'x-api-key': b.key })).status, 401);
});

await check('the last admin key is not deleted by mistake', async () => {
  const headers = { authorization: `Bearer ${root.key}` };
  const list = await (await fetch(`${server.admin}/admin/v1/keys`, { headers })).json();
  const path = `${server.admin}/admin/v1/keys/${list.data.find((k) => k.label === 'root').id}`;
  const refused = await fetch(path, { method: 'DELETE', headers });
  assert.equal(refused.status, 409);
  assert.match((await refused.json()).error.message, /last key with scope admin.*force=true/);
  assert.equal((await fetch(`${server.admin}/admin/v1/keys`, { headers })).status, 200);
  assert.equal((await fetch(`${path}?force=true`, { method: 'DELETE', headers })).status, 200);
  assert.equal((await fetch(`${server.admin}/admin/v1/keys`, { headers })).status, 401);
});

await server.stop();
finish();
