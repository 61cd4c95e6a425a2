// Native sessions: turns from exact tokens, appended results, forks, restarts, deletion, tenants, locks, exports.
import assert from 'node:assert/strict';
import { mkdtempSync, readFileSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { randomBytes } from 'node:crypto';
import http from 'node:http';
import { check, finish, metric, pick, post, sleep, startServer, weatherTool, word } from './lib.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-sessions-'));
let server = await startServer({ data });

async function call(method, path, body, headers = {}) {
  const response = await fetch(server.url + path, {
    method, headers: body === undefined ? headers : { 'content-type': 'application/json', ...headers },
    body: body === undefined || typeof body === 'string' ? body : JSON.stringify(body) });
  const text = await response.text();
  return { status: response.status, headers: response.headers, json: text ? JSON.parse(text) : undefined };
}
const ok = (r) => { assert.equal(r.status, 200, JSON.stringify(r.json)); return r.json; };
const make = async (body = {}, headers) => ok(await call('POST', '/v1/sessions', { model: 'nano', ...body }, headers));
const turn = (id, items, more = {}, headers) => call('POST', `/v1/sessions/${id}/turns`, { items, temperature: 0, max_tokens: 60, ...more }, headers);
const answer = (t) => t.items.at(-1);
const said = (t) => ({ content: answer(t).content, calls: answer(t).tool_calls?.map((c) => c.function) });
const whole = (t) => t.usage.prompt_tokens + t.usage.completion_tokens;
/** Waits until it is so. */
async function settle(test) {
  for (let i = 0; i < 300; i++) {
    if (await test()) return;
    await sleep(20);
  }
  throw new Error(`never: ${test}`);
}
/** Waits until no prefill runs or follows. */
async function quiet() {
  for (let calm = 0, before = -1; calm < 12;) {
    const now = await metric(server.admin, 'whimbrel_appended_tokens_total');
    calm = now === before ? calm + 1 : 0;
    before = now;
    await sleep(60);
  }
}
const user = (content) => ({ role: 'user', content });
/** Everything of the turn before comes from the cache, but at most its last token. */
function goesOn(before, after) {
  const cached = after.usage.prompt_tokens_details.cached_tokens;
  assert.ok(cached >= whole(before) - 1, `${cached} cached of ${whole(before)}`);
}
/** Server-sent events: [{event, data}]. */
async function stream(id, items, more = {}) {
  const response = await fetch(`${server.url}/v1/sessions/${id}/turns`, {
    method: 'POST', headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ items, temperature: 0, max_tokens: 60, stream: true, ...more }) });
  assert.equal(response.status, 200);
  const text = await response.text();
  return text.split('\n\n').filter((r) => r.startsWith('event:')).map((r) => {
    const [, event, json] = r.match(/^event: (.*)\ndata: (.*)$/);
    return { event, data: JSON.parse(json) };
  });
}
/** Asks until the model calls the tool: which city it understands is up to it. */
async function called(id) {
  for (let i = 0; i < 8; i++) {
    const s = id ?? (await make({ tools: [weatherTool] })).id;
    const t = ok(await turn(s, [user(`What is the weather in ${pick(['Oslo', 'Paris', 'Rome', 'Bergen', 'Madrid', 'London'])}?`)]));
    if (answer(t).tool_calls) return { id: s, t, call: answer(t).tool_calls[0] };
    if (id) break;
  }
  throw new Error('the model made no call');
}
/** What goes on from a turn: results if it made calls, else words. */
const onFrom = (t, text) => [...(answer(t).tool_calls ?? []).map((c) => ({ role: 'tool', tool_call_id: c.id, content: '7' })), user(text)];
const report = (lines) => Array.from({ length: lines }, () => `${word()} ${word()} ${word()} ${word()}`).join('\n');

await check('a session is made, read, listed and empty', async () => {
  const s = await make({ metadata: { project: 'p' }, system: 'You help.', tools: [weatherTool] });
  assert.match(s.id, /^sess_[0-9a-f]{24}$/);
  assert.deepEqual([s.object, s.head, s.turns, s.metadata.project], ['session', null, 0, 'p']);
  assert.deepEqual(ok(await call('GET', `/v1/sessions/${s.id}`)), s);
  const others = [await make(), await make()];
  const page = ok(await call('GET', '/v1/sessions?limit=2'));
  assert.deepEqual(page.data.map((x) => x.id), [others[1].id, others[0].id]);
  assert.deepEqual([page.first_id, page.last_id, page.has_more], [others[1].id, others[0].id, true]);
  const next = ok(await call('GET', `/v1/sessions?limit=1&after=${page.last_id}`));
  assert.equal(next.data[0].id, s.id);
  assert.equal(ok(await call('GET', '/v1/sessions?order=asc&limit=1')).data[0].id, s.id);
});

