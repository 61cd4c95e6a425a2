// A checkpoint, configuration or database that does not fit: exit 2 before listening, naming file and key.
import assert from 'node:assert/strict';
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, truncateSync, writeFileSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, root, runToExit, startServer, word } from './lib.mjs';

const work = mkdtempSync(join(tmpdir(), 'whimbrel-start-'));
let serial = 0;
function broken(change) {
  const dir = join(work, `model-${serial++}`);
  cpSync(join(root, 'config/models/nano'), dir, { recursive: true });
  change(dir);
  return dir;
}
async function refuses(dir, ...names) {
  const { code, log } = await runToExit(['--model', dir, '--listen', '127.0.0.1:0', '--data', join(work, 'data'), '--set', 'admin.listen=127.0.0.1:0']);
  assert.equal(code, 2, log);
  assert.ok(!/^ready/m.test(log));
  for (const name of names) assert.ok(log.includes(name), `"${name}" is not named in: ${log}`);
}
const edit = (file, fn) => (dir) => writeFileSync(join(dir, file), fn(readFileSync(join(dir, file))));
const json = (file, fn) => edit(file, (bytes) => { const o = JSON.parse(bytes); return JSON.stringify(fn(o) ?? o); });
/** Rewrites the safetensors header. */
const header = (fn) => edit('model.safetensors', (bytes) => {
  const n = Number(bytes.readBigUInt64LE());
  const text = Buffer.from(fn(bytes.subarray(8, 8 + n).toString()));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([size, text, bytes.subarray(8 + n)]);
});
const tensor = 'language_model.model.layers.3.self_attn.q_proj.weight';
const change = (fn) => header((text) => { const o = JSON.parse(text); fn(o); return JSON.stringify(o); });

await check('measured times of passes are kept in the data directory, and nowhere else', async () => {
  const data = join(work, 'costs-data'), before = readdirSync(root).sort();
  const server = await startServer({ data });
  const body = { model: 'nano', messages: [{ role: 'user', content: word() }], max_tokens: 16 };
  assert.equal((await fetch(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })).status, 200);
  await server.stop();
  assert.ok(statSync(join(data, 'costs')).size > 0);
  assert.deepEqual(readdirSync(root).sort(), before);
});

for (const [name, fn, ...names] of [
  ['a truncated checkpoint', (dir) => truncateSync(join(dir, 'model.safetensors'), Math.floor(statSync(join(dir, 'model.safetensors')).size / 2)), 'model.safetensors'],
  ['a header that is no JSON', header((t) => '{' + t), 'model.safetensors'],
  ['a missing tensor', change((o) => { delete o[tensor]; }), tensor],
  ['a wrong shape', change((o) => { o[tensor].shape = [o[tensor].shape[1], o[tensor].shape[0]]; }), tensor],
  ['a wrong dtype', change((o) => { o[tensor].dtype = 'I64'; }), tensor],
  ['offsets outside the file', change((o) => { o[tensor].data_offsets[1] += 1 << 30; }), tensor],
  ['a missing file', (dir) => rmSync(join(dir, 'model.safetensors')), 'model.safetensors'],
  ['a config that is no JSON', edit('config.json', () => '{'), 'config.json'],
  ['a config without hidden_size', json('config.json', (o) => { delete o.text_config.hidden_size; }), 'config.json', 'hidden_size'],
  ['a config that does not fit the tensors', json('config.json', (o) => { o.text_config.num_attention_heads = 4; })],
  ['a tokenizer that is no JSON', edit('tokenizer.json', () => 'x'), 'tokenizer.json'],
  ['a tokenizer of another kind', json('tokenizer.json', (o) => { o.model.type = 'Unigram'; }), 'tokenizer.json', 'Unigram'],
  ['a drafter that is cut', (dir) => truncateSync(join(dir, 'dspark/model.safetensors'), 1000), 'dspark'],
]) {
  await check(`${name}: exit 2, named`, async () => refuses(broken(fn), ...names));
}

await check('an unknown key, a value out of range and a missing model are named', async () => {
  const key = `engine.${word()}`;
  for (const [argv, ...names] of [[['--set', `${key}=1`], key], [['--set', 'limits.n_max=-1'], 'limits.n_max'], [['--model', '/nonexistent'], '/nonexistent'], [['--backend', 'abacus'], 'abacus']]) {
    const { code, log } = await runToExit(['--listen', '127.0.0.1:0', '--data', join(work, 'd2'), '--set', 'admin.listen=127.0.0.1:0', ...argv]);
    assert.equal(code, 2, log);
    for (const name of names) assert.ok(log.includes(name), log);
  }
});

await check('a database that is newer or no database is refused by name', async () => {
  const data = join(work, 'data3');
  const server = await startServer({ data });
  await server.stop();
  writeFileSync(join(data, 'whimbrel.db'), 'this is not a database, not at all'.repeat(100));
  for (const ext of ['-wal', '-shm']) rmSync(join(data, `whimbrel.db${ext}`), { force: true });
  const { code, log } = await runToExit(['--model', 'config/models/nano', '--listen', '127.0.0.1:0', '--data', data, '--set', 'admin.listen=127.0.0.1:0']);
  assert.equal(code, 2, log);
  assert.ok(log.includes('whimbrel.db'), log);
});

await check('--print-config, --version and --help end with status 0', async () => {
  for (const flag of ['--print-config', '--version', '--help']) assert.equal((await runToExit([flag])).code, 0, flag);
});
rmSync(work, { recursive: true, force: true });
finish();
