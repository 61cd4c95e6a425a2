// whimbrel-db: checks, backs up beside a running server, restores, migrates, and says what is wrong.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, openSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync, writeSync, closeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, databaseProgram, finish, ledger, post, root, startServer, word } from './lib.mjs';

const home = mkdtempSync(join(tmpdir(), 'whimbrel-db-'));
const at = (name) => join(home, name);
const data = at('data');
const exits = async (code, ...argv) => {
  const r = await databaseProgram(...argv);
  assert.equal(r.code, code, `whimbrel-db ${argv.join(' ')}: exit ${r.code}\n${r.out}`);
  return r.out;
};
const sql = (dir, text) => execFileSync('python3', ['-c',
  'import sqlite3,sys\nc=sqlite3.connect(sys.argv[1])\nc.executescript(sys.argv[2])\nc.close()', join(dir, 'whimbrel.db'), text]);
const respond = (server, input, extra = {}) => post(server.url, '/v1/responses', { model: 'nano', input, max_output_tokens: 12, ...extra });

await check('bad arguments are told and exit 2', async () => {
  assert.match(await exits(0, '--help'), /backup DATA TO/);
  await exits(2);
  assert.match(await exits(2, 'repair', data), /none of check/);
  assert.match(await exits(2, 'check'), /takes one directory/);
  assert.match(await exits(2, 'backup', data), /takes two directories/);
  assert.match(await exits(2, 'check', data, '--force'), /knows no --force/);
  assert.match(await exits(2, 'check', at('nothing')), /No such file/);
  mkdirSync(at('other'));
  sql(at('other'), 'create table t(x)');
  assert.match(await exits(1, 'info', at('other')), /another program/);
  mkdirSync(at('noise'));
  writeFileSync(at('noise/whimbrel.db'), 'not a database '.repeat(1000));
  assert.match(await exits(1, 'check', at('noise')), /not a database/);
});

let first, told = [];
await check('a backup beside a server that writes is one whole moment', async () => {
  const server = await startServer({ data });
  first = (await respond(server, `My code word is ${word()}.`)).json;
  let stop = false;
  const writers = Array.from({ length: 4 }, async () => {
    while (!stop) {
      const r = await respond(server, `hello ${word()}`);
      assert.equal(r.status, 200);
      told.push(r.json.id);
    }
  });
  for (let i = 0; i < 4; i++) {
    const before = [...told];
    assert.match(await exits(0, 'backup', data, at(`backup${i}`)), /schema=/);
    const checked = await exits(0, 'check', at(`backup${i}`));
    assert.doesNotMatch(checked, /wrong/);
    const there = new Set(ledger(at(`backup${i}`), 'select response from turns').map((r) => r.response));
    for (const id of before) assert.ok(there.has(id), 'a turn told before the backup is not in it');
    assert.match(await exits(0, 'check', data), /in use by a server, not looked at/);
    assert.match(await exits(0, 'info', data), /tenant +default bytes=\d+/);
  }
  stop = true;
  await Promise.all(writers);
  assert.ok(told.length > 8, `${told.length} turns`);
  assert.equal(statSync(at('backup3/key')).mode & 0o777, 0o600);
  assert.equal(statSync(at('backup3/whimbrel.db')).mode & 0o777, 0o600);
  assert.deepEqual(readdirSync(at('backup3')).sort(), ['key', 'whimbrel.db']);
  assert.match(await exits(2, 'backup', data, at('backup3')), /not an empty directory/);
  assert.match(await exits(2, 'restore', data, at('backup3'), '--force'), /in use/);
  assert.match(await exits(2, 'migrate', data), /in use/);
  await server.stop();
  assert.match(await exits(0, 'check', data), /ok +kv: [1-9]\d* records/);
});

await check('restored, into a new or a used directory, sessions go on', async () => {
  await exits(0, 'restore', at('fresh'), at('backup3'));
  assert.match(await exits(2, 'restore', data, at('backup3')), /--force replaces it/);
  await exits(0, 'restore', data, at('backup3'), '--force');
  assert.equal(readdirSync(join(data, 'kv')).length, 0);
  for (const dir of [at('fresh'), data]) {
    const server = await startServer({ data: dir });
    const read = await fetch(`${server.url}/v1/responses/${first.id}`);
    assert.equal(read.status, 200);
    assert.deepEqual((await read.json()).output, first.output);
    const next = await respond(server, 'And what was it?', { previous_response_id: first.id });
    assert.equal(next.status, 200, next.text);
    await server.stop();
    assert.doesNotMatch(await exits(0, 'check', dir), /wrong/);
  }
});

