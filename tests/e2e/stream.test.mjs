// The wire itself: event order over h2c and TLS, HTTP/1.1, and what a client sees of its errors.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { check, connect, finish, h2stream, pick, startServer, weatherTool, word } from './lib.mjs';

const dir = mkdtempSync(join(tmpdir(), 'whimbrel-tls-'));
execFileSync('openssl', ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2', '-subj', '/CN=localhost',
  '-keyout', join(dir, 'key.pem'), '-out', join(dir, 'cert.pem')], { stdio: 'ignore' });
const server = await startServer({ set: { 'server.tls_listen': '127.0.0.1:0', 'server.tls_cert': join(dir, 'cert.pem'), 'server.tls_key': join(dir, 'key.pem') } });
const body = () => ({
  model: 'nano', stream: true, stream_options: { include_usage: true }, temperature: 0, max_completion_tokens: 200, tools: [weatherTool],
  tool_choice: 'required', messages: [{ role: 'user', content: `What's the weather in ${pick(['Oslo', 'Kyoto', 'Turin'])}, ${word()}?` }],
});

/** The order that spec B1 of the chat stream demands, whatever the values. */
function checkOrder({ status, headers, records, rest }) {
  assert.equal(status, 200);
  assert.match(String(headers['content-type']), /^text\/event-stream/);
  assert.match(String(headers['x-request-id']), /^req_/);
  assert.equal(rest, '');
  assert.equal(records.at(-1), '[DONE]');
  const chunks = records.slice(0, -1);
  for (const chunk of chunks) {
    assert.equal(chunk.object, 'chat.completion.chunk');
    for (const key of ['id', 'created', 'model']) assert.equal(chunk[key], chunks[0][key]);
  }
  assert.deepEqual(chunks[0].choices[0].delta, { role: 'assistant', content: '' });
  const usage = chunks.at(-1);
  assert.deepEqual(usage.choices, []);
  assert.ok(usage.usage.total_tokens > 0);
  const middle = chunks.slice(0, -1);
  for (const chunk of middle) assert.equal(chunk.usage, null);
  const finishes = middle.filter((c) => c.choices[0].finish_reason !== null);
  assert.equal(finishes.length, 1);
  assert.equal(finishes[0], middle.at(-1));
  assert.deepEqual(finishes[0].choices[0].delta, {});
  const heads = new Map();
  let phase = 0; // 0 reasoning, 1 text, 2 calls
  for (const chunk of middle.slice(1, -1)) {
    const { delta } = chunk.choices[0];
    const now = 'reasoning_content' in delta ? 0 : 'content' in delta ? 1 : 2;
    assert.ok(now >= phase, 'reasoning, then text, then calls');
    phase = now;
    for (const call of delta.tool_calls ?? []) {
      if (!heads.has(call.index)) {
        assert.equal(call.index, heads.size, 'dense from 0');
        assert.ok(call.id && call.type === 'function' && call.function.name, 'a head is whole');
        heads.set(call.index, '');
      } else {
        assert.ok(!('id' in call) && !('name' in call.function), 'id and name once');
      }
      heads.set(call.index, heads.get(call.index) + call.function.arguments);
    }
  }
  return { heads, finish: finishes[0].choices[0].finish_reason };
}

for (const [name, url, options] of [['h2c', server.url], ['TLS', server.tls, { rejectUnauthorized: false }]]) {
  await check(`${name}: a streamed tool call has the right events in the right order`, async () => {
    assert.ok(url, 'no such listener');
    const session = await connect(url, options);
    if (name === 'TLS') assert.equal(session.alpnProtocol, 'h2');
    const { heads, finish: reason } = checkOrder(await h2stream(session, '/v1/chat/completions', body()));
    assert.equal(reason, 'tool_calls');
    assert.ok(heads.size >= 1);
    for (const text of heads.values()) JSON.parse(text);
    session.close();
  });
}

await check('curl --http2-prior-knowledge streams a tool call', () => {
  const out = execFileSync('curl', ['-sS', '-N', '-i', '--http2-prior-knowledge', `${server.url}/v1/chat/completions`, '-H', 'content-type: application/json', '-d', JSON.stringify(body())], { encoding: 'utf8' });
  const [head, ...rest] = out.split('\r\n\r\n');
  assert.match(head, /^HTTP\/2 200/);
  const records = rest.join('\r\n\r\n').trimEnd().split('\n\n').map((r) => r.replace(/^data: /, '')).map((d) => (d === '[DONE]' ? d : JSON.parse(d)));
  const headers = Object.fromEntries(head.split('\r\n').slice(1).map((l) => l.split(': ')));
  checkOrder({ status: 200, headers, records, rest: '' });
});

await check('without include_usage there is no usage anywhere; each record is one DATA frame', async () => {
  const session = await connect(server.url);
  const { stream_options, ...plain } = body();
  const { records } = await h2stream(session, '/v1/chat/completions', plain);
  for (const record of records.slice(0, -1)) assert.ok(!('usage' in record));
  session.close();
});

await check('many streams share one connection', async () => {
  const session = await connect(server.url);
  const all = await Promise.all(Array.from({ length: 12 }, () => h2stream(session, '/v1/chat/completions', body())));
  all.forEach(checkOrder);
  session.close();
});

await server.stop();
finish();
