// whimbrel-chat over a pipe: a turn with a tool that is echoed, forks, reasons, failures by their status, and nothing that a terminal would obey.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { build, check, finish, startServer, weatherTool } from './lib.mjs';

const server = await startServer();
const tools = join(server.data, 'tools.json');
writeFileSync(tools, JSON.stringify([weatherTool]));
const chat = (lines, ...args) => new Promise((resolve) => {
  const child = spawn(join(build, 'whimbrel-chat'), ['--url', server.url, ...args]);
  let out = '', err = '';
  child.stdout.on('data', (bytes) => (out += bytes));
  child.stderr.on('data', (bytes) => (err += bytes));
  child.on('close', (code) => resolve({ code, out, err }));
  child.stdin.end(lines.map((line) => `${line}\n`).join(''));
});
const get = async (path) => (await fetch(server.url + path)).json();

await check('a session is made and kept; a fork goes on from it; /why and /turns tell what the server says', async () => {
  const { code, out, err } = await chat(['What is the weather in Oslo?', '/why', '/fork', 'hello again', '/turns', '/sessions'], '--tools', tools, '--max-tokens', '60');
  assert.equal(code, 0, err);
  const { data } = await get('/v1/sessions');
  assert.equal(data.length, 2);
  const [fork, first] = data;
  assert.equal(fork.forked_from.session, first.id);
  for (const s of data) assert.ok(out.includes(s.id));
  const { data: turns } = await get(`/v1/sessions/${fork.id}/turns?order=asc`);
  for (const t of turns) {
    assert.ok(out.includes(t.id));
    assert.ok(out.includes(`${t.cache.hit} of ${t.usage.prompt_tokens} cached, ${t.usage.completion_tokens} made`), JSON.stringify(t.usage));
  }
  const calls = turns.flatMap((t) => t.items.at(-1).tool_calls ?? []);
  for (const call of calls) assert.ok(out.includes(`${call.function.name} ${call.function.arguments}`), 'a call is shown with its arguments');
  const again = await chat(['/turns'], '--session', first.id);
  assert.equal(again.code, 0);
  assert.ok(again.out.includes(`model ${first.model}`));
});

await check('control characters are not printed', async () => {
  const { code, out } = await chat(['red \u001b[31m bell \u0007 \u009b1m end', '/turns'], '--max-tokens', '1');
  assert.equal(code, 0);
  assert.match(out, /red \?\[31m bell \? \?1m end/);
  assert.doesNotMatch(out.replaceAll('\n', ''), /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/);
});

await check('what cannot be done: status 1 and the reason; wrong arguments: status 2', async () => {
  assert.match((await chat(['/open sess_nothing'])).out, /not found/);
  assert.equal((await chat(['/open sess_nothing'])).code, 1);
  assert.equal((await chat(['/nonsense'])).code, 1);
  assert.equal((await chat(['hello'], '--model', 'gpt-none')).code, 1);
  assert.equal((await chat([], '--nonsense', '1')).code, 2);
  assert.equal((await chat([], '--tools', join(server.data, 'none.json'))).code, 2);
  assert.match((await chat([], '--help')).out, /^usage: whimbrel-chat /);
});

await server.stop();
finish();
