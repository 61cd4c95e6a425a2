// A load client of AIPerf's kind: sessions replayed turn by turn with outputs of fixed length, usage in the last chunk, and a header that says when
// a session is over.
import assert from 'node:assert/strict';
import { randomInt, randomUUID } from 'node:crypto';
import { check, connect, finish, metric, startServer, word } from './lib.mjs';

const SESSIONS = 6, TURNS = 3;
const server = await startServer();
const session = await connect(server.url);

function post(body, headers) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ':method': 'POST', ':path': '/v1/chat/completions', 'content-type': 'application/json', ...headers });
    const arrivals = [], began = performance.now();
    let text = '', status;
    stream.setEncoding('utf8');
    stream.on('response', (h) => (status = h[':status'])).on('error', reject);
    stream.on('data', (bytes) => { text += bytes; arrivals.push(performance.now() - began); });
    stream.on('end', () => resolve({ status, arrivals, records: text.split('\n\n').filter((r) => r.startsWith('data: ')).map((r) => r.slice(6)) }));
    stream.end(JSON.stringify(body));
  });
}

await check('aiperf: sessions at once, every output of exactly the length asked for, usage true, last turns marked final', async () => {
  const before = await metric(server.admin, 'whimbrel_output_tokens_total');
  let output = 0;
  await Promise.all(Array.from({ length: SESSIONS }, async () => {
    const id = randomUUID(), messages = [];
    let known = 0;
    for (let turn = 0; turn < TURNS; turn++) {
      const length = randomInt(16, 48);
      messages.push({ role: 'user', content: Array.from({ length: randomInt(20, 60) }, () => word()).join(' ') });
      const headers = { 'x-dynamo-session-id': id, 'x-correlation-id': id, ...(turn === TURNS - 1 ? { 'x-dynamo-session-final': 'true' } : {}) };
      const { status, arrivals, records } = await post({ model: 'nano', messages, stream: true, stream_options: { include_usage: true },
        max_completion_tokens: length, min_tokens: length, ignore_eos: true, temperature: 0 }, headers);
      assert.equal(status, 200);
      assert.equal(records.at(-1), '[DONE]');
      const chunks = records.slice(0, -1).map((r) => JSON.parse(r));
      const { usage, choices } = chunks.at(-1);
      assert.deepEqual(choices, []);
      assert.equal(usage.completion_tokens, length);
      assert.equal(usage.total_tokens, usage.prompt_tokens + length);
      assert.equal(chunks.at(-2).choices[0].finish_reason, 'length');
      assert.ok(usage.prompt_tokens_details.cached_tokens >= known - 1, `${usage.prompt_tokens_details.cached_tokens} of ${known}`);
      assert.ok(arrivals.length >= 2 && arrivals.every((t, i) => i === 0 || t >= arrivals[i - 1]));
      known = usage.total_tokens;
      output += length;
      messages.push({ role: 'assistant', content: chunks.map((c) => c.choices[0]?.delta.content ?? '').join('') });
    }
  }));
  assert.equal((await metric(server.admin, 'whimbrel_output_tokens_total')) - before, output);
});

session.close();
await server.stop();

await check('aiperf: what a session has to itself makes room first once it was marked final; others keep theirs', async () => {
  const small = await startServer({ set: { 'engine.context_max_tokens': 2048, 'engine.kv_bytes_max': 8 << 20, 'cache.disk': false } });
  const text = (words) => Array.from({ length: words }, () => word()).join(' ');
  const run = async (prompt, headers) => {
    const r = await fetch(`${small.url}/v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json', ...headers }, body: JSON.stringify({ model: 'nano', prompt, max_tokens: 1 }) });
    const { usage } = await r.json();
    return { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens };
  };
  const evicted = () => metric(small.admin, 'whimbrel_evicted_pages_total');
  // The one that goes on was used before the one that is over, so by its age alone it would go first.
  const open = text(200), over = text(200);
  await run(open);
  await run(over, { 'x-dynamo-session-final': 'true' });
  for (let i = 0; i < 200 && (await evicted()) === 0; i++) await run(text(20));
  assert.ok((await evicted()) > 0);
  const kept = await run(open), gone = await run(over);
  assert.ok(kept.cached >= kept.prompt - 1, `${kept.cached} of ${kept.prompt} are kept`);
  assert.ok(gone.cached < gone.prompt - 1, `${gone.cached} of ${gone.prompt} had to go`);
  await small.stop();
});
finish();
