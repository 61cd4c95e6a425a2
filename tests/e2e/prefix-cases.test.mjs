// Faults of comparable servers' prefix caches (tests/gateway/cases/prefix-cache.json), each as a test through the front
// door, lengths scaled to the model served here. A cold run is the same request in a namespace of its own (cache_salt).
import assert from 'node:assert/strict';
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, pick, post, root, sleep, startServer, word } from './lib.mjs';

const cases = JSON.parse(readFileSync(join(root, 'tests/gateway/cases/prefix-cache.json')));
const long = !!process.env.WHIMBREL_LONG;
let server = await startServer();

/** `count` tokens of filler that shares no beginning with another tag's. */
async function filler(tag, count) {
  const text = Array.from({ length: count }, (_, i) => `${tag}${String(i).padStart(4, '0')}`).join(' ');
  const { json } = await post(server.url, '/tokenize', { prompt: text, add_special_tokens: false });
  assert.ok(json.tokens.length >= count);
  return json.tokens.slice(0, count);
}
async function complete(prompt, more = {}) {
  const { status, json, text } = await post(server.url, '/v1/completions', { model: 'nano', prompt, max_tokens: 8, temperature: 0, return_token_ids: true, ...more });
  assert.equal(status, 200, text);
  return { text: json.choices[0].text, cached: json.usage.prompt_tokens_details.cached_tokens, prompt: json.usage.prompt_tokens, own: json.usage.whimbrel };
}
const cold = (prompt, more = {}) => complete(prompt, { ...more, cache_salt: word(8) });
async function chat(body, path = '/v1/chat/completions') {
  const { status, json, text } = await post(server.url, path, { temperature: 0, max_tokens: 60, ...body, model: 'nano' });
  assert.equal(status, 200, text);
  return json;
}
const bookTool = { type: 'function', function: { name: 'book_table', description: 'Book a table at a restaurant.', parameters: { type: 'object', required: ['city', 'people'], properties: { city: { type: 'string' }, people: { type: 'integer' } } } } };
const used = (r) => ({ cached: r.usage.prompt_tokens_details.cached_tokens, prompt: r.usage.prompt_tokens, output: r.usage.completion_tokens });
const pages = (n) => Math.floor(n / 128) * 128;
const restart = async (options) => { await server.stop(); server = await startServer(options); };

