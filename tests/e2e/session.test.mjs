// Twenty scripted sessions over HTTP/2: whether the model calls what was meant is up to the model alone.
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import assert from 'node:assert/strict';
import { join } from 'node:path';
import { build, check, finish, startServer } from './lib.mjs';

const server = await startServer();
await check('20 seeds of the quickstart session: at least 80 % of the calls are right', async () => {
  // Not execFileSync: somebody has to read the server's log meanwhile, or its pipe fills.
  const { stdout: out } = await promisify(execFile)(join(build, 'whimbrel-session'), ['--url', server.url, '--seed', '1000', '--sessions', '20'], { encoding: 'utf8', maxBuffer: 1 << 24 });
  const last = out.trimEnd().split('\n').at(-1);
  console.log(`  ${last}`);
  const [, right, all] = last.match(/calls right: (\d+) of (\d+)/).map(Number);
  assert.equal(all, 60);
  assert.ok(right >= 0.8 * all);
});
await server.stop();
finish();
