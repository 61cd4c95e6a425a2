// Every call of the operator's OpenAPI document: its answer checked against it, and refusals: no key, another scope, a wrong id, a wrong body or parameter.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { build, check, finish, post, root as here, sleep, startServer, word } from './lib.mjs';
import { checker, pointer, valid } from './openapi-document.mjs';

const server = await startServer({ set: { 'sessions.pin_seconds_max': 60 } });
const mint = async (body, key) => (await post(server.admin, '/admin/v1/keys', body, key ? { 'x-api-key': key } : {})).json.key;
const root = await mint({ scopes: ['admin'] });
const tenant = `t-${word()}`, user = await mint({ tenant, scopes: ['inference'] }, root);
const document = await (await fetch(`${server.admin}/admin/v1/openapi.json`, { headers: { 'x-api-key': root } })).json();

await check('the document is OpenAPI 3.1', async () => {
  await valid(document);
});

const fits = checker(document);
const fitsSchema = (name, value) => fits(pointer('components', 'schemas', name), value, name);
const seen = new Set();
async function call(method, path, { id = 'x', query = '', body, status = 200, key = root, headers = {} } = {}) {
  const name = path.startsWith('/') ? path : `/admin/v1/${path}`, operation = document.paths[name]?.[method.toLowerCase()];
  assert.ok(operation, `${method} ${name} is in the document`);
  const r = await fetch(server.admin + name.replace('{id}', id) + query, { method, redirect: 'manual',
    headers: { ...(key && { 'x-api-key': key }), ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
    body: body === undefined || typeof body === 'string' ? body : JSON.stringify(body) });
  const text = await r.text(), type = r.headers.get('content-type') ?? '';
  assert.equal(r.status, status, `${method} ${name}${query}: ${text.slice(0, 500)}`);
  const answers = operation.responses[status]?.content;
  assert.ok(answers, `${method} ${name} says nothing of ${status}`);
  const kind = Object.keys(answers).find((t) => type.startsWith(t));
  assert.ok(kind, `${method} ${name}: ${type} is not described`);
  const json = kind === 'application/json' ? JSON.parse(text) : undefined;
  if (json !== undefined) fits(pointer('paths', name, method.toLowerCase(), 'responses', status, 'content', kind, 'schema'), json, `${status} of ${method} ${name}`);
  seen.add(`${method} ${name} ${status}`);
  return json ?? text;
}
const asUser = { 'x-api-key': user };
const chat = (more) => post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 8, messages: [{ role: 'user', content: word() }], ...more }, asUser);
/** A stream of many tokens: what runs while others look. Resolves once its first byte is there. */
async function running(session) {
  const response = await fetch(`${server.url}/v1/completions`, { method: 'POST', headers: { ...asUser, 'content-type': 'application/json', ...(session && { 'x-session-id': session }) },
    body: JSON.stringify({ model: 'nano', prompt: word(), max_tokens: 3500, ignore_eos: true, stream: true }) });
  const reader = response.body.getReader();
  await reader.read();
  return { id: response.headers.get('x-request-id'), reader, async rest() { let text = ''; for (;;) { const { done, value } = await reader.read(); if (done) return text; text += Buffer.from(value); } } };
}

// ---- refusals that every call has ----

const bodies = { 'POST /admin/v1/session': { key: root }, 'POST /admin/v1/keys': { tenant }, 'POST /admin/v1/tenants': { name: word() }, 'PATCH /admin/v1/config': {}, 'POST /admin/v1/cache/flush': { tenant } };
const operations = Object.entries(document.paths).flatMap(([path, methods]) => Object.keys(methods).map((m) => [m.toUpperCase(), path]));
await check('no call is answered without a key (401) or with one of another scope (403)', async () => {
  for (const [method, path] of operations) {
    const body = method === 'GET' || method === 'DELETE' ? undefined : bodies[`${method} ${path}`] ?? {};
    if (path === '/admin/v1/session' && method === 'POST') {
      await call(method, path, { key: null, body: { key: `wb_${word()}${word()}${word()}` }, status: 401 });
      await call(method, path, { key: null, body: { key: user }, status: 403 });
      continue;
    }
    await call(method, path, { key: null, body, status: 401 });
    await call(method, path, { key: 'wb_not-a-key-of-ours', body, status: 401 });
    await call(method, path, { key: user, body, status: 403 });
  }
});
await check('nothing of it is on the public port', async () => {
  for (const [method, path] of operations)
    assert.equal((await fetch(server.url + path.replace('{id}', 'x'), { method, headers: { 'x-api-key': root } })).status, 404, path);
});
await check('unknown ids are 404', async () => {
  for (const [method, path] of operations.filter(([, p]) => p.includes('{id}')))
    await call(method, path, { id: path.includes('turns') ? 'turn_none' : 'none', status: 404, ...(method === 'POST' || method === 'PATCH' ? { body: bodies[`${method} ${path}`] ?? { seconds: 1, limits: {} } } : {}) });
  await call('GET', 'sessions', { query: '?tenant=nobody', status: 404 });
});

