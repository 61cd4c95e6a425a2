// Nobody waits for who reads the log: with a stderr that takes no more, requests are served, and what was dropped is counted and told.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { closeSync, constants, mkdtempSync, openSync, readFileSync, readSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, finish, metric, sleep, startServer } from './lib.mjs';

const REQUESTS = 1500; // about 250 bytes of log each; a pipe holds 64 KiB
const dir = mkdtempSync(join(tmpdir(), 'whimbrel-log-'));
const ask = async (server, n) => { for (let i = 0; i < n; i++) assert.equal((await fetch(`${server.url}/v1/models`)).status, 200); };
const set = { 'metrics.public': 'true' };
const over = (lines) => lines.filter((line) => line.includes(' request_over ') && line.includes('path=/v1/models ')).length;
const told = (lines) => lines.reduce((sum, line) => sum + Number(line.match(/ level=warn log_dropped lines=(\d+)$/)?.[1] ?? 0), 0);

/** Whole lines, each with its beginning and its end. */
function linesOf(text) {
  assert.equal(text.at(-1), '\n');
  const lines = text.slice(0, -1).split('\n');
  for (const line of lines) assert.match(line, /^ts=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=(debug|info|warn|error) [a-z_]+/);
  for (const line of lines) if (line.includes(' request_over ')) assert.match(line, / us=\d+$/);
  return lines;
}

await check('a pipe that nobody reads: every request is served, lines are dropped, counted and told once there is room', async () => {
  const fifo = join(dir, 'fifo');
  execFileSync('mkfifo', [fifo]);
  const end = openSync(fifo, constants.O_RDWR | constants.O_NONBLOCK); // both ends: what is in it stays
  const writer = openSync(fifo, constants.O_WRONLY);
  let text = '';
  const drain = () => {
    const bytes = Buffer.alloc(65536);
    for (;;) {
      try { text += bytes.toString('utf8', 0, readSync(end, bytes)); } catch (error) { assert.equal(error.code, 'EAGAIN'); return; }
    }
  };
  const server = await startServer({ set, stderr: writer });
  await ask(server, REQUESTS);
  const dropped = await metric(server.url, 'whimbrel_log_dropped_total');
  assert.ok(dropped > REQUESTS / 4, `${dropped} dropped`);
  drain();
  await ask(server, 1);
  let lines = [];
  for (let i = 0; i < 200 && over(lines) + told(lines) < REQUESTS + 1; i++) { await sleep(10); drain(); lines = linesOf(text); }
  assert.equal(over(lines) + told(lines), REQUESTS + 1);
  assert.equal(told(lines), await metric(server.url, 'whimbrel_log_dropped_total'));
  // Full again: it stops as ever.
  await ask(server, REQUESTS);
  assert.deepEqual(await server.stop(), { code: 0, signal: null });
  closeSync(end);
  closeSync(writer);
});

await check('a file has every line, whole and in order, to the last', async () => {
  const path = join(dir, 'log'), file = openSync(path, 'a');
  const server = await startServer({ set, stderr: file });
  await ask(server, REQUESTS);
  assert.equal(await metric(server.url, 'whimbrel_log_dropped_total'), 0);
  await server.stop();
  closeSync(file);
  const lines = linesOf(readFileSync(path, 'utf8'));
  assert.equal(over(lines), REQUESTS);
  assert.ok(lines.some((line) => line.includes(' stopping signal=15')));
});

rmSync(dir, { recursive: true, force: true });
finish();
