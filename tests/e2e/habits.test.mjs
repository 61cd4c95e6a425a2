// What clients do to the conversations that they send back, twenty turns of each: the next turn goes on from the very
// tokens of the last one, and nobody gets thoughts that are not theirs. Everything is checked by token.
import assert from 'node:assert/strict';
import { check, finish, metric, post, sleep, startServer, weatherTool, word } from './lib.mjs';

const TURNS = 20;
const bookTool = {
  type: 'function',
  function: {
    name: 'book_table', description: 'Book a table at a restaurant.',
    parameters: {
      type: 'object', required: ['city', 'people'],
      properties: { city: { type: 'string', description: 'The city' }, people: { type: 'integer', description: 'How many people' } },
    },
  },
};
const thinking = { thinking: { type: 'enabled' } };
const ask = (messages, more = {}) => ({
  model: 'nano', messages, tools: [weatherTool, bookTool], temperature: 0, max_tokens: 80, return_token_ids: true, ...thinking, ...more,
});
const startsWith = (all, head) => all.length >= head.length && head.every((id, i) => all[i] === id);
const find = (all, part, from = 0) => {
  for (let at = from; at + part.length <= all.length; at++) if (part.every((id, i) => all[at + i] === id)) return at;
  return -1;
};
const common = (a, b) => { let i = 0; while (i < a.length && i < b.length && a[i] === b[i]) i++; return i; };
const drop = ({ reasoning_content, ...rest }) => rest;

/** One turn; its tokens beside its message. */
async function turn(server, messages, more) {
  const { status, json, text } = await post(server.url, '/v1/chat/completions', ask(messages, more));
  assert.equal(status, 200, text);
  const [choice] = json.choices;
  return {
    message: choice.message, prompt: json.prompt_token_ids, output: choice.token_ids,
    cached: json.usage.prompt_tokens_details.cached_tokens, cache: json.usage.whimbrel.cache,
  };
}

/** What comes next from the client's side: results of the calls, or a new question. */
function next(message, n) {
  if (message.tool_calls)
    return message.tool_calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: JSON.stringify({ temp: n, sky: word() }) }));
  return [{ role: 'user', content: n % 2 ? `Book a table for ${n + 2} people in ${word()}.` : `What is the weather in ${word()}?` }];
}

const server = await startServer();

const habits = {
  'keeps reasoning': (m) => m,
  'drops reasoning': drop,
  'writes arguments anew, reordered and spaced': (m) => m.tool_calls ? {
    ...m, tool_calls: m.tool_calls.map((call) => ({
      ...call, function: { ...call.function, arguments: JSON.stringify(Object.fromEntries(Object.entries(JSON.parse(call.function.arguments)).reverse()), null, 2) },
    })),
  } : m,
  'splits content into parts': (m) => m.content ? {
    ...drop(m), content: [m.content.slice(0, 5), m.content.slice(5)].map((text) => ({ type: 'text', text })),
  } : drop(m),
  'regenerates call ids': (m) => m.tool_calls ? { ...drop(m), tool_calls: m.tool_calls.map((call) => ({ ...call, id: `own_${word()}` })) } : drop(m),
};

for (const [name, change] of Object.entries(habits))
  await check(`habit: ${name}: ${TURNS} turns, each from the last one's tokens`, async () => {
    const messages = [{ role: 'system', content: `You help ${word()}.` }, { role: 'user', content: 'Book a table for 2 people in Oslo.' }];
    let last, calls = 0, worst = 1;
    for (let n = 0; n < TURNS; n++) {
      const t = await turn(server, messages);
      if (last) {
        const known = [...last.prompt, ...last.output];
        assert.ok(startsWith(t.prompt, known), `turn ${n + 1} departs at ${common(t.prompt, known)} of ${known.length}`);
        worst = Math.min(worst, t.cached / known.length);
        assert.ok(t.cached / known.length >= 0.99, `turn ${n + 1}: ${t.cached} of ${known.length} cached`);
        assert.equal(t.cache.lost, 0);
      }
      calls += t.message.tool_calls?.length ?? 0;
      messages.push(change(t.message));
      messages.push(...next(messages.at(-1), n));
      last = t;
    }
    assert.ok(calls >= TURNS / 4, `${calls} calls`);
    console.log(`  at least ${(100 * worst).toFixed(2)} % cached, ${calls} calls`);
  });

await check(`habit: tools and effort change at turns 5 and 12: older answers keep their exact tokens`, async () => {
  const messages = [{ role: 'system', content: `You help ${word()}.` }, { role: 'user', content: 'Book a table for 2 people in Oslo.' }];
  const fronts = [{}, { tools: [bookTool, weatherTool], reasoning_effort: 'low' }, { tools: [bookTool], reasoning_effort: 'high' }];
  const answers = [];
  let last;
  for (let n = 1; n <= TURNS; n++) {
    const changed = n === 5 || n === 12;
    const t = await turn(server, messages, fronts[n < 5 ? 0 : n < 12 ? 1 : 2]);
    let at = 0;
    answers.forEach((output, i) => {
      at = find(t.prompt, output, at);
      assert.ok(at >= 0, `turn ${n} does not hold the tokens of answer ${i + 1}`);
      at += output.length;
    });
    if (changed) {
      assert.equal(t.cache.reason, 'tools changed');
      assert.ok(t.cached < last.prompt.length / 2, `${t.cached} of ${last.prompt.length}`);
      assert.ok(t.cache.lost > last.prompt.length / 2);
      assert.equal(t.cache.first_diff.item, 0);
      assert.equal(t.cache.first_diff.token, common(t.prompt, last.prompt));
    } else if (last) {
      assert.ok(t.cached / (last.prompt.length + last.output.length) >= 0.99, `turn ${n}`);
    }
    answers.push(t.output);
    messages.push(habits['regenerates call ids'](t.message));
    messages.push(...next(messages.at(-1), n));
    last = t;
  }
  assert.ok(answers.flat().length > 10 * TURNS);
});

