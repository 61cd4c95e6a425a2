// What a client carries and cannot read: sealed reasoning with store:false, and compactions. Across restarts, changed, and in another tenant's hands.
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import OpenAI from 'openai';
import { check, finish, post, startServer, weatherTool, word } from './lib.mjs';
import { forecast, question } from './loop.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-sealed-'));
let server = await startServer({ data });
let client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const again = async (end) => {
  await server[end]();
  server = await startServer({ data });
  client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
};
const { type, function: definition } = weatherTool;
const tool = { type, ...definition, strict: null };
const ask = (input, more = {}) => ({ model: 'nano', input, temperature: 0, max_output_tokens: 120, tools: [tool], tool_choice: 'none', store: false,
  include: ['reasoning.encrypted_content'], enable_thinking: true, ...more });
const user = (content) => ({ role: 'user', content });
/** As clients that show a summary alone send reasoning back. */
const bare = (output) => output.map((i) => (i.type === 'reasoning' ? { type: 'reasoning', id: i.id, summary: [], encrypted_content: i.encrypted_content } : i));
const sealedOf = (output) => output.find((i) => i.encrypted_content);
const refused = (param) => (e) => e instanceof OpenAI.BadRequestError && e.code === 'invalid_encrypted_content' && e.param === param;
const changed = (text) => {
  const at = Math.floor(text.length / 2);
  return text.slice(0, at) + (text[at] === 'A' ? 'B' : 'A') + text.slice(at + 1);
};
/** An answer that reasoned, for a seal comes with reasoning. */
async function reasoned() {
  for (let i = 0; i < 30; i++) {
    const input = [user(`${question()} ${word()}`)];
    const answer = await client.responses.create(ask(input));
    if (sealedOf(answer.output)) return { input, answer };
  }
  throw new Error('no answer of thirty reasoned');
}
const two = async () => {
  const guarded = await startServer();
  const make = async (body, root) => (await post(guarded.admin, '/admin/v1/keys', body, root ? { authorization: `Bearer ${root}` } : {})).json.key;
  const root = await make({ label: 'root', scopes: ['admin'] });
  const of = async () => new OpenAI({ baseURL: `${guarded.url}/v1`, apiKey: await make({ tenant: word() }, root), maxRetries: 0 });
  return { guarded, mine: await of(), theirs: await of() };
};

for (const end of ['stop', 'kill9'])
  await check(`store:false goes on after ${end} with its exact tokens, from the seal alone; then its whole turn is cached`, async () => {
    const { input, answer } = await reasoned();
    const next = [...input, ...bare(answer.output), user('And tomorrow?')];
    const control = await client.responses.create(ask(next));
    assert.ok(control.usage.input_tokens_details.cached_tokens >= answer.usage.total_tokens - 1);
    assert.ok(control.usage.input_tokens > answer.usage.total_tokens);
    await again(end);
    const without = await client.responses.create(ask(next.map(({ encrypted_content, ...i }) => i), { max_output_tokens: 1 }));
    assert.ok(without.usage.input_tokens < control.usage.input_tokens, 'without the seal the hidden tokens are gone');
    const sealed = await client.responses.create(ask(next));
    assert.equal(sealed.usage.input_tokens, control.usage.input_tokens);
    assert.equal(sealed.output_text, control.output_text);
    const last = await client.responses.create(ask([...next, ...bare(sealed.output), user('Thanks!')]));
    assert.ok(last.usage.input_tokens_details.cached_tokens >= sealed.usage.total_tokens - 1, JSON.stringify(last.usage));
  });

await check('an answer that did not reason hides nothing, so it carries no seal: its text is all that the next turn needs, after a restart too', async () => {
  const input = [user(`hello, ${word()}!`)], plain = { enable_thinking: false };
  const answer = await client.responses.create(ask(input, plain));
  assert.deepEqual(answer.output.map((i) => [i.type, i.encrypted_content]), [['message', undefined]]);
  const next = [...input, ...answer.output, user('And tomorrow?')], control = await client.responses.create(ask(next, plain));
  assert.ok(control.usage.input_tokens_details.cached_tokens >= answer.usage.total_tokens - 1, 'its tokens are known as long as memory has them');
  await again('stop');
  const later = await client.responses.create(ask(next, plain));
  assert.ok(['completed', 'incomplete'].includes(later.status));
  assert.equal(later.usage.input_tokens_details.cached_tokens, 0);
});

