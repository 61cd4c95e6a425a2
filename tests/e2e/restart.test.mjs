// kill -9 and what the disk tier brings back: a session's next turn finds its pages and says the same as in a server that
// nobody killed. WHIMBREL_LONG: 200 rounds.
import assert from 'node:assert/strict';
import { existsSync, mkdtempSync, readdirSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, connect, finish, h2stream, metric, pick, post, runToExit, sleep, startServer, word } from './lib.mjs';

const rounds = process.env.WHIMBREL_LONG ? 200 : 20;
const turns_max = 20; // of one conversation
const lines = ['What is my name?', 'Tell me about the weather.', 'Thanks a lot!', 'Count to ten, please.', 'And where do I live?'];
const chat = async (server, messages) => {
  const r = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, max_tokens: 60, messages });
  assert.equal(r.status, 200, r.text);
  return { message: r.json.choices[0].message, ...r.json.usage, ...r.json.usage.whimbrel };
};

/** Waits until nothing waits to be written. */
async function written(server) {
  for (let i = 0; i < 200 && (await metric(server.admin, 'whimbrel_disk_queued')) > 0; i++) await sleep(10);
}

await check(`${rounds} rounds of kill -9 under load: the next turn comes from disk and says the same`, async () => {
  const data = mkdtempSync(join(tmpdir(), 'whimbrel-restart-'));
  const unkilled = await startServer({ set: { 'cache.disk': false } });
  let messages = [], told = 0, restored = 0, settled = 0;
  for (let round = 0; round < rounds; round++) {
    const server = await startServer({ data });
    if (round % turns_max === 0) {
      messages = [{ role: 'user', content: `Hello! My name is ${word()} and I live in ${word()}.` }];
      told = 0;
    } else {
      messages = [...messages, { role: 'user', content: pick(lines) }];
    }
    const session = await connect(server.url);
    session.on('error', () => {});
    const load = Promise.allSettled(Array.from({ length: 3 }, async () => {
      for (;;) await h2stream(session, '/v1/chat/completions', { model: 'nano', stream: true, max_tokens: 30,
        messages: [{ role: 'user', content: `hello ${word()}` }] });
    }));
    const [turn, same] = await Promise.all([chat(server, messages), chat(unkilled, messages)]);
    assert.deepEqual(turn.message, same.message, `round ${round}`);
    // Of a turn that was written before the kill, everything is there: what the load has not brought to memory, from disk.
    if (told > 0) {
      assert.ok(turn.cached_tokens >= told - 1, `round ${round}: ${turn.cached_tokens} of ${told}`);
      assert.ok(turn.restored_tokens > 0, `round ${round}`);
    }
    restored += turn.restored_tokens;
    messages.push(turn.message);
    told = 0;
    if (round % 2 === 0) {
      await written(server);
      told = turn.prompt_tokens + turn.completion_tokens;
      settled++;
    } else {
      await sleep(Math.random() * 100);
    }
    await server.kill9();
    await load;
    session.destroy();
  }
  console.log(`  ${restored} tokens restored; ${settled} turns were written before the kill`);
  assert.ok(restored > 0);
  await unkilled.stop();
  rmSync(data, { recursive: true, force: true });
});

await check('a damaged or deleted tier costs speed only; a locked one is named', async () => {
  const data = mkdtempSync(join(tmpdir(), 'whimbrel-restart-'));
  const kv = join(data, 'kv');
  const messages = [{ role: 'user', content: `Hello! My name is ${word()}. ${'Please tell me about the weather. '.repeat(20)}` }];
  let server = await startServer({ data });
  const first = await chat(server, messages);
  const second = await runToExit(['--model', 'config/models/nano', '--listen', '127.0.0.1:0', '--data', data, '--set', 'admin.listen=']);
  assert.equal(second.code, 2, second.log);
  await server.stop();
  const spoil = {
    'segments cut': () => readdirSync(kv).filter((f) => f.startsWith('seg-')).forEach((f) => truncateSync(join(kv, f), 5000)),
    'an index of nonsense': () => writeFileSync(join(kv, 'index.db'), 'nonsense'.repeat(2000)),
    'no folder': () => rmSync(kv, { recursive: true }),
    nothing: () => {},
  };
  for (const [what, how] of Object.entries(spoil)) {
    how();
    server = await startServer({ data });
    const again = await chat(server, messages);
    assert.deepEqual(again.message, first.message, what);
    if (what === 'nothing') assert.ok(again.restored_tokens >= first.prompt_tokens - 1, `${again.restored_tokens} restored`);
    else assert.equal(again.restored_tokens, 0, what);
    await server.stop(); // writes what was computed again
  }
  server = await startServer({ data, set: { 'cache.disk': false } });
  assert.equal((await chat(server, messages)).restored_tokens, 0);
  assert.equal(await metric(server.admin, 'whimbrel_disk_tier'), 0);
  await server.stop();
  rmSync(data, { recursive: true, force: true });
});

await check('pages that are fetched ahead are in memory when the turn comes', async () => {
  const data = mkdtempSync(join(tmpdir(), 'whimbrel-restart-'));
  let server = await startServer({ data });
  const messages = [{ role: 'user', content: `Hello! My name is ${word()}. ${'Please tell me about the weather. '.repeat(20)}` }];
  const first = await chat(server, messages);
  await written(server);
  await server.stop();
  server = await startServer({ data });
  const { status, json, text } = await post(server.admin, '/admin/v1/cache/prefetch', { session: first.session });
  assert.equal(status, 200, text);
  assert.equal(json.turn, first.turn);
  assert.ok(json.restored_tokens >= first.prompt_tokens, text);
  const next = await chat(server, [...messages, first.message, { role: 'user', content: pick(lines) }]);
  assert.ok(next.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1, JSON.stringify(next));
  assert.equal(next.restored_tokens, 0);
  await server.stop();
  rmSync(data, { recursive: true, force: true });
});

await check('store: false leaves no page on disk', async () => {
  const data = mkdtempSync(join(tmpdir(), 'whimbrel-restart-'));
  let server = await startServer({ data });
  const body = { model: 'nano', temperature: 0, max_tokens: 20, store: false,
    messages: [{ role: 'user', content: `Hello! My name is ${word()}. ${'Please tell me about the weather. '.repeat(20)}` }] };
  await post(server.url, '/v1/chat/completions', body);
  await written(server);
  assert.equal(await metric(server.admin, 'whimbrel_disk_records'), 0);
  assert.ok(!existsSync(join(data, 'kv')) || !readdirSync(join(data, 'kv')).some((f) => f.startsWith('seg-')));
  const kept = await post(server.url, '/v1/chat/completions', { ...body, store: true });
  assert.ok(kept.json.usage.prompt_tokens_details.cached_tokens > 0); // memory had it
  await written(server);
  assert.ok((await metric(server.admin, 'whimbrel_disk_records')) > 0);
  await server.stop();
  rmSync(data, { recursive: true, force: true });
});
finish();
