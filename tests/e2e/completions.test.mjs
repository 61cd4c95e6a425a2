// Stored chat completions: read, listed, filtered, changed, erased, and nobody else's.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, ledger, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const run = word();
const chat = (content, more) => ({ model: 'nano', store: true, messages: [{ role: 'system', content: 'Be brief.' }, { role: 'user', content }], max_tokens: 12, ignore_eos: true, enable_thinking: false, ...more });
const create = (content, more) => client.chat.completions.create(chat(content, more));
const gone = (e) => e instanceof OpenAI.NotFoundError && e.code === 'completion_not_found';

await check('what was stored reads as it was told: text, two choices, a stream, a call, a custom call', async () => {
  const custom = { type: 'custom', custom: { name: 'note', format: { type: 'grammar', grammar: { syntax: 'regex', definition: '[a-z]{5}' } } } };
  for (const more of [{}, { n: 2 }, { tools: [weatherTool], tool_choice: 'required', ignore_eos: false, max_tokens: 200 },
    { tools: [custom], tool_choice: { type: 'custom', custom: { name: 'note' } }, ignore_eos: false, max_tokens: 200 }]) {
    const r = await create(word(), { metadata: { run, nth: '1' }, ...more });
    assert.ok(r.usage.whimbrel.stored);
    const kept = await client.chat.completions.retrieve(r.id);
    const { logprobs, ...first } = r.choices[0];
    for (const key of ['id', 'object', 'created', 'model']) assert.equal(kept[key], r[key], key);
    assert.deepEqual(kept.choices, r.choices);
    for (const key of ['prompt_tokens', 'completion_tokens', 'total_tokens']) assert.equal(kept.usage[key], r.usage[key], key);
    assert.deepEqual(kept.metadata, { run, nth: '1' });
    assert.deepEqual(kept.tools, more.tools);
    if (more.tools) assert.equal(first.message.tool_calls[0].type, more.tools[0].type);
  }
  let id, text = '';
  for await (const chunk of await client.chat.completions.create(chat(word(), { stream: true }))) { id = chunk.id; text += chunk.choices[0]?.delta.content ?? ''; }
  assert.equal((await client.chat.completions.retrieve(id)).choices[0].message.content, text);
});

await check('without store there is nothing to read', async () => {
  for (const store of [undefined, false]) await assert.rejects(client.chat.completions.retrieve((await create(word(), { store })).id), gone);
  for (const id of ['chatcmpl-0123456789abcdef01234567', 'chatcmpl-x', 'resp_0123456789abcdef01234567']) await assert.rejects(client.chat.completions.retrieve(id), gone);
});

await check('lists page in both orders and filter by model and metadata', async () => {
  const tag = word(5), ids = [];
  for (let i = 0; i < 5; i++) ids.push((await create(word(), { metadata: { tag, 'odd key[]&=': i % 2 ? 'ü' : 'no' } })).id);
  const all = async (query) => { const found = []; for await (const c of client.chat.completions.list(query)) found.push(c.id); return found; };
  assert.deepEqual(await all({ metadata: { tag }, order: 'asc', limit: 2 }), ids);
  assert.deepEqual(await all({ metadata: { tag }, limit: 3 }), [...ids].reverse());
  assert.deepEqual(await all({ metadata: { tag, 'odd key[]&=': 'ü' }, order: 'asc' }), [ids[1], ids[3]]);
  assert.deepEqual(await all({ metadata: { tag }, model: 'other' }), []);
  assert.deepEqual(await all({ metadata: { tag }, model: 'nano', order: 'asc', after: ids[2] }), ids.slice(3));
  const page = (await (await fetch(`${server.url}/v1/chat/completions?limit=2&order=asc&metadata[tag]=${tag}`)).json());
  assert.deepEqual([page.object, page.first_id, page.last_id, page.has_more], ['list', ids[0], ids[1], true]);
  for (const [query, param] of [['limit=0', 'limit'], ['limit=101', 'limit'], ['order=x', 'order'], ['after=chatcmpl-0123456789abcdef01234567', 'after'], ['after=x', 'after'], ['metadata=x', 'metadata']]) {
    const r = await fetch(`${server.url}/v1/chat/completions?${query}`);
    assert.equal(r.status, 400, query);
    assert.equal((await r.json()).error.param, param);
  }
});

