// The shared cases of HTTP/2 (tests/gateway/cases/http2.json), each a check under its number, through the front door. B134's frames without end
// and B126's relatives are in tests/gateway/test_h2o.c too; only the patched libh2o can pass some of them.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import net from 'node:net';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { check, connect, finish, h2stream, metric, root, sleep, startServer, word } from './lib.mjs';

const cases = new Map(JSON.parse(readFileSync(join(root, 'tests/gateway/cases/http2.json'))).map((c) => [c.id, c]));
const done = new Set();
const test = (id, fn) => { done.add(id); return check(`${id} ${cases.get(id).title}`, () => fn(cases.get(id))); };
const STALL_MS = 1500, UPLOAD_MS = 1000;
const server = await startServer({ set: { 'limits.write_stall_ms': STALL_MS, 'limits.idle_connection_ms': UPLOAD_MS, 'engine.sequences_max': 2 } });
const { hostname: host, port } = new URL(server.url);
const until = async (what, holds) => { for (let i = 0; !(await holds()); i++) { assert.ok(i < 1000, what); await sleep(10); } };
const idle = async () => (await metric(server.admin, 'whimbrel_running')) === 0 && (await metric(server.admin, 'whimbrel_queued')) === 0;
const ask = (max, more) => ({ model: 'nano', temperature: 0, ignore_eos: true, max_tokens: max, stream: true, messages: [{ role: 'user', content: `Hello ${word()}` }], ...more });
const head = { ':method': 'POST', ':path': '/v1/chat/completions', 'content-type': 'application/json' };

