// What was not to be stored, or was deleted, is in no byte of the data directory: as text and as tokens.
import assert from 'node:assert/strict';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, ledger, post, sleep, startServer, word } from './lib.mjs';

const dirs = [];
const newData = () => { dirs.push(mkdtempSync(join(tmpdir(), 'whimbrel-erase-'))); return dirs.at(-1); };
const files = (dir) => readdirSync(dir).flatMap((name) => {
  const path = join(dir, name);
  return statSync(path).isDirectory() ? files(path) : [path];
});

/** As the ledger's blobs spell token ids. */
const leb = (ids) => Buffer.from(ids.flatMap((id) => {
  const bytes = [];
  do { bytes.push((id & 0x7f) | (id > 0x7f ? 0x80 : 0)); id >>>= 7; } while (id);
  return bytes;
}));
/** As the disk tier's rows do. */
const int32 = (ids) => { const b = Buffer.alloc(4 * ids.length); ids.forEach((id, i) => b.writeInt32LE(id, 4 * i)); return b; };

/** A line that stands nowhere else, and its forms on a disk. */
async function canary(server) {
  const text = `${word(5)} ${word(5)} ${word(5)}`;
  const r = await post(server.url, '/tokenize', { model: 'nano', prompt: ` ${text}`, add_special_tokens: false });
  assert.equal(r.status, 200, r.text);
  // The first and last may be joined with what stands around them.
  const ids = r.json.tokens.slice(1, -1);
  assert.ok(ids.length >= 6, `${ids.length} tokens`);
  return { text, needles: [Buffer.from(text.split(' ')[1]), leb(ids), int32(ids)] };
}
function found(data, { needles }) {
  const hits = [];
  for (const path of files(data)) {
    const bytes = readFileSync(path);
    needles.forEach((needle, form) => { if (bytes.includes(needle)) hits.push(`${['text', 'tokens', 'tokens of pages'][form]} in ${path}`); });
  }
  return hits;
}
const until = async (what, ms = 8000) => {
  for (let waited = 0; waited < ms; waited += 100) { if (await what()) return true; await sleep(100); }
  return what();
};

const long = (mark) => `${mark.text}. ${'Please remember this for me. '.repeat(30)} ${mark.text}`;
const chat = (mark, extra = {}) => ({ model: 'nano', temperature: 0, max_tokens: 24, messages: [{ role: 'user', content: long(mark) }], ...extra });

await check('store:false is in no file: after traffic, SIGTERM and kill -9', async () => {
  for (const end of ['stop', 'kill9']) {
    const data = newData();
    const server = await startServer({ data });
    const seen = await canary(server), hidden = await canary(server);
    assert.equal((await post(server.url, '/v1/chat/completions', chat(seen))).status, 200);
    const calls = [
      ['/v1/chat/completions', chat(hidden, { store: false })],
      ['/v1/chat/completions', chat(hidden, { store: false, stream: true })],
      ['/v1/responses', { model: 'nano', input: long(hidden), store: false, max_output_tokens: 24 }],
      ['/v1/responses', { model: 'nano', input: long(hidden), store: false, instructions: hidden.text, max_output_tokens: 24 }],
    ];
    for (const [path, body] of calls) {
      const r = await post(server.url, path, body);
      assert.equal(r.status, 200, r.text);
    }
    // A stored turn beside it lets the writers work.
    assert.equal((await post(server.url, '/v1/chat/completions', chat(seen))).status, 200);
    assert.ok(await until(() => found(data, seen).length >= 2), `the search finds what was stored: ${found(data, seen)}`);
    assert.deepEqual(found(data, hidden), []);
    await server[end]();
    assert.deepEqual(found(data, hidden), [], end);
    const again = await startServer({ data });
    await sleep(300);
    assert.deepEqual(found(data, hidden), [], `${end}, started again`);
    await again.stop();
  }
});

await check('a deleted response leaves rows, tokens, log and pages', async () => {
  const data = newData();
  const server = await startServer({ data });
  const gone = await canary(server), kept = await canary(server);
  const other = await post(server.url, '/v1/responses', { model: 'nano', input: long(kept), max_output_tokens: 24 });
  const first = await post(server.url, '/v1/responses', { model: 'nano', input: long(gone), max_output_tokens: 24 });
  const second = await post(server.url, '/v1/responses', { model: 'nano', input: `And ${gone.text}?`, previous_response_id: first.json.id, max_output_tokens: 24 });
  assert.equal(second.status, 200, second.text);
  assert.ok(await until(() => found(data, gone).length >= 3), `rows, tokens and pages are there first: ${found(data, gone)}`);
  const remove = async (id) => (await fetch(`${server.url}/v1/responses/${id}`, { method: 'DELETE' })).status;
  assert.equal(await remove(second.json.id), 200);
  assert.equal(await remove(first.json.id), 200);
  // No waiting here: the answer to DELETE says that it is gone.
  assert.deepEqual(found(data, gone), []);
  assert.ok(found(data, kept).length > 0);
  assert.equal((await fetch(`${server.url}/v1/responses/${first.json.id}`)).status, 404);
  assert.equal((await fetch(`${server.url}/v1/responses/${other.json.id}`)).status, 200);
  const next = await post(server.url, '/v1/responses', { model: 'nano', input: 'x', previous_response_id: first.json.id });
  assert.ok([400, 404].includes(next.status), next.text);
  assert.equal(next.json.error.param, 'previous_response_id');
  await server.stop();
  assert.deepEqual(found(data, gone), []);
  assert.equal(ledger(data, 'select count(*) n from erasures')[0].n, 0);
});

await check('what another session shares keeps its pages', async () => {
  const server = await startServer();
  const system = `You are ${word()}. ${'Answer in one word. '.repeat(60)}`;
  const ask = async (text) => (await post(server.url, '/v1/responses', { model: 'nano', instructions: system, input: text, max_output_tokens: 8 })).json;
  await ask('one');
  const two = await ask('two');
  assert.equal((await fetch(`${server.url}/v1/responses/${two.id}`, { method: 'DELETE' })).status, 200);
  const three = await ask('three');
  assert.ok(three.usage.input_tokens_details.cached_tokens > 200, `cached ${three.usage.input_tokens_details.cached_tokens}`);
  await server.stop();
});

await check('an expired turn is in no file', async () => {
  const data = newData();
  const server = await startServer({ data, set: { 'ledger.cached_ttl_s': 1 } });
  const gone = await canary(server);
  assert.equal((await post(server.url, '/v1/chat/completions', chat(gone))).status, 200);
  await sleep(1200);
  await server.stop();
  // The sweeper runs at the start.
  const again = await startServer({ data, set: { 'ledger.cached_ttl_s': 1 } });
  const clean = await until(() => found(data, gone).length === 0);
  assert.ok(clean, `${found(data, gone)}`);
  await again.stop();
});

for (const dir of dirs) rmSync(dir, { recursive: true, force: true });
finish();
