// Structured output through the front door: what comes back is judged by ajv, at a temperature where a small model
// would write anything.
import assert from 'node:assert/strict';
import Ajv from 'ajv/dist/2020.js';
import addFormats from 'ajv-formats';
import OpenAI from 'openai';
import { object, schemas, tools as strictTools } from './forms.mjs';
import { check, finish, metric, post, startServer, weatherTool, word } from './lib.mjs';

const LONG = process.env.WHIMBREL_LONG === '1';
const server = await startServer();
const ajv = addFormats(new Ajv({ strict: false, multipleOfPrecision: 9 }));
const clientOf = (at) => new OpenAI({ baseURL: `${at.url}/v1`, apiKey: 'none', maxRetries: 0 });
const client = clientOf(server);
const MAX = 300;
const ask = (more) => ({ model: 'nano', messages: [{ role: 'user', content: `Fill the form for ${word()}.` }], max_completion_tokens: MAX, temperature: 1.5, ...more });
const held = (schema) => ({ response_format: { type: 'json_schema', json_schema: { name: 'out', strict: true, schema } } });

/** `count` times `one(i)`, four at a time; the results in order. */
async function many(count, one) {
  const results = [];
  let next = 0;
  await Promise.all(Array.from({ length: 4 }, async () => { while (next < count) { const i = next++; results[i] = await one(i); } }));
  return results;
}

const ANSWERS = LONG ? 1000 : 50;
const validators = schemas.map((schema) => ajv.compile(schema));

/** Texts of ANSWERS answers, each checked; drafts change nothing, so that both servers give the same. */
async function answers(at) {
  const its = clientOf(at);
  let cut = 0;
  const texts = await many(ANSWERS, async (i) => {
    const k = i % schemas.length;
    const r = await its.chat.completions.create({ ...ask({ ...held(schemas[k]), seed: i }), messages: [{ role: 'user', content: `Fill form ${i}.` }] });
    const [{ finish_reason, message }] = r.choices;
    if (finish_reason === 'length') {
      cut++;
      assert.equal(r.usage.completion_tokens, MAX);
    } else {
      assert.equal(finish_reason, 'stop');
      assert.ok(validators[k](JSON.parse(message.content)), `schema ${k}, seed ${i}: ${message.content}: ${ajv.errorsText(validators[k].errors)}`);
    }
    return message.content;
  });
  console.log(`${ANSWERS - cut} valid, ${cut} cut`);
  assert.ok(cut < ANSWERS);
  return texts;
}

await check(`${ANSWERS} answers at temperature 1.5 under ${schemas.length} schemas are valid, or were cut by max_tokens and say so, with drafts and without`, async () => {
  const drafted = await answers(server);
  assert.ok(await metric(server.admin, 'whimbrel_forced_tokens_total') > 0);
  const plain = await startServer({ set: { 'engine.draft': 'off' } });
  assert.deepEqual(await answers(plain), drafted);
  await plain.stop();
});

await check('a streamed answer is the same, and the parser of the SDK takes it', async () => {
  for (const schema of schemas.slice(0, 3)) {
    const body = ask({ ...held(schema), seed: 7 });
    const whole = await client.chat.completions.create(body);
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
    const parsed = await client.chat.completions.parse(body);
    assert.deepEqual(parsed.choices[0].message.parsed, JSON.parse(whole.choices[0].message.content));
  }
});

await check('B060: reasoning is free, the grammar begins behind it', async () => {
  const schema = object({ n: { type: 'integer', minimum: 0, maximum: 99 } });
  let reasoned = 0;
  for (const mode of ['enabled', 'adaptive'])
    for (let i = 0; i < 4; i++) {
      const r = await client.chat.completions.create(ask({ ...held(schema), temperature: 0.7, seed: i, chat_template_kwargs: { thinking_mode: mode } }));
      const [{ message, finish_reason }] = r.choices;
      if (finish_reason === 'length') continue;
      reasoned += Boolean(message.reasoning_content);
      assert.ok(ajv.validate(schema, JSON.parse(message.content)), message.content);
    }
  assert.ok(reasoned > 0);
});

await check('B048, B059: schemas that admit nothing or point nowhere are 400 with the field, and nobody else is harmed', async () => {
  const bad = [
    [{ $ref: '#/$defs/n', $defs: { n: { $ref: '#/$defs/m' }, m: { $ref: '#/$defs/n' } } }, /\$ref/],
    [{ enum: [] }, /./], [{ $ref: '#/$defs/missing' }, /\$ref/], [{ $ref: '#definitions/a' }, /\$ref/],
    [{ type: 'text' }, /type/], [false, /./],
  ];
  for (const [schema, says] of bad) {
    const r = await post(server.url, '/v1/chat/completions', ask(held(schema)));
    assert.equal(r.status, 400, JSON.stringify(schema) + r.text);
    assert.equal(r.json.error.type, 'invalid_request_error');
    assert.equal(r.json.error.param, 'response_format.json_schema.schema');
    assert.match(r.json.error.message, says);
  }
  assert.equal((await post(server.url, '/v1/chat/completions', ask(held({})))).status, 200);
  const twice = await post(server.url, '/v1/chat/completions', ask({ ...held({}), guided_regex: 'a' }));
  assert.equal(twice.status, 400);
  assert.equal(twice.json.error.param, 'guided_regex');
});