await check('three turns with a tool: each goes on from the whole turn before', async () => {
  const { id, t: first, call: made } = await called();
  const twin = await called(); // who said the same has calls of its own
  assert.notEqual(twin.call.id, made.id);
  assert.equal(first.finish_reason, 'tool_calls');
  const refused = await turn(id, [user('hm')]);
  assert.equal(refused.status, 400);
  assert.match(refused.json.error.message, new RegExp(`No tool output found for function call ${made.id}`));
  const second = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id, content: '{"temperature": 7}' }], { tool_choice: 'none' }));
  ok(await turn(twin.id, [{ role: 'tool', tool_call_id: twin.call.id, content: '8' }]));
  goesOn(first, second);
  assert.equal(second.parent, first.id);
  const third = ok(await turn(id, [{ type: 'message', role: 'user', content: [{ type: 'input_text', text: 'Thanks a lot!' }] }]));
  goesOn(second, third);
  const list = ok(await call('GET', `/v1/sessions/${id}/turns?order=asc&tokens=true`));
  assert.deepEqual(list.data.map((t) => t.id), [first.id, second.id, third.id]);
  assert.equal(list.data[1].items[0].tool_call_id, made.id);
  list.data.forEach((t, i) => assert.deepEqual(t.items, [first, second, third][i].items));
  // The exact tokens: every prompt begins with the prompt and output before it.
  for (let i = 1; i < 3; i++) {
    const before = [...list.data[i - 1].tokens.prompt, ...list.data[i - 1].tokens.output];
    assert.deepEqual(list.data[i].tokens.prompt.slice(0, before.length), before);
  }
  const newest = ok(await call('GET', `/v1/sessions/${id}/turns?limit=1`));
  assert.deepEqual([newest.data[0].id, newest.has_more], [third.id, true]);
  const rest = ok(await call('GET', `/v1/sessions/${id}/turns?after=${third.id}`));
  assert.deepEqual(rest.data.map((t) => t.id), [second.id, first.id]);
  assert.deepEqual(rest.data[0].items, second.items);
  assert.deepEqual(ok(await call('GET', `/v1/sessions/${id}`)).turns, 3);
});

await check('a streamed turn: created, deltas that add up, completed with the whole turn', async () => {
  const { id, t, call: made } = await called();
  const events = await stream(id, [{ type: 'function_call_output', call_id: made.id, output: 'sunny, 21 degrees' }]);
  assert.equal(events[0].event, 'turn.created');
  assert.equal(events[0].data.turn.status, 'in_progress');
  assert.equal(events.at(-1).event, 'turn.completed');
  const done = events.at(-1).data.turn;
  goesOn(t, done);
  const text = events.filter((e) => e.event === 'turn.delta' && e.data.type === 'text').map((e) => e.data.text).join('');
  assert.equal(text, answer(done).content);
  // A streamed call: its head has id and name, its arguments add up.
  for (let i = 0; i < 8; i++) {
    const s = (await make({ tools: [weatherTool] })).id;
    const e = await stream(s, [user('What is the weather in Oslo?')]);
    const calls = answer(e.at(-1).data.turn).tool_calls;
    if (!calls) continue;
    const parts = e.filter((x) => x.data.type === 'tool_call');
    assert.deepEqual([parts[0].data.id, parts[0].data.name], [calls[0].id, calls[0].function.name]);
    assert.equal(parts.map((x) => x.data.arguments ?? '').join(''), calls[0].function.arguments);
    return;
  }
});

await check('an appended result is prefilled as it arrives; the next turn names the call alone', async () => {
  const { id, t, call: made } = await called();
  const text = report(60);
  const pieces = Buffer.from(text + ' \u00e9\u{1f426} end');
  const before = await metric(server.admin, 'whimbrel_appended_tokens_total');
  let at = 0, last;
  while (at < pieces.length) {
    const end = Math.min(at + 97, pieces.length); // cuts characters, too
    const r = await fetch(`${server.url}/v1/sessions/${id}/append?call_id=${made.id}&done=${end === pieces.length}`, {
      method: 'POST', headers: { 'content-type': 'text/plain' }, body: pieces.subarray(at, end) });
    last = await r.json();
    assert.equal(r.status, 200, JSON.stringify(last));
    assert.equal(last.received_bytes, end);
    at = end;
    await sleep(5);
  }
  assert.ok(last.prefilled_tokens > whole(t), `${last.prefilled_tokens} of ${whole(t)}`);
  await quiet();
  const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id }]));
  assert.equal(next.items[0].content, pieces.toString());
  const cached = next.usage.prompt_tokens_details.cached_tokens;
  console.log(`  ${cached} of ${next.usage.prompt_tokens} prompt tokens were there when the turn came`);
  assert.ok(cached >= next.usage.prompt_tokens - 1);
  assert.ok(await metric(server.admin, 'whimbrel_appended_tokens_total') > before);
});

