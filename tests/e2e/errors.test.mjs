// Every row of the two error tables, provoked, with the exception class that the vendor's client makes of it.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import http from 'node:http';
import net from 'node:net';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { check, finish, post, sleep, startServer, word } from './lib.mjs';

const server = await startServer({ set: { 'limits.body_bytes_max': 1 << 20 } });
const chat = (more) => ({ model: 'nano', messages: [{ role: 'user', content: 'hello!' }], max_completion_tokens: 8, ...more });
const message = (more) => ({ model: 'nano', messages: [{ role: 'user', content: 'hello!' }], max_tokens: 8, ...more });
const long = Array.from({ length: 40000 }, () => word(1)).join(' ');

const openai = (url, more) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, ...more });
const anthropic = (url, more) => new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0, ...more });

/** The promise fails as class `kind` with that status, type and code, in the vendor's shape. */
async function fails(promise, kind, { status, type, code, retry, text }) {
  const e = await promise.then(() => assert.fail(`nothing was thrown for ${status}`), (error) => error);
  assert.ok(e instanceof kind, `${e.constructor.name} is ${kind.name}: ${e.message}`);
  assert.equal(e.status, status);
  const vendor = e instanceof OpenAI.APIError;
  const body = vendor ? e.error : e.error.error;
  if (vendor) assert.deepEqual(Object.keys(body).sort(), ['code', 'message', 'param', 'type']);
  else assert.deepEqual([e.error.type, /^req_/.test(e.error.request_id)], ['error', true]);
  assert.equal(body.type, type);
  if (code !== undefined) assert.equal(body.code, code);
  if (text) assert.match(e.message, text);
  assert.match(e.requestID, /^req_/);
  const ms = Number(e.headers.get('retry-after-ms')), seconds = Number(e.headers.get('retry-after'));
  if (retry === true) assert.ok(ms > 0 && ms < 60000 && seconds === Math.ceil(ms / 1000), `retry-after-ms ${ms}, retry-after ${seconds}`);
  if (retry === false) assert.equal(e.headers.get('x-should-retry'), 'false');
}

await check('openai 400: a bad value, a prompt too long, something not offered', async () => {
  const { chat: { completions } } = openai(server.url);
  await fails(completions.create(chat({ temperature: 9 })), OpenAI.BadRequestError, { status: 400, type: 'invalid_request_error', code: 'invalid_value', text: /temperature/ });
  await fails(completions.create(chat({ messages: [{ role: 'user', content: long }] })), OpenAI.BadRequestError,
    { status: 400, type: 'invalid_request_error', code: 'context_length_exceeded', text: /maximum context length is 32768 tokens.*requested \d{5,}/ });
  await fails(completions.create(chat({ modalities: ['text', 'audio'] })), OpenAI.BadRequestError, { status: 400, type: 'invalid_request_error', code: 'unsupported_value', text: /modalities/ });
  // A stream is refused before its status line.
  await fails(completions.create(chat({ stream: true, top_p: 2 })), OpenAI.BadRequestError, { status: 400, type: 'invalid_request_error', code: 'invalid_value' });
});

await check('openai 404: model, response, conversation, path', async () => {
  const client = openai(server.url), kind = OpenAI.NotFoundError, type = 'invalid_request_error';
  await fails(client.chat.completions.create(chat({ model: word() })), kind, { status: 404, type, code: 'model_not_found' });
  await fails(client.responses.retrieve(`resp_${word()}`), kind, { status: 404, type });
  await fails(client.conversations.retrieve(`conv_${word()}`), kind, { status: 404, type });
  await fails(client.get(`/${word()}`), kind, { status: 404, type });
});

await check('openai 405, 415, 413: APIError', async () => {
  const client = openai(server.url);
  await fails(client.put('/chat/completions'), OpenAI.APIError, { status: 405, type: 'invalid_request_error' });
  await fails(client.post('/chat/completions', { body: new TextEncoder().encode('{}'), headers: { 'content-type': 'text/plain' } }), OpenAI.APIError, { status: 415, type: 'invalid_request_error' });
  await fails(client.chat.completions.create(chat({ messages: [{ role: 'user', content: 'a'.repeat(2 << 20) }] })), OpenAI.APIError, { status: 413, type: 'request_too_large' });
});

await check('anthropic 400, 404, 413', async () => {
  const { messages } = anthropic(server.url);
  await fails(messages.create(message({ temperature: 9 })), Anthropic.BadRequestError, { status: 400, type: 'invalid_request_error', text: /temperature/ });
  await fails(messages.create(message({ messages: [{ role: 'user', content: long }] })), Anthropic.BadRequestError,
    { status: 400, type: 'invalid_request_error', text: /prompt is too long: \d{5,} tokens > 32768 maximum/ });
  await fails(messages.create(message({ model: word() })), Anthropic.NotFoundError, { status: 404, type: 'not_found_error' });
  await fails(messages.create(message({ messages: [{ role: 'user', content: 'a'.repeat(2 << 20) }] })), Anthropic.APIError, { status: 413, type: 'request_too_large' });
});