// ---- what runs ----

await check('requests: listed while they live, with their phase; cancelled; listed as ended', async () => {
  const stream = await running(`lab-${word()}`);
  const { data } = await call('GET', 'requests');
  const mine = data.find((r) => r.id === stream.id);
  assert.equal(mine.phase, 'decode');
  assert.equal(mine.tenant, tenant);
  assert.ok(mine.prompt_tokens > 0 && mine.output_tokens > 0 && mine.passes > 0 && mine.first_ms >= mine.started_ms && mine.started_ms >= mine.received_ms, JSON.stringify(mine));
  assert.equal((await call('GET', 'overview')).phases.decode, 1);
  assert.deepEqual((await call('GET', 'requests/{id}', { id: stream.id })).label, mine.label);
  await call('POST', 'requests/{id}/cancel', { id: stream.id });
  assert.match(await stream.rest(), /cancelled/);
  await call('POST', 'requests/{id}/cancel', { id: stream.id, status: 409 });
  const ended = (await call('GET', 'requests', { query: '?recent=5' })).data.find((r) => r.id === stream.id);
  assert.equal(ended.phase, 'done');
  assert.equal(ended.finish, 'cancelled');
  assert.ok(ended.ended_ms >= ended.first_ms);
  await call('GET', 'requests', { query: '?recent=513', status: 400 });
});

await check('the overview and the cache in numbers', async () => {
  await chat();
  const o = await call('GET', 'overview');
  assert.ok(o.window.output_tokens >= 8 && o.window.ttft_ms.p50 > 0 && o.window.itl_ms.p99 >= o.window.itl_ms.p50 && o.window.accepted_length >= 1, JSON.stringify(o.window));
  assert.ok(o.process.memory_bytes > 1e6 && o.process.cpu_seconds > 0 && o.process.pid === server.child.pid);
  assert.deepEqual((await call('GET', 'cache')).tiers.map((t) => [t.name, t.bytes_max]), o.tiers.map((t) => [t.name, t.bytes_max]));
  assert.equal((await call('GET', 'model')).name, 'nano');
});

await check('config, drain and resume', async () => {
  await call('GET', 'config');
  await call('PATCH', 'config', { body: { 'log.level': 'info' } });
  for (const body of [{ 'log.level': 'loud' }, { 'server.listen': 'x' }, '[]', '{']) await call('PATCH', 'config', { body, status: 400 });
  await call('PATCH', 'config', { body: ' '.repeat(5000), status: 413 });
  await call('PATCH', 'config', { body: '{}', headers: { 'content-type': 'text/plain' }, status: 415 });
  assert.equal((await call('POST', 'drain')).draining, true);
  assert.equal((await call('POST', 'resume')).draining, false);
});

await check('events: a request from its start to its end, a change of the configuration, draining', async () => {
  const response = await fetch(`${server.admin}/admin/v1/events`, { headers: { 'x-api-key': root } });
  assert.match(response.headers.get('content-type'), /^text\/event-stream/);
  seen.add('GET /admin/v1/events 200');
  const reader = response.body.getReader();
  let text = '';
  const records = () => text.split('\n\n').filter((r) => r.includes('data: ')).map((r) => Object.fromEntries(r.split('\n').map((l) => [l.slice(0, l.indexOf(':')), l.slice(l.indexOf(': ') + 2)])));
  const until = async (done) => { while (!done(records())) text += Buffer.from((await reader.read()).value); };
  await chat();
  await call('PATCH', 'config', { body: { 'log.level': 'info' } });
  await call('POST', 'drain');
  await call('POST', 'resume');
  await until((all) => all.filter((r) => r.event === 'drain.changed').length === 2);
  const all = records(), ids = all.map((r) => Number(r.id));
  assert.deepEqual(ids, [...ids].sort((a, b) => a - b));
  const requests = all.filter((r) => r.event.startsWith('request.')).map((r) => ({ event: r.event, ...JSON.parse(r.data) }));
  requests.forEach(({ event, ...r }) => fitsSchema('Request', r));
  assert.deepEqual(requests.map((r) => `${r.event} ${r.phase}`), ['request.started prepare', 'request.phase queue', 'request.phase prefill', 'request.phase decode', 'request.phase commit', 'request.ended done']);
  assert.equal(requests.at(-1).status, 200);
  assert.deepEqual(JSON.parse(all.find((r) => r.event === 'config.changed').data), { 'log.level': 'info' });
  assert.deepEqual(all.filter((r) => r.event === 'drain.changed').map((r) => JSON.parse(r.data).draining), [true, false]);
  await reader.cancel();
});

