// whimbrel-replay against a server: generated agent sessions with their own answers sent back, and single requests in Mooncake's form.
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import assert from 'node:assert/strict';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { build, check, finish, startServer } from './lib.mjs';

const program = join(build, 'whimbrel-replay');

function replay(...argv) {
  return new Promise((resolve) => execFile(program, argv, { encoding: 'utf8', maxBuffer: 1 << 24 }, (error, out, log) =>
    resolve({ code: error ? error.code : 0, out, log, rows: argv.includes('--json') && out ? out.trimEnd().split('\n').map((line) => JSON.parse(line)) : [] })));
}

const dir = mkdtempSync(join(tmpdir(), 'whimbrel-replay-'));
let server = await startServer({ data: join(dir, 'data') });
const load = ['--generate', '2', '--seed', '3', '--turns', '5', '--lanes', '2', '--scale', '0.006', '--output-max', '12', '--speed', '0', '--context-max', '3000'];

await check('the generated load says what it is', async () => {
  const { code, rows } = await replay('stats', '--json', '--generate', '40');
  assert.equal(code, 0);
  assert.ok(rows[0].ideal_hit_pct >= 94 && rows[0].ideal_hit_pct <= 97, `ideal hit ${rows[0].ideal_hit_pct}`);
  assert.ok(rows[0].in_out > 100 && rows[0].in_out < 160, `in:out ${rows[0].in_out}`);
});

for (const [habit, http] of [['keep', '1'], ['drop', '2'], ['reserialise', '1']])
  await check(`sessions of a client that does "${habit}", over HTTP/${http}: nearly all that could be cached is`, async () => {
    const { code, rows, log } = await replay('server', '--json', '--habit', habit, '--http', http, ...load, server.url);
    assert.equal(code, 0, log);
    const turns = rows.filter((row) => row.ttft_ms !== undefined), total = rows.find((row) => row.turns !== undefined && row.failed !== undefined);
    assert.equal(total.failed, 0);
    assert.ok(total.turns >= 8 && turns.length === total.turns, `${turns.length} of ${total.turns} turns`);
    assert.ok(total.of_ideal_pct >= 97, `cached ${total.of_ideal_pct} % of ideal`);
    const shown = turns.filter((row) => row.ttft_ms > 0); // an answer may hold nothing to show
    assert.ok(shown.length >= turns.length / 2 && turns.every((row) => row.cached <= row.prompt));
    const buckets = rows.filter((row) => row.uncached !== undefined);
    assert.ok(buckets.length > 0 && buckets.reduce((n, row) => n + row.turns, 0) === shown.length);
  });

await check('single requests: equal blocks are found again', async () => {
  const file = join(dir, 'requests.jsonl');
  const requests = Array.from({ length: 8 }, (_, i) => ({ timestamp: i * 100, input_length: 8192, output_length: 400, hash_ids: [...Array(14).keys(), 100 + i, 200 + i] }));
  writeFileSync(file, requests.map((r) => JSON.stringify(r) + '\n').join(''));
  const { code, rows, log } = await replay('server', '--json', '--lanes', '1', '--scale', '0.05', '--speed', '10', '--output-max', '4', server.url, file);
  assert.equal(code, 0, log);
  const total = rows.find((row) => row.requests !== undefined);
  assert.equal(total.requests, 8);
  assert.equal(total.failed, 0);
  const turns = rows.filter((row) => row.ttft_ms !== undefined);
  for (const row of turns.slice(1)) // 14 of 16 blocks, and less where a token crosses the border
    assert.ok(row.cached >= 0.8 * row.prompt && row.cached < row.prompt, `cached ${row.cached} of ${row.prompt}`);
});

await check('a server that has gone is told, turn by turn, and the status is 1', async () => {
  await server.stop();
  const { code, log } = await replay('server', ...load, server.url);
  assert.equal(code, 1);
  assert.match(log, /turns failed/);
});

await check('a server started anew on the same data serves them as before', async () => {
  server = await startServer({ data: join(dir, 'data') });
  const { code, rows, log } = await replay('server', '--json', ...load, server.url);
  assert.equal(code, 0, log);
  assert.ok(rows.find((row) => row.of_ideal_pct !== undefined).of_ideal_pct >= 97);
  await server.stop();
});

rmSync(dir, { recursive: true, force: true });
finish();
