// Certificates and their renewal, Unix sockets, the end of the process: asked for, twice, overdue and by a fault.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import net from 'node:net';
import tls from 'node:tls';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, runToExit, sleep, startServer, word } from './lib.mjs';

const dir = mkdtempSync(join(tmpdir(), 'whimbrel-transport-'));
const at = (file) => join(dir, file);
const openssl = (...argv) => execFileSync('openssl', argv, { stdio: 'ignore' });
/** A key and a certificate of it, self-signed or by `ca`. */
function certify(name, ca) {
  const own = ['req', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-subj', `/CN=${name}`, '-keyout', at(`${name}.key`)];
  if (!ca) return openssl(...own, '-x509', '-days', '2', '-addext', 'subjectAltName=IP:127.0.0.1', '-out', at(`${name}.pem`));
  openssl(...own, '-out', at(`${name}.csr`));
  openssl('x509', '-req', '-in', at(`${name}.csr`), '-CA', at(`${ca}.pem`), '-CAkey', at(`${ca}.key`), '-CAcreateserial', '-days', '2', '-out', at(`${name}.pem`));
}
for (const name of ['first', 'second', 'ca', 'stranger']) certify(name);
certify('agent', 'ca');
certify('intruder', 'stranger');
const install = (name) => { copyFileSync(at(`${name}.pem`), at('cert.pem')); copyFileSync(at(`${name}.key`), at('key.pem')); };

/** A TLS connection, its handshake done and, as TLS 1.3 tells of a refusal only then, one answer read. */
function dial(server, { name, ...options } = {}) {
  const { hostname, port } = new URL(server.tls);
  const client = name ? { cert: readFileSync(at(`${name}.pem`)), key: readFileSync(at(`${name}.key`)) } : {};
  return new Promise((resolve, reject) => {
    const socket = tls.connect({ host: hostname, port, rejectUnauthorized: false, ...client, ...options });
    socket.on('error', reject);
    socket.on('close', () => reject(new Error('closed')));
    socket.on('secureConnect', () => ask(socket).then(() => resolve(socket), reject));
  });
}
function ask(socket) {
  return new Promise((resolve, reject) => {
    socket.once('data', (bytes) => (/^HTTP\/1.1 200/.test(bytes) ? resolve(String(bytes)) : reject(new Error(String(bytes)))));
    socket.once('close', () => reject(new Error('closed without an answer')));
    socket.write('GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n');
  });
}
const shown = (socket) => socket.getPeerCertificate().subject.CN;
async function until(fn, what) {
  for (let i = 0; i < 250; i++) { if (fn()) return; await sleep(20); }
  assert.fail(what());
}
const tlsKeys = { 'server.tls_listen': '127.0.0.1:0', 'server.tls_cert': at('cert.pem'), 'server.tls_key': at('key.pem') };

await check('SIGHUP renews certificates: old connections keep theirs, new ones have the new, a bad one changes nothing', async () => {
  install('first');
  const server = await startServer({ set: tlsKeys });
  const old = await dial(server);
  assert.equal(shown(old), 'first');
  // One that has not said a word when the certificate changes.
  const { hostname, port } = new URL(server.tls);
  const silent = net.connect(port, hostname);
  await new Promise((resolve) => silent.on('connect', resolve));
  await sleep(50);
  install('second');
  server.child.kill('SIGHUP');
  await until(() => / tls_renewed/.test(server.log()), server.log);
  const fresh = await dial(server);
  assert.equal(shown(fresh), 'second');
  await ask(old);
  assert.equal(shown(old), 'first');
  const late = tls.connect({ socket: silent, rejectUnauthorized: false });
  await new Promise((resolve, reject) => { late.on('secureConnect', resolve); late.on('error', reject); });
  assert.equal(shown(late), 'first');
  await ask(late);
  for (const break_ of [() => writeFileSync(at('cert.pem'), 'no certificate'), () => { install('second'); copyFileSync(at('first.key'), at('key.pem')); }, () => rmSync(at('cert.pem'))]) {
    const before = server.log().length;
    break_();
    server.child.kill('SIGHUP');
    await until(() => /tls_kept reason="server\.tls_(cert|key) /.test(server.log().slice(before)), server.log);
    assert.equal(shown(await dial(server)), 'second');
  }
  for (const socket of [old, late, fresh]) socket.destroy();
  assert.deepEqual(await server.stop(), { code: 0, signal: null });
});

await check('TLS 1.2 and 1.3 only; ALPN gives h2 and http/1.1', async () => {
  install('first');
  const server = await startServer({ set: tlsKeys });
  for (const version of ['TLSv1.2', 'TLSv1.3']) assert.equal((await dial(server, { minVersion: version, maxVersion: version })).getProtocol(), version);
  await assert.rejects(dial(server, { minVersion: 'TLSv1.1', maxVersion: 'TLSv1.1', ciphers: 'ALL@SECLEVEL=0' }));
  const { hostname, port } = new URL(server.tls);
  for (const [offer, taken] of [[['h2', 'http/1.1'], 'h2'], [['http/1.1'], 'http/1.1']]) {
    const socket = tls.connect({ host: hostname, port, rejectUnauthorized: false, ALPNProtocols: offer });
    await new Promise((resolve, reject) => { socket.on('secureConnect', resolve); socket.on('error', reject); });
    assert.equal(socket.alpnProtocol, taken);
    socket.destroy();
  }
  await server.stop();
});

await check('with server.tls_client_ca only clients with a certificate of it are served', async () => {
  install('first');
  const server = await startServer({ set: { ...tlsKeys, 'server.tls_client_ca': at('ca.pem') } });
  for (const version of ['TLSv1.2', 'TLSv1.3']) {
    (await dial(server, { name: 'agent', maxVersion: version })).destroy();
    await assert.rejects(dial(server, { maxVersion: version }), version);
    await assert.rejects(dial(server, { name: 'intruder', maxVersion: version }), version);
  }
  await server.stop();
  const { code, log } = await runToExit(['--data', at('d'), '--listen', '127.0.0.1:0', ...Object.entries({ ...tlsKeys, 'server.tls_client_ca': at('key.pem'), 'admin.listen': '' }).flatMap(([k, v]) => ['--set', `${k}=${v}`])]);
  assert.equal(code, 2, log);
  assert.match(log, /server\.tls_client_ca .*key\.pem/);
});

/** Over a Unix socket. */
function overUnix(path, route, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const request = http.request({ socketPath: path, path: route, method: body ? 'POST' : 'GET', headers: { host: 'localhost', 'content-type': 'application/json', ...headers } }, (answer) => {
      let text = '';
      answer.on('data', (bytes) => (text += bytes));
      answer.on('end', () => resolve({ status: answer.statusCode, text }));
    });
    request.on('error', reject);
    request.end(body && JSON.stringify(body));
  });
}
const chat = (more) => ({ model: 'nano', temperature: 0, max_tokens: 4, messages: [{ role: 'user', content: word() }], ...more });