await check('a changed seal is refused by name, an edited answer wins, others are let be', async () => {
  const { input, answer } = await reasoned();
  const at = 1 + answer.output.findIndex((i) => i.encrypted_content);
  const withSeal = (seal) => [...input, ...bare(answer.output).map((i) => (i.encrypted_content ? { ...i, encrypted_content: seal(i.encrypted_content) } : i)), user('x')];
  await again('stop'); // the ledger's memory knows nothing of it now
  for (const seal of [changed, (t) => t.slice(0, -20), (t) => t.replace(/\..{8}/, '.AAAAAAAA'), (t) => t.slice(0, 7)])
    await assert.rejects(client.responses.create(ask(withSeal(seal))), refused(`input[${at}].encrypted_content`));
  for (const seal of [() => '', () => 'gAAAAABpM0Yj-another-servers', () => word(40)]) await client.responses.create(ask(withSeal(seal), { max_output_tokens: 1 }));
  const edited = withSeal((t) => t).map((i) => (i.type === 'message' && i.role === 'assistant' ? { ...i, content: [{ type: 'output_text', text: 'It was edited.', annotations: [] }] } : i));
  const plain = edited.map(({ encrypted_content, ...i }) => i);
  const count = async (list) => (await client.responses.create(ask(list, { max_output_tokens: 1 }))).usage.input_tokens;
  assert.equal(await count(edited), await count(plain), 'a seal that says something else than the item is of no use');
});

await check('a seal tells nothing, and nobody else may use it', async () => {
  const { guarded, mine, theirs } = await two();
  let input, answer;
  for (let i = 0; !(answer && sealedOf(answer.output)) && i < 30; i++) {
    input = [user(`${question()} ${word()}`)];
    answer = await mine.responses.create(ask(input));
  }
  const seal = sealedOf(answer.output).encrypted_content;
  const inside = Buffer.from(seal.split('.')[1], 'base64');
  const texts = answer.output.flatMap((i) => [...(i.content ?? []), ...(i.summary ?? [])].map((c) => c.text)).concat(input[0].content);
  for (const text of texts) for (let at = 0; at + 5 <= text.length; at++) assert.ok(!inside.includes(text.slice(at, at + 5)), text);
  const { tokens } = (await post(guarded.url, '/tokenize', { model: 'nano', prompt: answer.output_text, add_special_tokens: false }, { authorization: `Bearer ${mine.apiKey}` })).json;
  for (let i = 0; i + 2 <= tokens.length; i++) { const pair = Buffer.alloc(8); pair.writeInt32LE(tokens[i]); pair.writeInt32LE(tokens[i + 1], 4); assert.ok(!inside.includes(pair)); }
  const next = [...input, ...bare(answer.output), user('x')], at = 1 + answer.output.findIndex((i) => i.encrypted_content);
  await assert.rejects(theirs.responses.create(ask(next)), (e) => refused(`input[${at}].encrypted_content`)(e) && !texts.some((t) => t && e.message.includes(t)));
  await assert.rejects(theirs.conversations.create({ items: next }), refused(`items[${at}].encrypted_content`));
  await mine.conversations.create({ items: next });
  const { output: [, compaction] } = await mine.responses.compact({ model: 'nano', input, max_output_tokens: 20 });
  assert.equal(compaction.type, 'compaction');
  await assert.rejects(theirs.responses.create(ask([compaction, user('x')])), refused('input[0].encrypted_content'));
  await assert.rejects(mine.responses.create(ask([user('x'), { ...compaction, encrypted_content: changed(compaction.encrypted_content) }])), refused('input[1].encrypted_content'));
  // One kind of seal is not another.
  await assert.rejects(mine.responses.create(ask([{ type: 'compaction', encrypted_content: seal }, user('x')])), refused('input[0].encrypted_content'));
  await mine.responses.create(ask([compaction, user('x')], { max_output_tokens: 1 }));
  await guarded.stop();
});

