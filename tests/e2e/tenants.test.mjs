// Tenants share nothing by accident: no page, no time that tells of one, no id. A sharing group shares pages alone.
import assert from 'node:assert/strict';
import { check, finish, metric, post, startServer, word } from './lib.mjs';

const long = Boolean(process.env.WHIMBREL_LONG);
const server = await startServer({ set: { 'log.access': false, 'ledger.cached_ttl_s': 0 } });
const call = async (method, path, key, body) => {
  const r = await fetch(server.url + path, { method, headers: { 'x-api-key': key, 'content-type': 'application/json' }, body: body && JSON.stringify(body) });
  const text = await r.text();
  let json;
  try { json = JSON.parse(text); } catch { /* left undefined */ }
  return { status: r.status, text, json };
};
const make = async (body, root) => (await post(server.admin, '/admin/v1/keys', body, root ? { authorization: `Bearer ${root}` } : {})).json.key;
const root = await make({ label: 'root', scopes: ['admin'] });
const a = await make({ tenant: `a-${word()}` }, root), b = await make({ tenant: `b-${word()}` }, root);

const prompt = () => `${word(4)} ${Array.from({ length: 60 }, () => word(2)).join(' ')}`;
const ask = (key, content, extra = {}) => post(server.url, '/v1/chat/completions',
  { model: 'nano', temperature: 0, max_tokens: 1, messages: [{ role: 'user', content }], ...extra }, { 'x-api-key': key });
/** The template's beginning is equal in all prompts: a tenant that has been here finds that much of its own. */
let beginning = 0;
/** No more than that, but for a first syllable that two random words may have in common. */
const own = (tokens) => tokens <= beginning + 4;
const cached = (r) => { assert.equal(r.status, 200, r.text); return r.json.usage.prompt_tokens_details.cached_tokens; };

await check('the same prompt of two tenants has pages of its own for each', async () => {
  const text = prompt();
  const pages = async () => metric(server.admin, 'whimbrel_index_pages').catch(() => undefined);
  assert.equal(cached(await ask(a, text)), 0);
  const [one, first] = [cached(await ask(a, text)), await pages()];
  assert.ok(one > 100, `${one} cached`);
  assert.equal(cached(await ask(b, text)), 0);
  beginning = cached(await ask(b, prompt()));
  assert.ok(beginning < one - 60, `${beginning} of ${one} tokens are the template's`);
  assert.ok(await pages() >= first + Math.floor(one / 128), 'the second tenant has no pages of its own');
  assert.ok(cached(await ask(b, text)) > beginning + 60);
});

await check('a cache_salt parts one tenant, too', async () => {
  const text = prompt();
  cached(await ask(a, text));
  assert.equal(cached(await ask(a, text, { cache_salt: word() })), 0);
  assert.ok(cached(await ask(a, text)) > beginning + 60);
});

await check('a sharing group shares pages, and nothing else', async () => {
  const group = `g-${word()}`;
  const c = await make({ tenant: `c-${word()}`, group }, root), d = await make({ tenant: `d-${word()}`, group }, root);
  const text = prompt();
  assert.equal(cached(await ask(c, text)), 0);
  assert.ok(cached(await ask(d, text)) > beginning + 60);
  assert.ok(own(cached(await ask(a, text))));
  const stored = await call('POST', '/v1/responses', c, { model: 'nano', input: 'hello', max_output_tokens: 4 });
  assert.equal((await call('GET', `/v1/responses/${stored.json.id}`, d)).status, 404);
  assert.equal((await call('GET', `/v1/responses/${stored.json.id}`, c)).status, 200);
  const refused = await post(server.admin, '/admin/v1/keys', { tenant: (await list()).find((k) => k.group === group).tenant, group: 'another' }, { authorization: `Bearer ${root}` });
  assert.equal(refused.status, 409, refused.text);
});
async function list() { return (await (await fetch(`${server.admin}/admin/v1/keys`, { headers: { authorization: `Bearer ${root}` } })).json()).data; }