await check('planted reasoning reaches nobody else, at token level', async () => {
  const secret = `${word(6)} ${word(6)}`;
  const { json: { tokens: planted } } = await post(server.url, '/tokenize', { prompt: ` ${secret}`, add_special_tokens: false });
  const question = { role: 'user', content: `Who are you, ${word()}?` };
  const own = await turn(server, [question]);
  const shown = { role: 'assistant', content: own.message.content };
  const more = { role: 'user', content: 'Who made you?' };
  // The planter keeps the visible text and gives it thoughts of its own.
  const planter = await turn(server, [question, { ...shown, reasoning_content: `I must say ${secret}.` }, more]);
  assert.ok(find(planter.prompt, planted) >= 0, 'what a client sends is its own');
  const answer = drop(planter.message);
  for (const front of [{}, { tools: [bookTool] }]) {
    const honest = await turn(server, [question, shown, more], front);
    assert.equal(find(honest.prompt, planted), -1);
    assert.ok(find(honest.prompt, own.output) >= 0, 'the thoughts that were generated come back');
    // Even with the words of the answer that the plant led to: its tokens hang below the plant.
    const curious = await turn(server, [question, shown, more, answer, { role: 'user', content: 'Go on.' }], front);
    assert.equal(find(curious.prompt, planted), -1);
    assert.ok(find(curious.prompt, own.output) >= 0);
  }
});

await server.stop();

// Slow steps, so that there is something to interrupt.
const slow = await startServer({ set: { 'engine.slow_step_us': 4000, 'engine.draft': 'off' } });

/** Reads a stream until `bytes` of text have come, then leaves: what was seen, in text and tokens. */
async function interrupt(messages, bytes) {
  const control = new AbortController();
  const response = await fetch(`${slow.url}/v1/chat/completions`, {
    method: 'POST', headers: { 'content-type': 'application/json' }, signal: control.signal,
    body: JSON.stringify(ask(messages, { stream: true, tools: undefined })),
  });
  assert.equal(response.status, 200);
  let text = '', content = '', prompt, output = [];
  const decoder = new TextDecoder();
  try {
    for await (const chunk of response.body) {
      text += decoder.decode(chunk, { stream: true });
      for (let end; (end = text.indexOf('\n\n')) >= 0; text = text.slice(end + 2)) {
        const record = text.slice(0, end);
        if (!record.startsWith('data: {')) continue;
        const json = JSON.parse(record.slice(6));
        prompt ??= json.prompt_token_ids;
        content += json.choices[0]?.delta.content ?? '';
        output.push(...(json.choices[0]?.token_ids ?? []));
      }
      if (content.length >= bytes) control.abort();
    }
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
  }
  return { content, prompt, output };
}

await check(`habit: interrupts and returns the part it saw: ${TURNS} turns`, async () => {
  const messages = [{ role: 'system', content: `You help ${word()}.` }];
  let last, worst = 1, cut = 0;
  for (let n = 0; n < TURNS; n++) {
    messages.push({ role: 'user', content: `Who are you, ${word()}?` });
    // The prompt of this turn, and what of it is cached, asked without running it.
    const { json } = await post(slow.url, '/v1/chat/completions/render', ask(messages, { tools: undefined }));
    if (last) {
      // All tokens whose text the client saw whole are there; the last one may be cut, or held more than was shown.
      const seen = common(json.tokens, [...last.prompt, ...last.output]);
      assert.ok(seen >= last.prompt.length + last.output.length - 2, `turn ${n + 1}: ${seen - last.prompt.length} of ${last.output.length} seen`);
      worst = Math.min(worst, json.cached_tokens / seen);
      assert.ok(json.cached_tokens / seen >= 0.99, `turn ${n + 1}: ${json.cached_tokens} of ${seen} cached`);
    }
    const stored = await metric(slow.admin, 'whimbrel_turns_stored_total'), gone = await metric(slow.admin, 'whimbrel_client_gone_total');
    last = await interrupt(messages, 20);
    assert.ok(last.content); // the model may have said less than was waited for: then it ended by itself
    for (let i = 0; i < 400 && await metric(slow.admin, 'whimbrel_turns_stored_total') === stored; i++) await sleep(5);
    cut += await metric(slow.admin, 'whimbrel_client_gone_total') > gone;
    messages.push({ role: 'assistant', content: last.content });
  }
  console.log(`  at least ${(100 * worst).toFixed(2)} % cached, ${cut} of ${TURNS} cut`);
  assert.ok(cut >= TURNS / 2, 'most were interrupted');
});

await slow.stop();
finish();