await check('what was prefilled of unfinished text is what the turn needs, whatever the text is', async () => {
  const kinds = {
    words: () => `${word()} `, lines: () => `${word()}:\n\n  ${word()}\n`, json: () => `{"${word()}":[${Math.random()},"${word()}"]},`, numbers: () => String(Math.floor(Math.random() * 1e9)),
    base64: () => randomBytes(24).toString('base64'), chinese: () => String.fromCodePoint(...Array.from({ length: 8 }, () => 0x4e00 + Math.floor(Math.random() * 5000))), spaces: () => ' '.repeat(Math.floor(Math.random() * 9)) + word(1),
  };
  for (const [kind, make_piece] of Object.entries(kinds)) {
    const { id, t, call: made } = await called();
    let last;
    for (let i = 0; i < 14; i++) {
      let text = '';
      while (text.length < 120) text += make_piece();
      last = ok(await call('POST', `/v1/sessions/${id}/append`, { call_id: made.id, text }));
      await sleep(8);
    }
    await quiet();
    const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id }], { max_tokens: 2 }));
    const cached = next.usage.prompt_tokens_details.cached_tokens;
    assert.ok(cached >= last.prefilled_tokens && cached > whole(t) + 50, `${kind}: ${cached} cached of ${next.usage.prompt_tokens}, ${last.prefilled_tokens} were prefilled, ${whole(t)} before`);
  }
});

/** A result as one body that is written by and by; `answer` is what it got, undefined if it was cut. */
function bodyOf(id, callId, { length, headers = {} } = {}) {
  const request = http.request(`${server.url}/v1/sessions/${id}/append?call_id=${callId}&done=true`, {
    method: 'POST', headers: { 'content-type': 'text/plain', ...(length ? { 'content-length': length } : {}), ...headers } });
  const answer = new Promise((resolve) => {
    request.on('error', () => resolve(undefined));
    request.on('response', (response) => {
      let text = '';
      response.on('data', (bytes) => (text += bytes));
      response.on('end', () => resolve({ status: response.statusCode, json: JSON.parse(text) }));
    });
  });
  return { request, answer };
}

await check('the body of an append is prefilled while it is on its way, in chunks or of a known length; one that is cut has appended nothing', async () => {
  for (const known of [false, true]) {
    const { id, call: made } = await called();
    await quiet();
    const text = `${report(40)} \u00e9\u{1f426} end`, bytes = Buffer.from(text), half = Math.floor(bytes.length / 2);
    const tokens = () => metric(server.admin, 'whimbrel_appended_tokens_total');
    const held = () => metric(server.admin, 'whimbrel_appended_bytes');
    const before = await tokens();
    // A client that leaves in the middle.
    const cut = bodyOf(id, made.id, { length: known ? bytes.length : 0 });
    cut.request.write(bytes.subarray(0, half));
    await settle(async () => await held() === half);
    await settle(async () => await tokens() > before);
    assert.match((await turn(id, [{ role: 'tool', tool_call_id: made.id }])).json.error.message, /nothing was appended/);
    cut.request.destroy();
    assert.equal(await cut.answer, undefined);
    await settle(async () => await held() === 0);
    await quiet();
    const between = await tokens();
    // One that stays: what is on its way is in the cache before its end.
    const stays = bodyOf(id, made.id, { length: known ? bytes.length : 0 });
    for (let at = 0; at < bytes.length - 1; at += 501) stays.request.write(bytes.subarray(at, Math.min(at + 501, bytes.length - 1)));
    await settle(async () => await tokens() > between);
    stays.request.end(bytes.subarray(bytes.length - 1));
    const r = await stays.answer;
    assert.equal(r.status, 200, JSON.stringify(r.json));
    assert.equal(r.json.received_bytes, bytes.length);
    assert.equal(r.json.done, true);
    await quiet();
    const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id }]));
    assert.equal(next.items[0].content, text);
    assert.ok(next.usage.prompt_tokens_details.cached_tokens >= next.usage.prompt_tokens - 1);
    await settle(async () => await held() === 0);
  }
});

await check('bodies on their way that lead nowhere cost nothing', async () => {
  const { id, call: made } = await called();
  await quiet();
  const before = await metric(server.admin, 'whimbrel_appended_bytes');
  const all = [bodyOf(id, 'call_none'), bodyOf('sess_none', made.id), bodyOf(id, made.id)];
  all[0].request.write('x'.repeat(4000));
  all[1].request.write('x'.repeat(4000));
  all[2].request.write(Buffer.from([65, 255, 65]));
  await sleep(500);
  assert.equal(await metric(server.admin, 'whimbrel_appended_bytes'), before);
  for (const { request } of all) request.end();
  const answers = await Promise.all(all.map(({ answer }) => answer));
  assert.deepEqual(answers.map((r) => r?.status), [400, 404, 400]);
  const much = bodyOf(id, made.id);
  much.request.end('x'.repeat(5 << 20)); // more than may be appended
  assert.equal((await much.answer).status, 413);
  await settle(async () => await metric(server.admin, 'whimbrel_appended_bytes') === before);
});

await check('a session is deleted though its glue is being prefilled', async () => {
  const { id } = await called();
  ok(await call('DELETE', `/v1/sessions/${id}`));
});

await check('appending: wrong calls, done ones, too much, no UTF-8, and a result that is not there', async () => {
  const { id, call: made } = await called();
  const append = (body) => call('POST', `/v1/sessions/${id}/append`, body);
  assert.equal((await append({ call_id: 'call_none', text: 'x' })).status, 400);
  assert.equal((await append({ text: 'x' })).json.error.param, 'call_id');
  assert.match((await turn(id, [{ role: 'tool', tool_call_id: made.id }])).json.error.message, /nothing was appended/);
  const bad = await fetch(`${server.url}/v1/sessions/${id}/append?call_id=${made.id}`, { method: 'POST', headers: { 'content-type': 'text/plain' }, body: new Uint8Array([65, 255, 65]) });
  assert.equal(bad.status, 400);
  assert.equal((await append({ call_id: made.id, text: 'x'.repeat(5 << 20) })).status, 413);
  ok(await append({ call_id: made.id, text: 'so', done: true }));
  assert.equal((await append({ call_id: made.id, text: 'more' })).status, 409);
  assert.equal(ok(await turn(id, [{ role: 'tool', tool_call_id: made.id }])).items[0].content, 'so');
});

