// Anthropic's client: streamed loops, its tool runner, pings, the cache's counters, models and probes in its dialect.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { z } from 'zod';
import { check, connect, finish, h2stream, startServer, weatherTool, word } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

const options = { apiKey: 'none', maxRetries: 0 };
const server = await startServer();
const client = new Anthropic({ ...options, baseURL: server.url });
const { name, description, parameters } = weatherTool.function;
const weather = { name, description, input_schema: parameters };
const usage = (u) => ({ prompt: u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens, cached: u.cache_read_input_tokens, output: u.output_tokens });

for (const api of ['messages', 'beta.messages'])
  await check(`anthropic: a streamed tool loop of five turns over ${api}; the whole previous turn is cached each time`, async () => {
    const messages = [], watch = cacheWatch(), { messages: resource } = api === 'messages' ? client : client.beta;
    for (let turn = 0; turn < TURNS; turn++) {
      messages.push({ role: 'user', content: question() });
      for (const type of ['any', 'none']) {
        const stream = resource.stream({ model: 'nano', max_tokens: 120, temperature: 0, messages, tools: [weather], tool_choice: { type }, thinking: { type: 'adaptive' },
          system: [{ type: 'text', text: 'Be brief.', cache_control: { type: 'ephemeral' } }] });
        let start;
        for await (const event of stream) if (event.type === 'message_start') start = { ...event.message.usage };
        const final = await stream.finalMessage();
        watch(usage(final.usage));
        for (const key of ['input_tokens', 'cache_read_input_tokens', 'cache_creation_input_tokens']) assert.equal(start[key], final.usage[key], key);
        assert.equal(final.stop_reason, type === 'any' ? 'tool_use' : 'end_turn');
        messages.push({ role: 'assistant', content: final.content });
        const calls = final.content.filter((b) => b.type === 'tool_use');
        assert.equal(calls.length > 0, type === 'any');
        if (!calls.length) continue;
        messages.push({ role: 'user', content: calls.map((c) => ({ type: 'tool_result', tool_use_id: c.id, content: JSON.stringify(forecast()) })) });
        for (const c of calls) assert.equal(typeof c.input.city, 'string');
      }
    }
  });

await check('anthropic: its tool runner runs the tools by itself', async () => {
  const ran = [];
  const tool = betaZodTool({ name, description, inputSchema: z.object({ city: z.string() }), run: (input) => { ran.push(input); return JSON.stringify(forecast()); } });
  const runner = client.beta.messages.toolRunner({ model: 'nano', max_tokens: 120, temperature: 0, max_iterations: 2, tools: [tool], tool_choice: { type: 'any' },
    messages: [{ role: 'user', content: question() }] });
  const last = await runner.runUntilDone();
  assert.equal(last.type, 'message');
  assert.ok(ran.length > 0 && ran.every((input) => typeof input.city === 'string'));
});

await check('anthropic: the three input counts add up to the prompt, and what is new is counted as written', async () => {
  const body = { model: 'nano', max_tokens: 4, temperature: 0, messages: [{ role: 'user', content: `Remember ${word()} ${word()} ${word()}.` }] };
  const { input_tokens: prompt } = await client.messages.countTokens({ model: 'nano', messages: body.messages });
  const first = (await client.messages.create(body)).usage, second = (await client.messages.create(body)).usage;
  for (const u of [first, second]) {
    assert.equal(usage(u).prompt, prompt);
    assert.equal(u.cache_creation.ephemeral_5m_input_tokens + u.cache_creation.ephemeral_1h_input_tokens, u.cache_creation_input_tokens);
  }
  assert.ok(first.cache_creation_input_tokens > 0);
  assert.ok(second.cache_read_input_tokens >= prompt - 1);
  assert.ok(second.cache_read_input_tokens >= first.cache_read_input_tokens + first.cache_creation_input_tokens, 'what was written is read');
  assert.ok(second.cache_creation_input_tokens <= 1);
});

