// The official OpenAI client's tool loops of five turns: Chat and Responses, whole and streamed, and its own tool runner.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, finish, startServer, weatherTool } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });

const chatUsage = (u) => ({ prompt: u.prompt_tokens, cached: u.prompt_tokens_details.cached_tokens, output: u.completion_tokens, total: u.total_tokens });
const responseUsage = (u) => ({ prompt: u.input_tokens, cached: u.input_tokens_details.cached_tokens, output: u.output_tokens, total: u.total_tokens });

async function chatAnswer(body, streamed) {
  if (!streamed) return client.chat.completions.create(body);
  const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  const final = await stream.finalChatCompletion();
  for (const c of chunks) assert.deepEqual([c.id, c.created, c.model], [final.id, final.created, final.model]);
  assert.equal(chunks[0].choices[0].delta.role, 'assistant');
  assert.equal(chunks.filter((c) => c.choices[0]?.finish_reason).length, 1);
  assert.deepEqual(chunks.map((c) => c.choices.length), chunks.map((_, i) => (i === chunks.length - 1 ? 0 : 1)), 'the last chunk alone has no choice');
  assert.deepEqual(chunks.map((c) => c.usage === null), chunks.map((_, i) => i < chunks.length - 1), 'and it alone has the usage');
  return final;
}

for (const streamed of [false, true])
  await check(`openai chat: a tool loop of five turns, ${streamed ? 'streamed' : 'whole'}; the whole previous turn is cached each time`, async () => {
    const messages = [{ role: 'developer', content: 'Be brief.' }], watch = cacheWatch();
    for (let turn = 0; turn < TURNS; turn++) {
      messages.push({ role: 'user', content: question() });
      for (const tool_choice of ['required', 'none']) {
        const body = { model: 'nano', messages, tools: [weatherTool], tool_choice, temperature: 0, max_completion_tokens: 120 };
        const answer = await chatAnswer(body, streamed);
        watch(chatUsage(answer.usage));
        const { message, finish_reason } = answer.choices[0];
        messages.push(message);
        assert.equal(finish_reason, tool_choice === 'required' ? 'tool_calls' : 'stop');
        assert.equal(Boolean(message.tool_calls?.length), tool_choice === 'required');
        for (const call of message.tool_calls ?? []) {
          assert.match(call.id, /^call_[0-9a-f]{32}$/);
          assert.equal(call.function.name, 'get_weather');
          assert.equal(typeof JSON.parse(call.function.arguments).city, 'string');
          messages.push({ role: 'tool', tool_call_id: call.id, content: JSON.stringify(forecast()) });
        }
      }
    }
  });

await check('openai chat: its tool runner runs the tools by itself', async () => {
  const ran = [];
  const runner = client.chat.completions.runTools({
    model: 'nano', temperature: 0, max_completion_tokens: 120, messages: [{ role: 'user', content: question() }],
    tool_choice: { type: 'function', function: { name: 'get_weather' } },
    tools: [{ type: 'function', function: { ...weatherTool.function, parse: JSON.parse, function: (args) => { ran.push(args); return forecast(); } } }],
  });
  await runner.done();
  assert.ok(ran.length > 0 && ran.every((args) => typeof args.city === 'string'));
});

async function response(body, streamed) {
  if (!streamed) return client.responses.create(body);
  const stream = client.responses.stream(body);
  let next = 0, first;
  for await (const event of stream) {
    assert.equal(event.sequence_number, next++);
    first ??= event.type;
  }
  assert.equal(first, 'response.created');
  return stream.finalResponse();
}

for (const linked of [false, true])
  for (const streamed of [false, true])
    await check(`openai responses: a tool loop of five turns, ${linked ? 'by previous_response_id' : 'items carried'}, ${streamed ? 'streamed' : 'whole'}`, async () => {
      const watch = cacheWatch();
      let input = [], previous_response_id;
      const { type, function: definition } = weatherTool;
      for (let turn = 0; turn < TURNS; turn++) {
        input.push({ role: 'user', content: question() });
        for (const tool_choice of ['required', 'none']) {
          const answer = await response({ model: 'nano', input, previous_response_id, tools: [{ type, ...definition, strict: null }], tool_choice,
            store: linked, include: linked ? [] : ['reasoning.encrypted_content'], instructions: 'Be brief.', temperature: 0, max_output_tokens: 120 }, streamed);
          watch(responseUsage(answer.usage));
          assert.equal(answer.status, 'completed');
          const calls = answer.output.filter((i) => i.type === 'function_call');
          assert.equal(calls.length > 0, tool_choice === 'required');
          if (tool_choice === 'none') assert.ok(answer.output_text.length > 0);
          previous_response_id = linked ? answer.id : undefined;
          input = linked ? [] : [...input, ...answer.output];
          for (const call of calls) {
            assert.equal(call.name, 'get_weather');
            assert.equal(typeof JSON.parse(call.arguments).city, 'string');
            input.push({ type: 'function_call_output', call_id: call.call_id, output: JSON.stringify(forecast()) });
          }
        }
      }
    });

await server.stop();
finish();