if (process.env.WHIMBREL_LONG)
  await check('a listener that takes nothing loses the oldest, is told how many, and holds no one up', async () => {
    const { hostname, port } = new URL(server.admin), socket = connect(Number(port), hostname);
    socket.write(`GET /admin/v1/events HTTP/1.1\r\nhost: ${hostname}:${port}\r\nx-api-key: ${root}\r\n\r\n`);
    await new Promise((resolve) => socket.once('readable', resolve)); /* and reads no more */
    const lost = async () => (await call('GET', 'overview')).events.lost;
    for (let i = 0; i < 400 && !(await lost()); i++) await Promise.all(Array.from({ length: 100 }, () => chat({ model: 'x'.repeat(90) })));
    assert.ok(await lost() > 0);
    let text = '';
    socket.on('data', (bytes) => (text += bytes));
    for (let i = 0; i < 500 && !/event: lost\ndata: \{"count":\d+\}/.test(text); i++) await sleep(10);
    assert.match(text, /event: lost\ndata: \{"count":\d+\}/);
    socket.destroy();
  });

// ---- sessions ----

await check('sessions of labels and native ones: listed, searched by text, tenant and kind, page by page', async () => {
  const label = `<img src=x onerror=alert(1)> ${word()}`, first = await post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 4, messages: [{ role: 'user', content: word() }] }, { ...asUser, 'x-session-id': label });
  assert.equal(first.status, 200);
  const native = (await post(server.url, '/v1/sessions', { model: 'nano', metadata: { name: `meta-${word()}` } }, asUser)).json;
  const found = (await call('GET', 'sessions', { query: `?q=${encodeURIComponent(label)}` })).data;
  assert.deepEqual(found.map((s) => [s.label, s.kind, s.tenant, s.usage.turns]), [[label, 'label', tenant, 1]]);
  assert.equal(found[0].usage.prompt_tokens, first.json.usage.prompt_tokens);
  assert.deepEqual((await call('GET', 'sessions', { query: `?q=${native.metadata.name.toUpperCase()}&kind=native&tenant=${tenant}` })).data.map((s) => s.id), [native.id]);
  assert.deepEqual((await call('GET', 'sessions', { query: `?q=${word(6)}` })).data, []);
  const all = (await call('GET', 'sessions')).data.map((s) => s.id), paged = [];
  for (let next = ''; next !== null;) {
    const page = await call('GET', 'sessions', { query: `?limit=1${next && `&after=${next}`}` });
    assert.ok(page.data.length <= 1);
    paged.push(...page.data.map((s) => s.id));
    next = page.next;
  }
  assert.deepEqual(paged, all);
  for (const query of ['?limit=0', '?limit=x', '?kind=odd', '?after=sess_1', '?q=%ff']) await call('GET', 'sessions', { query, status: 400 });
});

