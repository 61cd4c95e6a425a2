// Twelve things that keep a turn from going on where the last one ended, one at a time: usage names the one that was
// done, how much it cost, and where the prompt departs. Each on a conversation of its own.
import assert from 'node:assert/strict';
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, ledger, metric, post, root, startServer, weatherTool, word } from './lib.mjs';

let url, right = 0, done = 0;
const told = []; // reasons of all turns, to compare with the metrics
const base = () => ({
  model: 'nano', temperature: 0, max_tokens: 60, return_token_ids: true, tools: [weatherTool], reasoning_effort: 'low', thinking: { type: 'enabled' },
  messages: [{ role: 'system', content: `You help ${word()}. Today is Tuesday, 2026-12-01; request 17.` }, { role: 'user', content: `Who are you, ${word()}?` }],
});
async function run(body, headers) {
  const { status, json, text } = await post(url, '/v1/chat/completions', body, headers);
  assert.equal(status, 200, text);
  const { cache, turn } = json.usage.whimbrel;
  told.push(cache.reason);
  return { message: json.choices[0].message, prompt: json.prompt_token_ids, output: json.choices[0].token_ids, cached: json.usage.prompt_tokens_details.cached_tokens, cache, turn };
}
const goOn = (body, message) => { body.messages.push(message, { role: 'user', content: `And who is ${word()}?` }); return body; };
const drop = ({ reasoning_content, ...rest }) => rest;
const common = (a, b) => { let i = 0; while (i < a.length && i < b.length && a[i] === b[i]) i++; return i; };

/** Two turns of a conversation, whole, then the third with something done to it. */
async function third(change, headers) {
  const body = base();
  for (let n = 0; n < 2; n++) {
    const t = await run(body, headers);
    body.before = [...t.prompt, ...t.output];
    goOn(body, t.message);
  }
  const { before } = body;
  delete body.before;
  const after = await change(body) ?? {};
  return { before, after, ...await run(body, after.headers ?? headers) };
}

const cost = (t) => {
  assert.equal(t.cache.hit, t.cached);
  assert.ok(t.cached < t.before.length - 1, `${t.cached} of ${t.before.length}`);
  assert.equal(t.cache.lost, Math.min(t.before.length, t.prompt.length - 1) - t.cached);
};
const departs = (t, item) => {
  cost(t);
  assert.deepEqual(t.cache.first_diff, { item, token: common(t.prompt, t.before) });
};

async function reason(name, fn) {
  done++;
  await check(`reason: ${name}`, async () => { await fn(); right++; });
}

let server = await startServer({ set: { 'ledger.volatile_lines': true } });
url = server.url;

await reason('none while nothing is done', async () => {
  const t = await third(() => {});
  assert.deepEqual(t.cache, { hit: t.cached, lost: 0 });
  assert.ok(t.cached >= t.before.length - 1);
});
await reason('new session', async () => {
  const t = await run(base());
  assert.equal(t.cache.reason, 'new session');
  assert.equal(t.cache.lost, 0);
  assert.ok(!('first_diff' in t.cache));
});
await reason('volatile header', async () => {
  const t = await third((body) => { body.messages[0].content = body.messages[0].content.replace('Tuesday, 2026-12-01; request 17', 'Wednesday, 2026-12-02; request 18'); });
  assert.equal(t.cache.reason, 'volatile header');
  departs(t, 0);
});
await reason('tools changed', async () => {
  const t = await third((body) => { body.tools = [{ ...weatherTool, function: { ...weatherTool.function, name: 'weather_of' } }]; });
  assert.equal(t.cache.reason, 'tools changed');
  departs(t, 0);
});
await reason('effort or mode changed: effort', async () => {
  const t = await third((body) => { body.reasoning_effort = 'high'; });
  assert.equal(t.cache.reason, 'effort or mode changed');
  departs(t, 0);
});
await reason('effort or mode changed: mode', async () => {
  const t = await third((body) => { body.thinking = { type: 'disabled' }; });
  assert.equal(t.cache.reason, 'effort or mode changed');
  departs(t, 0);
});
await reason('reasoning dropped and restored', async () => {
  const t = await third((body) => { body.messages = body.messages.map(drop); });
  assert.deepEqual(t.cache, { hit: t.cached, lost: 0, reason: 'reasoning dropped and restored' });
  assert.ok(t.cached >= t.before.length - 1);
});
await reason('ambiguous', async () => {
  // The same words after other thoughts: one token of the first thought is forbidden in the second run.
  const body = base();
  const first = await run(body);
  let second;
  for (let i = 0; i < first.output.length && !second; i++) {
    const other = await run({ ...body, logit_bias: { [first.output[i]]: -100 } });
    if (other.message.content === first.message.content && other.message.reasoning_content !== first.message.reasoning_content) second = other;
  }
  assert.ok(second, 'the model says the same after other thoughts');
  goOn(body, drop(first.message));
  const t = await run(body);
  assert.equal(t.cache.reason, 'ambiguous');
});
await reason('edited history: a question', async () => {
  const t = await third((body) => { body.messages[1].content += ' Tell me.'; });
  assert.equal(t.cache.reason, 'edited history');
});
await reason('edited history: an answer', async () => {
  const t = await third((body) => { body.messages.at(-2).content = `I am ${word()}.`; });
  assert.equal(t.cache.reason, 'edited history');
});
await reason('tenant boundary: another cache_salt', async () => {
  const t = await third((body) => { body.cache_salt = word(); });
  assert.equal(t.cache.reason, 'tenant boundary');
  assert.equal(t.cached, 0);
  cost(t);
});
await check('usage, ledger and metrics tell the same', async () => {
  const rows = ledger(server.data, 'SELECT reason, lost FROM turns ORDER BY id');
  assert.deepEqual(rows.map((row) => row.reason ?? undefined), told);
  const text = await (await fetch(`${server.admin}/metrics`)).text();
  for (const name of new Set(told.filter(Boolean)))
    assert.ok(text.includes(`whimbrel_cache_reasons_total{reason="${name}"} ${told.filter((r) => r === name).length}\n`), name);
  assert.equal(await metric(server.admin, 'whimbrel_cache_lost_tokens_total'), rows.reduce((sum, row) => sum + row.lost, 0));
});
await server.stop();

