// The Conversations API by the official client: items and their bounds, responses on a conversation, their order, restarts, tenants, deletion.
import assert from 'node:assert/strict';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import OpenAI from 'openai';
import { check, databaseProgram, finish, ledger, metric, pick, post, sleep, startServer, weatherTool, word } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-conversations-'));
let server = await startServer({ data });
const connect = (at, apiKey = 'none') => new OpenAI({ baseURL: `${at.url}/v1`, apiKey, maxRetries: 0 });
let client = connect(server);
const { type, function: definition } = weatherTool;
const tool = { type, ...definition, strict: null };
const ask = (conversation, input, more = {}) => ({ model: 'nano', conversation, input, temperature: 0, max_output_tokens: 60, ...more });
const user = (text) => ({ type: 'message', role: 'user', content: [{ type: 'input_text', text }] });
const collect = async (list) => { const all = []; for await (const item of list) all.push(item); return all; };
const items = (id, client_ = client) => collect(client_.conversations.items.list(id, { order: 'asc', limit: 3 }));
const textOf = (item) => item.content.map((c) => c.text).join('');
const refusal = (status, param, code) => (e) => {
  assert.ok(e instanceof OpenAI.APIError, String(e));
  assert.deepEqual([e.status, e.param, e.code], [status, param, code ?? e.code]);
  return true;
};
const usage = (u) => ({ prompt: u.input_tokens, cached: u.input_tokens_details.cached_tokens, output: u.output_tokens, total: u.total_tokens });

await check('made, read, changed, listed, deleted: every object has its typed fields', async () => {
  const words = Array.from({ length: 4 }, () => word());
  const made = await client.conversations.create({ metadata: { topic: words[0] }, items: [{ role: 'user', content: words[1] }, { role: 'assistant', content: words[2] }] });
  assert.match(made.id, /^conv_[0-9a-f]{24}$/);
  assert.deepEqual({ ...made }, { id: made.id, object: 'conversation', created_at: made.created_at, metadata: { topic: words[0] } });
  assert.ok(Math.abs(made.created_at - Date.now() / 1000) < 60);
  assert.deepEqual({ ...(await client.conversations.retrieve(made.id)) }, { ...made });
  assert.deepEqual((await client.conversations.update(made.id, { metadata: { topic: words[3] } })).metadata, { topic: words[3] });
  assert.deepEqual((await client.conversations.retrieve(made.id)).metadata, { topic: words[3] });
  assert.deepEqual((await client.conversations.update(made.id, { metadata: null })).metadata, {});
  const added = await client.conversations.items.create(made.id, { items: [user(words[3]), { type: 'function_call', call_id: 'call_1', name: 'f', arguments: '{}' },
    { type: 'function_call_output', call_id: 'call_1', output: 'ok' }, { type: 'web_search_call', id: 'ws_1', status: 'completed', action: { type: 'search' } }] });
  assert.equal(added.object, 'list');
  assert.equal(added.has_more, false);
  assert.deepEqual([added.first_id, added.last_id], [added.data[0].id, added.data[3].id]);
  assert.equal(added.data[3].id, 'ws_1', 'an id of the client stays');
  const all = await items(made.id);
  assert.deepEqual(all.map((i) => i.type), ['message', 'message', 'message', 'function_call', 'function_call_output', 'web_search_call']);
  assert.deepEqual(all.slice(0, 3).map(textOf), [words[1], words[2], words[3]]);
  assert.deepEqual(all.slice(0, 2).map((i) => [i.role, i.content[0].type, i.status]), [['user', 'input_text', 'completed'], ['assistant', 'output_text', 'completed']]);
  assert.equal(new Set(all.map((i) => i.id)).size, 6);
  const page = (await client.conversations.items.list(made.id, { limit: 2, after: all[4].id }));
  assert.deepEqual(page.data.map((i) => i.id), [all[3].id, all[2].id], 'the newest come first');
  assert.equal(page.has_more, true);
  assert.deepEqual(await client.conversations.items.retrieve(all[2].id, { conversation_id: made.id }), all[2]);
  const left = await client.conversations.items.delete(all[2].id, { conversation_id: made.id });
  assert.deepEqual([left.object, left.id], ['conversation', made.id]);
  assert.deepEqual((await items(made.id)).map((i) => i.id), all.filter((_, i) => i !== 2).map((i) => i.id));
  await assert.rejects(client.conversations.items.retrieve(all[2].id, { conversation_id: made.id }), refusal(404, 'item_id', 'item_not_found'));
  await assert.rejects(client.conversations.items.delete(all[2].id, { conversation_id: made.id }), refusal(404, 'item_id', 'item_not_found'));
  const again = await client.conversations.items.create(made.id, { items: [{ type: 'web_search_call', id: 'ws_1', status: 'completed' }] });
  assert.notEqual(again.data[0].id, 'ws_1', 'an id that is there already is minted anew');
  const before = await metric(server.admin, 'whimbrel_conversations');
  assert.deepEqual({ ...(await client.conversations.delete(made.id)) }, { id: made.id, object: 'conversation.deleted', deleted: true });
  assert.equal(await metric(server.admin, 'whimbrel_conversations'), before - 1);
  const gone = refusal(404, 'conversation_id', 'conversation_not_found');
  await assert.rejects(client.conversations.retrieve(made.id), gone);
  await assert.rejects(client.conversations.update(made.id, { metadata: {} }), gone);
  await assert.rejects(client.conversations.delete(made.id), gone);
  await assert.rejects(client.conversations.items.list(made.id).then((p) => p), gone);
  await assert.rejects(client.conversations.items.create(made.id, { items: [] }), gone);
  await assert.rejects(client.responses.create(ask(made.id, 'hi')), refusal(404, 'conversation', 'conversation_not_found'));
});