await check('422: what others answer so is 400 here, with the field', async () => {
  const { chat: { completions }, responses } = openai(server.url), tool = (parameters) => [{ type: 'function', function: { name: 'f', strict: true, parameters } }];
  const bad = { status: 400, type: 'invalid_request_error' };
  await fails(completions.create(chat({ messages: [{ role: 'user' }] })), OpenAI.BadRequestError, bad);
  await fails(completions.create(chat({ tools: tool({ type: 'object', properties: { x: { $ref: '#/nowhere' } } }) })), OpenAI.BadRequestError, { ...bad, text: /nowhere/ });
  await fails(responses.create({ model: 'nano', input: [{ type: 'message', role: 'user', content: [{ type: 'input_text' }] }] }), OpenAI.BadRequestError, bad);
  console.log('[skip] 422 is never sent: every refusal of a body is 400');
});

await check('401 and 403: keys', async () => {
  const root = (await post(server.admin, '/admin/v1/keys', { label: 'root', scopes: ['admin'] })).json.key;
  const key = word();
  await fails(openai(server.url, { apiKey: key }).chat.completions.create(chat()), OpenAI.AuthenticationError, { status: 401, type: 'authentication_error', code: 'invalid_api_key' });
  await fails(openai(server.url, { apiKey: root }).chat.completions.create(chat()), OpenAI.PermissionDeniedError, { status: 403, type: 'permission_error' });
  await fails(anthropic(server.url, { apiKey: key }).messages.create(message()), Anthropic.AuthenticationError, { status: 401, type: 'authentication_error' });
  await fails(anthropic(server.url, { apiKey: root }).messages.create(message()), Anthropic.PermissionDeniedError, { status: 403, type: 'permission_error' });
});
await server.stop();

// ---- bounds of a tenant ----

await check('429: a bound of the tenant; no SDK tries it again, for waiting does not help', async () => {
  const small = await startServer({ set: { 'sessions.count_max': 1 } });
  const make = (client, path) => client.post(path, { body: { model: 'nano' } });
  await make(openai(small.url), '/sessions');
  await fails(make(openai(small.url), '/sessions'), OpenAI.RateLimitError, { status: 429, type: 'rate_limit_error', code: 'session_limit', retry: false, text: /sessions.count_max|1 session/ });
  await fails(make(anthropic(small.url), '/v1/sessions'), Anthropic.RateLimitError, { status: 429, type: 'rate_limit_error', retry: false });
  await small.stop();
  // rate_limit_exceeded: limits.test.mjs
  console.log('[skip] 402 billing_error, 429 insufficient_quota: nothing is paid for here, so no account runs out of money');
});

// ---- one turn at a time ----

await check('409: a session that is busy longer than a turn may wait; a retry is right, and both SDKs make it', async () => {
  const busy = await startServer({ set: { 'engine.slow_step_us': 50000, 'engine.draft': 'off', 'sessions.queue_max': 0 } });
  const client = openai(busy.url), { id } = await client.post('/sessions', { body: { model: 'nano' } }), path = `/sessions/${id}/turns`;
  const turn = (more) => ({ body: { items: [{ role: 'user', content: 'hello!' }], max_tokens: 4, ...more } });
  const leave = new AbortController();
  const long = await fetch(`${busy.url}/v1${path}`, { method: 'POST', signal: leave.signal, headers: { 'content-type': 'application/json' }, body: JSON.stringify(turn({ stream: true, ignore_eos: true, max_tokens: 4000 }).body) });
  await long.body.getReader().read(); // it has the session
  await fails(client.post(path, turn()), OpenAI.ConflictError, { status: 409, type: 'conflict_error', code: 'conversation_locked', retry: true });
  await fails(anthropic(busy.url).post(`/v1${path}`, turn()), Anthropic.ConflictError, { status: 409, type: 'invalid_request_error', retry: true });
  const patient = openai(busy.url, { maxRetries: 8 }).post(path, turn());
  leave.abort();
  assert.equal((await patient).object, 'session.turn');
  await busy.stop();
});

// ---- what we cannot keep ----

await check('500: a turn that was to be stored and could not be; said once, and not to be made twice', async () => {
  const full = await startServer({ set: { 'cache.disk': false } });
  const body = { body: { model: 'nano', input: 'hello!', max_output_tokens: 4 } }, client = openai(full.url);
  assert.equal((await client.post('/responses', body)).status, 'incomplete');
  execFileSync('prlimit', ['--pid', String(full.child.pid), '--fsize=1024:unlimited']); // no file grows any more: a full disk
  await fails(client.post('/responses', body), OpenAI.InternalServerError, { status: 500, type: 'server_error', code: 'not_stored', retry: false });
  await fails(anthropic(full.url).post('/v1/responses', body), Anthropic.InternalServerError, { status: 500, type: 'api_error', retry: false });
  await full.stop();
});