// Room for little, and no disk: another conversation pushes the pages out.
server = await startServer({ set: { 'engine.context_max_tokens': 4096, 'engine.kv_bytes_max': 12 << 20, 'cache.disk': false } });
url = server.url;
await reason('evicted', async () => {
  const t = await third(async () => {
    for (let i = 0; i < 6; i++)
      await run({ ...base(), messages: [{ role: 'user', content: Array.from({ length: 500 }, () => word()).join(' ') }], max_tokens: 1 });
  });
  assert.equal(t.cache.reason, 'evicted');
  cost(t);
  assert.ok(!('first_diff' in t.cache), 'the prompt itself goes on');
});
await server.stop();

// The same weights under another configuration are another model; a process that kept no pages has none to give.
const copy = mkdtempSync(join(tmpdir(), 'whimbrel-e2e-'));
const model = join(copy, 'nano'), data = join(copy, 'data');
cpSync(join(root, 'config/models/nano'), model, { recursive: true });
const restart = async (set = {}) => {
  if (server.data === data) await server.stop();
  server = await startServer({ data, model, set: { 'cache.disk': false, ...set } });
  url = server.url;
};
await restart();
await reason('not yet written', async () => {
  const t = await third(() => restart());
  assert.equal(t.cache.reason, 'not yet written');
  assert.equal(t.cached, 0);
  cost(t);
});
await reason('model changed', async () => {
  const t = await third(() => {
    writeFileSync(join(model, 'config.json'), `${readFileSync(join(model, 'config.json'), 'utf8')}\n`);
    return restart();
  });
  assert.equal(t.cache.reason, 'model changed');
  assert.equal(t.cached, 0);
  cost(t);
});
await reason("tenant boundary: another tenant's ids", async () => {
  const make = async (body, headers) => (await post(server.admin, '/admin/v1/keys', body, headers)).json.key;
  const admin = { 'x-api-key': await make({ label: 'root', scopes: ['admin'] }) };
  const [a, b] = [await make({ tenant: 'one', scopes: ['inference'] }, admin), await make({ tenant: 'two', scopes: ['inference'] }, admin)];
  const body = { ...base(), tool_choice: 'required' };
  const t = await run(body, { 'x-api-key': a });
  body.messages.push(t.message, ...t.message.tool_calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: 'rain' })));
  const other = await run({ ...body, tool_choice: 'auto' }, { 'x-api-key': b });
  assert.equal(other.cache.reason, 'tenant boundary');
  assert.equal(other.cached, 0);
});
await server.stop();
rmSync(copy, { recursive: true, force: true });

console.log(`  ${right} of ${done} right`);
finish();
