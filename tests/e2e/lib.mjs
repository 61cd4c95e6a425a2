// A server for a test, clients for it, and checks that print one line each: "[pass] name" or "[fail] name".
import { spawn, execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { randomInt } from 'node:crypto';
import http2 from 'node:http2';

export const root = join(dirname(fileURLToPath(import.meta.url)), '../..');
export const build = process.env.WHIMBREL_E2E_BUILD ?? join(root, 'build');
export const program = join(build, 'whimbrel');
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const pick = (list) => list[randomInt(list.length)];
/** A pronounceable word that no test has seen before. */
export const word = (syllables = 3) =>
  Array.from({ length: syllables }, () => pick([...'bdfgklmnprstv']) + pick([...'aeiou'])).join('');

let failures = 0;
export async function check(name, fn) {
  try {
    await fn();
    console.log(`[pass] ${name}`);
  } catch (error) {
    failures++;
    console.log(`${String(error.stack ?? error).split('\n').slice(0, 6).join('\n')}`);
    console.log(`[fail] ${name}`);
  }
}
export const finish = () => process.exit(failures ? 1 : 0);

const living = new Set();
process.on('exit', () => living.forEach((child) => child.kill('SIGKILL')));

/** Starts build/whimbrel on free ports; `set` is a map of configuration keys. `stderr`: a descriptor that takes its log, which is then not read here. */
export async function startServer({ data, model = process.env.WHIMBREL_E2E_MODEL ?? 'config/models/nano', set = {}, args = [], env = {}, stderr } = {}) {
  const own = data === undefined;
  data ??= mkdtempSync(join(tmpdir(), 'whimbrel-e2e-'));
  const argv = ['--model', model, '--listen', '127.0.0.1:0', '--data', data, '--set', 'admin.listen=127.0.0.1:0', ...args];
  for (const [key, value] of Object.entries(set)) argv.push('--set', `${key}=${value}`);
  const child = spawn(program, argv, { cwd: root, env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', stderr ?? 'pipe'] });
  living.add(child);
  let log = '', out = '';
  child.stderr?.on('data', (bytes) => (log += bytes));
  const exited = new Promise((resolve) => child.on('exit', (code, signal) => { living.delete(child); resolve({ code, signal }); }));
  const line = await new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no ready line in 60 s:\n${log}`)), 60000);
    child.stdout.on('data', (bytes) => {
      out += bytes;
      const ready = out.match(/^ready .*$/m);
      if (ready) { clearTimeout(timer); resolve(ready[0]); }
    });
    exited.then(({ code }) => { clearTimeout(timer); reject(new Error(`exit ${code} before ready:\n${log}`)); });
  });
  const url = line.match(/^ready (\S+)/)[1];
  // The other listeners' addresses are in the log, for they may be off.
  let where;
  for (let i = 0; i < 100 && !stderr && !(where = log.match(/ listening tls=(\S+) admin=(\S+)/)); i++) await sleep(10);
  const [, tls, admin] = [...where ?? []].map((address, i) => (address === 'off' ? undefined : `${i === 1 ? 'https' : 'http'}://${address}`));
  return {
    url, admin, tls, data, child, exited, line, log: () => log,
    async stop() {
      child.kill('SIGTERM');
      const result = await exited;
      if (own) rmSync(data, { recursive: true, force: true });
      return result;
    },
    async kill9() { child.kill('SIGKILL'); return exited; },
  };
}

/** Runs the server expecting it to refuse: exit status and what it wrote. */
export function runToExit(argv, { timeout = 60000 } = {}) {
  return new Promise((resolve) => {
    const child = spawn(program, argv, { cwd: root });
    living.add(child);
    let log = '';
    child.stderr.on('data', (bytes) => (log += bytes));
    child.stdout.on('data', (bytes) => (log += bytes));
    const timer = setTimeout(() => child.kill('SIGKILL'), timeout);
    child.on('exit', (code, signal) => { clearTimeout(timer); living.delete(child); resolve({ code, signal, log }); });
  });
}

/** whimbrel-db with these arguments: exit status and what it wrote. */
export function databaseProgram(...argv) {
  return new Promise((resolve) => {
    const child = spawn(join(build, 'whimbrel-db'), argv, { cwd: root });
    living.add(child);
    let out = '';
    child.stdout.on('data', (bytes) => (out += bytes));
    child.stderr.on('data', (bytes) => (out += bytes));
    child.on('close', (code, signal) => { living.delete(child); resolve({ code, signal, out }); });
  });
}

/** Rows of the ledger, read by another implementation of SQLite's file format: Python's module. */
export function ledger(data, sql) {
  const script = 'import sqlite3,json,sys\nc=sqlite3.connect(sys.argv[1])\nc.row_factory=sqlite3.Row\n' +
    'f=lambda v: v.hex() if isinstance(v,bytes) else v\n' +
    'print(json.dumps([{k:f(r[k]) for k in r.keys()} for r in c.execute(sys.argv[2])]))';
  return JSON.parse(execFileSync('python3', ['-c', script, join(data, 'whimbrel.db'), sql], { encoding: 'utf8' }));
}

export async function post(url, path, body, headers = {}) {
  const response = await fetch(url + path, {
    method: 'POST', headers: { 'content-type': 'application/json', ...headers },
    body: typeof body === 'string' || body instanceof Uint8Array ? body : JSON.stringify(body),
  });
  const text = await response.text();
  let json;
  try { json = JSON.parse(text); } catch { /* left undefined */ }
  return { status: response.status, headers: response.headers, text, json };
}

/** A streamed request over HTTP/2: every record's JSON in order, "[DONE]" as the string. */
export function h2stream(session, path, body, { onRecord, headers: more = {} } = {}) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ':method': 'POST', ':path': path, 'content-type': 'application/json', ...more });
    const records = [];
    let text = '', status, headers;
    stream.on('response', (h) => { status = h[':status']; headers = h; });
    stream.setEncoding('utf8');
    stream.on('data', (chunk) => {
      text += chunk;
      let end;
      while ((end = text.indexOf('\n\n')) >= 0) {
        const record = text.slice(0, end);
        text = text.slice(end + 2);
        for (const line of record.split('\n')) {
          if (!line.startsWith('data: ')) continue;
          const data = line.slice(6);
          records.push(data === '[DONE]' ? data : JSON.parse(data));
          onRecord?.(records.at(-1), stream);
        }
      }
    });
    stream.on('end', () => resolve({ status, headers, records, rest: text }));
    stream.on('error', reject);
    stream.end(JSON.stringify(body));
  });
}

export const connect = (url, options) => new Promise((resolve, reject) => {
  const session = http2.connect(url, options);
  session.on('connect', () => resolve(session));
  session.on('error', reject);
});

/** One metric's value (sum over its labels). */
export async function metric(admin, name) {
  const text = await (await fetch(`${admin}/metrics`)).text();
  let sum, seen = false;
  for (const line of text.split('\n')) {
    const match = line.match(/^([a-zA-Z_:]+)(\{.*\})? (\S+)$/);
    if (match && match[1] === name) { sum = (sum ?? 0) + Number(match[3]); seen = true; }
  }
  if (!seen) throw new Error(`no metric ${name}`);
  return sum;
}

export const weatherTool = {
  type: 'function',
  function: {
    name: 'get_weather', description: 'Get the current weather for a city.',
    parameters: { type: 'object', properties: { city: { type: 'string', description: 'The city name' } }, required: ['city'] },
  },
};
