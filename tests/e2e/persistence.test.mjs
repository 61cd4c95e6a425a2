// What lasts: the cases of other servers' failures by number, and a ledger that cannot write while the server serves.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, connect, databaseProgram, finish, h2stream, ledger, metric, post, sleep, startServer, word } from './lib.mjs';

const long = Boolean(process.env.WHIMBREL_LONG);
const dirs = [];
const newData = () => { dirs.push(mkdtempSync(join(tmpdir(), 'whimbrel-lasts-'))); return dirs.at(-1); };
const respond = (server, input, extra = {}, headers = {}) => post(server.url, '/v1/responses', { model: 'nano', temperature: 0, max_output_tokens: 16, input, ...extra }, headers);
const read = async (server, id, headers = {}) => {
  const r = await fetch(`${server.url}/v1/responses/${id}`, { headers });
  return { status: r.status, json: await r.json() };
};
const remove = (server, id) => fetch(`${server.url}/v1/responses/${id}`, { method: 'DELETE' });
const logBytes = (data) => { const path = join(data, 'whimbrel.db-wal'); return existsSync(path) ? statSync(path).size : 0; };

await check('B137: no read pins the log: it is bounded under load and cut when idle', async () => {
  const data = newData();
  const server = await startServer({ data, set: { 'log.access': false } });
  const { id } = (await respond(server, 'hello')).json;
  let stop = false, most = 0;
  const watch = (async () => { while (!stop) { most = Math.max(most, logBytes(data)); await sleep(20); } })();
  const dashboards = Array.from({ length: 3 }, async () => {
    while (!stop) {
      await read(server, id);
      await (await fetch(`${server.url}/v1/sessions`)).text();
    }
  });
  const text = Array.from({ length: 3000 }, () => word(2)).join(' ');
  const end = Date.now() + (long ? 60000 : 5000);
  await Promise.all(Array.from({ length: 6 }, async () => {
    while (Date.now() < end) {
      const r = await respond(server, `${word()} ${text}`, { max_output_tokens: 4 });
      // Too long for the window is an answer as well; shorter ones are stored.
      assert.ok(r.status === 200 || r.status === 400, r.text);
      assert.equal((await respond(server, `hello ${word()} ${text.slice(0, 4000)}`, { max_output_tokens: 4 })).status, 200);
    }
  }));
  stop = true;
  await Promise.all([...dashboards, watch]);
  assert.ok(most > 100000 && most < 64 << 20, `the log had ${most} bytes`);
  for (let i = 0; i < 50 && logBytes(data) >= 1 << 20; i++) await sleep(100);
  assert.ok(logBytes(data) < 1 << 20, `${logBytes(data)} bytes of log when idle`);
  await server.stop();
  assert.equal(logBytes(data), 0);
});

await check('B138: appends by many clients while backups run: no 5xx, none lost, none twice', async () => {
  const data = newData();
  const server = await startServer({ data, set: { 'log.access': false, 'engine.queue_max': 4096, 'workers.queue_max': 4096 } });
  const [clients, rounds] = long ? [100, 50] : [20, 5];
  const told = [];
  let stop = false;
  const backups = (async () => {
    for (let i = 0; !stop; i++) {
      const to = join(data, `backup${i}`);
      assert.equal((await databaseProgram('backup', data, to)).code, 0);
      rmSync(to, { recursive: true });
    }
  })();
  await Promise.all(Array.from({ length: clients }, async (_, client) => {
    for (let i = 0; i < rounds; i++) {
      const r = await post(server.url, '/v1/chat/completions',
        { model: 'nano', max_tokens: 4, messages: [{ role: 'user', content: `hello ${word()}` }] }, { 'x-session-id': `session-${client % 10}` });
      assert.equal(r.status, 200, r.text);
      assert.equal(r.json.usage.whimbrel.stored, true);
      told.push(r.json.id);
    }
  }));
  stop = true;
  await backups;
  await server.stop();
  const rows = ledger(data, 'select t.response, s.label from turns t join sessions s on s.id=t.session');
  assert.equal(rows.length, clients * rounds);
  assert.deepEqual(rows.map((r) => r.response).sort(), [...told].sort());
  assert.equal(new Set(rows.map((r) => r.label)).size, 10);
});