await check('turns: usage, reason, parent and fork; items, exact tokens and text on demand', async () => {
  const s = (await post(server.url, '/v1/sessions', { model: 'nano' }, asUser)).json, say = (content) => post(server.url, `/v1/sessions/${s.id}/turns`, { items: [{ role: 'user', content }], max_tokens: 12, temperature: 0 }, asUser);
  const one = (await say('What is the capital of Norway?')).json, two = (await say('And of Italy?')).json;
  const list = await call('GET', 'sessions/{id}/turns', { id: s.id });
  assert.deepEqual(list.data.map((t) => [t.id, t.parent]), [[one.id, null], [two.id, one.id]]);
  assert.deepEqual(list.data.map((t) => t.usage.prompt_tokens), [one, two].map((t) => t.usage.prompt_tokens));
  assert.deepEqual((await call('GET', 'sessions/{id}/turns', { id: s.id, query: '?order=desc&limit=1' })).data.map((t) => t.id), [two.id]);
  for (const query of ['?order=up', '?limit=201', '?after=-1']) await call('GET', 'sessions/{id}/turns', { id: s.id, query, status: 400 });
  const bare = await call('GET', 'turns/{id}', { id: two.id });
  assert.deepEqual([bare.items, bare.tokens, bare.text], [null, null, null]);
  const turn = await call('GET', 'turns/{id}', { id: two.id, query: '?include=items,tokens,text' });
  assert.equal(turn.items.fresh_from, 2);
  assert.deepEqual(turn.items.data.map((i) => i.role), ['user', 'assistant', 'user', 'assistant']);
  const exact = (await (await fetch(`${server.url}/v1/sessions/${s.id}/turns?tokens=true&order=asc`, { headers: asUser })).json()).data[1].tokens;
  assert.deepEqual(turn.tokens.ids, [...exact.prompt, ...exact.output]);
  assert.equal(turn.tokens.prompt_tokens, exact.prompt.length);
  assert.equal(turn.tokens.pieces.join(''), turn.text.value);
  assert.match(turn.text.value, /And of Italy\?/);
  const part = await call('GET', 'turns/{id}', { id: two.id, query: '?include=tokens&from=3&limit=2' });
  assert.deepEqual(part.tokens.ids, turn.tokens.ids.slice(3, 5));
  for (const query of ['?include=secrets', '?limit=0', '?from=-1', '?items_limit=501']) await call('GET', 'turns/{id}', { id: two.id, query, status: 400 });

  const fork = await call('POST', 'sessions/{id}/fork', { id: s.id, body: { turn: one.id } });
  assert.deepEqual(fork.forked_from, { session: s.id, turn: one.id });
  assert.equal(fork.tenant, tenant);
  const three = (await post(server.url, `/v1/sessions/${fork.id}/turns`, { items: [{ role: 'user', content: 'Paris?' }], max_tokens: 4 }, asUser)).json;
  const [away] = (await call('GET', 'sessions/{id}/turns', { id: fork.id })).data;
  assert.deepEqual([away.id, away.parent, away.parent_session], [three.id, one.id, s.id]);
  await call('POST', 'sessions/{id}/fork', { id: s.id, body: { turn: 5 }, status: 400 });
  assert.ok((await call('POST', 'sessions/{id}/pin', { id: s.id, body: { seconds: 5 } })).pinned_until > 0);
  assert.ok((await call('GET', 'sessions/{id}', { id: s.id })).pinned_until > 0);
  for (const seconds of [-1, 'x', undefined]) await call('POST', 'sessions/{id}/pin', { id: s.id, body: { seconds }, status: 400 });
  assert.equal((await call('GET', 'sessions/{id}/export', { id: s.id })).format, 'whimbrel.session/1');
  await call('DELETE', 'sessions/{id}', { id: fork.id });
  await call('GET', 'sessions/{id}', { id: fork.id, status: 404 });
  const [label] = (await call('GET', 'sessions', { query: '?kind=label' })).data;
  for (const [method, path, body] of [['DELETE', 'sessions/{id}'], ['GET', 'sessions/{id}/export'], ['POST', 'sessions/{id}/fork', {}], ['POST', 'sessions/{id}/pin', { seconds: 1 }]])
    await call(method, path, { id: label.id, body, status: 409 });
});

await check('a turn that is not stored is a count: no items, no tokens', async () => {
  const { usage } = (await chat({ store: false })).json;
  const turn = await call('GET', 'turns/{id}', { id: usage.whimbrel.turn, query: '?include=items,tokens,text' });
  assert.deepEqual([turn.retention, turn.items, turn.tokens, turn.text], ['usage', null, null, null]);
});

// ---- a browser's session ----

