// The shared cases of security (tests/gateway/cases/security.json), each a check under its number, through the front door.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import { join } from 'node:path';
import { check, finish, post, root, startServer, word } from './lib.mjs';

const cases = new Map(JSON.parse(readFileSync(join(root, 'tests/gateway/cases/security.json'))).map((c) => [c.id, c]));
const done = new Set();
const test = (id, fn) => { done.add(id); return check(`${id} ${cases.get(id).title}`, () => fn(cases.get(id))); };
const server = await startServer();
const make = async (body, key) => (await post(server.admin, '/admin/v1/keys', body, key ? { authorization: `Bearer ${key}` } : {})).json.key;
const rootKey = await make({ label: 'root', scopes: ['admin'] });
const a = await make({ tenant: `a-${word()}` }, rootKey);
const b = await make({ tenant: `b-${word()}` }, rootKey);
const say = (content, more) => ({ model: 'nano', temperature: 0, max_tokens: 4, messages: [{ role: 'user', content }], ...more });
const chat = (body, headers = { 'x-api-key': a }) => post(server.url, '/v1/chat/completions', body, headers);
/** One request as it stands: no path is normalised, a header may come twice. */
const plain = (method, path, headers = {}, body, base = server.url) => new Promise((resolve, reject) => {
  const { hostname, port } = new URL(base);
  const request = http.request({ hostname, port, method, path, headers, agent: false }, (response) => {
    let text = '';
    response.setEncoding('utf8').on('data', (chunk) => (text += chunk)).on('end', () => resolve({ status: response.statusCode, text }));
  });
  request.on('error', reject);
  request.end(body);
});
const json = { 'content-type': 'application/json' };
const call = (key, method, path, body) => plain(method, path, { 'x-api-key': key, ...(body && json) }, body && JSON.stringify(body));

await test('B146', async () => {
  const response = JSON.parse((await call(a, 'POST', '/v1/responses', { model: 'nano', input: 'hi', max_output_tokens: 16 })).text).id;
  const session = JSON.parse((await call(a, 'POST', '/v1/sessions', { model: 'nano' })).text).id;
  assert.equal((await call(a, 'GET', `/v1/responses/${response}`)).status, 200);
  assert.equal((await call(a, 'GET', `/v1/sessions/${session}`)).status, 200);
  const routes = (r, s) => [
    ['GET', `/v1/responses/${r}`], ['POST', `/v1/responses/${r}/cancel`], ['GET', `/v1/responses/${r}/input_items`], ['DELETE', `/v1/responses/${r}`],
    ['POST', '/v1/responses', { model: 'nano', input: 'hi', max_output_tokens: 16, previous_response_id: r }],
    ['GET', `/v1/sessions/${s}`], ['GET', `/v1/sessions/${s}/turns`], ['GET', `/v1/sessions/${s}/export`], ['POST', `/v1/sessions/${s}/fork`],
    ['POST', `/v1/sessions/${s}/turns`, { items: [{ role: 'user', content: 'hi' }], max_tokens: 4 }], ['DELETE', `/v1/sessions/${s}`],
  ];
  // The ids of another tenant, and ids of the same make that nobody has.
  const other = (id) => id.slice(0, -6) + [...id.slice(-6)].reverse().join('').replace(/./g, (c) => (/[0-9]/.test(c) ? (Number(c) + 1) % 10 : c === 'a' ? 'b' : 'a'));
  const own = routes(response, session), none = routes(other(response), other(session));
  for (let i = 0; i < own.length; i++) {
    const theirs = await call(b, ...own[i]), nobodys = await call(b, ...none[i]), what = own[i].slice(0, 2).join(' ');
    assert.equal(theirs.status, what === 'POST /v1/responses' ? 400 : 404, `${what}: ${theirs.text}`); // 400 is OpenAI's word for an unknown previous_response_id
    const hide = (text) => text.replaceAll(response, 'ID').replaceAll(session, 'ID').replaceAll(other(response), 'ID').replaceAll(other(session), 'ID').replace(/req_[0-9a-f]+/, '');
    assert.equal(hide(theirs.text), hide(nobodys.text), what);
  }
  assert.equal((await call(a, 'GET', `/v1/responses/${response}`)).status, 200, 'it is still there');
  assert.equal((await call(a, 'GET', `/v1/sessions/${session}`)).status, 200);
});

await test('B147', async () => {
  const get = async (headers) => (await plain('GET', '/v1/models', headers)).status;
  for (const wrong of [`Bearer ${a}x`, 'Bearer ', `Bearer ${a.slice(0, -1)}`, `Basic ${a}`, `Bearer ${a.slice(0, -1)}${a.at(-1) === 'a' ? 'b' : 'a'}`])
    assert.equal(await get({ authorization: wrong }), 401, wrong.slice(0, 12));
  assert.equal(await get({ authorization: `bearer ${a}` }), 200);
  assert.ok([400, 401].includes(await get(['Host', '127.0.0.1', 'Authorization', `Bearer ${a}`, 'Authorization', `Bearer ${word()}`])));
  const message = await post(server.url, '/v1/messages', { model: 'nano', max_tokens: 1, messages: [{ role: 'user', content: 'hi' }] }, { 'x-api-key': a, 'anthropic-version': '2023-06-01' });
  assert.equal(message.status, 200);
});

