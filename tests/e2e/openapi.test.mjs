// The OpenAPI document: valid itself, served as described, and true of what the server really answers.
import assert from 'node:assert/strict';
import { check, finish, post, startServer, weatherTool } from './lib.mjs';
import { checker, pointer, valid } from './openapi-document.mjs';

const server = await startServer();
const response = await fetch(`${server.url}/openapi.json`);
const document = await response.json();

await check('the document is OpenAPI 3.1', async () => {
  assert.equal(response.status, 200);
  assert.equal(response.headers.get('content-type'), 'application/json');
  await valid(document);
});

const fits = checker(document);
const seen = new Set();
/** Calls an operation; request and answer must be as the document says. `path` holds {id}. */
async function call(method, path, { id, item, query = '', body, status = 200, headers = {}, unchecked } = {}) {
  const operation = document.paths[path]?.[method.toLowerCase()];
  assert.ok(operation, `${method} ${path} is in the document`);
  if (body !== undefined && !unchecked)
    fits(pointer('paths', path, method.toLowerCase(), 'requestBody', 'content', 'application/json', 'schema'), body, `request of ${method} ${path}`);
  const r = await fetch(server.url + path.replace('{id}', id).replace('{item_id}', item) + query, { method,
    headers: { ...(body === undefined ? {} : { 'content-type': 'application/json' }), ...headers }, body: body === undefined ? undefined : JSON.stringify(body) });
  const json = await r.json();
  assert.equal(r.status, status, `${method} ${path}: ${JSON.stringify(json)}`);
  assert.ok(operation.responses[status], `${method} ${path} says nothing of ${status}`);
  fits(pointer('paths', path, method.toLowerCase(), 'responses', status, 'content', 'application/json', 'schema'), json, `${status} of ${method} ${path}`);
  if (status === 200) seen.add(`${method} ${path}`);
  return json;
}
/** The JSON of a stream's records. */
async function stream(path, body) {
  const r = await fetch(server.url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ ...body, stream: true }) });
  assert.equal(r.status, 200);
  return (await r.text()).split('\n').filter((l) => l.startsWith('data: {')).map((l) => JSON.parse(l.slice(6)));
}
const schema = (name) => pointer('components', 'schemas', name);
const ask = 'What is the weather in Oslo?';
await check('a wrong answer would be seen', () => {
  assert.throws(() => fits(schema('Session'), { id: 'sess_1' }, 'x'));
  assert.throws(() => fits(schema('Error'), { error: { message: 'x', type: 'y', param: null } }, 'x'));
  assert.throws(() => fits(pointer('paths', '/v1/sessions', 'get', 'responses', 200, 'content', 'application/json', 'schema'), { object: 'list', data: [{}] }, 'x'));
});
const messages = [{ role: 'user', content: ask }];

await check('native sessions: every operation answers as described', async () => {
  const s = await call('POST', '/v1/sessions', { body: { model: 'nano', metadata: { a: 'b' }, system: 'You help.', tools: [weatherTool] } });
  const path = '/v1/sessions/{id}';
  const note = { type: 'custom', custom: { name: 'note', format: { type: 'grammar', grammar: { syntax: 'regex', definition: '[a-z]{3}' } } } };
  const custom = await call('POST', '/v1/sessions', { body: { model: 'nano', tools: [note] } });
  await call('POST', `${path}/turns`, { id: custom.id, body: { items: [{ role: 'user', content: 'x' }], tool_choice: 'required', max_tokens: 100 } });
  await call('GET', '/v1/sessions', { query: '?limit=1' });
  await call('GET', path, { id: s.id });
  const turn = await call('POST', `${path}/turns`, { id: s.id, body: { items: messages, temperature: 0, max_output_tokens: 60, tool_choice: { type: 'function', function: { name: 'get_weather' } } } });
  const made = turn.items.at(-1).tool_calls[0];
  await call('POST', `${path}/append`, { id: s.id, body: { call_id: made.id, text: '{"temperature": ', done: false } });
  await call('POST', `${path}/append`, { id: s.id, body: { call_id: made.id, text: '7}', done: true } });
  await call('POST', `${path}/turns`, { id: s.id, body: { items: [{ role: 'tool', tool_call_id: made.id }], temperature: 0, max_output_tokens: 3, tool_choice: 'none' } });
  const records = await stream(`/v1/sessions/${s.id}/turns`, { items: [{ type: 'message', role: 'user', content: [{ type: 'input_text', text: 'Thanks!' }] }], max_output_tokens: 30, tool_choice: 'none' });
  assert.deepEqual([records[0].type, records.at(-1).type], ['turn.created', 'turn.completed']);
  for (const record of [records[0], records.at(-1)]) fits(schema('SessionTurn'), record.turn, record.type);
  await call('GET', `${path}/turns`, { id: s.id, query: '?tokens=true&order=asc&limit=2' });
  await call('GET', `${path}/turns`, { id: s.id });
  const fork = await call('POST', `${path}/fork`, { id: s.id, body: { turn: turn.id } });
  await call('POST', `${path}/pin`, { id: fork.id, body: { seconds: 5 } });
  await call('GET', path, { id: fork.id });
  const copy = await call('GET', `${path}/export`, { id: s.id });
  await call('POST', '/v1/sessions/import', { body: copy });
  await call('DELETE', path, { id: fork.id });
  const operations = Object.entries(document.paths).filter(([p]) => p.startsWith('/v1/sessions')).flatMap(([p, o]) => Object.keys(o).map((m) => `${m.toUpperCase()} ${p}`));
  assert.deepEqual(operations.filter((o) => !seen.has(o)), [], 'no operation was left out');
});