await check('a cookie stands for a key, changes nothing for other sites, and ends', async () => {
  const login = await fetch(`${server.admin}/admin/v1/session`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ key: root }) });
  fitsSchema('AdminSession', await login.json());
  seen.add('POST /admin/v1/session 200');
  const set = login.headers.get('set-cookie');
  assert.match(set, /^whimbrel_admin=[0-9a-f]{64}; Path=\/; Max-Age=43200; HttpOnly; SameSite=Strict$/);
  const cookie = set.split(';')[0], origin = server.admin, here = { cookie, 'sec-fetch-site': 'same-origin', origin };
  assert.match((await fetch(`${server.admin}/admin/v1/session`, { method: 'POST', headers: { 'content-type': 'application/json', 'x-forwarded-proto': 'https' }, body: JSON.stringify({ key: root }) })).headers.get('set-cookie'), /; Secure$/);
  assert.equal((await call('GET', 'session', { key: null, headers: { cookie } })).via, 'cookie');
  assert.equal((await call('GET', 'session')).via, 'key');
  await call('GET', 'overview', { key: null, headers: { cookie: `a=b; ${cookie}; c=d` } });
  await call('POST', 'resume', { key: null, headers: here });
  for (const headers of [{ cookie }, { cookie, 'sec-fetch-site': 'cross-site' }, { cookie, 'sec-fetch-site': 'same-site', origin }, { cookie, origin: 'http://evil.example' }])
    await call('POST', 'resume', { key: null, headers, status: 403 });
  for (const wrong of ['whimbrel_admin=', `whimbrel_admin=${'0'.repeat(64)}`, `xwhimbrel_admin${cookie.slice(14)}`]) await call('GET', 'overview', { key: null, headers: { cookie: wrong }, status: 401 });
  await call('GET', 'overview', { key: user, headers: { cookie }, status: 403 });
  for (const body of ['{}', '[]', { key: 5 }]) await call('POST', 'session', { key: null, body, status: 400 });
  await call('DELETE', 'session', { key: null, headers: here });
  await call('GET', 'overview', { key: null, headers: { cookie }, status: 401 });
  const other = await mint({ scopes: ['admin'] }, root), again = await fetch(`${server.admin}/admin/v1/session`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ key: other }) });
  const second = again.headers.get('set-cookie').split(';')[0], rows = (await call('GET', 'keys')).data;
  await call('GET', 'overview', { key: null, headers: { cookie: second } });
  await call('DELETE', 'keys/{id}', { id: rows.at(-1).id });
  await call('GET', 'overview', { key: null, headers: { cookie: second }, status: 401 });
});

// ---- tenants, keys and limits ----

await check('tenants: made once, found by name, limited; keys', async () => {
  const name = `t-${word()}`;
  const made = await call('POST', 'tenants', { body: { name, group: `g-${word()}`, limits: { requests_max: 3 } } });
  assert.deepEqual(made.limits, { requests_max: 3, requests_per_minute: null, tokens_per_minute: null, weight: null });
  await call('POST', 'tenants', { body: { name }, status: 409 });
  assert.deepEqual((await call('PATCH', 'tenants/{id}', { id: name, body: { limits: { requests_max: null, tokens_per_minute: 5, weight: 3 } } })).limits, { requests_max: null, requests_per_minute: null, tokens_per_minute: 5, weight: 3 });
  assert.ok((await call('GET', 'tenants')).data.some((t) => t.id === name && t.limits.tokens_per_minute === 5));
  assert.equal((await call('GET', 'tenants', { query: '?limit=1' })).has_more, true);
  await call('GET', 'tenants', { query: '?limit=0', status: 400 });
  for (const body of [{}, { name: 'a b' }, { name, limits: 5 }, { name: word(), limits: { requests_max: 0 } }, { name: word(), limits: { speed: 1 } }]) await call('POST', 'tenants', { body, status: 400 });
  for (const body of [{}, { limits: [] }, { limits: { requests_max: 'x' } }]) await call('PATCH', 'tenants/{id}', { id: name, body, status: 400 });
  await call('GET', 'tenants/{id}', { id: tenant });
  await call('POST', 'keys', { body: { tenant: name, label: 'x', scopes: ['inference'] } });
  for (const body of [{ tenant: '' }, { scopes: ['all of them'] }, { scopes: [] }]) await call('POST', 'keys', { body, status: 400 });
  const { data } = await call('GET', 'keys');
  await call('DELETE', 'keys/{id}', { id: data.find((k) => k.tenant === 'default' && k.scopes.includes('admin')).id, status: 409 });
  await call('DELETE', 'keys/{id}', { id: data.find((k) => k.tenant === name).id });
});

