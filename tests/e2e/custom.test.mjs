// Custom tools: a call is one text, free or held to a grammar, on chat completions and responses alike.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, pick, post, startServer, weatherTool, word } from './lib.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const regex = { type: 'grammar', grammar: { syntax: 'regex', definition: '[0-9]{4}-[A-F]{2}"\\\\?' } };
const ticket = { type: 'custom', custom: { name: 'ticket', description: 'Opens a ticket.', format: regex } };
const held = /^[0-9]{4}-[A-F]{2}"\\?$/;
const chat = (more) => ({ model: 'nano', messages: [{ role: 'user', content: `Open a ticket for ${word()}.` }], tools: [weatherTool, ticket],
  tool_choice: { type: 'custom', custom: { name: 'ticket' } }, temperature: 1.3, max_completion_tokens: 200, enable_thinking: false, ...more });

await check('chat: a chosen custom tool is called with a text of its grammar, whole and streamed', async () => {
  const body = chat({ seed: 4 });
  const r = await client.chat.completions.create(body);
  assert.equal(r.choices[0].finish_reason, 'tool_calls');
  const [call] = r.choices[0].message.tool_calls;
  assert.equal(call.type, 'custom');
  assert.match(call.id, /^call_/);
  assert.equal(call.custom.name, 'ticket');
  assert.match(call.custom.input, held);
  assert.equal(call.function, undefined);
  let name = '', input = '', heads = 0;
  for await (const { choices } of await client.chat.completions.create({ ...body, stream: true }))
    for (const c of choices[0]?.delta.tool_calls ?? []) {
      heads += c.type === 'custom';
      name += c.custom.name ?? '';
      input += c.custom.input ?? '';
    }
  assert.equal(heads, 1);
  assert.equal(name, 'ticket');
  assert.equal(input, call.custom.input);
});

await check('chat: the call comes back as it was given and its turn is cached whole', async () => {
  const body = chat();
  const r = await client.chat.completions.create(body);
  const { message } = r.choices[0];
  const next = await client.chat.completions.create({ ...body, tool_choice: 'none',
    messages: [...body.messages, message, { role: 'tool', tool_call_id: message.tool_calls[0].id, content: 'opened' }] });
  assert.ok(next.usage.prompt_tokens_details.cached_tokens >= r.usage.total_tokens - 1);
});

await check('chat: allowed_tools and required hold for custom tools; parallel_tool_calls false makes one', async () => {
  const allowed = { type: 'allowed_tools', allowed_tools: { mode: 'required', tools: [{ type: 'custom', custom: { name: 'ticket' } }] } };
  for (const more of [{ tool_choice: allowed }, { tools: [ticket], tool_choice: 'required' }]) {
    const [call, ...others] = (await client.chat.completions.create(chat({ ...more, parallel_tool_calls: false }))).choices[0].message.tool_calls;
    assert.equal(others.length, 0);
    assert.match(call.custom.input, held);
  }
});

await check('chat: one of several literal inputs in GBNF; a free text is whatever the model writes', async () => {
  const words = [word(), word(), `two\nlines "${word()}"`];
  const definition = `root ::= ${words.map((w) => JSON.stringify(w)).join(' | ')}`;
  const tool = { type: 'custom', custom: { name: 'say', format: { type: 'grammar', grammar: { syntax: 'gbnf', definition } } } };
  const choice = { type: 'custom', custom: { name: 'say' } };
  const r = await client.chat.completions.create(chat({ tools: [tool], tool_choice: choice }));
  assert.ok(words.includes(r.choices[0].message.tool_calls[0].custom.input), JSON.stringify(r.choices[0].message));
  for (const format of [undefined, { type: 'text' }]) {
    const free = await client.chat.completions.create(chat({ tools: [{ type: 'custom', custom: { name: 'say', format } }], tool_choice: choice, max_completion_tokens: 80 }));
    assert.equal(typeof free.choices[0].message.tool_calls[0].custom.input, 'string');
  }
});

await check('chat: what cannot be held to is refused by name', async () => {
  const format = (grammar) => ({ tools: [{ type: 'custom', custom: { name: 'x', format: { type: 'grammar', grammar } } }], tool_choice: 'auto' });
  for (const [more, param] of [[format({ syntax: 'lark', definition: 'start: "a"' }), 'tools[0].custom.format.grammar.syntax'], [format({ syntax: 'regex', definition: '(' }), 'tools[0]'],
    [format({ syntax: 'regex' }), 'tools[0].custom.format.grammar.definition'], [{ tools: [{ type: 'custom' }], tool_choice: 'auto' }, 'tools[0].custom'],
    [{ tool_choice: { type: 'custom', custom: { name: 'other' } } }, 'tool_choice.custom.name']])
    await assert.rejects(client.chat.completions.create(chat(more)), (e) => e instanceof OpenAI.BadRequestError && e.param === param, JSON.stringify(more));
});