await check('native sessions: so do refusals', async () => {
  const s = await call('POST', '/v1/sessions', { body: { model: 'nano' } });
  await call('POST', '/v1/sessions', { body: { model: 'no-such' }, status: 404 });
  await call('POST', '/v1/sessions', { body: {}, status: 400, unchecked: true });
  await call('GET', '/v1/sessions/{id}', { id: 'sess_none', status: 404 });
  await call('DELETE', '/v1/sessions/{id}', { id: 'sess_none', status: 404 });
  await call('POST', '/v1/sessions/{id}/turns', { id: s.id, body: { items: 1 }, status: 400, unchecked: true });
  await call('POST', '/v1/sessions/{id}/append', { id: s.id, body: { call_id: 'call_x', text: 'x' }, status: 400 });
  await call('POST', '/v1/sessions/{id}/append', { id: 'sess_none', body: { call_id: 'call_x', text: 'x' }, status: 404 });
  await call('POST', '/v1/sessions/{id}/pin', { id: s.id, body: { seconds: -1 }, status: 400, unchecked: true });
});

await check('chat, completions and tokens', async () => {
  const chat = { model: 'nano', messages, tools: [weatherTool], temperature: 0, max_tokens: 60 };
  await call('POST', '/v1/chat/completions', { body: chat });
  await call('POST', '/v1/chat/completions', { body: { ...chat, messages: [{ role: 'user', content: 'Hello!' }] } });
  const chunks = await stream('/v1/chat/completions', { ...chat, stream_options: { include_usage: true } });
  chunks.forEach((chunk) => fits(schema('ChatCompletionChunk'), chunk, 'chunk'));
  await call('POST', '/v1/chat/completions', { body: { ...chat, temperature: 9 }, status: 400, unchecked: true });
  await call('POST', '/v1/chat/completions', { body: { ...chat, model: 'no-such' }, status: 404 });
  await call('POST', '/v1/chat/completions/render', { body: chat });
  const { id } = await call('POST', '/v1/chat/completions', { body: { ...chat, n: 2, store: true, metadata: { a: 'b' } } });
  await call('GET', '/v1/chat/completions', { query: '?limit=1&metadata[a]=b' });
  await call('GET', '/v1/chat/completions', { query: '?limit=0', status: 400 });
  await call('GET', '/v1/chat/completions/{id}', { id });
  await call('POST', '/v1/chat/completions/{id}', { id, body: { metadata: { c: 'd' } } });
  await call('GET', '/v1/chat/completions/{id}/messages', { id });
  await call('DELETE', '/v1/chat/completions/{id}', { id });
  await call('GET', '/v1/chat/completions/{id}', { id, status: 404 });
  await call('POST', '/v1/completions', { body: { model: 'nano', prompt: 'Hello', max_tokens: 3, logprobs: 1 } });
  await call('POST', '/v1/completions', { body: { model: 'nano', prompt: ['Hello', 'there'], max_tokens: 0, echo: true, logprobs: 1, return_token_ids: true } });
  (await stream('/v1/completions', { model: 'nano', prompt: 'Hello', max_tokens: 3 })).forEach((r) => fits(schema('Completion'), r, 'record'));
  const { tokens } = await call('POST', '/tokenize', { body: { model: 'nano', prompt: 'Hello' } });
  await call('POST', '/detokenize', { body: { model: 'nano', tokens } });
});

