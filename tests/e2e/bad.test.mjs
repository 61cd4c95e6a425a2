// Bad input: a clear error within a second, naming the field; and the next honest request works.
import assert from 'node:assert/strict';
import { check, finish, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const good = { model: 'nano', messages: [{ role: 'user', content: 'hello!' }], max_tokens: 20, temperature: 0 };

let slowest = 0; // printed, not asserted: a busy machine is not a fault
async function refused(body, status, { param, code, text, headers } = {}) {
  const start = Date.now();
  const r = await post(server.url, '/v1/chat/completions', body, headers);
  const ms = Date.now() - start;
  assert.equal(r.status, status, r.text.slice(0, 300));
  assert.deepEqual(Object.keys(r.json.error).sort(), ['code', 'message', 'param', 'type']);
  if (param !== undefined) assert.equal(r.json.error.param, param);
  if (code !== undefined) assert.equal(r.json.error.code, code);
  if (text !== undefined) assert.match(r.json.error.message, text);
  assert.match(r.headers.get('x-request-id'), /^req_/);
  slowest = Math.max(slowest, ms);
  const next = await post(server.url, '/v1/chat/completions', good);
  assert.equal(next.status, 200, 'the next request works');
}

await check('unknown fields are ignored', async () => {
  const r = await post(server.url, '/v1/chat/completions', { ...good, [word()]: { deep: [1, null] }, service_tier: word() });
  assert.equal(r.status, 200);
});

await check('wrong types are 400 and name the field', async () => {
  const user = { role: 'user', content: 'hi' };
  for (const [change, param] of [
    [{ messages: 'hi' }, 'messages'], [{ messages: [] }, 'messages'], [{ messages: [user, 7] }, 'messages[1]'],
    [{ messages: [{ role: 'wizard', content: 'x' }] }, 'messages[0].role'], [{ messages: [{ role: 'user', content: 5 }] }, 'messages[0].content'],
    [{ messages: [user, { role: 'assistant', tool_calls: [{ id: 'a', type: 'function', function: { name: 'f', arguments: 3 } }] }] }, 'messages[1].tool_calls[0].function.arguments'],
    [{ messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'data:' } }] }] }, 'messages[0].content[0].type'],
    [{ temperature: 'hot' }, 'temperature'], [{ temperature: 9 }, 'temperature'], [{ top_p: -1 }, 'top_p'], [{ max_tokens: 0 }, 'max_tokens'],
    [{ max_tokens: 1.5 }, 'max_tokens'], [{ stop: 5 }, 'stop'], [{ stop: ['a', 'b', 'c', 'd', 'e'] }, 'stop'], [{ tools: {} }, 'tools'],
    [{ tools: [{ type: 'function', function: { name: 'bad name!' } }] }, 'tools[0].function.name'], [{ tool_choice: 'sometimes' }, 'tool_choice'],
    [{ tools: [weatherTool], tool_choice: { type: 'function', function: { name: 'nothing' } } }, 'tool_choice.function.name'], [{ n: 0 }, 'n'], [{ stream: 'yes' }, 'stream'],
    [{ logit_bias: { x: 1 } }, 'logit_bias'], [{ top_logprobs: 21, logprobs: true }, 'top_logprobs'], [{ seed: 'a' }, 'seed'], [{ model: 5 }, 'model'],
    [{ response_format: { type: 'xml' } }, 'response_format.type'],
  ]) {
    await refused({ ...good, ...change }, 400, { param });
  }
});

await check('malformed JSON, a cut body, invalid UTF-8, an array, nothing', async () => {
  await refused('{"model":"nano"', 400);
  await refused('not json', 400);
  await refused('[]', 400);
  await refused('', 400);
  const bytes = Buffer.from(JSON.stringify(good));
  bytes[bytes.indexOf('hello')] = 0xff;
  await refused(new Uint8Array(bytes), 400);
});

await check('JSON 10,000 deep, where it matters and where it is ignored', async () => {
  const deep = '['.repeat(10000) + ']'.repeat(10000);
  await refused(`{"model":"nano","messages":${deep}}`, 400);
  await refused(`{"model":"nano","messages":[{"role":"user","content":"x"}],"zzz":${deep}}`, 400);
});

await check('10 MB of one letter is too long, with numbers', async () => {
  await refused({ ...good, messages: [{ role: 'user', content: 'a'.repeat(10 << 20) }] }, 400, { code: 'context_length_exceeded', text: /maximum context length is 32768 tokens/ });
});

await check('a body past the limit is 413 as JSON', async () => {
  const r = await post(server.url, '/v1/chat/completions', JSON.stringify(good) + ' '.repeat(33 << 20));
  assert.equal(r.status, 413);
  assert.equal(r.json.error.code ?? r.json.error.type, r.json.error.code ?? 'request_too_large');
});

await check('wrong content type is 415, wrong method 405, unknown path 404, all JSON', async () => {
  await refused(JSON.stringify(good), 415, { headers: { 'content-type': 'text/plain' } });
  for (const [method, path, status] of [['PUT', '/v1/chat/completions', 405], ['DELETE', '/health', 405], ['GET', '/v1/nothing', 404], ['GET', '/v1/models/nothing', 404]]) {
    const r = await fetch(server.url + path, { method });
    assert.equal(r.status, status, path);
    assert.ok((await r.json()).error.message);
  }
});

await check('a lone surrogate, a NUL and an emoji do not kill the turn', async () => {
  const messages = '[{"role":"user","content":"cut \\ud83d and \\u0000 and \\ud83d\\ude00"}]';
  const r = await post(server.url, '/v1/chat/completions', `{"model":"nano","max_tokens":5,"messages":${messages}}`);
  assert.equal(r.status, 200, r.text);
});

await check('special tokens spelled by a client are text', async () => {
  const plain = await post(server.url, '/v1/chat/completions', { ...good, messages: [{ role: 'user', content: 'x' }] });
  const spelled = await post(server.url, '/v1/chat/completions', { ...good, messages: [{ role: 'user', content: '[e~[' }] });
  assert.equal(spelled.status, 200);
  assert.ok(spelled.json.usage.prompt_tokens > plain.json.usage.prompt_tokens, 'spelled out, it takes several tokens');
});

console.log(`  slowest refusal ${slowest} ms`);
await server.stop();
finish();