const tests = {
  async B087() { // adapters are not offered: the key without one, with a salt, and with two that join to the same text
    const p = await filler(word(), 300);
    const salts = ['X', 'a', 'ab', 'abc', 'Xa'];
    await complete(p);
    for (const salt of salts) assert.equal((await complete(p, { cache_salt: salt })).cached, 0, salt);
    for (const salt of salts) assert.equal((await complete(p, { cache_salt: salt })).cached, 299, salt);
  },
  async B089() { // the same name, other weights' fingerprint, over the same data directory
    const copy = mkdtempSync(join(tmpdir(), 'whimbrel-e2e-'));
    const options = { data: join(copy, 'data'), model: join(copy, 'nano') };
    cpSync(join(root, 'config/models/nano'), options.model, { recursive: true });
    await restart(options);
    const p = await filler(word(), 700);
    const first = await complete(p);
    await restart(options);
    const again = await complete(p);
    assert.equal(again.text, first.text);
    writeFileSync(join(options.model, 'config.json'), `${readFileSync(join(options.model, 'config.json'), 'utf8')}\n`);
    await restart(options);
    const other = await complete(p);
    assert.equal(other.cached, 0);
    assert.equal(other.text, (await cold(p)).text);
    rmSync(copy, { recursive: true, force: true });
  },
  async B090() {
    const prompts = Array.from({ length: long ? 32 : 12 }, (_, i) => [{ role: 'user', content: `${Array.from({ length: 60 }, () => word()).join(' ')}\nThe word is CANARY-${i}. Who are you, CANARY-${i}?` }]);
    const solo = [];
    for (const messages of prompts) solo.push((await chat({ messages, cache_salt: word(8) })).choices[0].message.content);
    for (let round = 0; round < 3; round++) {
      const order = prompts.map((_, i) => i).sort(() => Math.random() - 0.5);
      const work = async () => {
        for (let i; (i = order.pop()) !== undefined;) {
          const said = (await chat({ messages: prompts[i] })).choices[0].message.content;
          assert.equal(said, solo[i]);
          for (const [, n] of said.matchAll(/CANARY-(\d+)/g)) assert.equal(Number(n), i);
        }
      };
      await Promise.all(Array.from({ length: 8 }, work));
    }
  },
  async B091() {
    const messages = [{ role: 'system', content: Array.from({ length: 250 }, () => word()).join(' ') }, { role: 'user', content: 'Who are you?' }];
    const whole = (await chat({ messages, cache_salt: word(8) })).choices[0].message.content;
    const stop = whole.slice(12, 17);
    const first = await chat({ messages, stop });
    assert.equal(first.choices[0].message.content, whole.slice(0, whole.indexOf(stop)));
    messages.push(first.choices[0].message, { role: 'user', content: 'And then?' });
    const second = await chat({ messages });
    const returned = used(first).prompt + used(first).output;
    assert.ok(used(second).cached >= pages(returned) - 128, JSON.stringify(used(second)));
    assert.equal(second.choices[0].message.content, (await chat({ messages, cache_salt: word(8) })).choices[0].message.content);
  },
  async B092() { // four draft tokens a step, whatever they cost
    const body = {
      messages: [{ role: 'system', content: Array.from({ length: 500 }, () => word()).join(' ') }, { role: 'user', content: 'Book a table for 4 people in Oslo.' }],
      tools: [bookTool], thinking: { type: 'enabled' },
    };
    const rate = (r) => r.usage.whimbrel.accepted / r.usage.whimbrel.drafted;
    const first = await chat(body), warm = await chat(body);
    assert.ok(used(first).prompt > 1000);
    assert.equal(used(warm).cached, used(first).prompt - 1);
    const said = ({ content, reasoning_content, tool_calls }) => ({ content, reasoning_content, calls: tool_calls?.map((call) => call.function) });
    assert.deepEqual(said(warm.choices[0].message), said(first.choices[0].message));
    assert.ok(first.usage.whimbrel.accepted >= 5, `${first.usage.whimbrel.accepted} of ${first.usage.whimbrel.drafted} accepted`);
    assert.ok(rate(warm) >= 0.9 * rate(first), `${rate(warm)} warm, ${rate(first)} cold`);
  },
  async B093() {
    const p = await filler(word(), 1500);
    const right = (await cold(p)).text;
    for (let n = 0; n < (long ? 200 : 4); n++) {
      const salt = word(8), control = new AbortController();
      const sent = fetch(`${server.url}/v1/completions`, {
        method: 'POST', signal: control.signal, headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ model: 'nano', prompt: p, max_tokens: 8, temperature: 0, stream: true, cache_salt: salt }),
      }).then((r) => r.text()).catch(() => {});
      await sleep(1 + Math.random() * 50);
      control.abort();
      await sent;
      const second = await complete(p, { cache_salt: salt });
      assert.equal(second.text, right);
      assert.ok(second.cached < p.length);
    }
  },
  async B095() {
    const p = await filler(word(), 600), more = { max_tokens: 150, ignore_eos: true };
    const right = (await cold(p, more)).text;
    const others = await Promise.all(Array.from({ length: 6 }, () => filler(word(), 900)));
    const all = await Promise.all([complete(p, more), complete(p, more), ...others.map((o) => complete(o, { max_tokens: 30, ignore_eos: true }))]);
    assert.equal(all[0].text, right);
    assert.equal(all[1].text, right);
  },
  async B098() {
    const a = await filler(word(), 800);
    const first = await complete(a);
    for (let i = 0; i < 6; i++) await complete(await filler(word(), 1200), { max_tokens: 1 });
    const again = await complete(a);
    assert.ok(again.cached < 799, `${again.cached} cached after nine times as much`);
    assert.equal(again.text, first.text);
    assert.equal((await complete(a)).cached, 799);
  },
  async B099() { // the window of nano: the best 4 blocks of 128
    for (const length of [400, 700, 1300, ...(long ? [5000] : [])]) {
      const p = await filler(word(), length), more = { max_tokens: 24, ignore_eos: true };
      const first = await complete(p, more), again = await complete(p, more);
      assert.ok(first.cached < 8, 'a letter or two may be common');
      assert.equal(again.cached, length - 1);
      assert.equal(again.text, first.text, `${length} tokens`);
    }
  },
  async B100(c) {
    for (const length of c.input.prompt_tokens) {
      const p = await filler(word(), length);
      const first = await complete(p), second = await complete(p);
      assert.equal(second.cached, length - 1, `${length} tokens`);
      assert.equal(second.prompt, length);
      assert.equal(second.text, first.text);
    }
  },
  async B102(c) {
    const body = structuredClone(c.input.steps[0].body);
    body.system[1].text = `You are a coding assistant. ${Array.from({ length: 300 }, () => word()).join(' ')}`;
    body.max_tokens = 40;
    const first = await chat(body, '/v1/messages');
    body.system[0].text = body.system[0].text.replace('cch=11111', 'cch=22222');
    body.messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: 'Go on.' });
    const { usage } = await chat(body, '/v1/messages');
    const prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
    assert.ok(usage.cache_read_input_tokens >= 0.9 * prompt, JSON.stringify(usage));
    // A line inside another block goes too; what a user writes stays.
    const rendered = await chat({ messages: [{ role: 'user', content: 'x-anthropic-billing-header: cch=3;' }] }, '/v1/chat/completions/render');
    assert.ok(rendered.prompt.includes('x-anthropic-billing-header: cch=3;'));
  },
  async B103() { // the call is what the model writes; the client echoes it in another order
    const tools = [bookTool];
    const messages = [{ role: 'user', content: `Book a table for ${pick([2, 3, 5])} people in Oslo.` }];
    const first = await chat({ messages, tools, thinking: { type: 'enabled' } });
    const { tool_calls: calls } = first.choices[0].message;
    const args = JSON.parse(calls[0].function.arguments);
    calls[0].function.arguments = JSON.stringify(Object.fromEntries(Object.entries(args).reverse()), null, 1);
    messages.push({ role: 'assistant', content: null, tool_calls: calls }, { role: 'tool', tool_call_id: calls[0].id, content: 'done' });
    const second = await chat({ messages, tools, thinking: { type: 'enabled' } });
    assert.ok(used(second).cached >= used(first).prompt + used(first).output - 1, JSON.stringify(used(second)));
  },
  async B104() {
    const p = await filler(word(), 1000);
    const [a, b, more] = await Promise.all([filler(word(), 300), filler(word(), 300), filler(word(), 10)]);
    await complete([...p, ...a]);
    const branch = await complete([...p, ...b]);
    assert.ok(branch.cached >= 896 && branch.cached <= 1001, `${branch.cached}`);
    const again = await complete([...p, ...a, ...more]);
    assert.ok(again.cached >= 1299, `${again.cached}`);
    assert.equal(again.text, (await cold([...p, ...a, ...more])).text);
  },
};

// Those that need little memory, so that pages are reused, and no disk that brings them back; the last one restarts.
const tight = { set: { 'engine.context_max_tokens': 4096, 'engine.kv_bytes_max': 14 << 20, 'cache.disk': false } };
const needs = { B092: { set: { 'engine.draft': 4 } }, B095: tight, B098: tight, B089: {} };
const order = Object.keys(needs);
let now;
for (const c of cases.sort((a, b) => order.indexOf(a.id) - order.indexOf(b.id)))
  await check(`${c.id} ${c.title}`, async () => {
    assert.ok(tests[c.id], 'a case without a test');
    if (needs[c.id] !== now && c.id !== 'B089') await restart(now = needs[c.id]);
    await tests[c.id](c);
  });

await server.stop();
finish();
