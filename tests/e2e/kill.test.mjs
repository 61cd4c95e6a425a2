// kill -9 in the middle: every turn whose end was told is in the ledger with its tokens, and the server starts again.
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, connect, databaseProgram, finish, h2stream, ledger, post, sleep, startServer, word } from './lib.mjs';

const data = mkdtempSync(join(tmpdir(), 'whimbrel-kill-'));
const rounds = process.env.WHIMBREL_LONG ? 200 : 20;
const told = new Map(); // response id -> completion tokens
const first = {};

await check(`${rounds} rounds of kill -9 under load lose no told turn`, async () => {
  for (let round = 0; round < rounds; round++) {
    const server = await startServer({ data });
    if (round === 0) {
      first.messages = [{ role: 'user', content: `hello from ${word()}` }];
      const r = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, messages: first.messages });
      first.messages.push(r.json.choices[0].message, { role: 'user', content: 'Thanks a lot!' });
      first.tokens = r.json.usage.prompt_tokens + r.json.usage.completion_tokens;
      told.set(r.json.id, r.json.usage.completion_tokens);
    }
    const session = await connect(server.url);
    session.on('error', () => {});
    const run = async () => {
      for (;;) {
        let id, usage, ended = false;
        const done = h2stream(session, '/v1/chat/completions', {
          model: 'nano', stream: true, stream_options: { include_usage: true }, max_tokens: 30, temperature: 1,
          messages: [{ role: 'user', content: `hello ${word()}` }] },
        { onRecord(record) {
          if (record === '[DONE]') return;
          id = record.id;
          if (record.choices[0]?.finish_reason) { ended = true; told.set(id, undefined); }
          if (record.usage) { usage = record.usage; told.set(id, usage.completion_tokens); }
        } });
        await done;
        assert.ok(ended);
      }
    };
    const load = Promise.allSettled(Array.from({ length: 6 }, run));
    await sleep(300 + Math.random() * 700);
    await server.kill9();
    await load;
    session.destroy();
    // Every page, row and sum of the ledger and of the disk tier, as the kill left them.
    const { code, out } = await databaseProgram('check', data);
    assert.equal(code, 0, `after round ${round}: ${out}`);
  }
  const rows = ledger(data, `select t.response as response_id, t.public, t.output_tokens, t.status, t.lead, r.tokens,
    r.token_count from turns t left join runs r on r.id=t.run`);
  const known = new Map(rows.map((r) => [r.response_id, r]));
  assert.equal(known.size, rows.length, 'a response id was used twice');
  assert.equal(new Set(rows.map((r) => r.public)).size, rows.length, 'a turn id was used twice');
  for (const [id, tokens] of told) {
    const row = known.get(id);
    assert.ok(row, `told turn ${id} is not in the ledger`);
    if (tokens === undefined) continue;
    assert.equal(row.output_tokens, tokens);
    // Its run is the whole output, but for a special token that ends it.
    const count = row.token_count - row.lead;
    assert.ok(count === tokens || count === tokens - 1, `${count} of ${tokens} tokens`);
    assert.equal([...Buffer.from(row.tokens, 'hex')].filter((byte) => byte < 128).length, row.token_count);
  }
  console.log(`  ${told.size} told turns, ${rows.length} rows`);
  assert.ok(told.size > rounds);
});

await check('after the restart a session goes on from its exact tokens', async () => {
  const server = await startServer({ data });
  const r = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, messages: first.messages });
  assert.equal(r.status, 200);
  const again = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, messages: first.messages });
  assert.ok(again.json.usage.prompt_tokens_details.cached_tokens >= first.tokens - 1);
  assert.equal(again.json.choices[0].message.content, r.json.choices[0].message.content);
  await server.stop();
});

await check('imports that a kill cuts are whole or not there', async () => {
  const own = mkdtempSync(join(tmpdir(), 'whimbrel-import-'));
  const listed = async (server) => (await (await fetch(`${server.url}/v1/sessions?limit=100`)).json()).data;
  const turns = 6, known = [];
  let document, cut = 0;
  for (let round = 0; round < (process.env.WHIMBREL_LONG ? 40 : 4); round++) {
    const server = await startServer({ data: own });
    if (round === 0) {
      const { json: s } = await post(server.url, '/v1/sessions', { model: 'nano' });
      for (let i = 0; i < turns; i++)
        assert.equal((await post(server.url, `/v1/sessions/${s.id}/turns`, { items: [{ role: 'user', content: word() }], max_tokens: 8 })).status, 200);
      document = await (await fetch(`${server.url}/v1/sessions/${s.id}/export`)).json();
      known.push(s.id);
    } else {
      const there = await listed(server);
      for (const s of there) assert.equal(s.turns, turns, `${s.id} has ${s.turns} turns`);
      for (const id of known) assert.ok(there.some((s) => s.id === id), `${id} was told`);
      for (const { id } of there.slice(1)) await fetch(`${server.url}/v1/sessions/${id}`, { method: 'DELETE' });
      known.splice(0, known.length, there[0].id);
    }
    const run = async () => {
      for (let i = 0; i < 24; i++) {
        const r = await post(server.url, '/v1/sessions/import', document);
        assert.equal(r.status, 200, r.text);
        assert.deepEqual([r.json.imported.tokens, r.json.turns], [true, turns]);
        known.push(r.json.id);
      }
    };
    const load = Promise.allSettled([run(), run(), run()]);
    await sleep(20 + Math.random() * 120);
    await server.kill9();
    await load;
    cut += ledger(own, 'select count(*) as n from sessions where kind=3')[0].n;
    const { code, out } = await databaseProgram('check', own);
    assert.equal(code, 0, out);
  }
  const server = await startServer({ data: own });
  assert.ok((await listed(server)).every((s) => s.turns === turns));
  await server.stop();
  assert.equal(ledger(own, 'select count(*) as n from sessions where kind=3')[0].n, 0);
  console.log(`  ${cut} imports were cut`);
  rmSync(own, { recursive: true, force: true });
});
rmSync(data, { recursive: true, force: true });
finish();