await check('anthropic: models in its shape for its header, in OpenAI\'s without', async () => {
  const list = await client.models.list();
  assert.deepEqual([list.data[0].type, list.data[0].id, list.has_more, list.first_id, list.last_id], ['model', 'nano', false, 'nano', list.data.at(-1).id]);
  assert.ok(!Number.isNaN(Date.parse(list.data[0].created_at)));
  assert.ok(list.data[0].max_input_tokens > 0 && list.data[0].max_tokens > 0);
  assert.equal((await client.models.retrieve('nano')).type, 'model');
  await assert.rejects(client.models.retrieve(word()), Anthropic.NotFoundError);
  const plain = await (await fetch(`${server.url}/v1/models`)).json();
  assert.deepEqual([plain.object, plain.data[0].object], ['list', 'model']);
});

await check('HEAD / and GET / are 200', async () => {
  const head = await fetch(server.url, { method: 'HEAD' });
  assert.equal(head.status, 200);
  assert.equal(await head.text(), '');
  assert.equal((await (await fetch(server.url)).json()).name, 'whimbrel');
});

await server.stop();

const slow = await startServer({ set: { 'engine.slow_step_us': 60000, 'engine.draft': 'off', 'server.keepalive_ms': 20 } });
await check('anthropic: pings keep a silent stream alive, and its events stay in order', async () => {
  const r = await fetch(`${slow.url}/v1/messages`, { method: 'POST', headers: { 'content-type': 'application/json', 'anthropic-version': '2023-06-01' },
    body: JSON.stringify({ model: 'nano', max_tokens: 5, stream: true, messages: [{ role: 'user', content: 'hello!' }] }) });
  const events = (await r.text()).trim().split('\n\n').map((record) => {
    const [event, data] = record.split('\n');
    assert.equal(JSON.parse(data.slice(6)).type, event.slice(7));
    return event.slice(7);
  });
  assert.ok(events.filter((e) => e === 'ping').length >= 2, events.join(' '));
  const rest = events.filter((e) => e !== 'ping');
  assert.deepEqual([rest[0], rest[1], ...rest.slice(-3)], ['message_start', 'content_block_start', 'content_block_stop', 'message_delta', 'message_stop']);
});

await check('two requests under one session header at once stream side by side, on each dialect: a session is a name, not a queue', async () => {
  const messages = () => [{ role: 'user', content: `hello, ${word()}!` }], more = { model: 'nano', stream: true, ignore_eos: true };
  for (const [path, header, body, isDelta] of [
    ['/v1/messages', 'x-claude-code-session-id', () => ({ ...more, max_tokens: 24, messages: messages() }), (d) => d.type === 'content_block_delta'],
    ['/v1/responses', 'session-id', () => ({ ...more, max_output_tokens: 24, input: messages() }), (d) => /\.delta$/.test(d.type)],
    ['/v1/chat/completions', 'x-session-id', () => ({ ...more, max_tokens: 24, messages: messages() }), (d) => d.choices?.[0]?.delta.content || d.choices?.[0]?.delta.reasoning_content],
  ]) {
    // On one connection the order of records is the server's, whatever holds the reader up.
    const connection = await connect(slow.url), headers = { [header]: word() }, order = [];
    await Promise.all(['a', 'b'].map((name) => h2stream(connection, path, body(), { headers, onRecord: (d) => { if (d !== '[DONE]' && isDelta(d)) order.push(name); } })));
    connection.close();
    const both = Math.max(order.indexOf('a'), order.indexOf('b'));
    assert.ok(order.includes('a') && order.includes('b'), order.join(''));
    assert.ok(both < 8, `${path}: the second one's first token comes within the first one's first few: ${order.join('')}`);
    assert.ok(both < Math.min(order.lastIndexOf('a'), order.lastIndexOf('b')), `${path}: both have begun before either ends: ${order.join('')}`);
  }
});
await slow.stop();
finish();
