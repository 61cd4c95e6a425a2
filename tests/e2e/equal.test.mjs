// Same answer, faster: concurrent = alone, cached = uncached, chunked = whole, drafted = plain, to the last byte.
import assert from 'node:assert/strict';
import { check, finish, metric, pick, post, startServer, weatherTool, word } from './lib.mjs';

const N = 32;
// Drawn once; all different, and long answers: the end token is ignored.
const bodies = Array.from({ length: N }, (_, i) => ({
  model: 'nano', temperature: 0, ignore_eos: true, max_tokens: 64 + (i % 5),
  messages: [
    ...(i % 3 ? [{ role: 'system', content: `You help ${word()} with ${word()}.` }] : []),
    { role: 'user', content: `${pick(['Tell me about', 'What is', 'Describe', 'Find'])} ${word()} and ${word()}${' and more'.repeat(i * 3)}.` }],
  ...(i % 2 ? { tools: [weatherTool], tool_choice: 'none' } : {}),
}));
const text = ({ json, text: raw }) => {
  assert.ok(json?.choices, raw);
  const { message } = json.choices[0];
  return JSON.stringify([message.reasoning_content ?? null, message.content, json.usage.completion_tokens]);
};
const one = async (server) => {
  const out = [];
  for (const body of bodies) out.push(text(await post(server.url, '/v1/chat/completions', body)));
  return out;
};

const alone = await startServer({ set: { 'engine.draft': 'off', 'engine.step_rows_max': 512, 'engine.prefill_chunk_tokens': 512 } });
const plain = await one(alone);
await check('the 32 texts are different and long', () => {
  assert.equal(new Set(plain).size, N);
});
await check('cached equals uncached', async () => assert.deepEqual(await one(alone), plain));
await alone.stop();

const crowd = await startServer({ set: { 'engine.draft': 'off', 'engine.sequences_max': 32, 'engine.step_rows_max': 48, 'engine.prefill_chunk_tokens': 16 } });
await check('32 concurrent streams in small chunks equal one at a time in whole prefills', async () => {
  const all = await Promise.all(bodies.map((body) => post(crowd.url, '/v1/chat/completions', body)));
  assert.deepEqual(all.map(text), plain);
});
await crowd.stop();

const drafts = await startServer({ set: { 'engine.draft': 7 } });
await check('drafted equals plain', async () => assert.deepEqual(await one(drafts), plain));
await check('drafted equals plain with a seed at temperature 0.8', async () => {
  const body = { ...bodies[1], temperature: 0.8, seed: 12345 };
  const a = text(await post(drafts.url, '/v1/chat/completions', body));
  const other = await startServer({ set: { 'engine.draft': 'off' } });
  const b = text(await post(other.url, '/v1/chat/completions', body));
  await other.stop();
  assert.equal(a, b);
});
await drafts.stop();

// The early drafter is wrong often enough to exercise refusal; its drafts must change nothing either.
const early = await startServer({ args: ['--draft', 'tests/vectors/dspark-early'], set: { 'engine.draft': 7 } });
await check('drafted by an early, often wrong drafter equals plain', async () => {
  assert.deepEqual(await one(early), plain);
  const drafted = await metric(early.admin, 'whimbrel_drafted_tokens_total'), accepted = await metric(early.admin, 'whimbrel_accepted_tokens_total');
  console.log(`  ${accepted} of ${drafted} drafts kept`);
  assert.ok(accepted > 0 && accepted < drafted);
});
await early.stop();
finish();