await check('limits: requests at once, a minute, tokens a minute; 429 says when', async () => {
  const limit = (limits) => call('PATCH', 'tenants/{id}', { id: tenant, body: { limits } });
  await limit({ requests_max: 1 });
  const stream = await running();
  const refused = await chat();
  assert.equal(refused.status, 429);
  assert.match(refused.json.error.message, /requests_max/);
  assert.equal(refused.json.error.code, 'rate_limit_exceeded');
  assert.ok(Number(refused.headers.get('retry-after-ms')) > 0);
  await stream.reader.cancel();
  for (let i = 0; i < 200 && (await call('GET', 'tenants/{id}', { id: tenant })).running; i++);
  assert.equal((await chat()).status, 200);
  await limit({ requests_max: null, requests_per_minute: 1 });
  assert.deepEqual([(await chat()).status, (await chat()).status], [200, 429]);
  await limit({ requests_per_minute: null, tokens_per_minute: 1 });
  assert.deepEqual([(await chat()).status, (await chat()).status], [200, 429], 'the first takes more than there is');
  await limit({ tokens_per_minute: null });
  const free = await chat();
  assert.equal(free.status, 200);
  assert.equal(free.headers.get('x-ratelimit-limit-requests'), null, 'no bound, no header');
  assert.match(await (await fetch(`${server.admin}/metrics`)).text(), /^whimbrel_limited_total 3$/m);
});

// ---- the cache ----

await check('the prefix tree as a list; flushed by session, tenant and as a whole', async () => {
  const text = Array.from({ length: 120 }, () => word()).join(' '), content = `${text}?`;
  const ask = async () => (await chat({ messages: [{ role: 'user', content }], max_tokens: 2, temperature: 0 })).json.usage;
  const first = await ask(), again = await ask();
  assert.ok(again.prompt_tokens_details.cached_tokens >= first.prompt_tokens - 1);
  const tree = await call('GET', 'cache/tree');
  assert.ok(tree.data.some((e) => e.tenant === tenant && e.tokens > 0 && e.pages > 0), JSON.stringify(tree.data));
  for (const e of tree.data.filter((x) => x.parent !== null)) { const up = tree.data.find((x) => x.id === e.parent); assert.equal(up.start + up.tokens, e.start); }
  assert.equal((await call('GET', 'cache/tree', { query: '?limit=1' })).data.length, 1);
  await call('GET', 'cache/tree', { query: '?limit=1001', status: 400 });
  assert.ok((await call('POST', 'cache/flush', { body: { session: first.whimbrel.session } })).paths >= 1);
  const after = (await ask()).prompt_tokens_details.cached_tokens;
  assert.ok(after < first.prompt_tokens - 1, `${after} of ${first.prompt_tokens}`);
  assert.ok((await call('POST', 'cache/flush', { body: { tenant } })).namespaces >= 1);
  assert.equal((await ask()).prompt_tokens_details.cached_tokens, 0);
  await call('POST', 'cache/flush', { body: { all: true } });
  assert.deepEqual((await call('GET', 'cache/tree')).data, []);
  const warmed = await call('POST', 'cache/prefetch', { body: { session: first.whimbrel.session } });
  assert.deepEqual([warmed.cached_tokens, warmed.restored_tokens], [0, 0]);
  assert.ok(warmed.tokens > first.prompt_tokens, 'the answer too');
  assert.ok((await ask()).prompt_tokens_details.cached_tokens >= first.prompt_tokens - 1, 'what was fetched ahead is found');
  for (const body of [{}, { session: 5 }]) await call('POST', 'cache/prefetch', { body, status: 400 });
  await call('POST', 'cache/prefetch', { body: { session: 'sess_none' }, status: 404 });
  for (const body of [{}, { all: false }, { tenant, all: true }, { tenant: 5 }]) await call('POST', 'cache/flush', { body, status: 400 });
  await call('POST', 'cache/flush', { body: { session: 'sess_none' }, status: 404 });
  await call('POST', 'cache/flush', { body: { tenant: 'nobody' }, status: 404 });
});

// ---- usage and traces ----