await check('the glue behind a call is in the cache before its result', async () => {
  const { id, t, call: made } = await called();
  await quiet();
  const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id, content: `${word()} ${word()}` }]));
  const cached = next.usage.prompt_tokens_details.cached_tokens;
  assert.ok(cached > whole(t) + 2, `${cached} of ${whole(t)}: the end of turn, the tool's turn and its tag follow`);
});

await check('a fork answers as the session itself would, from shared pages', async () => {
  const parent = await make();
  const one = ok(await turn(parent.id, [user(`Remember ${word()}: ${report(20)}`)]));
  const two = ok(await turn(parent.id, [user('Go on.')]));
  const f = ok(await call('POST', `/v1/sessions/${parent.id}/fork`, { turn: one.id, metadata: { branch: 'b' } }));
  assert.deepEqual(f.forked_from, { session: parent.id, turn: one.id });
  assert.deepEqual([f.head, f.turns, f.metadata.branch], [one.id, 1, 'b']);
  const again = ok(await turn(f.id, [user('Go on.')]));
  assert.deepEqual(said(again), said(two));
  goesOn(one, again);
  const branch = ok(await turn(parent.id, [user('Something else.')], { parent: one.id }));
  assert.equal(branch.parent, one.id);
  assert.equal(ok(await call('GET', `/v1/sessions/${parent.id}`)).head, branch.id);
  assert.equal((await call('POST', `/v1/sessions/${parent.id}/fork`, { turn: 'turn_none' })).status, 404);
  assert.equal((await turn(f.id, [user('x')], { parent: two.id })).status, 404);
  const bare = ok(await call('POST', `/v1/sessions/${parent.id}/fork`));
  assert.equal(bare.head, branch.id);
});

await check('32 forks of one parent of 8K tokens add pages for their tails only, and answer as unforked runs', async () => {
  const parent = await make();
  let text = '';
  while (text.length < 26000) text += `${word()} ${word()} `;
  const first = ok(await turn(parent.id, [user(text)], { max_tokens: 8 }));
  assert.ok(first.usage.prompt_tokens > 8000, `${first.usage.prompt_tokens} tokens`);
  const parentPages = Math.ceil(whole(first) / 128);
  const forks = [];
  for (let i = 0; i < 32; i++) forks.push(ok(await call('POST', `/v1/sessions/${parent.id}/fork`)));
  const before = await metric(server.admin, 'whimbrel_index_pages');
  const turns = await Promise.all(forks.map((f, i) => turn(f.id, [user(`Question ${i} of ${i * 7}?`)], { max_tokens: 24 }).then(ok)));
  turns.forEach((t) => goesOn(first, t));
  const added = await metric(server.admin, 'whimbrel_index_pages') - before;
  const tails = turns.reduce((sum, t) => sum + Math.ceil((whole(t) - whole(first)) / 128) + 1, 0);
  console.log(`  parent ${whole(first)} tokens = ${parentPages} pages; 32 forks added ${added} pages (bound ${tails}), copies would be ${32 * parentPages}`);
  assert.ok(added <= tails, `${added} pages, tails are ${tails}`);
  for (const i of [0, 13, 31]) { // unforked: the same conversation from its beginning
    const alone = await make();
    ok(await turn(alone.id, [user(text)], { max_tokens: 8 }));
    assert.deepEqual(said(ok(await turn(alone.id, [user(`Question ${i} of ${i * 7}?`)], { max_tokens: 24 }))), said(turns[i]));
  }
});

await check('other tools for one turn: rendered anew, older answers keep their exact tokens', async () => {
  const s = await make({ tools: [weatherTool] });
  const one = ok(await turn(s.id, [user(`Hello from ${word()}!`)], { temperature: 1 }));
  const other = { ...weatherTool, function: { ...weatherTool.function, name: 'get_forecast' } };
  const two = ok(await turn(s.id, onFrom(one, 'And now?'), { tools: [other] }));
  assert.equal(two.parent, one.id);
  const three = ok(await turn(s.id, onFrom(two, 'And then?')));
  const list = ok(await call('GET', `/v1/sessions/${s.id}/turns?order=asc&tokens=true`)).data;
  assert.deepEqual(list.map((t) => t.items), [one, two, three].map((t) => t.items), 'a turn lists what it added');
  for (const i of [1, 2]) {
    const run = list[i - 1].tokens.output.join(',');
    assert.ok(list[i].tokens.prompt.join(',').includes(run), 'the output before stands in the prompt token for token');
  }
  assert.ok(list[2].tokens.prompt.join(',').includes(list[0].tokens.output.join(',')));
  assert.ok(three.cache.reason, 'a reason is given');
});