await check('bounds and wrong types are named; nothing of a refused call is kept', async () => {
  const { id } = await client.conversations.create();
  const create = (body) => client.conversations.create(body), add = (list) => client.conversations.items.create(id, { items: list });
  const many = Array.from({ length: 21 }, () => user('x'));
  await assert.rejects(create({ items: many }), refusal(400, 'items'));
  await assert.rejects(add(many), refusal(400, 'items'));
  await assert.rejects(add('x'), refusal(400, 'items'));
  await assert.rejects(add([user('x'), 5]), refusal(400, 'items[1]'));
  await assert.rejects(add([user('x'), { role: 'wizard', content: 'x' }]), refusal(400, 'items[1].role'));
  await assert.rejects(add([{ role: 'user', content: [{ type: 'input_image', image_url: 'x' }] }]), refusal(400, 'items[0].content[0].type'));
  await assert.rejects(add([{ type: 'item_reference', id: 'msg_none' }]), refusal(404, 'items[0]', 'item_not_found'));
  await assert.rejects(create({ metadata: Object.fromEntries(Array.from({ length: 17 }, (_, i) => [`k${i}`, 'v'])) }), refusal(400, 'metadata'));
  await assert.rejects(create({ metadata: { k: 5 } }), refusal(400, 'metadata'));
  await assert.rejects(client.conversations.update(id, { metadata: 'x' }), refusal(400, 'metadata'));
  for (const query of [{ limit: 0 }, { limit: 101 }]) await assert.rejects(client.conversations.items.list(id, query).then((p) => p), refusal(400, 'limit'));
  await assert.rejects(client.conversations.items.list(id, { order: 'up' }).then((p) => p), refusal(400, 'order'));
  await assert.rejects(client.conversations.items.list(id, { after: 'msg_none' }).then((p) => p), refusal(400, 'after'));
  await assert.rejects(client.responses.create(ask(id, 'x', { previous_response_id: 'resp_1' })), refusal(400, 'conversation'));
  await assert.rejects(client.responses.create(ask({ id: 5 }, 'x')), refusal(400, 'conversation.id'));
  await assert.rejects(client.responses.create(ask('conv_'.padEnd(100, 'x'), 'x')), refusal(404, 'conversation', 'conversation_not_found'));
  const list = await fetch(`${server.url}/v1/conversations/${id}/items`);
  assert.deepEqual(await list.json(), { object: 'list', data: [], first_id: null, last_id: null, has_more: false });
  const path = await fetch(`${server.url}/v1/conversations/${id}/turns`);
  assert.equal(path.status, 404);
});