await check('a Unix socket: its mode, chats, streams and a large body; a second server is refused; the file goes with the server', async () => {
  const path = at('public.sock'), admin = at('admin.sock');
  const set = { 'server.listen': `unix:${path}`, 'server.unix_mode': '0640', 'admin.listen': `unix:${admin}` };
  const server = await startServer({ set });
  assert.match(server.line, new RegExp(`^ready unix:${path} `));
  for (const file of [path, admin]) {
    assert.ok(statSync(file).isSocket());
    assert.equal(statSync(file).mode & 0o777, 0o640);
  }
  assert.equal((await overUnix(path, '/v1/chat/completions', chat())).status, 200);
  const stream = await overUnix(path, '/v1/chat/completions', chat({ stream: true }));
  assert.match(stream.text, /data: \[DONE\]/);
  const large = await overUnix(path, '/v1/chat/completions', chat({ metadata: { text: 'x'.repeat(3 << 20) } }));
  assert.ok([200, 400].includes(large.status), large.text);
  assert.equal((await overUnix(admin, '/admin/v1/overview')).status, 200);
  const { code, log } = await runToExit(['--data', at('d2'), ...Object.entries(set).flatMap(([k, v]) => ['--set', `${k}=${v}`])]);
  assert.equal(code, 2, log);
  assert.match(log, /server\.listen unix:.*in use/);
  assert.equal((await overUnix(path, '/health')).status, 200, 'the first one still serves');
  assert.deepEqual(await server.stop(), { code: 0, signal: null });
  for (const file of [path, admin]) assert.ok(!existsSync(file), file);
});

