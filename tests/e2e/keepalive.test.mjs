// A silent stream is kept alive in each dialect's own form, and says what it would have said without; a client that lost it asks again and joins it.
import assert from 'node:assert/strict';
import { check, finish, metric, post, startServer, word } from './lib.mjs';

// Slow enough that every silence is longer than the interval, however fast the machine.
const server = await startServer({ set: { 'engine.slow_step_us': 150000, 'engine.draft': 'off', 'server.keepalive_ms': 30 } });
const session = (await post(server.url, '/v1/sessions', { model: 'nano' })).json.id;
const messages = [{ role: 'user', content: 'hello!' }];
const base = { model: 'nano', temperature: 0, stream: true };
const comment = (record) => record === ': ping';
const data = (record) => JSON.parse(record.slice(record.indexOf('data: ') + 6));
const event = (name) => (record) => record.startsWith(`event: ${name}\n`);
const empty = (record) => record !== 'data: [DONE]' && JSON.stringify(data(record).choices) === '[{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]';

const dialects = {
  'chat: comments': { path: '/v1/chat/completions', body: { ...base, messages, max_tokens: 4 }, is: comment, text: (r) => data(r).choices[0].delta.content },
  'chat: empty deltas, for clients that count events': { path: '/v1/chat/completions', body: { ...base, messages, max_tokens: 4, stream_options: { keepalive_chunk: true } }, is: empty, text: (r) => data(r).choices[0].delta.content },
  'completions: comments': { path: '/v1/completions', body: { ...base, prompt: 'hello!', max_tokens: 4 }, is: comment, text: (r) => data(r).choices[0].text },
  'responses: numbered keepalive events': { path: '/v1/responses', body: { ...base, input: 'hello!', max_output_tokens: 4 }, is: event('keepalive'), text: (r) => (event('response.output_text.delta')(r) ? data(r).delta : '') },
  'messages: ping events': { path: '/v1/messages', body: { ...base, messages, max_tokens: 4 }, is: event('ping'), text: (r) => data(r).delta?.text },
  'native turns: comments': { path: `/v1/sessions/${session}/turns`, body: { ...base, items: messages, max_tokens: 4 }, is: comment, text: (r) => (event('turn.delta')(r) ? data(r).delta ?? data(r).text : '') },
};

for (const [name, { path, body, is, text }] of Object.entries(dialects)) {
  await check(`keep-alive ${name}`, async () => {
    const r = await fetch(server.url + path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) });
    assert.equal(r.status, 200);
    const records = (await r.text()).split('\n\n').filter(Boolean);
    assert.ok(records.filter(is).length >= 2, records.join('\n'));
    const rest = records.filter((record) => !is(record) && record !== 'data: [DONE]');
    assert.ok(!rest.some(comment), 'in one form only');
    if (path === '/v1/responses') records.forEach((record, i) => assert.equal(data(record).sequence_number, i));
    if (name.startsWith('native')) return assert.equal(rest.at(-1).split('\n')[0], 'event: turn.completed');
    const still = await post(server.url, path, { ...body, stream: false, stream_options: undefined });
    const said = still.json.choices?.[0].message?.content ?? still.json.choices?.[0].text ?? (still.json.output ?? [still.json]).flatMap((o) => o.content).map((c) => c.text).join('');
    assert.equal(rest.map((record) => text(record) ?? '').join(''), said);
  });
}
for (const [path, more] of [['/v1/chat/completions', { messages, max_tokens: 12 }], ['/v1/responses', { input: 'hello!', max_output_tokens: 12 }], ['/v1/messages', { messages, max_tokens: 12 }]]) {
  await check(`the same request again under its Idempotency-Key joins the stream that runs: ${path}`, async () => {
    const ran = await metric(server.admin, 'whimbrel_engine_requests_total');
    const headers = { 'content-type': 'application/json', 'idempotency-key': word(6) }, body = JSON.stringify({ ...base, ...more, temperature: 1 });
    const ask = () => fetch(server.url + path, { method: 'POST', headers, body });
    const first = (await ask()).body.getReader(), decoder = new TextDecoder();
    let text = decoder.decode((await first.read()).value, { stream: true }); // it has begun
    const second = await ask();
    assert.equal(second.headers.get('idempotent-replayed'), 'true');
    const whole = second.text();
    for (let part; !(part = await first.read()).done;) text += decoder.decode(part.value, { stream: true });
    assert.equal(await whole, text);
    assert.equal(await metric(server.admin, 'whimbrel_engine_requests_total') - ran, 1);
  });
}

await server.stop();
finish();