await check('compact: messages of the user stay, the rest becomes one sealed item that stands for it, after a restart too', async () => {
  const asked = [`${question()} ${word()}`, `And ${word()}?`];
  const history = [{ role: 'developer', content: 'Be brief.' }, user(asked[0]), { type: 'function_call', call_id: 'call_1', name: 'get_weather', arguments: '{"city":"Oslo"}' },
    { type: 'function_call_output', call_id: 'call_1', output: JSON.stringify(Array.from({ length: 30 }, forecast)) }, { role: 'assistant', content: 'Fog.' }, user(asked[1])];
  const before = await client.responses.create(ask(history, { max_output_tokens: 1 }));
  const compact = await client.responses.compact({ ...ask(history), max_output_tokens: 40, include: undefined });
  assert.equal(compact.object, 'response.compaction');
  assert.match(compact.id, /^resp_/);
  assert.ok(Math.abs(compact.created_at - Date.now() / 1000) < 60);
  assert.equal(compact.usage.total_tokens, compact.usage.input_tokens + compact.usage.output_tokens);
  assert.ok(compact.usage.output_tokens <= 40);
  assert.ok(compact.usage.input_tokens_details.cached_tokens >= before.usage.input_tokens - 16, 'what was there is cached, up to what asks for an answer');
  assert.deepEqual(compact.output.map((i) => [i.type, i.role, i.content?.[0].text]),
    [['message', 'system', 'Be brief.'], ['message', 'user', asked[0]], ['message', 'user', asked[1]], ['compaction', undefined, undefined]]);
  assert.equal(new Set(compact.output.map((i) => i.id)).size, 4);
  await assert.rejects(client.responses.retrieve(compact.id), OpenAI.NotFoundError);
  const next = [...compact.output, user('Go on.')];
  const short = await client.responses.create(ask(next));
  assert.ok(short.usage.input_tokens < before.usage.input_tokens, `${short.usage.input_tokens} of ${before.usage.input_tokens}`);
  await again('kill9');
  const same = await client.responses.create(ask(next));
  assert.deepEqual([same.usage.input_tokens, same.output_text], [short.usage.input_tokens, short.output_text]);
  // Compacted once more, the first one is part of the second; a stored response may be what is compacted.
  const stored = await client.responses.create(ask(next, { store: true }));
  const second = await client.responses.compact({ model: 'nano', previous_response_id: stored.id, input: [user(asked[1])], max_output_tokens: 40 });
  assert.deepEqual(second.output.map((i) => i.type), ['message', 'message', 'message', 'message', 'message', 'compaction']);
  const conversation = await client.conversations.create({ items: second.output });
  const onIt = await client.responses.create({ model: 'nano', conversation: conversation.id, input: 'Go on.', max_output_tokens: 1 });
  const beside = await client.responses.create({ model: 'nano', input: [...second.output, user('Go on.')], max_output_tokens: 1, store: false });
  assert.equal(onIt.usage.input_tokens, beside.usage.input_tokens);
});

await check('compact: what is wrong is named', async () => {
  const wrong = (body, param) => assert.rejects(client.responses.compact({ model: 'nano', ...body }), (e) => e instanceof OpenAI.BadRequestError && e.param === param);
  await wrong({}, 'input');
  await wrong({ input: 5 }, 'input');
  await wrong({ input: [{ type: 'compaction', encrypted_content: 5 }] }, 'input[0].encrypted_content');
  await wrong({ input: 'x', previous_response_id: 'resp_none' }, 'previous_response_id');
  await assert.rejects(client.responses.compact({ model: word(), input: 'x' }), OpenAI.NotFoundError);
  // Another server's is a gap that the model is told of.
  const count = async (input) => (await client.responses.create(ask(input, { max_output_tokens: 1 }))).usage.input_tokens;
  assert.ok(await count([{ type: 'compaction', id: 'cmp_1', encrypted_content: 'gAAAAABpM0Yj-' }, user('x')]) > await count([user('x')]));
});

await server.stop();
rmSync(data, { recursive: true, force: true });
finish();