await check('usage by day, tenant, tool and session; as CSV', async () => {
  const since = await call('GET', 'usage');
  const all = await call('GET', 'usage', { query: '?by=tenant' });
  for (const name of ['turns', 'prompt_tokens', 'cached_tokens', 'output_tokens']) assert.equal(all.totals[name], since.totals[name], name);
  for (const by of ['day', 'tool', 'day,tenant,tool', 'session']) {
    const report = await call('GET', 'usage', { query: `?by=${by}` });
    assert.deepEqual(report.by, by.split(','));
    assert.ok(report.data.length > 0);
    for (const name of ['turns', 'prompt_tokens', 'output_tokens']) assert.equal(report.data.reduce((sum, r) => sum + r[name], 0), report.totals[name], `${name} by ${by}`);
  }
  const today = new Date().toISOString().slice(0, 10), day = await call('GET', 'usage', { query: `?by=day&from=2020-01-01&to=${new Date(Date.now() + 864e5).toISOString().slice(0, 10)}&tenant=${tenant}` });
  assert.ok(day.data.every((r) => r.day <= today));
  assert.deepEqual((await call('GET', 'usage', { query: '?by=day&to=2020-01-01' })).data, []);
  const one = await call('GET', 'usage', { query: '?by=session&limit=1' });
  assert.deepEqual([one.data.length, one.has_more], [1, true]);
  const csv = (await call('GET', 'usage', { query: '?by=tenant,tool&format=csv' })).trimEnd().split('\r\n').map((l) => l.split(','));
  assert.deepEqual(csv[0].slice(0, 3), ['tenant', 'tool', 'turns']);
  assert.equal(csv.slice(1).reduce((sum, l) => sum + Number(l[csv[0].indexOf('prompt_tokens')]), 0), all.totals.prompt_tokens);
  for (const query of ['?by=colour', '?by=', '?by=session,day', '?by=day&from=2026-02-30', '?by=day&limit=0', '?by=day&format=xml', '?format=xml']) await call('GET', 'usage', { query, status: 400 });
  await call('GET', 'usage', { query: '?by=day&tenant=nobody', status: 404 });
});

await check('a trace in both forms is one that whimbrel-replay reads, without a word of text unless asked', async () => {
  const secret = word(8), s = (await post(server.url, '/v1/sessions', { model: 'nano' }, asUser)).json;
  for (const content of [`${secret} `.repeat(40), 'More.']) await post(server.url, `/v1/sessions/${s.id}/turns`, { items: [{ role: 'user', content }], max_tokens: 6 }, asUser);
  const folder = mkdtempSync(join(tmpdir(), 'whimbrel-trace-'));
  for (const format of ['weka', 'mooncake']) {
    const text = await call('GET', 'trace', { query: `?format=${format}` });
    assert.ok(!text.includes(secret));
    writeFileSync(join(folder, format), text);
    const stats = JSON.parse(execFileSync(join(build, 'whimbrel-replay'), ['stats', '--json', join(folder, format)], { encoding: 'utf8' }).split('\n')[0]);
    assert.ok(JSON.stringify(stats).length > 10, format);
  }
  rmSync(folder, { recursive: true });
  const [line] = (await call('GET', 'trace', { query: `?session=${s.id}&contents=true` })).trim().split('\n').map(JSON.parse);
  assert.deepEqual([line.id, line.requests.length], [s.id, 2]);
  assert.ok(line.requests[0].text.includes(secret) && line.requests[1].text.includes('More.'));
  const blocks = (r) => r.hash_ranges.reduce((sum, [a, b]) => sum + b - a + 1, 0);
  line.requests.forEach((r) => assert.equal(blocks(r), Math.floor(r.in / 64)));
  assert.equal(line.requests[1].hash_ranges[0][0], line.requests[0].hash_ranges[0][0], 'the second goes on where the first was');
  for (const query of ['?format=x', '?contents=x', '?limit=0']) await call('GET', 'trace', { query, status: 400 });
  await call('GET', 'trace', { query: '?session=sess_none', status: 404 });
  await call('GET', 'trace', { query: '?tenant=nobody', status: 404 });
});

await check('every call of the document was answered well, and refused as it says', () => {
  seen.add('GET /admin/v1/openapi.json 200');
  const needless = (path, status) => (status === '429' && !path.includes('x')) || (status === '413' && path !== '/admin/v1/config') || status === '415';
  const open = operations.flatMap(([m, p]) => Object.keys(document.paths[p][m.toLowerCase()].responses).filter((status) => !needless(p, status)).map((status) => `${m} ${p} ${status}`)).filter((o) => !seen.has(o));
  console.log(`  ${operations.length} calls, ${seen.size} of their answers seen`);
  assert.deepEqual(open.filter((o) => / (200|400|401|403|404)$/.test(o)), []);
});

await server.stop();
finish();
