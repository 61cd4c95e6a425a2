// Stored streams go on: resumed while they run, when they are over and after a crash; in the background; cancelled; retried.
import assert from 'node:assert/strict';
import { mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, pick, post, sleep, startServer, weatherTool, word } from './lib.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-resume-'));
const set = { 'engine.slow_step_us': 15000, 'server.keepalive_ms': 200 };
let server = await startServer({ data, set });
const tool = { type: 'function', ...weatherTool.function };
const body = (more = {}) => ({ model: 'nano', temperature: 0, max_output_tokens: 100, input: `What's the weather in ${pick(['Oslo', 'Quito', 'Porto'])}? ${word()}`, ...more });

/** Records of a stream as raw text; `until(records)` true: the connection is dropped. */
async function records(method, path, json, until) {
  const controller = new AbortController();
  const response = await fetch(server.url + path, { method, signal: controller.signal, headers: { 'content-type': 'application/json' }, body: json && JSON.stringify(json) });
  assert.equal(response.status, 200, path);
  const list = [];
  let text = '';
  const decoder = new TextDecoder();
  try {
    for await (const chunk of response.body) {
      text += decoder.decode(chunk, { stream: true });
      for (let end; (end = text.indexOf('\n\n')) >= 0; text = text.slice(end + 2)) list.push(text.slice(0, end));
      if (until?.(list)) { controller.abort(); break; }
    }
  } catch (error) { if (!until && server.child.exitCode === null && !server.child.killed) throw error; }
  return list;
}
const parsed = (record) => JSON.parse(record.slice(record.indexOf('data: ') + 6));
const replay = (id, after) => records('GET', `/v1/responses/${id}?stream=true${after === undefined ? '' : `&starting_after=${after}`}`);
const get = async (id) => (await fetch(`${server.url}/v1/responses/${id}`)).json();

for (const [name, more] of Object.entries({ text: {}, calls: { tools: [tool], tool_choice: 'required' }, reasoning: { reasoning: { effort: 'high', summary: 'auto' } },
  encrypted: { include: ['reasoning.encrypted_content'] }, logprobs: { include: ['message.output_text.logprobs'], top_logprobs: 2 }, cut: { max_output_tokens: 3 }, stop: { stop: ['e'] } })) {
  await check(`replayed to the byte: ${name}`, async () => {
    const live = await records('POST', '/v1/responses', body({ stream: true, ...more }));
    live.forEach((record, i) => assert.equal(parsed(record).sequence_number, i));
    const { id } = parsed(live[0]).response;
    assert.deepEqual(await replay(id), live);
    const after = Math.floor(live.length / 2);
    assert.deepEqual(await replay(id, after), live.slice(after + 1));
    assert.deepEqual(await get(id), parsed(live.at(-1)).response);
  });
}

await check('a dropped stream goes on and is resumed while it runs', async () => {
  const first = await records('POST', '/v1/responses', body({ stream: true, ignore_eos: true }), (list) => list.length >= 8);
  const { id } = parsed(first[0]).response, after = parsed(first.at(-1)).sequence_number;
  const rest = await replay(id, after);
  const all = [...first, ...rest];
  all.forEach((record, i) => assert.equal(parsed(record).sequence_number, i));
  assert.match(parsed(all.at(-1)).type, /^response\.(completed|incomplete)$/);
  assert.deepEqual(await replay(id), all);
});

await check('in the background: queued, polled, completed; cancelled once and again', async () => {
  const { json } = await post(server.url, '/v1/responses', body({ background: true }));
  assert.equal(json.status, 'queued');
  let now;
  for (let i = 0; i < 400 && (now = await get(json.id)).status !== 'completed'; i++) { assert.match(now.status, /queued|in_progress/); await sleep(25); }
  assert.equal(now.status, 'completed');
  assert.ok(now.output.length > 0);
  const long = (await post(server.url, '/v1/responses', body({ background: true, ignore_eos: true, max_output_tokens: 4000 }))).json;
  await sleep(100);
  for (let again = 0; again < 2; again++) {
    const cancelled = await post(server.url, `/v1/responses/${long.id}/cancel`, {});
    assert.equal(cancelled.status, 200);
    assert.equal(cancelled.json.status, 'cancelled');
  }
  assert.equal((await get(long.id)).status, 'cancelled');
  const plain = (await post(server.url, '/v1/responses', body())).json;
  assert.equal((await post(server.url, `/v1/responses/${plain.id}/cancel`, {})).status, 400);
  assert.equal((await post(server.url, '/v1/responses', body({ background: true, store: false }))).status, 400);
});

await check('after kill -9 in mid-stream: what is there, then response.incomplete with the next number', async () => {
  let told;
  const reading = records('POST', '/v1/responses', body({ stream: true, ignore_eos: true, max_output_tokens: 4000 }), (list) => { told = list; return false; }).catch(() => {});
  for (let i = 0; i < 400 && !(told?.length > 120); i++) await sleep(25);
  await server.kill9();
  await reading;
  const { id } = parsed(told[0]).response, last = parsed(told.at(-1)).sequence_number;
  server = await startServer({ data, set });
  const again = await replay(id);
  again.forEach((record, i) => assert.equal(parsed(record).sequence_number, i));
  const end = parsed(again.at(-1));
  assert.equal(end.type, 'response.incomplete');
  assert.equal(end.response.incomplete_details.reason, 'server_restart');
  const same = again.findIndex((record, i) => record !== told[i]);
  assert.ok(same > 40, `${same} events of ${told.length} were kept`);
  // Behind what was kept: the open items are closed, numbered on from where the client was.
  const beyond = (await replay(id, last + 5)).map(parsed);
  beyond.forEach((event, k) => assert.equal(event.sequence_number, last + 6 + k));
  assert.equal(beyond.at(-1).type, 'response.incomplete');
  assert.equal((await get(id)).status, 'incomplete');
});

await check('the same request under an Idempotency-Key: attached while it runs, given again, refused with another body', async () => {
  for (const [path, request] of [['/v1/responses', body()], ['/v1/chat/completions', { model: 'nano', messages: [{ role: 'user', content: word() }] }]]) {
    const key = { 'idempotency-key': word(6) };
    const [a, b] = await Promise.all([post(server.url, path, request, key), post(server.url, path, request, key)]);
    const c = await post(server.url, path, request, key);
    assert.equal(a.text, b.text);
    assert.equal(a.text, c.text);
    assert.equal(c.headers.get('idempotent-replayed'), 'true');
    assert.equal((await post(server.url, path, { ...request, temperature: 0.5 }, key)).json.error.code, 'idempotency_error');
  }
});

await check('input items are paged; a deleted response is gone from every call', async () => {
  const { json } = await post(server.url, '/v1/responses', body({ input: [{ role: 'user', content: 'one' }, { role: 'user', content: 'two' }] }));
  const page = await (await fetch(`${server.url}/v1/responses/${json.id}/input_items?limit=1&order=asc`)).json();
  assert.equal(page.data[0].content[0].text, 'one');
  assert.equal(page.has_more, true);
  const next = await (await fetch(`${server.url}/v1/responses/${json.id}/input_items?order=asc&after=${page.last_id}`)).json();
  assert.deepEqual(next.data.map((item) => item.content[0].text), ['two']);
  assert.equal((await fetch(`${server.url}/v1/responses/${json.id}`, { method: 'DELETE' })).status, 200);
  for (const path of ['', '?stream=true', '/input_items']) assert.equal((await fetch(`${server.url}/v1/responses/${json.id}${path}`)).status, 404);
});

await server.stop();
finish();
