// The operator's calls: every one with its answer, without a key, with a key of another scope, and with a wrong body; numbers that agree.
import assert from 'node:assert/strict';
import { check, finish, post, startServer, word } from './lib.mjs';

const server = await startServer();
const make = async (body, key) => (await post(server.admin, '/admin/v1/keys', body, key ? { 'x-api-key': key } : {})).json.key;
const root = await make({ scopes: ['admin'] });
const tenant = `t-${word()}`, user = await make({ tenant, scopes: ['inference'] }, root);
const call = async (method, path, { key = root, body } = {}) => {
  const response = await fetch(server.admin + path, { method, body, headers: { ...(key && { 'x-api-key': key }), ...(body !== undefined && { 'content-type': 'application/json' }) } });
  const text = await response.text();
  return { status: response.status, text, type: response.headers.get('content-type'), json: response.headers.get('content-type')?.includes('json') ? JSON.parse(text) : null };
};
const get = async (path) => (await call('GET', path)).json;
const ask = () => post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 12, messages: [{ role: 'user', content: word() }] }, { 'x-api-key': user });

const calls = [['GET', 'overview'], ['GET', 'model'], ['GET', 'cache'], ['GET', 'usage'], ['GET', 'config'], ['PATCH', 'config', '{}'], ['POST', 'drain'], ['POST', 'resume']];
for (const [method, name, body] of calls)
  await check(`${method} ${name}: 200 with the scope admin, 401 without a key, 403 with another scope`, async () => {
    const path = `/admin/v1/${name}`;
    const { status, json } = await call(method, path, { body });
    assert.equal(status, 200, JSON.stringify(json));
    assert.equal(json.object, { resume: 'drain' }[name] ?? name);
    assert.equal((await call(method, path, { body, key: null })).status, 401);
    assert.equal((await call(method, path, { body, key: user })).status, 403);
    assert.equal((await fetch(server.url + path, { method, body, headers: { 'x-api-key': root, 'content-type': 'application/json' } })).status, 404, 'not on the public port');
  });

await check('usage objects, the report as JSON and CSV, the overview and /metrics say the same', async () => {
  const sum = { prompt_tokens: 0, output_tokens: 0 };
  for (let i = 0; i < 5; i++) {
    const { usage } = (await ask()).json;
    sum.prompt_tokens += usage.prompt_tokens;
    sum.output_tokens += usage.completion_tokens;
  }
  const report = await get('/admin/v1/usage'), row = report.data.find((r) => r.tenant === tenant);
  const csv = await call('GET', '/admin/v1/usage?format=csv');
  assert.match(csv.type, /^text\/csv/);
  const [names, ...lines] = csv.text.trimEnd().split('\r\n').map((line) => line.split(','));
  const line = lines.find((l) => l[0] === `"${tenant}"`);
  const metrics = (await call('GET', '/metrics')).text, overview = await get('/admin/v1/overview');
  for (const name of Object.keys(sum)) {
    assert.equal(row[name], sum[name]);
    assert.equal(Number(line[names.indexOf(name)]), sum[name]);
    assert.equal(report.totals[name], sum[name]);
    assert.equal(overview.totals[name], sum[name]);
    assert.equal(Number(metrics.match(new RegExp(`^whimbrel_${name}_total (\\d+)$`, 'm'))[1]), sum[name]);
  }
  assert.equal(row.turns, 5);
  assert.equal((await call('GET', '/admin/v1/usage?format=xml')).status, 400);
  const cache = await get('/admin/v1/cache');
  assert.equal(Object.values(cache.reasons).reduce((all, r) => all + r.turns, 0), 5);
  assert.equal(cache.memory.pages, overview.memory.pages);
});

await check('the model says what it is', async () => {
  const model = await get('/admin/v1/model');
  assert.equal(model.name, 'nano');
  assert.match(model.fingerprint, /^[0-9a-f]{32}$/);
  assert.equal(model.page_tokens, 128);
});

await check('config: live keys change at once, others and wrong values are 400 by name', async () => {
  const patch = (body) => call('PATCH', '/admin/v1/config', { body });
  assert.equal((await get('/admin/v1/config')).config.log.level, 'info');
  assert.equal((await patch('{"log.level":"debug"}')).json.config.log.level, 'debug');
  await ask();
  assert.match(server.log(), /level=debug/);
  for (const [body, param] of [['{"log.level":"loud"}', 'log.level'], ['{"log.level":"warn","server.listen":"x"}', 'server.listen'], ['{"log.levle":"warn"}', 'log.levle'], ['[]', null], ['{', null]]) {
    const { status, json } = await patch(body);
    assert.equal(status, 400, body);
    assert.equal(json.error.param, param, JSON.stringify(json));
  }
  assert.equal((await get('/admin/v1/config')).config.log.level, 'debug', 'all or none');
  await patch('{"log.level":"info"}');
});

await check('drain: new work is 503, what runs goes on, readiness says so; resume takes it back', async () => {
  const running = fetch(`${server.url}/v1/completions`, { method: 'POST', headers: { 'x-api-key': user, 'content-type': 'application/json' },
    body: JSON.stringify({ model: 'nano', prompt: word(), max_tokens: 400, ignore_eos: true, stream: true }) });
  const stream = await running;
  assert.equal((await call('POST', '/admin/v1/drain')).json.draining, true);
  const refused = await ask();
  assert.equal(refused.status, 503);
  assert.equal(refused.json.error.code, 'draining');
  assert.equal((await fetch(`${server.url}/health/ready`)).status, 503);
  assert.equal((await fetch(`${server.url}/health`)).status, 200);
  assert.equal((await get('/admin/v1/overview')).status, 'draining');
  assert.match(await stream.text(), /"finish_reason":"length"[\s\S]*\[DONE\]/);
  assert.equal((await call('POST', '/admin/v1/resume')).json.draining, false);
  assert.equal((await ask()).status, 200);
  assert.equal((await fetch(`${server.url}/health/ready`)).status, 200);
});

await server.stop();
finish();