await check('metadata is replaced, within its bounds', async () => {
  const { id } = await create(word(), { metadata: { a: '1', b: '2' } });
  assert.deepEqual((await client.chat.completions.update(id, { metadata: { c: '3' } })).metadata, { c: '3' });
  assert.deepEqual((await client.chat.completions.retrieve(id)).metadata, { c: '3' });
  for (const metadata of [{ a: 1 }, [], Object.fromEntries(Array.from({ length: 17 }, (_, i) => [i, 'x']))])
    await assert.rejects(client.chat.completions.update(id, { metadata }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'metadata');
  await assert.rejects(client.chat.completions.update('chatcmpl-0123456789abcdef01234567', { metadata: {} }), gone);
});

await check('the messages of the request are listed, results with their calls', async () => {
  const content = word();
  const first = await create(content, { tools: [weatherTool], tool_choice: 'required', ignore_eos: false, max_tokens: 200 });
  const { message } = first.choices[0];
  const messages = [...chat(content).messages, message, ...message.tool_calls.map((c) => ({ role: 'tool', tool_call_id: c.id, content: word() }))];
  const { id } = await client.chat.completions.create({ ...chat('x'), messages, tools: [weatherTool] });
  const list = [];
  for await (const m of client.chat.completions.messages.list(id, { order: 'asc' })) list.push(m);
  assert.deepEqual(list.map((m) => m.id), messages.map((_, i) => `${id}-${i}`));
  assert.deepEqual(list.map((m) => m.role), messages.map((m) => m.role));
  assert.equal(list[1].content, content);
  assert.deepEqual(list.slice(3).map((m) => [m.tool_call_id, m.content]), messages.slice(3).map((m) => [m.tool_call_id, m.content]));
});

await check('a deleted completion is gone with all its choices, from the file too', async () => {
  const secret = word(8);
  const r = await create(`Say ${secret}`, { n: 3, metadata: { secret } });
  const turns = r.usage.whimbrel.choices.map((c) => c.turn);
  assert.deepEqual(await client.chat.completions.delete(r.id), { id: r.id, object: 'chat.completion.deleted', deleted: true });
  await assert.rejects(client.chat.completions.retrieve(r.id), gone);
  await assert.rejects(client.chat.completions.delete(r.id), gone);
  await assert.rejects(client.chat.completions.messages.list(r.id), gone);
  assert.equal(ledger(server.data, `select count(*) n from turns where public in (${turns.map((t) => `'${t}'`)})`)[0].n, 0);
  assert.equal(ledger(server.data, `select count(*) n from items where instr(data, '${secret}')`)[0].n, 0);
});

await check('what others stored is unknown to a tenant', async () => {
  const key = async (tenant, headers) => {
    const r = await post(server.admin, '/admin/v1/keys', { tenant, scopes: ['inference', 'admin'] }, headers);
    assert.ok(r.json.key, r.text);
    return r.json.key;
  };
  const mine = await key('default'), theirs = await key(`t${word()}`, { authorization: `Bearer ${mine}` });
  const [a, b] = [mine, theirs].map((apiKey) => new OpenAI({ baseURL: `${server.url}/v1`, apiKey, maxRetries: 0 }));
  const { id } = await a.chat.completions.create(chat(word()));
  assert.equal((await a.chat.completions.retrieve(id)).id, id);
  for (const call of [() => b.chat.completions.retrieve(id), () => b.chat.completions.update(id, { metadata: {} }), () => b.chat.completions.delete(id), () => b.chat.completions.messages.list(id)])
    await assert.rejects(call, gone);
  assert.equal((await b.chat.completions.list()).data.length, 0);
  assert.equal((await fetch(`${server.url}/v1/chat/completions`)).status, 401);
});

await server.stop();
finish();