await check('a damaged backup is not restored, and changes nothing', async () => {
  const before = readFileSync(join(data, 'whimbrel.db'));
  mkdirSync(at('damaged'));
  copyFileSync(at('backup3/whimbrel.db'), at('damaged/whimbrel.db'));
  sql(at('damaged'), "update items set data=replace(data,'hello','hallo')");
  const said = await exits(1, 'restore', data, at('damaged'), '--force');
  assert.match(said, /items: item \d+: it does not fit its sum/);
  assert.match(said, /nothing was changed/);
  assert.ok(before.equals(readFileSync(join(data, 'whimbrel.db'))));
  assert.ok(!existsSync(join(data, 'whimbrel.db.part')));
});

await check('check finds what is wrong, by table and row', async () => {
  const cases = [
    ["update items set data=replace(data,'hello','hallo')", /wrong +items: item \d+: it does not fit its sum/],
    ["update items set data='{' where id=2", /wrong +items: item 2: not JSON/],
    ['update runs set tokens=x\'8f01\' where id=1', /wrong +runs: run 1: it does not fit its digest/],
    ['update nodes set parent=(select max(id) from nodes) where id=3', /wrong +nodes: node 3: it does not follow/],
    ['delete from items where id=2', /wrong +nodes: node \d+: a digest is damaged/],
    ['update turns set public=public||\'x\' where id=1', /wrong +turns: turn 1: its key is not its id/],
    ['update turns set prompt=x\'01\' where id=1', /wrong +turns: turn 1: it does not fit its sum/],
    ['update turns set session=999999 where id=1', /wrong +references: turns row 1 refers to no row of sessions/],
    ['update stored set bytes=bytes+1', /wrong +bytes: tenant 1/],
  ];
  for (const [change, wanted] of cases) {
    rmSync(at('case'), { recursive: true, force: true });
    mkdirSync(at('case'));
    copyFileSync(at('backup3/whimbrel.db'), at('case/whimbrel.db'));
    sql(at('case'), change);
    assert.match(await exits(1, 'check', at('case')), wanted, change);
  }
  // A page as a disk might give it back.
  const file = openSync(at('case/whimbrel.db'), 'r+');
  writeSync(file, Buffer.alloc(4096, 0xa5), 0, 4096, 8 * 4096);
  closeSync(file);
  assert.match(await exits(1, 'check', at('case')), /wrong/);
  // A record of the disk tier.
  const segment = join(at('fresh'), 'kv', readdirSync(join(at('fresh'), 'kv')).find((name) => name.startsWith('seg-')));
  const pages = openSync(segment, 'r+');
  writeSync(pages, Buffer.from('damage'), 0, 6, 4096 + 3000);
  closeSync(pages);
  assert.match(await exits(1, 'check', at('fresh')), /wrong +kv: .*record \d+: a plane does not fit its sum/);
  assert.match(await exits(0, 'check', at('fresh'), '--no-kv'), /ok +turns/);
});

await check('a newer schema is refused by name, an older one is migrated', async () => {
  const version = ledger(at('backup3'), 'pragma user_version')[0].user_version;
  mkdirSync(at('newer'));
  copyFileSync(at('backup3/whimbrel.db'), at('newer/whimbrel.db'));
  sql(at('newer'), `pragma user_version=${version + 1}`);
  for (const command of [['check', at('newer')], ['info', at('newer')], ['migrate', at('newer')], ['backup', at('newer'), at('nowhere')], ['restore', at('nowhere'), at('newer')]])
    assert.match(await exits(2, ...command), new RegExp(`schema ${version + 1} is newer than ${version}`));
  assert.ok(!existsSync(at('nowhere')));
  mkdirSync(at('older'));
  sql(at('older'), readFileSync(join(root, 'tests/vectors/ledger-schema2.sql'), 'utf8'));
  assert.match(await exits(2, 'check', at('older')), /older than \d+: run whimbrel-db migrate/);
  assert.match(await exits(0, 'info', at('older')), /older than this program's/);
  assert.match(await exits(0, 'migrate', at('older')), new RegExp(`2 to ${version}`));
  assert.match(await exits(0, 'migrate', at('older')), /already/);
  assert.doesNotMatch(await exits(0, 'check', at('older')), /wrong/);
  const server = await startServer({ data: at('older') });
  const [old] = ledger(at('older'), "select response from turns where response like 'resp_%' and parent is null");
  const read = await fetch(`${server.url}/v1/responses/${old.response}`);
  assert.equal(read.status, 200);
  assert.ok((await read.json()).output[0].content[0].text.length > 0);
  const next = await respond(server, 'And what was it?', { previous_response_id: old.response });
  assert.equal(next.status, 200, next.text);
  assert.equal((await fetch(`${server.url}/v1/responses/${old.response}`, { method: 'DELETE' })).status, 200);
  await server.stop();
  assert.doesNotMatch(await exits(0, 'check', at('older')), /wrong/);
});

rmSync(home, { recursive: true, force: true });
finish();