await check('B140: a kill in mid-turn leaves whole turns, and the session goes on', async () => {
  const data = newData();
  let server = await startServer({ data, set: { 'engine.slow_step_us': 50000 } });
  const first = await respond(server, `My code word is ${word()}.`);
  const session = await connect(server.url);
  session.on('error', () => {});
  const begun = new Set();
  const streams = Array.from({ length: 5 }, () => h2stream(session, '/v1/responses',
    { model: 'nano', input: 'Count.', stream: true, max_output_tokens: 2000, ignore_eos: true, previous_response_id: first.json.id },
    { onRecord(record) {
      if (record.type === 'response.created') begun.add(record.response.id);
      if (record.type === 'response.completed') begun.delete(record.response.id);
    } }).catch(() => {}));
  for (let i = 0; i < 100 && begun.size < 5; i++) await sleep(50);
  await server.kill9();
  await Promise.all(streams);
  session.destroy();
  const { code, out } = await databaseProgram('check', data);
  assert.equal(code, 0, out);
  server = await startServer({ data });
  assert.deepEqual((await read(server, first.json.id)).json.output, first.json.output);
  assert.ok(begun.size, 'no stream was cut');
  for (const id of begun) {
    const cut = await read(server, id);
    assert.ok(cut.status === 404 || ['incomplete', 'cancelled', 'failed'].includes(cut.json.status), JSON.stringify(cut.json));
  }
  const next = await respond(server, 'And what was it?', { previous_response_id: first.json.id });
  assert.equal(next.status, 200, next.text);
  assert.ok(!begun.has(next.json.id));
  await server.stop();
});

await check('B141: previous_response_id is honoured or refused', async () => {
  const server = await startServer();
  const first = (await respond(server, 'My code word is kiwi-88.')).json;
  const second = await respond(server, 'What is my code word?', { previous_response_id: first.id });
  assert.equal(second.status, 200, second.text);
  const alone = await respond(server, 'What is my code word?');
  const { usage } = second.json;
  // The earlier turn is in the prompt, by its tokens: all of it is cached.
  assert.ok(usage.input_tokens >= alone.json.usage.input_tokens + first.usage.output_tokens);
  assert.ok(usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 2, JSON.stringify(usage));
  const unstored = (await respond(server, 'My code word is kiwi-88.', { store: false })).json;
  const deleted = (await respond(server, 'My code word is kiwi-88.')).json;
  assert.equal((await remove(server, deleted.id)).status, 200);
  for (const id of ['resp_does_not_exist', unstored.id, deleted.id]) {
    const r = await respond(server, 'x', { previous_response_id: id });
    assert.ok(r.status === 404 || r.json.error.code === 'previous_response_not_found', r.text);
    assert.equal(r.json.error.param, 'previous_response_id');
  }
  // The parent of another key: tests/e2e/tenants.test.mjs.
  await server.stop();
});

await check('B143: the id of a stream whose client left is never unknown', async () => {
  const server = await startServer({ set: { 'engine.slow_step_us': 10000 } });
  const begin = async (store) => {
    const session = await connect(server.url);
    session.on('error', () => {});
    let id, deltas = 0;
    await h2stream(session, '/v1/responses', { model: 'nano', input: 'Write 300 words.', stream: true, store, max_output_tokens: 100, temperature: 1 }, {
      onRecord(record, stream) {
        id ??= record.response?.id;
        if (String(record.type).endsWith('.delta') && ++deltas === 5) stream.close();
      } }).catch(() => {});
    session.destroy();
    return id;
  };
  const id = await begin(true);
  assert.ok(id);
  let last;
  for (let i = 0; i < 100; i++) {
    last = await read(server, id);
    if (last.status !== 200) break;
    if (last.json.status !== 'in_progress') break;
    await sleep(50);
  }
  assert.equal(last.status, 200, JSON.stringify(last.json));
  assert.ok(['completed', 'incomplete', 'cancelled'].includes(last.json.status), last.json.status);
  const hidden = await begin(false);
  await sleep(300);
  assert.equal((await read(server, hidden)).status, 404);
  await server.stop();
});

await check('B144: responses and sessions survive a restart', async () => {
  const data = newData();
  let server = await startServer({ data });
  const bodies = [];
  let previous;
  for (let i = 0; i < 4; i++) {
    const r = await respond(server, `turn ${i} ${word()}`, previous ? { previous_response_id: previous } : {});
    previous = r.json.id;
    bodies.push((await read(server, previous)).json);
  }
  await server.stop();
  server = await startServer({ data });
  for (const body of bodies) {
    const again = await read(server, body.id);
    assert.equal(again.status, 200);
    assert.deepEqual(again.json, body);
  }
  const next = await respond(server, 'go on', { previous_response_id: previous });
  assert.equal(next.status, 200, next.text);
  assert.ok(next.json.usage.input_tokens > bodies.at(-1).usage.total_tokens);
  await server.stop();
});

// ---- a ledger that cannot write ----

/** Another process that holds the database's write lock until it is let go. */
async function lock(data) {
  const child = spawn('python3', ['-c', 'import sqlite3,sys\nc=sqlite3.connect(sys.argv[1],isolation_level=None)\nc.execute("BEGIN IMMEDIATE")\nprint("held",flush=True)\nsys.stdin.read()\n', join(data, 'whimbrel.db')]);
  await new Promise((resolve) => child.stdout.once('data', resolve));
  return () => new Promise((resolve) => { child.once('exit', resolve); child.stdin.end(); });
}
const fileSize = (server, bytes) => execFileSync('prlimit', ['--pid', String(server.child.pid), `--fsize=${bytes}:unlimited`]);

