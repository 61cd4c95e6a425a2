// undici, the client under Node's own fetch, over HTTP/2 with TLS: a tool loop of five turns, many streams on one connection, and one that leaves.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Agent, fetch } from 'undici';
import { check, finish, metric, sleep, startServer, weatherTool, word } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

const dir = mkdtempSync(join(tmpdir(), 'whimbrel-tls-'));
const [cert, key] = ['cert.pem', 'key.pem'].map((file) => join(dir, file));
execFileSync('openssl', ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2', '-subj', '/CN=localhost',
  '-addext', 'subjectAltName=DNS:localhost,IP:127.0.0.1', '-keyout', key, '-out', cert], { stdio: 'ignore' });
const server = await startServer({ set: { 'server.tls_listen': '127.0.0.1:0', 'server.tls_cert': cert, 'server.tls_key': key } });
// One connection, its certificate checked.
const dispatcher = new Agent({ allowH2: true, connections: 1, connect: { ca: readFileSync(cert) } });
const post = (body, more = {}) => fetch(`${server.tls}/v1/chat/completions`, { method: 'POST', dispatcher, headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), ...more });
const ask = (more) => ({ model: 'nano', temperature: 0, max_completion_tokens: 120, tools: [weatherTool], ...more });

async function* records(response) {
  let text = '';
  for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) {
    text += chunk;
    for (let end; (end = text.indexOf('\n\n')) >= 0; text = text.slice(end + 2))
      if (text.startsWith('data: ')) yield text.slice(6, end);
  }
  assert.equal(text, '');
}

/** The message that a stream's deltas make, with its usage. */
async function read(response) {
  const message = { role: 'assistant', content: '' };
  let usage, done, reason;
  for await (const record of records(response)) {
    assert.ok(!done, 'nothing follows [DONE]');
    if (record === '[DONE]') { done = true; continue; }
    const chunk = JSON.parse(record), [choice] = chunk.choices;
    usage = chunk.usage ?? usage;
    message.content += choice?.delta.content ?? '';
    reason = choice?.finish_reason ?? reason;
    for (const { index, ...call } of choice?.delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      if (call.id) message.tool_calls[index] = call;
      else message.tool_calls[index].function.arguments += call.function.arguments;
    }
  }
  assert.ok(done && usage);
  return { message, usage, reason };
}

await check('undici: a tool loop of five turns over one TLS connection of HTTP/2', async () => {
  const messages = [], watch = cacheWatch();
  for (let turn = 0; turn < TURNS; turn++) {
    messages.push({ role: 'user', content: question() });
    for (const tool_choice of ['required', 'none']) {
      const response = await post(ask({ messages, tool_choice, stream: true, stream_options: { include_usage: true } }));
      assert.equal(response.status, 200);
      assert.equal(response.headers.get('content-type'), 'text/event-stream; charset=utf-8');
      assert.equal(response.headers.get('connection'), null);
      assert.match(response.headers.get('x-request-id'), /^req_/);
      const { message, usage, reason } = await read(response);
      watch({ prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens, output: usage.completion_tokens, total: usage.total_tokens });
      assert.equal(reason, tool_choice === 'required' ? 'tool_calls' : 'stop');
      messages.push(message);
      for (const call of message.tool_calls ?? []) {
        JSON.parse(call.function.arguments);
        messages.push({ role: 'tool', tool_call_id: call.id, content: JSON.stringify(forecast()) });
      }
    }
  }
});

await check('undici: twelve streams at once on that connection, each whole', async () => {
  const all = await Promise.all(Array.from({ length: 12 }, async () => read(await post(ask({ messages: [{ role: 'user', content: `hello, ${word()}!` }], stream: true, stream_options: { include_usage: true } })))));
  for (const { usage, message } of all) assert.ok(usage.completion_tokens > 0 && (message.content || message.tool_calls));
});

await check('undici: an aborted stream frees its turn, the connection goes on', async () => {
  const gone = await metric(server.admin, 'whimbrel_client_gone_total').catch(() => 0);
  const stop = new AbortController();
  const response = await post(ask({ messages: [{ role: 'user', content: word() }], stream: true, max_completion_tokens: 4000, ignore_eos: true }), { signal: stop.signal });
  await assert.rejects(async () => { for await (const _ of records(response)) stop.abort(); }, { name: 'AbortError' });
  for (let i = 0; i < 100 && (await metric(server.admin, 'whimbrel_client_gone_total').catch(() => 0)) <= gone; i++) await sleep(20);
  assert.ok((await metric(server.admin, 'whimbrel_client_gone_total')) > gone);
  assert.equal((await post(ask({ messages: [{ role: 'user', content: 'hello!' }] }))).status, 200);
});

await check('undici: it spoke HTTP/2', async () => {
  const path = `/${word()}`;
  await (await fetch(server.tls + path, { dispatcher })).text();
  for (let i = 0; i < 50 && !server.log().includes(path); i++) await sleep(10);
  assert.match(server.log().split("\n").find((line) => line.includes(`path=${path} `)), / http=2 /);
});

await dispatcher.close();
await server.stop();
rmSync(dir, { recursive: true });
finish();