await test('B148', async () => {
  const admin = { authorization: `Bearer ${rootKey}` };
  for (const path of ['/v1/sessions/..%2f..%2fetc%2fpasswd', '/v1/sessions/..%252f..%252fetc', '/v1/sessions/%00', '/v1/sessions/../../etc/passwd/export', '/v1/responses/..%2f..%2fetc%2fpasswd'])
    assert.ok([400, 404].includes((await plain('GET', path, { 'x-api-key': a })).status), path);
  for (const path of ['/dashboard/../../config/default.json', '/dashboard/..%5c..%5cconfig', '/dashboard//etc/passwd', '/dashboard/..%2f..%2fetc%2fpasswd', '/dashboard/%00'])
    assert.ok([400, 404].includes((await plain('GET', path, admin, undefined, server.admin)).status), path);
});

await test('B150', async ({ input }) => {
  const { body } = input.request, before = server.log().length;
  const secret = `Bearer ${a}`;
  const r = await plain('POST', '/v1/chat/completions', { ...json, authorization: secret, 'user-agent': 'x y="z"' }, JSON.stringify(body));
  assert.equal(r.status, 404, r.text);
  assert.ok(!r.text.includes(a));
  await plain('POST', '/v1/chat/completions', { ...json, authorization: secret }, JSON.stringify({ ...say('hi'), user: body.user, safety_identifier: 'a\r\nts=1 level=error b', tools: [{ type: 'function', function: { name: 'x\ny' } }] }));
  await plain('GET', '/v1/mod%0als%1b[31m', { authorization: secret });
  await plain('GET', '/v1/models', { authorization: `Bearer ${word()}-wrong` });
  await plain('GET', '/v1/models', { authorization: secret }); // its line is the last
  for (let i = 0; i < 100 && !/GET path=\/v1\/models status=200/.test(server.log().slice(before)); i++) await new Promise((resolve) => setTimeout(resolve, 10));
  const added = server.log().slice(before);
  for (const line of added.trimEnd().split('\n')) assert.match(line, /^ts=\d{4}-\d\d-\d\dT[\d:.]+Z level=(debug|info|warn|error) [a-z_]+( |$)/, line);
  assert.doesNotMatch(added, /[\x00-\x09\x0b-\x1f\x7f]/);
  assert.doesNotMatch(added, /^ts=1 |INFO login ok user=root \x1b/m);
  for (const key of [a, b, rootKey, '-wrong']) assert.ok(!server.log().includes(key), 'a key in the log');
});

await test('B151', async () => {
  const nest = (n, open, close, core = '') => open.repeat(n) + core + close.repeat(n);
  const hi = '"model":"nano","max_tokens":2,"messages":[{"role":"user","content":"hi"}]';
  const properties = (n) => nest(n, '{"type":"object","properties":{"a":', '}}', '{"type":"string"}');
  const tool = (n) => `{${hi},"tools":[{"type":"function","function":{"name":"f","parameters":${properties(n)}}}]}`;
  for (const [what, body, statuses] of [
    ['100,000 in the body', '['.repeat(100000), [400]], ['metadata', `{${hi},"metadata":${nest(2000, '{"a":', '}', '1')}}`, [200, 400]],
    ['metadata, 100,000', `{${hi},"metadata":${nest(100000, '{"a":', '}', '1')}}`, [400]],
    ['a tool of 20', tool(20), [200]], ['a tool of 1,000', tool(1000), [200, 400]], ['a tool of 100,000', tool(100000), [400]],
    ['arguments', JSON.stringify(say('hi', { messages: [{ role: 'user', content: 'hi' }, { role: 'assistant', tool_calls: [{ id: 'c', type: 'function', function: { name: 'f', arguments: '['.repeat(100000) } }] }, { role: 'tool', tool_call_id: 'c', content: '1' }] })), [200, 400]],
    ['a schema', `{${hi},"response_format":{"type":"json_schema","json_schema":{"name":"s","strict":true,"schema":${properties(1000)}}}}`, [200, 400]],
  ]) assert.ok(statuses.includes((await chat(body)).status), what);
  assert.equal((await chat(say('still there?'))).status, 200);
});

await test('B153', async () => {
  const nul = await call(a, 'POST', '/v1/responses', { model: 'nano', input: `abc\u0000SECRET${word()}`, max_output_tokens: 16 });
  if (nul.status !== 400) {
    const items = await call(a, 'GET', `/v1/responses/${JSON.parse(nul.text).id}/input_items`);
    assert.match(items.text, /abc\\u0000SECRET/, 'all of it comes back');
  }
  const count = async (content) => (await chat(say(content))).json?.usage.prompt_tokens;
  const [short, long] = [await count('abc'), await count('abc\u0000SECRETSECRET')];
  assert.ok(long === undefined || long > short, 'not cut before the model');
  assert.equal((await chat(`{"model":"nano","max_tokens":2,"messages":[{"role":"user","content":"hi"}],"a\\u0000b":1}`)).status, 400);
  assert.equal((await chat(`${JSON.stringify(say('hi'))}\u0000`)).status, 400);
});

// The parser itself is timed on megabytes of these in tests/engine/test_chat_decode.c and test_chat.c; here they come in as history,
// short of the first, which is too long: the little model reads them slowly.
await test('B155', async () => {
  const open = ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="a">]<]minimax[>[<p>';
  for (const text of [open.repeat(1000), open.repeat(20), ']<]minimax[>'.repeat(60), '<mm:thin'.repeat(100), `${open}${'x'.repeat(1000)}`]) {
    const r = await chat(say('go on', { messages: [{ role: 'user', content: 'x' }, { role: 'assistant', content: text }, { role: 'user', content: 'go on' }] }));
    assert.ok([200, 400].includes(r.status), r.text.slice(0, 200)); // 400: too long
    if (r.status === 400) assert.equal(r.json.error.code, 'context_length_exceeded');
  }
});

await check('every case of the file is here, and the server ends well', async () => {
  assert.deepEqual([...cases.keys()].filter((id) => !done.has(id)), []);
  assert.equal((await server.stop()).code, 0);
});
finish();