/** What comes over a plain connection until it is closed. */
const raw = (bytes) => new Promise((resolve, reject) => {
  const socket = net.connect(port, host, () => socket.write(bytes));
  const chunks = [];
  socket.on('data', (chunk) => chunks.push(chunk)).on('close', () => resolve(Buffer.concat(chunks))).on('error', (e) => e.code !== 'ECONNRESET' && e.code !== 'EPIPE' && reject(e));
});
/** The system's libh2o takes a request without a host, and more. */
const patched = (await raw('GET / HTTP/1.1\r\nConnection: close\r\n\r\n')).toString().startsWith('HTTP/1.1 400 ');
const frame = (type, flags, stream, payload = Buffer.alloc(0)) => {
  const h = Buffer.alloc(9);
  h.writeUIntBE(payload.length, 0, 3); h[3] = type; h[4] = flags; h.writeUInt32BE(stream, 5);
  return Buffer.concat([h, payload]);
};
const preface = Buffer.concat([Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'), frame(4, 0, 0)]);
const field = (name, value) => Buffer.concat([Buffer.from([0, name.length]), Buffer.from(name), Buffer.from([value.length]), Buffer.from(value)]);
const get = Buffer.concat([field(':method', 'GET'), field(':scheme', 'http'), field(':authority', host), field(':path', '/v1/models')]);
/** Frames of an answer: {type, flags, stream, payload}. */
function frames(bytes) {
  const list = [];
  for (let at = 0; at + 9 <= bytes.length;) {
    const length = bytes.readUIntBE(at, 3);
    list.push({ type: bytes[at + 3], flags: bytes[at + 4], stream: bytes.readUInt32BE(at + 5) & 0x7fffffff, payload: bytes.subarray(at + 9, at + 9 + length) });
    at += 9 + length;
  }
  return list;
}

await test('B126', async () => {
  const before = await metric(server.admin, 'whimbrel_requests_total').catch(() => 0);
  const flood = [preface];
  for (let i = 0; i < 20000; i++) flood.push(frame(1, 5, 2 * i + 1, get), frame(3, 0, 2 * i + 1, Buffer.from([0, 0, 0, 8])));
  const answer = await raw(Buffer.concat(flood));
  const goaway = frames(answer).find((f) => f.type === 7);
  if (patched && goaway) assert.equal(goaway.payload.readUInt32BE(4), 11, 'ENHANCE_YOUR_CALM'); // the kernel may drop it with the connection
  assert.ok(frames(answer).filter((f) => f.type === 1).length < 1000);
  assert.ok((await metric(server.admin, 'whimbrel_requests_total').catch(() => 0)) - before < 3000);
  await until('nothing runs', idle);
  const session = await connect(server.url);
  assert.equal((await h2stream(session, '/v1/chat/completions', ask(3))).status, 200);
  session.close();
});

await test('B129', async () => {
  const session = await connect(server.url, { settings: { initialWindowSize: 100 } });
  const body = ask(400);
  const whole = await h2stream(session, '/v1/chat/completions', body);
  const text = (records) => records.filter((r) => r !== '[DONE]').map((r) => (r.choices[0]?.delta.content ?? '') + (r.choices[0]?.delta.reasoning_content ?? '')).join('');
  // Reads nothing for a while, then all: no byte lost or repeated.
  const slow = session.request(head);
  slow.setEncoding('utf8');
  slow.end(JSON.stringify(body));
  await new Promise((resolve) => slow.on('response', resolve));
  await sleep(STALL_MS / 3);
  let got = '';
  for await (const chunk of slow) got += chunk;
  assert.equal(text(got.split('\n\n').filter((r) => r.startsWith('data: {')).map((r) => JSON.parse(r.slice(6)))), text(whole.records));
  // Never reads: the generation ends, the neighbour does not notice.
  const stuck = session.request(head);
  stuck.on('error', () => {});
  stuck.end(JSON.stringify(ask(20000)));
  await new Promise((resolve) => stuck.on('response', resolve));
  assert.equal((await h2stream(session, '/v1/chat/completions', ask(50))).records.at(-1), '[DONE]');
  await until('the slot is released', idle);
  assert.equal((await h2stream(session, '/v1/chat/completions', ask(5))).status, 200, 'the connection goes on');
  session.destroy();
});

await test('B130', async () => {
  const session = await connect(server.url, { settings: { initialWindowSize: 1024 } });
  const all = await Promise.all(Array.from({ length: 6 }, () => h2stream(session, '/v1/chat/completions', ask(60)))); // two run, four wait
  for (const { records } of all) assert.equal(records.at(-1), '[DONE]');
  session.close();
});

const refusal = async (session, headers, chunks) => {
  const stream = session.request({ ...head, ...headers });
  stream.on('error', () => {});
  for (const chunk of chunks) stream.write(chunk);
  const status = await new Promise((resolve) => stream.on('response', (h) => resolve(h[':status'])));
  let text = '';
  stream.setEncoding('utf8').on('data', (chunk) => (text += chunk));
  await new Promise((resolve) => stream.on('close', resolve));
  return { status, json: JSON.parse(text), code: stream.rstCode };
};
if (patched) await test('B131', async () => {
  const session = await connect(server.url);
  const declared = await refusal(session, { 'content-length': '10737418240' }, [Buffer.alloc(16384, ' ')]);
  const over = await refusal(session, {}, Array.from({ length: 33 * 16 + 1 }, () => Buffer.alloc(65536, ' ')));
  for (const { status, json, code } of [declared, over]) {
    assert.equal(status, 413);
    assert.equal(json.error.code ?? json.error.type, 'request_too_large');
    assert.equal(code, 0);
  }
  assert.equal((await h2stream(session, '/v1/chat/completions', ask(3))).status, 200);
  session.close();
});

if (patched) await test('B132', async () => {
  const big = (await raw(`POST /v1/chat/completions HTTP/1.1\r\nHost: ${host}\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 10737418240\r\n\r\n`)).toString();
  assert.match(big, /^HTTP\/1\.1 413 /);
  assert.doesNotMatch(big, / 100 /);
  const body = JSON.stringify({ ...ask(3), stream: false });
  const small = (await raw(`POST /v1/chat/completions HTTP/1.1\r\nHost: ${host}\r\nContent-Type: application/json\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: ${body.length}\r\n\r\n${body}`)).toString();
  assert.match(small, /^HTTP\/1\.1 100 Continue\r\n\r\nHTTP\/1\.1 200 /);
});

await test('B134', async () => {
  const long = Buffer.concat([get, Buffer.from([0, 1, 0x78, 0x7f, 0x81, 0xff, 3]), Buffer.alloc(65536, 'z')]);
  const parts = [frame(1, 1, 1, long.subarray(0, 16384))];
  for (let at = 16384; at < long.length; at += 16384) parts.push(frame(9, at + 16384 >= long.length ? 4 : 0, 1, long.subarray(at, at + 16384)));
  // PING on a stream ends the connection, after the answer.
  const answer = frames(await raw(Buffer.concat([preface, ...parts, frame(6, 0, 1, Buffer.alloc(8))])));
  assert.match(answer.find((f) => f.type === 1).payload.toString('latin1'), /^\x08\x03431/);
  for (const [bytes, codes] of [
    [Buffer.concat([preface, frame(1, 1, 1, get), ...Array.from({ length: 10000 }, () => frame(9, 0, 1, field('x', 'y')))]), patched ? [11] : [1, 11]],
    [Buffer.concat([preface, frame(1, 1, 1, get), frame(6, 0, 0, Buffer.alloc(8))]), [1]],
  ]) {
    const goaway = frames(await raw(bytes)).find((f) => f.type === 7);
    if (goaway) assert.ok(codes.includes(goaway.payload.readUInt32BE(4)), goaway.payload.toString('latin1'));
  }
  assert.equal((await fetch(`${server.url}/v1/models`)).status, 200);
});

await test('B135', async () => {
  const body = JSON.stringify({ ...ask(5), stream: false, metadata: { filler: 'x'.repeat(400), more: 'y'.repeat(400), last: 'z'.repeat(400) } });
  const content = (text) => JSON.parse(text).choices[0].message.content;
  const one = await fetch(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body });
  const whole = content(await one.text());
  const chunks = [...Buffer.from(body)].map((byte) => `1\r\n${String.fromCharCode(byte)}\r\n`).join('');
  const answer = (await raw(`POST /v1/chat/completions HTTP/1.1\r\nHost: ${host}\r\nContent-Type: application/json\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n${chunks}0\r\nX-T: 1\r\n\r\n`)).toString();
  assert.match(answer, /^HTTP\/1\.1 200 /);
  assert.equal(content(answer.slice(answer.indexOf('\r\n\r\n') + 4)), whole);
  const session = await connect(server.url);
  const stream = session.request(head, { waitForTrailers: false });
  stream.setEncoding('utf8');
  for (const byte of Buffer.from(body)) stream.write(Buffer.from([byte]));
  stream.end();
  let text = '';
  for await (const chunk of stream) text += chunk;
  assert.equal(content(text), whole);
  // An upload that stops: no slot is held, and the connection ends.
  const stalled = raw(`POST /v1/chat/completions HTTP/1.1\r\nHost: ${host}\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"model"`);
  assert.equal(await idle(), true);
  assert.match((await stalled).toString(), /^(HTTP\/1\.1 408 |$)/);
  const gzip = await fetch(`${server.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json', 'content-encoding': 'gzip' }, body: gzipSync(body) });
  assert.ok([400, 415].includes(gzip.status), `${gzip.status}`);
  session.close();
});

await check('every case of the file is here', async () => {
  assert.deepEqual([...cases.keys()].filter((id) => !done.has(id) && (patched || !['B131', 'B132'].includes(id))), []);
  assert.equal((await server.stop()).code, 0);
});
finish();