for (const streamed of [false, true])
  await check(`a tool loop of five turns on a conversation, ${streamed ? 'streamed' : 'whole'}: items stand in order, the whole previous turn is cached`, async () => {
    const { id } = await client.conversations.create({ items: [{ role: 'developer', content: 'Be brief.' }] });
    const expected = ['message'], watch = cacheWatch();
    for (let turn = 0; turn < TURNS; turn++) {
      let input = pick([question(), [user(question())]]);
      for (const tool_choice of ['required', 'none']) {
        const body = ask(pick([id, { id }]), input, { tools: [tool], tool_choice });
        const answer = streamed ? await client.responses.stream(body).finalResponse() : await client.responses.create(body);
        assert.equal(answer.status, 'completed');
        assert.deepEqual(answer.conversation, { id });
        watch(usage(answer.usage));
        const calls = answer.output.filter((i) => i.type === 'function_call');
        assert.equal(calls.length > 0, tool_choice === 'required');
        expected.push(...(tool_choice === 'required' ? ['message'] : input.map((i) => i.type)), ...answer.output.map((i) => i.type));
        const { output } = await client.responses.retrieve(answer.id);
        assert.deepEqual((await items(id)).slice(-output.length), output, 'the output items, as they were answered');
        assert.deepEqual(output.map((i) => i.id), answer.output.map((i) => i.id));
        input = calls.map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: JSON.stringify(forecast()) }));
      }
    }
    assert.deepEqual((await items(id)).map((i) => i.type), expected);
  });

await check('a call without its output is refused; an output that was added answers it', async () => {
  const { id } = await client.conversations.create();
  const called = await client.responses.create(ask(id, question(), { tools: [tool], tool_choice: 'required', parallel_tool_calls: false }));
  await assert.rejects(client.responses.create(ask(id, 'And?', { tools: [tool] })), refusal(400, 'input'));
  const { call_id } = called.output.find((i) => i.type === 'function_call');
  await client.conversations.items.create(id, { items: [{ type: 'function_call_output', call_id, output: JSON.stringify(forecast()) }] });
  const next = await client.responses.create(ask(id, 'And?', { tools: [tool], tool_choice: 'none' }));
  assert.ok(next.usage.input_tokens_details.cached_tokens >= called.usage.total_tokens - 1);
});

await check('store:false keeps the items and no response; input_tokens and items elsewhere look on', async () => {
  const { id } = await client.conversations.create();
  const answer = await client.responses.create(ask(id, word(), { store: false }));
  assert.equal(answer.store, false);
  await assert.rejects(client.responses.retrieve(answer.id), refusal(404, 'response_id', 'response_not_found'));
  await assert.rejects(client.responses.create({ model: 'nano', input: 'x', previous_response_id: answer.id }), refusal(400, 'previous_response_id'));
  const all = await items(id);
  assert.deepEqual(all.slice(1), answer.output);
  const counted = await client.responses.inputTokens.count({ model: 'nano', conversation: id, input: 'more' });
  assert.deepEqual(await items(id), all, 'counting adds nothing');
  const next = await client.responses.create(ask(id, 'more'));
  assert.equal(next.usage.input_tokens, counted.input_tokens);
  assert.ok(next.usage.input_tokens_details.cached_tokens >= answer.usage.total_tokens - 1);
  // An item is named from outside its conversation, and from another.
  const named = all[0].id;
  const outside = await client.responses.create({ model: 'nano', max_output_tokens: 1, input: [{ type: 'item_reference', id: named }], store: false });
  const written = await client.responses.create({ model: 'nano', max_output_tokens: 1, input: [user(textOf(all[0]))], store: false });
  assert.equal(outside.usage.input_tokens, written.usage.input_tokens);
  const other = await client.conversations.create({ items: [{ type: 'item_reference', id: named }, { type: 'item_reference', id: next.output.at(-1).id }] });
  assert.deepEqual(await items(other.id), [all[0], next.output.at(-1)]);
});

await check('sealed reasoning is listed for who asks', async () => {
  const { id } = await client.conversations.create({ items: [{ type: 'reasoning', id: 'rs_1', summary: [], encrypted_content: 'another-servers' }] });
  assert.equal((await client.conversations.items.list(id)).data[0].encrypted_content, undefined);
  assert.equal((await client.conversations.items.list(id, { include: ['reasoning.encrypted_content'] })).data[0].encrypted_content, 'another-servers');
  assert.equal((await client.conversations.items.retrieve('rs_1', { conversation_id: id, include: ['reasoning.encrypted_content'] })).encrypted_content, 'another-servers');
});