const flat = { type: 'custom', name: 'ticket', description: 'Opens a ticket.', format: { type: 'grammar', syntax: 'regex', definition: regex.grammar.definition } };
const responses = (more) => ({ model: 'nano', input: `Open a ticket for ${word()}.`, tools: [flat], tool_choice: { type: 'custom', name: 'ticket' }, temperature: 1.3, max_output_tokens: 200,
  reasoning: { effort: 'none' }, ...more });

await check('responses: the item, its events and what is stored agree; the result goes on from the cache', async () => {
  const events = [];
  for await (const event of await client.responses.create(responses({ stream: true }))) events.push(event);
  const done = events.at(-1).response;
  const [item] = done.output.filter((i) => i.type === 'custom_tool_call');
  assert.match(item.id, /^ctc_/);
  assert.match(item.input, held);
  assert.equal(item.status, 'completed');
  const deltas = events.filter((e) => e.type === 'response.custom_tool_call_input.delta');
  assert.ok(deltas.every((e) => e.item_id === item.id));
  assert.equal(deltas.map((e) => e.delta).join(''), item.input);
  assert.equal(events.find((e) => e.type === 'response.custom_tool_call_input.done').input, item.input);
  assert.equal(events.some((e) => e.type.includes('function_call')), false);
  assert.deepEqual((await client.responses.retrieve(done.id)).output, done.output);
  const again = [];
  for await (const event of await client.responses.retrieve(done.id, { stream: true })) again.push(event);
  assert.deepEqual(again, events);
  const next = await client.responses.create(responses({ previous_response_id: done.id, input: [{ type: 'custom_tool_call_output', call_id: item.call_id, output: 'opened' }], tool_choice: 'none' }));
  assert.ok(next.usage.input_tokens_details.cached_tokens >= done.usage.total_tokens - 1);
  // What a later response was given, whether the call came from the ledger or from the client.
  const own = { ...item, call_id: `call_${word()}`, input: word() };
  const brought = await client.responses.create(responses({ tool_choice: 'none', input: [{ role: 'user', content: word() }, own, { type: 'custom_tool_call_output', call_id: own.call_id, output: 'opened' }] }));
  for (const [response, { call_id, name, input }] of [[next, item], [brought, own]]) {
    const { data } = await client.responses.inputItems.list(response.id, { order: 'asc' });
    assert.deepEqual(data.map((i) => i.type), ['message', 'custom_tool_call', 'custom_tool_call_output']);
    assert.deepEqual([data[1].call_id, data[1].name, data[1].input, data[1].arguments], [call_id, name, input, undefined]);
    assert.deepEqual([data[2].call_id, data[2].output], [call_id, 'opened']);
    assert.match(data[1].id, /^ctc_/);
    assert.equal(new Set(data.map((i) => i.id)).size, 3);
  }
  const stateless = await client.responses.create(responses({ store: false, tool_choice: 'none',
    input: [{ role: 'user', content: done.input ?? 'x' }, item, { type: 'custom_tool_call_output', call_id: item.call_id, output: 'opened' }] }));
  assert.ok(stateless.output.length > 0);
});

await check('responses: a grammar in lark, which agents send unasked, is told to the model and not enforced', async () => {
  const lark = { ...flat, format: { type: 'grammar', syntax: 'lark', definition: `start: "${word()}"` } };
  const r = await client.responses.create(responses({ tools: [lark] }));
  assert.equal(typeof r.output.find((i) => i.type === 'custom_tool_call').input, 'string');
});

await check('a call of a custom tool that another dialect made is the same turn', async () => {
  const body = chat();
  const r = await client.chat.completions.create(body);
  const [call] = r.choices[0].message.tool_calls;
  const next = await post(server.url, '/v1/responses', { model: 'nano', temperature: 0, max_output_tokens: 20, reasoning: { effort: 'none' }, tool_choice: 'none',
    tools: [{ type: 'function', ...weatherTool.function }, flat],
    input: [...body.messages, { type: 'custom_tool_call', call_id: call.id, name: 'ticket', input: call.custom.input }, { type: 'custom_tool_call_output', call_id: call.id, output: 'opened' }] });
  assert.equal(next.status, 200, next.text);
  assert.ok(next.json.usage.input_tokens_details.cached_tokens >= r.usage.total_tokens - 1, JSON.stringify([next.json.usage, r.usage]));
});

await server.stop();
finish();