await check('a pattern, choices, a grammar and any object, by the names that engines use', async () => {
  const text = async (more) => (await client.chat.completions.create(ask(more))).choices[0].message.content;
  assert.match(await text({ guided_regex: '[a-c]{3}-[0-9]{2}' }), /^[a-c]{3}-[0-9]{2}$/);
  assert.match(await text({ structured_outputs: { regex: 'v[0-9]+\\.[0-9]' } }), /^v[0-9]+\.[0-9]$/);
  const names = [word(), word(), word()];
  assert.ok(names.includes(await text({ guided_choice: names })));
  assert.ok(names.includes(await text({ extra_body: { structured_outputs: { choice: names } } })));
  assert.match(await text({ grammar: 'root ::= "<" digit digit ">"\ndigit ::= [0-9]' }), /^<[0-9][0-9]>$/);
  assert.ok(ajv.validate(schemas[0], JSON.parse(await text({ guided_json: schemas[0] }))));
});

await check('Responses and Messages hold their text to a schema too', async () => {
  for (const schema of schemas.slice(0, 2)) {
    const r = await client.responses.create({ model: 'nano', input: 'Fill the form.', temperature: 1.5, max_output_tokens: 300, text: { format: { type: 'json_schema', name: 'out', strict: true, schema } } });
    assert.ok(ajv.validate(schema, JSON.parse(r.output_text)), r.output_text);
    const m = await post(server.url, '/v1/messages', { model: 'nano', max_tokens: 300, temperature: 1, messages: [{ role: 'user', content: 'Fill the form.' }], output_config: { format: { type: 'json_schema', schema } } });
    assert.equal(m.status, 200, m.text);
    assert.ok(ajv.validate(schema, JSON.parse(m.json.content.at(-1).text)), m.text);
  }
});

await check('what has one way on is written without the model', async () => {
  const before = await metric(server.admin, 'whimbrel_forced_tokens_total');
  const r = await client.chat.completions.create(ask(held(object({ [`a_long_name_${word()}`]: { const: 'and a long constant text' } }))));
  const forced = await metric(server.admin, 'whimbrel_forced_tokens_total') - before;
  assert.ok(forced > 0 && forced <= r.usage.completion_tokens, `${forced} of ${r.usage.completion_tokens}`);
});

/* ---- calls ---- */

const tool = (name, parameters, strict = true) => ({ type: 'function', function: { name, description: `The tool ${name}.`, parameters, strict } });
const booking = strictTools.book;

const CALLS = LONG ? 1000 : 24;
await check(`${CALLS} strict calls at temperature 1.5: every one parses and validates`, async () => {
  const tools = Object.entries(strictTools).map(([name, parameters]) => tool(name, parameters));
  const judges = Object.fromEntries(Object.entries(strictTools).map(([name, schema]) => [name, ajv.compile(schema)]));
  let cut = 0, called = 0;
  const one = async (i) => {
    const r = await client.chat.completions.create(ask({ tools, tool_choice: i % 3 ? 'required' : 'auto', seed: i }));
    const [{ finish_reason, message }] = r.choices;
    if (finish_reason === 'length') { cut++; return; }
    for (const call of message.tool_calls ?? []) {
      const judge = judges[call.function.name];
      assert.ok(judge, call.function.name);
      assert.ok(judge(JSON.parse(call.function.arguments)), `${call.function.name} ${call.function.arguments}: ${ajv.errorsText(judge.errors)}`);
      called++;
    }
    if (i % 3) assert.equal(finish_reason, 'tool_calls');
  };
  await many(CALLS, one);
  for (let i = CALLS; LONG && called < CALLS && i < 4 * CALLS; i += 100) await many(100, (k) => one(i + k));
  console.log(`${called} calls, ${cut} answers cut`);
  assert.ok(called >= (LONG ? CALLS : 1));
});

await check('a named tool is called and no other; allowed_tools leaves the others out; one call where parallel calls are off', async () => {
  const tools = [weatherTool, tool('look', object({ q: { type: 'string', maxLength: 9 } })), tool('book', booking)];
  const calls = async (more) => (await client.chat.completions.create(ask({ tools, temperature: 1, ...more }))).choices[0].message.tool_calls;
  for (let seed = 0; seed < 4; seed++) {
    const named = await calls({ tool_choice: { type: 'function', function: { name: 'look' } }, seed });
    assert.ok(named.every((c) => c.function.name === 'look'));
    const allowed = await calls({ tool_choice: { type: 'allowed_tools', allowed_tools: { mode: 'required', tools: [{ type: 'function', function: { name: 'book' } }, { type: 'function', function: { name: 'look' } }] } }, parallel_tool_calls: false, seed });
    assert.equal(allowed?.length, 1);
    assert.ok(['book', 'look'].includes(allowed[0].function.name));
  }
});

await check('a strict tool whose schema cannot be enforced is refused by name; without strict its arguments are free', async () => {
  const parameters = { type: 'object', properties: { a: { type: 'array', items: { type: 'number' }, uniqueItems: true } }, required: ['a'], additionalProperties: false };
  const refused = await post(server.url, '/v1/chat/completions', ask({ tools: [weatherTool, tool('odd', parameters)], tool_choice: 'auto' }));
  assert.equal(refused.status, 400, refused.text);
  assert.equal(refused.json.error.param, 'tools[1]');
  assert.match(refused.json.error.message, /uniqueItems/);
  const free = await post(server.url, '/v1/chat/completions', ask({ tools: [tool('odd', parameters, false)], tool_choice: 'required', parallel_tool_calls: false }));
  assert.equal(free.status, 200, free.text);
});

await server.stop();
finish();