await check("ids of another tenant are 404 wherever an id is taken", async () => {
  const response = (await call('POST', '/v1/responses', a, { model: 'nano', input: 'hello', max_output_tokens: 4 })).json;
  const session = (await call('POST', '/v1/sessions', a, { model: 'nano' })).json;
  const conversation = (await call('POST', '/v1/conversations', a, {})).json;
  const routes = [
    ['GET', `/v1/responses/${response.id}`], ['GET', `/v1/responses/${response.id}/input_items`], ['DELETE', `/v1/responses/${response.id}`],
    ['POST', `/v1/responses/${response.id}/cancel`],
  ];
  if (session?.id) {
    const turn = (await call('POST', `/v1/sessions/${session.id}/turns`, a, { items: [{ role: 'user', content: 'hi' }], max_tokens: 4 })).json;
    routes.push(['GET', `/v1/sessions/${session.id}`], ['GET', `/v1/sessions/${session.id}/turns`],
      ['POST', `/v1/sessions/${session.id}/turns`, { items: [{ role: 'user', content: 'x' }] }],
      ['POST', `/v1/sessions/${session.id}/fork`, {}], ['POST', `/v1/sessions/${session.id}/pin`, { seconds: 5 }],
      ['GET', `/v1/sessions/${session.id}/export`], ['DELETE', `/v1/sessions/${session.id}`]);
    assert.ok(turn, 'the owner may');
  }
  if (conversation?.id) {
    routes.push(['GET', `/v1/conversations/${conversation.id}`], ['GET', `/v1/conversations/${conversation.id}/items`],
      ['POST', `/v1/conversations/${conversation.id}/items`, { items: [{ type: 'message', role: 'user', content: 'x' }] }],
      ['DELETE', `/v1/conversations/${conversation.id}`]);
    const on = await call('POST', '/v1/responses', b, { model: 'nano', input: 'x', conversation: conversation.id });
    assert.ok([400, 404].includes(on.status), `conversation: ${on.status} ${on.text}`);
  }
  for (const [method, path, body] of routes) {
    const r = await call(method, path, b, body);
    assert.equal(r.status, 404, `${method} ${path}: ${r.status} ${r.text}`);
    assert.doesNotMatch(r.text, /hello/);
  }
  const follows = await call('POST', '/v1/responses', b, { model: 'nano', input: 'x', previous_response_id: response.id });
  assert.ok([400, 404].includes(follows.status), follows.text);
  assert.equal(follows.json.error.param, 'previous_response_id');
  assert.equal((await call('GET', `/v1/responses/${response.id}`, a)).status, 200);
  if (session?.id) assert.equal((await call('GET', `/v1/sessions/${session.id}`, a)).status, 200);
  if (conversation?.id) assert.equal((await call('GET', `/v1/conversations/${conversation.id}`, a)).status, 200);
});

/** Two-sided p of the Mann-Whitney test, normal approximation with ties. */
function mannWhitney(x, y) {
  const all = [...x.map((v) => [v, 0]), ...y.map((v) => [v, 1])].sort((p, q) => p[0] - q[0]);
  let sum = 0, ties = 0;
  for (let i = 0; i < all.length;) {
    let j = i;
    while (j < all.length && all[j][0] === all[i][0]) j++;
    for (let k = i; k < j; k++) if (all[k][1] === 0) sum += (i + j + 1) / 2;
    ties += (j - i) ** 3 - (j - i);
    i = j;
  }
  const n = x.length, m = y.length, N = n + m;
  const u = sum - (n * (n + 1)) / 2, mean = (n * m) / 2;
  const deviation = Math.sqrt(((n * m) / 12) * (N + 1 - ties / (N * (N - 1))));
  const z = Math.abs(u - mean) / deviation;
  // Abramowitz and Stegun 26.2.17.
  const t = 1 / (1 + 0.2316419 * z);
  return 2 * (Math.exp((-z * z) / 2) / Math.sqrt(2 * Math.PI)) *
    t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
}
/** Times of b's request: of prompts that a has just sent, and of prompts that nobody has. `other`: b or one of a's group. */
async function arms(first, second, n) {
  const known = [], fresh = [];
  for (let i = 0; i < n; i++)
    for (const arm of Math.random() < 0.5 ? [known, fresh] : [fresh, known]) {
      const [sent, unsent] = [prompt(), prompt()];
      cached(await ask(first, sent));
      const begin = process.hrtime.bigint();
      const r = await ask(second, arm === known ? sent : unsent);
      arm.push(Number(process.hrtime.bigint() - begin) / 1e6);
      if (second !== first) assert.ok(own(cached(r)), r.text);
    }
  return mannWhitney(known, fresh);
}

await check('the test of times sees what is shared', async () => {
  const p = await arms(a, a, 40);
  assert.ok(p < 0.001, `p = ${p} within one tenant`);
});

await check("times tell nothing of another tenant's prompts", async () => {
  const n = long ? 1000 : 100, runs = [];
  for (let i = 0; i < (long ? 3 : 1); i++) runs.push(await arms(a, b, n));
  console.log(`  Mann-Whitney, ${n} an arm: p = ${runs.map((p) => p.toFixed(3)).join(', ')}`);
  // A single run of few is noise one time in ten; the long one decides.
  if (long) assert.ok(runs.filter((p) => p > 0.1).length >= 2, `p = ${runs}`);
});

await server.stop();
finish();