await check('the socket of a server that was killed is replaced, another file is not', async () => {
  const path = at('left.sock'), set = { 'server.listen': `unix:${path}` };
  await (await startServer({ set })).kill9();
  assert.ok(statSync(path).isSocket());
  const server = await startServer({ set });
  assert.equal((await overUnix(path, '/health')).status, 200);
  assert.equal(statSync(path).mode & 0o777, 0o600);
  await server.stop();
  writeFileSync(path, 'a file of somebody');
  for (const [listen, text] of [[path, /in use/], ['relative.sock', /absolute path/], [`/${'x'.repeat(200)}`, /absolute path/]]) {
    const { code, log } = await runToExit(['--data', at('d3'), '--set', 'admin.listen=', '--set', `server.listen=unix:${listen}`]);
    assert.equal(code, 2, log);
    assert.match(log, text);
  }
  assert.equal(readFileSync(path, 'utf8'), 'a file of somebody');
  const { code, log } = await runToExit(['--data', at('d3'), '--set', 'server.unix_mode=888']);
  assert.equal(code, 2, log);
  assert.match(log, /server\.unix_mode/);
});

/** The records of a long stream as they come. */
function longStream(server) {
  const state = { text: '', done: null };
  state.done = fetch(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' },
    body: JSON.stringify(chat({ stream: true, max_tokens: 3000, ignore_eos: true, min_tokens: 3000 })) }).then(async (response) => {
    for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) state.text += chunk;
  });
  state.done.catch(() => {});
  return state;
}
const slow = { 'engine.slow_step_us': '100000' };

await check('what still runs at the drain\'s deadline is handed back with an error that says why', async () => {
  const server = await startServer({ set: { ...slow, 'server.drain_ms': '500' } });
  const stream = longStream(server);
  await until(() => /data: /.test(stream.text), () => 'no record');
  const begin = Date.now(), ended = server.stop();
  await stream.done;
  assert.match(stream.text, /"error":\{[^}]*shutting down/);
  assert.deepEqual(await ended, { code: 0, signal: null });
  assert.ok(Date.now() - begin < 8000);
});

await check('a second SIGTERM ends at once', async () => {
  const server = await startServer({ set: { ...slow, 'server.drain_ms': '60000' } });
  const stream = longStream(server);
  await until(() => /data: /.test(stream.text), () => 'no record');
  server.child.kill('SIGTERM');
  await until(() => /stopping signal=15/.test(server.log()), server.log);
  const begin = Date.now();
  server.child.kill('SIGTERM');
  assert.deepEqual(await server.exited, { code: 0, signal: null });
  assert.ok(Date.now() - begin < 3000);
  rmSync(server.data, { recursive: true, force: true });
});

await check('a fault is told with its calls, without what was said, and ends by its signal', async () => {
  const secret = word(12);
  for (const signal of ['SIGSEGV', 'SIGABRT', 'SIGBUS']) {
    const server = await startServer();
    await fetch(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(chat({ messages: [{ role: 'user', content: secret }] })) });
    server.child.kill(signal);
    assert.deepEqual(await server.exited, { code: null, signal });
    await until(() => new RegExp(`crashed signal=${signal} thread=\\S+\\n(.*\\[0x[0-9a-f]+\\]\\n){2}`).test(server.log()), server.log);
    assert.ok(!server.log().includes(secret));
    rmSync(server.data, { recursive: true, force: true });
  }
});
rmSync(dir, { recursive: true, force: true });
finish();
