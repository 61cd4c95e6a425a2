// Vercel's AI SDK over Chat (@ai-sdk/openai-compatible) and over Responses (@ai-sdk/openai): tool loops of five turns, whole and streamed.
import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateText, isStepCount, streamText, tool } from 'ai';
import { z } from 'zod';
import { check, finish, startServer, word } from './lib.mjs';
import { cacheWatch, city, forecast, question, TURNS } from './loop.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;
const server = await startServer();
const settings = { baseURL: `${server.url}/v1`, apiKey: 'none' };
const compatible = createOpenAICompatible({ ...settings, name: 'whimbrel', includeUsage: true });
const openai = createOpenAI(settings);
const models = {
  'ai-sdk chat': () => compatible('nano'),
  'ai-sdk responses': () => openai.responses('nano'),
};

/** The tools of one conversation; `ran` has what the model called and what it was told. */
function station() {
  const ran = [];
  const get_weather = tool({
    description: 'Get the current weather for a city.',
    inputSchema: z.object({ city: z.string().describe('The city name') }),
    execute: async (input, { toolCallId }) => {
      const output = forecast();
      ran.push({ input, toolCallId, output });
      return output;
    },
  });
  return { ran, tools: { get_weather } };
}

const play = (model, messages, tools) => ({
  model, messages, tools, temperature: 0, maxOutputTokens: 120, maxRetries: 0, stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
});

function checkSteps(steps, watch, ran, seen) {
  assert.equal(steps.length, 2);
  for (const { usage } of steps)
    watch({ prompt: usage.inputTokens, cached: usage.inputTokenDetails.cacheReadTokens, output: usage.outputTokens, total: usage.totalTokens });
  const [first, second] = steps;
  assert.equal(first.finishReason, 'tool-calls');
  assert.ok(first.toolCalls.length > 0);
  assert.deepEqual(first.toolCalls.map((c) => [c.toolCallId, c.input]), ran.slice(seen).map((r) => [r.toolCallId, r.input]));
  assert.deepEqual(first.toolResults.map((r) => r.output), ran.slice(seen).map((r) => r.output));
  assert.ok(ran.every((r) => typeof r.input.city === 'string' && /^call_[0-9a-f]{32}$/.test(r.toolCallId)));
  assert.equal(second.finishReason, 'stop');
  assert.equal(second.toolCalls.length, 0);
  assert.ok(second.text.length > 0);
  assert.equal(second.response.modelId, 'nano');
}

for (const [name, model] of Object.entries(models)) {
  await check(`${name}: a tool loop of five turns; the whole previous turn is cached each time`, async () => {
    const messages = [], watch = cacheWatch(), { ran, tools } = station();
    for (let turn = 0; turn < TURNS; turn++) {
      const seen = ran.length;
      messages.push({ role: 'user', content: question() });
      const result = await generateText(play(model(), messages, tools));
      checkSteps(result.steps, watch, ran, seen);
      messages.push(...result.responseMessages);
    }
  });

  await check(`${name}: the same loop streamed; parts come in order and say what the result says`, async () => {
    const messages = [], watch = cacheWatch(), { ran, tools } = station();
    for (let turn = 0; turn < TURNS; turn++) {
      const seen = ran.length;
      messages.push({ role: 'user', content: question() });
      const result = streamText(play(model(), messages, tools));
      let text = '', open, inputs = {};
      for await (const part of result.stream) {
        assert.notEqual(part.type, 'error', String(part.error));
        if (part.type === 'text-start') { assert.equal(open, undefined); open = part.id; }
        if (part.type === 'text-delta') { assert.equal(part.id, open); text += part.text; }
        if (part.type === 'text-end') { assert.equal(part.id, open); open = undefined; }
        if (part.type === 'tool-input-start') inputs[part.id] = '';
        if (part.type === 'tool-input-delta') inputs[part.id] += part.delta;
        if (part.type === 'tool-call') assert.deepEqual(JSON.parse(inputs[part.toolCallId]), part.input);
        if (part.type === 'finish-step') text = part.finishReason === 'tool-calls' ? '' : text;
      }
      const steps = await result.steps;
      checkSteps(steps, watch, ran, seen);
      assert.equal(text, steps[1].text);
      messages.push(...(await result.responseMessages));
    }
  });

  await check(`${name}: a refusal is an APICallError with the server's words`, async () => {
    await assert.rejects(generateText({ model: model(), prompt: 'hello', temperature: 7, maxRetries: 0 }), (e) => {
      assert.ok(APICallError.isInstance(e), e.stack);
      assert.equal(e.statusCode, 400);
      assert.equal(e.isRetryable, false);
      assert.match(e.message, /temperature/);
      return true;
    });
  });
}

await check('ai-sdk chat: reasoning comes as reasoning, streamed and whole', async () => {
  const prompt = `What's the weather in ${city()}? ${word()}`;
  const body = { model: compatible('nano'), prompt, temperature: 0, maxOutputTokens: 200, tools: station().tools, maxRetries: 0,
    providerOptions: { whimbrel: { chat_template_kwargs: { thinking_mode: 'enabled' } } } };
  const whole = await generateText(body);
  assert.ok(whole.reasoningText.length > 0);
  assert.ok(whole.usage.outputTokenDetails.reasoningTokens > 0);
  const streamed = streamText(body);
  assert.equal(await streamed.reasoningText, whole.reasoningText);
  assert.equal(await streamed.text, whole.text);
});

await server.stop();
finish();
