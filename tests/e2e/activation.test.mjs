// Sockets that were open before the server was: systemd's socket activation, played by this test.
import assert from 'node:assert/strict';
import net from 'node:net';
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, program, root } from './lib.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-e2e-'));
const listen = () => new Promise((resolve) => { const s = net.createServer(); s.listen(0, '127.0.0.1', () => resolve(s)); });

// LISTEN_PID is the server's own, which a shell knows before it becomes it. Here the sockets are closed again: who waits, waits for the server.
async function start(names) {
  const sockets = [await listen(), await listen()], ports = sockets.map((s) => s.address().port);
  const argv = ['-c', `LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=${names} exec "$0" "$@"`, program, '--model', 'config/models/nano', '--data', data];
  const child = spawn('/bin/sh', argv, { cwd: root, stdio: ['ignore', 'pipe', 'pipe', ...sockets.map((s) => s._handle.fd)] });
  sockets.forEach((s) => s.close());
  let out = '', log = '';
  child.stdout.on('data', (bytes) => (out += bytes));
  child.stderr.on('data', (bytes) => (log += bytes));
  const exited = new Promise((resolve) => child.on('exit', (code) => resolve({ code, log })));
  const ready = new Promise((resolve) => child.stdout.on('data', () => /^ready .*$/m.test(out) && resolve(out)));
  return { child, exited, ready, ports, log: () => log };
}

await check('the server takes the sockets by their names and leaves the configured addresses alone', async () => {
  const server = await start('admin:public'), [admin, open] = server.ports;
  const waiting = fetch(`http://127.0.0.1:${open}/health/ready`).then((r) => r.status, String); // asked before the server listens, answered after
  const out = await Promise.race([server.ready, server.exited.then(({ log }) => { throw new Error(log); })]);
  assert.match(out, new RegExp(`^ready http://127\\.0\\.0\\.1:${open} `));
  assert.equal(await waiting, 200);
  assert.equal((await fetch(`http://127.0.0.1:${admin}/admin/v1/overview`)).status, 200);
  assert.equal((await fetch(`http://127.0.0.1:${open}/admin/v1/overview`)).status, 404);
  server.child.kill('SIGTERM');
  assert.equal((await server.exited).code, 0, server.log());
});

await check('a name that is none of them: exit status 2 and the name', async () => {
  const { code, log } = await (await start('admin:web')).exited;
  assert.equal(code, 2);
  assert.match(log, /named "web"/);
});

rmSync(data, { recursive: true, force: true });
finish();