await check('chat goes on with what a native session said', async () => {
  const s = await make();
  const one = ok(await turn(s.id, [user(`I am ${word()} ${word()}.`)]));
  const r = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, max_tokens: 8,
    messages: [one.items[0], answer(one), user('Who am I?')] });
  assert.equal(r.status, 200);
  assert.ok(r.json.usage.prompt_tokens_details.cached_tokens >= whole(one) - 1);
  assert.equal(ok(await call('GET', `/v1/sessions/${s.id}`)).head, one.id, 'which does not move its head');
});

await check('turns of one session follow each other; too many are 409 with hints to retry', async () => {
  const slow = await startServer({ set: { 'engine.slow_step_us': 20000, 'engine.draft': 'off', 'sessions.queue_max': 2, 'sessions.queue_wait_ms': 60000 } });
  const url = slow.url;
  const s = (await post(url, '/v1/sessions', { model: 'nano' })).json;
  const run = (n) => post(url, `/v1/sessions/${s.id}/turns`, { items: [user(`Turn ${n}`)], temperature: 0, max_tokens: 60, ignore_eos: true });
  const first = run(0);
  await sleep(100);
  const second = run(1);
  await sleep(50);
  const gone = new AbortController();
  const third = fetch(`${url}/v1/sessions/${s.id}/turns`, { method: 'POST', signal: gone.signal, headers: { 'content-type': 'application/json' }, body: JSON.stringify({ items: [user('gone')] }) }).catch(() => 'left');
  await sleep(50);
  await settle(async () => (await metric(slow.admin, 'whimbrel_turns_waiting')) === 2);
  const full = await run(3);
  assert.equal(full.status, 409);
  assert.equal(full.json.error.code, 'conversation_locked');
  assert.equal(full.headers.get('x-should-retry'), 'true');
  assert.ok(Number(full.headers.get('retry-after-ms')) > 0);
  assert.equal((await fetch(`${url}/v1/sessions/${s.id}`, { method: 'DELETE' })).status, 409, 'nor is it deleted under a turn');
  gone.abort();
  assert.equal(await third, 'left');
  await settle(async () => (await metric(slow.admin, 'whimbrel_turns_waiting')) === 1); // who leaves is out of line
  const fourth = run(4);
  const all = [await first, await second, await fourth];
  all.forEach((r) => assert.equal(r.status, 200));
  assert.deepEqual(all.map((r) => r.json.parent), [null, all[0].json.id, all[1].json.id]);
  await slow.stop();
  const short = await startServer({ set: { 'engine.slow_step_us': 20000, 'engine.draft': 'off', 'sessions.queue_wait_ms': 200, 'server.keepalive_ms': 100 } });
  const q = (await post(short.url, '/v1/sessions', { model: 'nano' })).json;
  const go = () => post(short.url, `/v1/sessions/${q.id}/turns`, { items: [user('Hi')], max_tokens: 60, ignore_eos: true });
  const long = go();
  await sleep(50);
  const late = await go();
  assert.deepEqual([late.status, late.json.error.code], [409, 'conversation_locked']);
  assert.equal((await long).status, 200);
  assert.equal((await go()).status, 200);
  await short.stop();
});

await check('a cancelled turn does not move the head, and may be gone on from', async () => {
  const slow = await startServer({ set: { 'engine.slow_step_us': 20000, 'engine.draft': 'off' } });
  const s = (await post(slow.url, '/v1/sessions', { model: 'nano' })).json;
  const control = new AbortController();
  const response = await fetch(`${slow.url}/v1/sessions/${s.id}/turns`, { method: 'POST', signal: control.signal, headers: { 'content-type': 'application/json' }, body: JSON.stringify({ items: [user('Hi')], stream: true, ignore_eos: true, max_tokens: 500 }) });
  let text = '';
  for await (const chunk of response.body) {
    text += Buffer.from(chunk);
    if (text.includes('turn.delta')) break;
  }
  control.abort();
  const id = JSON.parse(text.match(/data: (.*)/)[1]).turn.id;
  for (let i = 0; i < 100 && await metric(slow.admin, 'whimbrel_running'); i++) await sleep(20);
  await sleep(100);
  assert.equal((await (await fetch(`${slow.url}/v1/sessions/${s.id}`)).json()).head, null);
  const on = await post(slow.url, `/v1/sessions/${s.id}/turns`, { items: [user('Go on')], parent: id, max_tokens: 4 });
  assert.equal(on.status, 200, on.text);
  assert.equal(on.json.parent, id);
  const turns = await (await fetch(`${slow.url}/v1/sessions/${s.id}/turns`)).json();
  assert.deepEqual(turns.data.map((t) => t.status), [on.json.status, 'cancelled']);
  await slow.stop();
});

await check('kill -9 between two turns: the session goes on from its tokens', async () => {
  const { id, t, call: made } = await called();
  await server.kill9();
  server = await startServer({ data });
  const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id, content: 'rain' }]));
  assert.equal(next.parent, t.id);
  const last = ok(await turn(id, [user('Thanks!')]));
  goesOn(next, last);
  const list = ok(await call('GET', `/v1/sessions/${id}/turns?order=asc&tokens=true`)).data;
  const before = [...list[0].tokens.prompt, ...list[0].tokens.output];
  assert.deepEqual(list[1].tokens.prompt.slice(0, before.length), before);
});

