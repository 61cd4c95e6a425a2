// OpenAI's agents SDK: its own loop runs the tools; Chat, Responses, and its sessions.
import assert from 'node:assert/strict';
import { Agent, MemorySession, OpenAIChatCompletionsModel, OpenAIConversationsSession, OpenAIResponsesModel, run, setTracingDisabled, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';
import { check, finish, startServer } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

setTracingDisabled(true);
const server = await startServer();
const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: 'none', maxRetries: 0 });
const models = { chat: new OpenAIChatCompletionsModel(client, 'nano'), responses: new OpenAIResponsesModel(client, 'nano') };

function makeAgent(model) {
  const ran = [];
  const get_weather = tool({
    name: 'get_weather', description: 'Get the current weather for a city.', parameters: z.object({ city: z.string().max(30).describe('The city name') }),
    execute: async (input) => {
      const output = forecast();
      ran.push({ input, output });
      agent.modelSettings.toolChoice = 'none';
      return JSON.stringify(output);
    },
  });
  // The SDK throws where an answer is cut or calls do not end, and the little model may talk or call without end; so each run calls once, then
  // answers, and schemas bound all that it can say, well below maxTokens.
  const agent = new Agent({ name: 'clerk', instructions: 'Be brief.', model, tools: [get_weather], resetToolChoice: false,
    outputType: z.object({ reply: z.string().max(20) }), modelSettings: { parallelToolCalls: false, reasoning: { effort: 'none' }, temperature: 0, maxTokens: 400 } });
  return { agent, ran };
}

/** Five runs on one history; `next` gives what the run is asked and its options. */
async function play(model, next, streamed) {
  const { agent, ran } = makeAgent(model), watch = cacheWatch();
  for (let turn = 0; turn < TURNS; turn++) {
    const seen = ran.length, { input, options, after } = next(question());
    agent.modelSettings.toolChoice = 'required';
    const result = await run(agent, input, { maxTurns: 8, ...options, stream: streamed });
    let deltas = '';
    if (streamed) {
      for await (const event of result)
        if (event.type === 'raw_model_stream_event' && event.data.type === 'output_text_delta') deltas += event.data.delta;
      await result.completed;
      const text = deltas.slice(deltas.lastIndexOf('{"reply"'));
      assert.deepEqual(JSON.parse(text), result.finalOutput, deltas);
    }
    assert.ok(ran.length > seen);
    for (const { input: args } of ran.slice(seen)) assert.equal(typeof args.city, 'string');
    assert.equal(typeof result.finalOutput.reply, 'string');
    for (const { usage } of result.rawResponses) {
      const cached = [usage.inputTokensDetails].flat().reduce((sum, d) => sum + (d.cached_tokens ?? 0), 0);
      watch({ prompt: usage.inputTokens, cached, output: usage.outputTokens, total: usage.totalTokens });
    }
    const outputs = result.newItems.filter((i) => i.type === 'tool_call_output_item');
    assert.deepEqual(outputs.map((i) => JSON.parse(i.output)), ran.slice(seen).map((r) => r.output));
    after?.(result);
  }
}

/** The history goes with every request. */
function carried() {
  let history = [];
  return (text) => ({ input: [...history, { role: 'user', content: text }], options: {}, after: (result) => (history = result.history) });
}

for (const [name, model] of Object.entries(models))
  for (const streamed of [false, true])
    await check(`agents ${name}: five runs of its tool loop, ${streamed ? 'streamed' : 'whole'}; the whole previous turn is cached each time`,
      () => play(model, carried(), streamed));

await check('agents chat: a memory session', () => {
  const session = new MemorySession();
  return play(models.chat, (text) => ({ input: text, options: { session } }), false);
});

await check('agents responses: runs linked by previous_response_id', () => {
  let previousResponseId;
  return play(models.responses, (text) => ({ input: text, options: { previousResponseId }, after: (r) => (previousResponseId = r.lastResponseId) }), false);
});

for (const streamed of [false, true])
  await check(`agents responses: its conversations session, ${streamed ? 'streamed' : 'whole'}; taken back, cleared`, async () => {
    const session = new OpenAIConversationsSession({ client });
    await play(models.responses, (text) => ({ input: text, options: { session } }), streamed);
    const items = await session.getItems();
    assert.deepEqual(items.map((i) => i.role ?? i.type).filter((kind) => kind === 'user').length, TURNS);
    assert.deepEqual((await session.getItems(2)), items.slice(-2));
    const last = await session.popItem();
    assert.deepEqual(last, items.at(-1));
    assert.deepEqual(await session.getItems(), items.slice(0, -1));
    const id = await session.getSessionId();
    await session.clearSession();
    await assert.rejects(client.conversations.retrieve(id), (e) => e instanceof OpenAI.NotFoundError && e.code === 'conversation_not_found');
    assert.notEqual(await session.getSessionId(), id, 'cleared, it begins anew');
  });

await check('agents responses: runs on a conversation of the server', async () => {
  const { id: conversationId } = await client.conversations.create();
  await play(models.responses, (text) => ({ input: text, options: { conversationId } }), false);
  const kinds = (await client.conversations.items.list(conversationId, { order: 'asc', limit: 100 })).data.map((i) => i.type);
  for (const kind of ['message', 'function_call', 'function_call_output']) assert.ok(kinds.filter((k) => k === kind).length >= TURNS, `${kinds}`);
});

await server.stop();
finish();
