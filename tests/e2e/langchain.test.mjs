// LangChain's ChatOpenAI, which never sends reasoning back: the gateway restores it, so its cache grows all the same.
import assert from 'node:assert/strict';
import { AIMessage, HumanMessage, SystemMessage, ToolMessage } from '@langchain/core/messages';
import { tool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { z } from 'zod';
import { check, finish, startServer } from './lib.mjs';
import { cacheWatch, forecast, question, TURNS } from './loop.mjs';

process.env.LANGCHAIN_TRACING_V2 = 'false';
const server = await startServer();
const chat = (more = {}) => new ChatOpenAI({
  model: 'nano', temperature: 0, maxTokens: 200, maxRetries: 0, apiKey: 'none', configuration: { baseURL: `${server.url}/v1` }, ...more,
});
const weather = tool(async () => JSON.stringify(forecast()), {
  name: 'get_weather', description: 'Get the current weather for a city.', schema: z.object({ city: z.string().describe('The city name') }),
});
const thinking = { modelKwargs: { chat_template_kwargs: { thinking_mode: 'enabled' } } };

/** The answer of a runnable, whole or joined from its chunks. */
async function answer(runnable, messages, streamed) {
  if (!streamed) return runnable.invoke(messages);
  let all;
  for await (const chunk of await runnable.stream(messages)) all = all ? all.concat(chunk) : chunk;
  return all;
}

async function play(model, streamed, reads = () => {}) {
  const messages = [new SystemMessage('Be brief.')], watch = cacheWatch();
  const look = ({ usage_metadata: u }) => watch({ prompt: u.input_tokens, cached: u.input_token_details.cache_read, output: u.output_tokens, total: u.total_tokens });
  for (let turn = 0; turn < TURNS; turn++) {
    messages.push(new HumanMessage(question()));
    const called = await answer(model.bindTools([weather], { tool_choice: 'required' }), messages, streamed);
    assert.ok(AIMessage.isInstance(called));
    look(called);
    reads(called);
    assert.ok(called.tool_calls.length > 0);
    assert.deepEqual(called.invalid_tool_calls, []);
    messages.push(called);
    for (const call of called.tool_calls) {
      assert.equal(call.name, 'get_weather');
      assert.equal(typeof call.args.city, 'string');
      const result = await weather.invoke(call);
      assert.ok(ToolMessage.isInstance(result));
      assert.equal(result.tool_call_id, call.id);
      messages.push(result);
    }
    const said = await answer(model.bindTools([weather], { tool_choice: 'none' }), messages, streamed);
    look(said);
    reads(said);
    assert.ok(said.content.length > 0);
    messages.push(said);
  }
}

for (const streamed of [false, true])
  await check(`langchain: a tool loop of five turns, ${streamed ? 'streamed' : 'whole'}; the whole previous turn is cached each time`,
    () => play(chat(), streamed));

await check('langchain: five turns with reasoning, which it does not send back; it is restored', async () => {
  const bodies = [], fetched = (url, init) => { bodies.push(init.body); return fetch(url, init); };
  let thought = 0;
  await play(chat({ ...thinking, configuration: { baseURL: `${server.url}/v1`, fetch: fetched } }), false, (message) => {
    thought += message.usage_metadata.output_token_details.reasoning;
  });
  assert.ok(thought > 0);
  assert.ok(bodies.length === 2 * TURNS && bodies.every((body) => !body.includes('"reasoning')), 'no request carries reasoning');
});

await check('langchain: a tool loop of five turns over Responses', () => play(chat({ useResponsesApi: true }), false));

await server.stop();
finish();