await check('under another model a session stays readable and goes on, rendered anew', async () => {
  const { id, t, call: made } = await called();
  await server.stop();
  server = await startServer({ data, model: 'tests/vectors/tiny' });
  assert.deepEqual(ok(await call('GET', `/v1/sessions/${id}/turns`)).data[0].items, t.items);
  const next = ok(await turn(id, [{ role: 'tool', tool_call_id: made.id, content: 'fog' }], { max_tokens: 3 }));
  assert.equal(next.parent, t.id);
  assert.equal(next.cache.reason, 'model changed');
  await server.stop();
  server = await startServer({ data });
  const back = ok(await turn(id, [...(answer(next).tool_calls ?? []).map((c) => ({ role: 'tool', tool_call_id: c.id })), user('Thanks!')], { max_tokens: 3 }));
  assert.equal(back.cache.reason, 'model changed');
  const list = ok(await call('GET', `/v1/sessions/${id}/turns?order=asc&tokens=true`)).data;
  assert.ok(list[2].tokens.prompt.join(',').includes(list[0].tokens.output.join(',')), 'what this model made has its tokens still');
});

await check('pins are bounded, shown, and end', async () => {
  const s = await make();
  ok(await turn(s.id, [user('Hello')]));
  const p = ok(await call('POST', `/v1/sessions/${s.id}/pin`, { seconds: 60 }));
  assert.ok(Math.abs(p.pinned_until - Date.now() / 1000 - 60) < 5);
  assert.equal(ok(await call('GET', `/v1/sessions/${s.id}`)).pinned_until, p.pinned_until);
  assert.equal(ok(await call('POST', `/v1/sessions/${s.id}/pin`, { seconds: 0 })).pinned_until, null);
  for (const seconds of [-1, 1e9, 'x', undefined]) {
    const r = await call('POST', `/v1/sessions/${s.id}/pin`, { seconds });
    assert.deepEqual([r.status, r.json.error.param], [400, 'seconds']);
  }
});

await check('an export brings a session back with its tokens; a changed one brings items only', async () => {
  const { id, call: made } = await called();
  ok(await turn(id, [{ role: 'tool', tool_call_id: made.id, content: 'windy' }], { tool_choice: 'none' }));
  const last = ok(await turn(id, [user('Thanks!')], { temperature: 1, tool_choice: 'none' }));
  const doc = ok(await call('GET', `/v1/sessions/${id}/export`));
  assert.equal(doc.format, 'whimbrel.session/1');
  assert.equal(doc.turns.length, 3);
  assert.ok(doc.items.some((i) => i.tool_call_id === made.id));
  assert.ok(!JSON.stringify({ ...doc, sealed_tokens: '' }).includes('tokens":['));
  const back = ok(await call('POST', '/v1/sessions/import', doc));
  assert.deepEqual([back.imported.tokens, back.imported.turns, back.turns], [true, 3, 3]);
  assert.notEqual(back.id, id);
  const [a, b] = await Promise.all([id, back.id].map((x) => turn(x, [user('One more.')]).then(ok)));
  assert.deepEqual(said(a), said(b));
  goesOn(last, b);
  const tokens = async (x) => ok(await call('GET', `/v1/sessions/${x}/turns?order=asc&tokens=true`)).data.map((t) => t.tokens);
  assert.deepEqual(await tokens(back.id), await tokens(id));
  // Written differently, it is the same document; edited anywhere, it is another.
  const reordered = Object.fromEntries(Object.entries(doc).reverse());
  assert.equal(ok(await call('POST', '/v1/sessions/import', JSON.stringify(reordered, null, 2))).imported.tokens, true);
  const flip = (s) => { const i = 40 + Math.floor(Math.random() * (s.length - 50)); return s.slice(0, i) + (s[i] === 'A' ? 'B' : 'A') + s.slice(i + 1); };
  const edits = [
    { ...doc, sealed_tokens: flip(doc.sealed_tokens) }, { ...doc, sealed_tokens: undefined }, { ...doc, sealed_tokens: '' }, { ...doc, sealed_tokens: 'x' },
    { ...doc, items: doc.items.map((i) => (i.role === 'user' ? { ...i, content: `${i.content}!` } : i)) },
    { ...doc, turns: doc.turns.slice(1) }, { ...doc, config: { ...doc.config, tools: [] } }];
  for (const edit of edits) {
    const r = ok(await call('POST', '/v1/sessions/import', edit));
    assert.deepEqual([r.imported.tokens, r.turns, r.imported.items], [false, 0, doc.items.length]);
    const t = ok(await turn(r.id, [user('One more.')]));
    assert.equal(t.usage.whimbrel.cache.reason ?? 'new session', t.usage.whimbrel.cache.reason ?? 'new session');
    assert.equal(t.items.filter((i) => i.role === 'assistant').length, 4);
  }
  for (const [edit, param] of [[{ ...doc, format: 'x' }, 'format'], [{ ...doc, items: 'x' }, 'items'], [{ ...doc, items: [{ role: 'x', content: 'y' }] }, 'items[0].role'], [{ ...doc, items: [{ role: 'user' }] }, 'items[0].content']]) {
    const r = await call('POST', '/v1/sessions/import', edit);
    assert.deepEqual([r.status, r.json.error.param], [400, param], JSON.stringify(r.json));
  }
  const elsewhere = ok(await call('POST', '/v1/sessions/import', { ...doc, model: word() }));
  assert.deepEqual([elsewhere.model, elsewhere.imported.tokens], ['nano', true]);
});