/** Turns while the ledger cannot write: kept ones end in an error that is not to be retried, others complete. */
async function unwritable(server, reason) {
  const failed = await metric(server.admin, 'whimbrel_commit_failed_total');
  const body = { model: 'nano', max_tokens: 8, messages: [{ role: 'user', content: `hello ${word()}` }] };
  const plain = await post(server.url, '/v1/chat/completions', body);
  assert.equal(plain.status, 200, plain.text);
  assert.equal(plain.json.usage.whimbrel.stored, false);
  assert.ok(plain.json.choices[0].message.content.length > 0);
  const messages = await post(server.url, '/v1/messages', body);
  assert.equal(messages.status, 200, messages.text);
  const kept = await respond(server, `hello ${word()}`, { store: true });
  assert.equal(kept.status, 500, kept.text);
  assert.equal(kept.json.error.code, 'not_stored');
  assert.equal(kept.headers.get('x-should-retry'), 'false');
  const session = await connect(server.url);
  const streamed = await h2stream(session, '/v1/responses', { model: 'nano', input: 'hello', stream: true, max_output_tokens: 8 });
  session.destroy();
  const end = streamed.records.at(-1);
  assert.ok(end.type === 'response.failed' || end.type === 'error', JSON.stringify(end));
  assert.ok(!streamed.records.some((record) => record.type === 'response.completed'), 'an end was told');
  const store = await post(server.url, '/v1/chat/completions', { ...body, store: true });
  assert.equal(store.status, 500, store.text);
  assert.ok(await metric(server.admin, 'whimbrel_commit_failed_total') >= failed + 5);
  assert.match(server.log(), new RegExp(`commit_failed turn=turn_\\w+ reason=".*${reason}`));
}
async function writable(server) {
  for (let i = 0; i < 20; i++) {
    const r = await respond(server, `hello ${word()}`);
    if (r.status === 200) {
      assert.equal((await read(server, r.json.id)).status, 200);
      return;
    }
    await sleep(100);
  }
  assert.fail('it does not write again');
}

await check('a database locked by another process: serving goes on, and stores again afterwards', async () => {
  const data = newData();
  const server = await startServer({ data });
  await writable(server);
  const release = await lock(data);
  await unwritable(server, 'locked');
  await release();
  await writable(server);
  await server.stop();
  assert.equal((await databaseProgram('check', data)).code, 0);
});

await check('a disk that takes no more: serving goes on, and stores again afterwards', async () => {
  const data = newData();
  const server = await startServer({ data, set: { 'cache.disk': false } });
  await writable(server);
  fileSize(server, 1024);
  await unwritable(server, '(full|I/O)');
  fileSize(server, 'unlimited');
  await writable(server);
  await server.stop();
  assert.equal((await databaseProgram('check', data)).code, 0);
});

await check('bounds: kept turns past ledger.tenant_bytes_max are refused by name, cached ones make room', async () => {
  const server = await startServer({ set: { 'ledger.tenant_bytes_max': 60000 } });
  const text = Array.from({ length: 200 }, () => word(2)).join(' ');
  for (let i = 0; i < 30; i++)
    assert.equal((await post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 2, messages: [{ role: 'user', content: `${word()} ${text}` }] })).status, 200);
  for (let i = 0; i < 60 && !(await metric(server.admin, 'whimbrel_ledger_trimmed_total')); i++) await sleep(100);
  assert.ok(await metric(server.admin, 'whimbrel_ledger_trimmed_total') > 0);
  const ids = [];
  let refused;
  for (let i = 0; i < 60 && !refused; i++) {
    const r = await respond(server, `${word()} ${text}`, { max_output_tokens: 2 });
    if (r.status === 200) ids.push(r.json.id);
    else refused = r;
    if (i % 10 === 9) await sleep(1200); // the keeper looks once a second
  }
  assert.equal(refused?.status, 429, refused?.text);
  assert.equal(refused.json.error.code, 'storage_full');
  assert.match(refused.json.error.message, /ledger\.tenant_bytes_max/);
  assert.equal(refused.headers.get('x-should-retry'), 'false');
  assert.equal((await respond(server, text, { store: false, max_output_tokens: 2 })).status, 200);
  for (const id of ids) assert.equal((await remove(server, id)).status, 200);
  assert.equal((await respond(server, text, { max_output_tokens: 2 })).status, 200);
  await server.stop();
});

for (const dir of dirs) rmSync(dir, { recursive: true, force: true });
finish();