await check('503 loading: the port opens when the model is loaded; before that an SDK cannot connect, and tries again', async () => {
  const probe = net.createServer().listen(0, '127.0.0.1');
  await new Promise((resolve) => probe.on('listening', resolve));
  const url = `http://127.0.0.1:${probe.address().port}`;
  await new Promise((resolve) => probe.close(resolve));
  await assert.rejects(openai(url).models.list(), (e) => e instanceof OpenAI.APIConnectionError);
  await assert.rejects(anthropic(url).models.list(), (e) => e instanceof Anthropic.APIConnectionError);
  console.log('[skip] 503 loading is never sent: nothing listens before the model is loaded');
});

// A server that is slow, full and short of patience.
const slow = await startServer({ set: { 'engine.queue_max': 1, 'engine.sequences_max': 1, 'engine.draft': 'off', 'engine.slow_step_us': 150000, 'limits.request_timeout_ms': 500 } });
await check('408 and 504: the deadline; both SDKs would retry', async () => {
  await fails(openai(slow.url).chat.completions.create(chat()), OpenAI.APIError, { status: 408, type: 'timeout' });
  await fails(anthropic(slow.url).messages.create(message()), Anthropic.InternalServerError, { status: 504, type: 'timeout_error' });
});

await check('499: for the log alone', async () => {
  const leave = new AbortController();
  const gone = openai(slow.url).chat.completions.create(chat({ stream: true, ignore_eos: true, max_completion_tokens: 400 }), { signal: leave.signal }).then((stream) => { leave.abort(); return stream.toReadableStream().getReader().read(); });
  await gone.catch((e) => assert.ok(e instanceof OpenAI.APIUserAbortError, e.constructor.name));
  for (let i = 0; i < 100 && !/ turn_over .*status=499/.test(slow.log()); i++) await sleep(20);
  assert.match(slow.log(), / turn_over .*status=499/);
});

await check('503 and 529: the queue is full', async () => {
  const many = (make) => Promise.allSettled(Array.from({ length: 8 }, make)).then((all) => Promise.reject(all.find((r) => r.status === 'rejected' && [503, 529].includes(r.reason.status)).reason));
  await fails(many(() => openai(slow.url).chat.completions.create(chat())), OpenAI.InternalServerError, { status: 503, type: 'server_error', code: 'overloaded', retry: true });
  await fails(many(() => anthropic(slow.url).messages.create(message())), Anthropic.InternalServerError, { status: 529, type: 'overloaded_error', retry: true });
});

await check('a failure inside a stream is an APIError of the SDK, never a whole answer', async () => {
  const stream = await openai(slow.url).chat.completions.create(chat({ stream: true }));
  await assert.rejects(async () => { for await (const chunk of stream) assert.equal(chunk.choices[0].finish_reason, null); },
    (e) => e instanceof OpenAI.APIError && e.type === 'timeout');
  const other = anthropic(slow.url).messages.stream(message());
  await assert.rejects(other.finalMessage(), (e) => e instanceof Anthropic.APIError && e.error.error.type === 'timeout_error');
});

await slow.stop();

const ending = await startServer({ set: { 'engine.slow_step_us': 50000 } });
await check('503 draining: a request on an open connection while the server goes down', async () => {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  const ask = (path, body) => new Promise((resolve, reject) => {
    const request = http.request(ending.url + path, { method: 'POST', agent, headers: { 'content-type': 'application/json' } }, (response) => {
      let text = '';
      response.on('data', (bytes) => (text += bytes)).on('end', () => resolve({ status: response.statusCode, headers: response.headers, json: JSON.parse(text) }));
    });
    request.on('error', reject).end(JSON.stringify(body));
  });
  const holds = fetch(`${ending.url}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(chat({ max_completion_tokens: 20 })) });
  assert.equal((await ask('/tokenize', { prompt: 'x' })).status, 200); // opens the connection
  await sleep(100);
  ending.child.kill('SIGTERM');
  await sleep(100);
  const r = await ask('/v1/chat/completions', chat()).catch((error) => ({ error }));
  if (!r.error) {
    assert.deepEqual([r.status, r.json.error.type, r.json.error.code], [503, 'server_error', 'draining']);
    assert.ok(Number(r.headers['retry-after-ms']) > 0);
  }
  agent.destroy();
  assert.equal((await holds).status, 200, 'what runs is told to its end');
});
await ending.exited;
finish();