await check('a deleted session leaves nothing in the data directory; a fork keeps what it stands on', async () => {
  const canary = () => `canary${randomBytes(9).toString('hex')}`;
  const files = (dir) => readdirSync(dir).flatMap((f) => { const p = join(dir, f); return statSync(p).isDirectory() ? files(p) : [p]; });
  const found = (text) => files(data).filter((f) => readFileSync(f).includes(text));
  const shared = canary(), own = canary(), small = [];
  const s = await make({ system: `Remember ${shared}.`, metadata: { note: own } });
  const one = ok(await turn(s.id, [user(`This is ${shared}.`)]));
  for (let i = 0; i < 12; i++) { // items of many sizes, between those of other sessions
    small.push(canary());
    ok(await turn(s.id, [user(`${small.at(-1)} ${own} ${'x'.repeat(i * 311)}`)], { max_tokens: 4, metadata: { m: own } }));
    ok(await turn((await make()).id, [user(`${word()} ${'y'.repeat(i * 97)}`)], { max_tokens: 2 }));
  }
  const f = ok(await call('POST', `/v1/sessions/${s.id}/fork`, { turn: one.id, metadata: {} }));
  ok(await turn(f.id, [user('I stay.')]));
  await sleep(1500);
  assert.ok(found(shared).length && found(own).length, 'there before');
  assert.deepEqual(ok(await call('DELETE', `/v1/sessions/${s.id}`)), { id: s.id, object: 'session.deleted', deleted: true });
  assert.deepEqual([own, ...small].flatMap(found), []);
  assert.equal((await call('GET', `/v1/sessions/${s.id}`)).status, 404);
  assert.equal((await turn(s.id, [user('x')])).json.error.code, 'session_not_found');
  assert.equal((await call('DELETE', `/v1/sessions/${s.id}`)).status, 404);
  const on = ok(await turn(f.id, [user('And I go on.')]));
  assert.equal(ok(await call('GET', `/v1/sessions/${f.id}`)).turns, 3);
  assert.ok(on.usage.prompt_tokens_details.cached_tokens > whole(one));
  ok(await call('DELETE', `/v1/sessions/${f.id}`));
  assert.deepEqual(found(shared), [], 'with its last fork the rest goes');
});

await check('bad turns: the field is named', async () => {
  const s = await make();
  for (const [body, param] of [
    [{}, 'items'], [{ items: 'x' }, 'items'], [{ items: [] }, 'items'], [{ items: [1] }, 'items[0]'], [{ items: [{ role: 'x', content: 'y' }] }, 'items[0].role'],
    [{ items: [user('x'), { role: 'user', content: [{ type: 'image_url' }] }] }, 'items[1].content[0].type'], [{ items: [{ role: 'tool', content: 'x' }] }, 'items[0].tool_call_id'],
    [{ items: [{ role: 'tool', tool_call_id: 'call_1', content: 'x' }] }, 'items'], [{ items: [user('x')], temperature: 9 }, 'temperature'],
    [{ items: [user('x')], stream: 'yes' }, 'stream'], [{ items: Array(1001).fill(user('x')) }, 'items']]) {
    const r = await call('POST', `/v1/sessions/${s.id}/turns`, body);
    assert.deepEqual([r.status, r.json.error.param], [400, param], JSON.stringify(body).slice(0, 120) + JSON.stringify(r.json));
  }
  assert.equal((await turn('sess_none', [user('x')])).json.error.code, 'session_not_found');
  assert.equal((await call('POST', '/v1/sessions', { model: word() })).json.error.code, 'model_not_found');
  assert.equal((await call('POST', '/v1/sessions', {})).json.error.param, 'model');
  assert.equal((await call('POST', '/v1/sessions', { model: 'nano', tools: [{ type: 'web' }] })).json.error.param, 'tools[0].type');
  assert.equal((await call('GET', '/v1/sessions?limit=0')).json.error.param, 'limit');
  assert.equal((await call('GET', '/v1/sessions?order=up')).json.error.param, 'order');
  assert.equal((await call('GET', `/v1/sessions/${s.id}/nothing`)).status, 404);
});