await check('responses', async () => {
  const tool = { type: 'function', name: 'get_weather', description: weatherTool.function.description, parameters: weatherTool.function.parameters };
  const r = await call('POST', '/v1/responses', { body: { model: 'nano', input: ask, tools: [tool], max_output_tokens: 60, temperature: 0 } });
  const events = await stream('/v1/responses', { model: 'nano', input: 'Hello!', max_output_tokens: 20 });
  for (const e of events.filter((x) => x.response)) fits(schema('Response'), e.response, e.type);
  await call('GET', '/v1/responses/{id}', { id: r.id });
  await call('POST', '/v1/responses/input_tokens', { body: { model: 'nano', input: ask } });
  await call('GET', '/v1/responses/{id}/input_items', { id: r.id, query: '?limit=1' });
  const { id } = await call('POST', '/v1/responses', { body: { model: 'nano', input: ask, background: true, ignore_eos: true, max_output_tokens: 2000 } });
  await call('POST', '/v1/responses/{id}/cancel', { id });
  await call('POST', '/v1/responses/{id}/cancel', { id: r.id, status: 400 });
  const compact = await call('POST', '/v1/responses/compact', { body: { model: 'nano', input: [{ role: 'user', content: ask }, { role: 'assistant', content: 'Rain.' }], max_output_tokens: 20 } });
  await call('POST', '/v1/responses', { body: { model: 'nano', input: [...compact.output, { role: 'user', content: 'And?' }], max_output_tokens: 5 } });
  await call('POST', '/v1/responses/compact', { body: { model: 'nano', input: [] }, status: 400 });
  await call('DELETE', '/v1/responses/{id}', { id: r.id });
  await call('GET', '/v1/responses/{id}', { id: r.id, status: 404 });
  await call('POST', '/v1/responses', { body: { model: 'nano', input: 7 }, status: 400, unchecked: true });
});

await check('conversations', async () => {
  const path = '/v1/conversations/{id}', items = `${path}/items`, one = `${items}/{item_id}`;
  const { id } = await call('POST', '/v1/conversations', { body: { items: [{ type: 'message', role: 'user', content: ask }], metadata: { a: 'b' } } });
  await call('GET', path, { id });
  await call('POST', path, { id, body: { metadata: { a: 'c' } } });
  const added = await call('POST', items, { id, body: { items: [{ role: 'assistant', content: 'Rain.' }, { type: 'reasoning', id: 'rs_1', summary: [] }] } });
  await call('POST', '/v1/responses', { body: { model: 'nano', conversation: id, input: 'And?', max_output_tokens: 8 } });
  await call('GET', items, { id, query: '?limit=2&order=asc&include[]=reasoning.encrypted_content' });
  await call('GET', one, { id, item: added.first_id });
  await call('DELETE', one, { id, item: added.first_id });
  await call('GET', one, { id, item: added.first_id, status: 404 });
  await call('POST', items, { id, body: { items: 'x' }, status: 400, unchecked: true });
  await call('POST', '/v1/conversations', { body: { metadata: 5 }, status: 400, unchecked: true });
  await call('DELETE', path, { id });
  for (const method of ['GET', 'DELETE']) await call(method, path, { id, status: 404 });
  await call('POST', path, { id, body: { metadata: {} }, status: 404 });
  await call('GET', items, { id, status: 404 });
});

await check('messages', async () => {
  const body = { model: 'nano', messages, max_tokens: 60, temperature: 0, tools: [{ name: 'get_weather', input_schema: weatherTool.function.parameters }] };
  await call('POST', '/v1/messages', { body });
  await call('POST', '/v1/messages', { body: { ...body, max_tokens: 2 } });
  await call('POST', '/v1/messages/count_tokens', { body: { model: 'nano', messages } });
  await call('POST', '/v1/messages', { body: { ...body, max_tokens: 'x' }, status: 400, unchecked: true });
});

await check('models and health', async () => {
  for (const path of ['/', '/health', '/health/ready', '/openapi.json', '/v1/models']) await call('GET', path);
  await call('GET', '/v1/models/{id}', { id: 'nano' });
  await call('GET', '/v1/models/{id}', { id: 'no-such', status: 404 });
});

await check('every operation of the document was called', () => {
  const all = Object.entries(document.paths).flatMap(([p, o]) => Object.keys(o).map((m) => `${m.toUpperCase()} ${p}`));
  assert.deepEqual(all.filter((o) => !seen.has(o)), []);
});

await server.stop();
finish();