await check('two responses at once stand in line; what changes a conversation does so, too, and whoever waits too long is told to come again', async () => {
  const { id } = await client.conversations.create();
  const [one, two] = await Promise.all([word(), word()].map((text) => client.responses.create(ask(id, text))));
  const order = (await items(id)).map((i) => i.id);
  const first = order.indexOf(one.output[0].id) < order.indexOf(two.output[0].id) ? [one, two] : [two, one];
  assert.ok(first[1].usage.input_tokens > first[0].usage.input_tokens, 'the second saw the first');
  assert.ok(first[1].usage.input_tokens_details.cached_tokens >= first[0].usage.total_tokens - 1);
  const running = await client.responses.create(ask(id, 'go on', { background: true, ignore_eos: true, max_output_tokens: 100000 }));
  const locked = (param) => (e) => {
    assert.deepEqual([e.constructor, e.status, e.code, e.param], [OpenAI.ConflictError, 409, 'conversation_locked', param]);
    assert.equal(e.headers.get('x-should-retry'), 'true');
    assert.ok(Number(e.headers.get('retry-after-ms')) > 0);
    return true;
  };
  const leave = new AbortController(), left = client.conversations.items.create(id, { items: [user('nobody waits for this')] }, { signal: leave.signal });
  const added = client.conversations.items.create(id, { items: [user('x')] }), gone = client.conversations.items.delete(order[0], { conversation_id: id });
  await sleep(100);
  leave.abort();
  await assert.rejects(left, OpenAI.APIUserAbortError);
  assert.equal((await items(id)).length, order.length, 'reading goes on, and nothing changes');
  assert.equal((await client.responses.cancel(running.id)).status, 'cancelled');
  await Promise.all([added, gone]);
  assert.deepEqual((await items(id)).map((i) => i.id), [...order.slice(1), (await added).data[0].id], 'what was cancelled adds nothing');
  const last = await client.responses.create(ask(id, 'go on', { background: true, ignore_eos: true, max_output_tokens: 100000 })), end = client.conversations.delete(id);
  await client.responses.cancel(last.id).catch((e) => assert.equal(e.status, 404, 'it may be gone with its conversation by now'));
  assert.equal((await end).deleted, true);
  const strict = await startServer({ set: { 'sessions.queue_max': 1, 'sessions.queue_wait_ms': 1 } });
  const own = connect(strict), conversation = (await own.conversations.create()).id;
  const busy = await own.responses.create(ask(conversation, 'go on', { background: true, ignore_eos: true, max_output_tokens: 100000 }));
  await assert.rejects(own.responses.create(ask(conversation, 'x')), locked('conversation'));
  await assert.rejects(own.conversations.items.create(conversation, { items: [user('x')] }), locked('conversation_id'));
  await assert.rejects(own.conversations.items.delete('msg_x', { conversation_id: conversation }), locked('conversation_id'));
  await assert.rejects(own.conversations.delete(conversation), locked('conversation_id'));
  await own.responses.cancel(busy.id);
  await own.responses.create(ask(conversation, 'x'));
  await strict.stop();
});

await check('so many conversations of a tenant, so many items of one', async () => {
  const small = await startServer({ set: { 'conversations.count_max': 2, 'conversations.items_max': 4 } });
  const own = connect(small), { id } = await own.conversations.create(), other = await own.conversations.create();
  await assert.rejects(own.conversations.create(), refusal(429, null, 'conversation_limit'));
  await own.conversations.delete(other.id);
  await own.conversations.create();
  await own.conversations.items.create(id, { items: [user('1'), user('2'), user('3')] });
  await assert.rejects(own.conversations.items.create(id, { items: [user('4'), user('5')] }), refusal(400, 'items', 'conversation_full'));
  await assert.rejects(own.responses.create(ask(id, 'x')), refusal(400, 'conversation', 'conversation_full'));
  assert.equal((await items(id, own)).length, 3);
  await small.stop();
});