await check('a first turn may bring a whole history, in the forms of both dialects', async () => {
  const id = `call_${word()}`, other = `call_${word()}`;
  const s = await make({ tools: [weatherTool] });
  const t = ok(await turn(s.id, [user('Weather in Rome?'),
    { role: 'assistant', content: null, reasoning_content: 'I look.', tool_calls: [{ id, type: 'function', function: { name: 'get_weather', arguments: '{"city":"Rome"}' } }] },
    { role: 'tool', tool_call_id: id, content: 'sun' }, { role: 'assistant', content: [{ type: 'text', text: 'Sun.' }] }, user('And Oslo?'),
    { type: 'function_call', call_id: other, name: 'get_weather', arguments: '{"city":"Oslo"}' }, { type: 'function_call_output', call_id: other, output: 'snow' }], { tool_choice: 'none', max_tokens: 8 }));
  assert.deepEqual(t.items.slice(0, 7).map((i) => i.role), ['user', 'assistant', 'tool', 'assistant', 'user', 'assistant', 'tool']);
  assert.deepEqual([t.items[1].reasoning_content, t.items[2].tool_call_id, t.items[6].content], ['I look.', id, 'snow']);
  assert.equal((await turn((await make()).id, [user('x'), { role: 'assistant', tool_calls: [{ id, type: 'function', function: { name: 'f', arguments: '[' } }] }, { role: 'tool', tool_call_id: id, content: 'y' }])).status, 400);
});

await check('custom tools: a call is its bare text, in the turn, the list, the stream, and behind an export', async () => {
  const note = { type: 'custom', custom: { name: 'note', description: 'Takes a note.', format: { type: 'grammar', grammar: { syntax: 'regex', definition: '[a-z]{5}' } } } };
  const s = await make({ tools: [weatherTool, note] }), choose = { tool_choice: { type: 'custom', custom: { name: 'note' } }, max_tokens: 200 };
  const first = ok(await turn(s.id, [user(`Take a note of ${word()}.`)], choose));
  const [made] = answer(first).tool_calls;
  assert.deepEqual([made.type, made.custom.name, made.function], ['custom', 'note', undefined]);
  assert.match(made.custom.input, /^[a-z]{5}$/);
  const result = { role: 'tool', tool_call_id: made.id, content: 'noted' };
  const events = await stream(s.id, [result, user('And another.')], choose), second = events.at(-1).data.turn;
  const parts = events.filter((e) => e.event === 'turn.delta' && e.data.type === 'tool_call').map((e) => e.data);
  goesOn(first, second);
  assert.equal(parts.map((p) => p.input ?? '').join(''), answer(second).tool_calls[0].custom.input);
  assert.deepEqual([parts[0].name, parts[0].id], ['note', answer(second).tool_calls[0].id]);
  const list = async (id) => ok(await call('GET', `/v1/sessions/${id}/turns?order=asc`)).data.map((t) => t.items);
  assert.deepEqual(await list(s.id), [first.items, second.items]);
  const copy = ok(await call('POST', '/v1/sessions/import', ok(await call('GET', `/v1/sessions/${s.id}/export`))));
  assert.deepEqual(await list(copy.id), [first.items, second.items]);
  const third = ok(await turn(copy.id, [{ ...result, tool_call_id: answer(second).tool_calls[0].id }]));
  goesOn(second, third);
  // History that another server made.
  const own = await make({ tools: [note] });
  ok(await turn(own.id, [user('x'), { role: 'assistant', content: null, tool_calls: [{ id: 'c1', type: 'custom', custom: { name: 'note', input: 'abc' } }] }, { role: 'tool', tool_call_id: 'c1', content: 'noted' }]));
  const lark = { type: 'custom', custom: { name: 'l', format: { type: 'grammar', grammar: { syntax: 'lark', definition: 'start: "a"' } } } };
  assert.equal((await call('POST', '/v1/sessions', { model: 'nano', tools: [lark] })).status, 400);
});

await check("another tenant's sessions are unknown, and so are its exports", async () => {
  const admin = (body, key) => post(server.admin, '/admin/v1/keys', body, key ? { authorization: `Bearer ${key}` } : {});
  const root = (await admin({ label: 'root', scopes: ['admin'] })).json;
  const [a, b] = await Promise.all(['a', 'b'].map(async () => ({ 'x-api-key': (await admin({ tenant: `t-${word()}`, scopes: ['inference'] }, root.key)).json.key })));
  const s = await make({}, a);
  const t = ok(await turn(s.id, [user('Mine.')], {}, a));
  const doc = ok(await call('GET', `/v1/sessions/${s.id}/export`, undefined, a));
  for (const [method, path, body] of [['GET', ''], ['GET', '/turns'], ['GET', '/export'], ['DELETE', ''], ['POST', '/fork', {}], ['POST', '/pin', { seconds: 1 }],
    ['POST', '/turns', { items: [user('x')] }], ['POST', '/append', { call_id: 'call_1', text: 'x' }]])
    assert.equal((await call(method, `/v1/sessions/${s.id}${path}`, body, b)).status, 404, `${method} ${path}`);
  assert.deepEqual(ok(await call('GET', '/v1/sessions', undefined, b)).data, []);
  assert.equal((await turn((await make({}, b)).id, [user('x')], { parent: t.id }, b)).status, 404);
  assert.equal(ok(await call('POST', '/v1/sessions/import', doc, b)).imported.tokens, false);
  assert.equal(ok(await call('POST', '/v1/sessions/import', doc, a)).imported.tokens, true);
  assert.equal(ok(await call('GET', `/v1/sessions/${s.id}`, undefined, a)).turns, 1);
});

await server.stop();
rmSync(data, { recursive: true, force: true });
finish();