await check('kept over SIGTERM with its whole cache, over kill -9 with every told turn', async () => {
  const { id } = await client.conversations.create({ metadata: { a: word() } });
  const before = await client.responses.create(ask(id, question(), { tools: [tool], tool_choice: 'none', reasoning: { effort: 'high' } }));
  await server.stop();
  server = await startServer({ data });
  client = connect(server);
  const after = await client.responses.create(ask(id, question(), { tools: [tool], tool_choice: 'none', reasoning: { effort: 'high' } }));
  assert.ok(after.usage.input_tokens_details.cached_tokens >= before.usage.total_tokens - 1, JSON.stringify(after.usage));
  const all = await items(id);
  await server.kill9();
  server = await startServer({ data });
  client = connect(server);
  assert.deepEqual(await items(id), all);
  const counted = await client.responses.inputTokens.count({ model: 'nano', conversation: id, input: 'x', tools: [tool], tool_choice: 'none', reasoning: { effort: 'high' } });
  const next = await client.responses.create(ask(id, 'x', { tools: [tool], tool_choice: 'none', reasoning: { effort: 'high' } }));
  assert.equal(counted.input_tokens, next.usage.input_tokens);
  // Of the turn before, the exact tokens are in the prompt, hidden ones included.
  assert.ok(next.usage.input_tokens > after.usage.total_tokens, `${next.usage.input_tokens} tokens follow ${after.usage.total_tokens}`);
});

await check("another tenant's conversation is unknown, by every call", async () => {
  const guarded = await startServer();
  const make = async (body, root) => (await post(guarded.admin, '/admin/v1/keys', body, root ? { authorization: `Bearer ${root}` } : {})).json.key;
  const root = await make({ label: 'root', scopes: ['admin'] });
  const mine = connect(guarded, await make({ tenant: word() }, root)), theirs = connect(guarded, await make({ tenant: word() }, root));
  const { id } = await mine.conversations.create({ items: [user(word())] });
  const [item] = (await mine.conversations.items.list(id)).data;
  const gone = refusal(404, 'conversation_id', 'conversation_not_found');
  for (const call of [() => theirs.conversations.retrieve(id), () => theirs.conversations.update(id, { metadata: {} }), () => theirs.conversations.delete(id),
    () => theirs.conversations.items.list(id).then((p) => p), () => theirs.conversations.items.create(id, { items: [user('x')] }),
    () => theirs.conversations.items.retrieve(item.id, { conversation_id: id }), () => theirs.conversations.items.delete(item.id, { conversation_id: id })])
    await assert.rejects(call(), gone);
  await assert.rejects(theirs.responses.create(ask(id, 'x')), refusal(404, 'conversation', 'conversation_not_found'));
  await assert.rejects(theirs.responses.create({ model: 'nano', input: [{ type: 'item_reference', id: item.id }] }), refusal(404, 'input[0]', 'item_not_found'));
  assert.deepEqual((await mine.conversations.items.list(id)).data, [item]);
  await guarded.stop();
});

await check('deleted, it is in no file: its items, and what ran on it', async () => {
  const files = (dir) => readdirSync(dir).flatMap((name) => (statSync(join(dir, name)).isDirectory() ? files(join(dir, name)) : [join(dir, name)]));
  const found = (needle) => files(data).filter((path) => readFileSync(path).includes(needle));
  const [added, said, beside] = [word(7), word(7), word(7)];
  const { id } = await client.conversations.create({ items: [user(`Remember ${added}.`)] });
  const kept = await client.responses.create({ model: 'nano', input: `Remember ${beside}.`, max_output_tokens: 8 });
  const first = await client.responses.create(ask(id, `And ${said}.`)), second = await client.responses.create(ask(id, 'Go on.', { store: false }));
  for (let i = 0; i < 100 && !(found(added).length && found(said).length); i++) await sleep(50);
  assert.ok(found(added).length && found(said).length, 'the search finds what is there');
  await client.conversations.delete(id);
  assert.deepEqual([found(added), found(said)], [[], []]);
  assert.ok(found(beside).length);
  await assert.rejects(client.responses.retrieve(first.id), refusal(404, 'response_id'));
  assert.equal((await client.responses.retrieve(kept.id)).id, kept.id);
  assert.ok(second.id);
  // An item alone: gone from the conversation and its row.
  const alone = await client.conversations.create({ items: [user(`Remember ${added}.`), user('x')] });
  await client.conversations.items.delete((await items(alone.id))[0].id, { conversation_id: alone.id });
  assert.deepEqual(found(added), []);
  await server.stop();
  assert.deepEqual([found(added), found(said)], [[], []]);
  assert.equal(ledger(data, 'select count(*) n from erasures')[0].n, 0);
  const checked = await databaseProgram('check', data);
  assert.equal(checked.code, 0, checked.out);
});

rmSync(data, { recursive: true, force: true });
finish();
