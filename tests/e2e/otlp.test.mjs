// Spans of requests, as a trace collector gets them: OTLP over HTTP in its JSON form (field names of opentelemetry-proto's trace.proto).
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { createServer } from 'node:http';
import { check, finish, metric, post, runToExit, sleep, startServer, word } from './lib.mjs';

const messages = []; // what came, oldest first
let status = 200;
const collector = createServer((request, response) => {
  let text = '';
  request.on('data', (d) => { text += d; });
  request.on('end', () => {
    if (status === 200) messages.push({ path: request.url, type: request.headers['content-type'], text });
    response.writeHead(status).end('{}');
  });
});
await new Promise((done) => collector.listen(0, '127.0.0.1', done));
const endpoint = `http://127.0.0.1:${collector.address().port}/v1/traces`;
const server = await startServer({ set: { 'otlp.endpoint': endpoint } });

const hex = (bytes) => randomBytes(bytes).toString('hex');
const said = word();
const chat = async (headers, more) => {
  const r = await post(server.url, '/v1/chat/completions', { model: 'nano', max_tokens: 12, messages: [{ role: 'user', content: said }], ...more }, headers);
  assert.equal(r.status, 200, r.text);
  return r.json.usage;
};
const spans = () => messages.flatMap((m) => JSON.parse(m.text).resourceSpans.flatMap((r) => r.scopeSpans.flatMap((s) => s.spans)));
/** The spans of a trace, once there are any. */
async function trace(find) {
  for (let i = 0; i < 300; i++) {
    const root = spans().find((s) => s.kind === 2 && find(s));
    if (root) return { root, children: spans().filter((s) => s.traceId === root.traceId && s.spanId !== root.spanId) };
    await sleep(50);
  }
  assert.fail('no such span came');
}
const value = (span, key) => { const v = span.attributes.find((a) => a.key === key)?.value; return v?.stringValue ?? (v?.intValue === undefined ? v?.arrayValue?.values.map((x) => x.stringValue) : Number(v.intValue)); };

await check("a request is a span of its client's trace, its phases below it, its counts those of usage, and no text in it", async () => {
  const id = hex(16), parent = hex(8);
  const usage = await chat({ traceparent: `00-${id}-${parent}-01`, 'x-session-id': said });
  const { root, children } = await trace((s) => s.traceId === id);
  assert.equal(root.parentSpanId, parent);
  assert.match(root.spanId, /^[0-9a-f]{16}$/);
  assert.notEqual(root.spanId, parent);
  assert.equal(root.name, 'chat nano');
  assert.deepEqual(children.map((c) => c.name).sort(), ['decode', 'prefill', 'queue']);
  for (const c of children) {
    assert.equal(c.parentSpanId, root.spanId);
    assert.equal(c.kind, 1);
    assert.ok(BigInt(c.startTimeUnixNano) >= BigInt(root.startTimeUnixNano) && BigInt(c.endTimeUnixNano) <= BigInt(root.endTimeUnixNano), c.name);
  }
  assert.ok(Math.abs(Number(BigInt(root.startTimeUnixNano) / 1000000n) - Date.now()) < 60000);
  assert.equal(value(root, 'gen_ai.usage.input_tokens'), usage.prompt_tokens);
  assert.equal(value(root, 'gen_ai.usage.cache_read.input_tokens'), usage.prompt_tokens_details.cached_tokens);
  assert.equal(value(root, 'gen_ai.usage.output_tokens'), usage.completion_tokens);
  assert.equal(value(root, 'whimbrel.session'), usage.whimbrel.session);
  assert.equal(value(root, 'whimbrel.turn'), usage.whimbrel.turn);
  assert.equal(value(root, 'http.response.status_code'), 200);
  assert.equal(value(root, 'gen_ai.response.finish_reasons').length, 1);
  assert.deepEqual(root.status, {});
  const [message] = messages;
  assert.equal(message.path, '/v1/traces');
  assert.equal(message.type, 'application/json');
  assert.ok(!message.text.includes(said), 'the label and the prompt stay here');
});

await check('without a traceparent, or with a malformed one, it is a trace of its own; one that its client does not record is not sent', async () => {
  const own = await chat(), odd = await chat({ traceparent: '00-xyz-01' });
  const hushed = hex(16);
  await chat({ traceparent: `00-${hushed}-${hex(8)}-00` });
  const last = await chat();
  for (const usage of [own, odd, last]) {
    const { root, children } = await trace((s) => value(s, 'whimbrel.turn') === usage.whimbrel.turn);
    assert.match(root.traceId, /^[0-9a-f]{32}$/);
    assert.equal(root.parentSpanId, '');
    assert.equal(children.length, 3);
  }
  assert.ok(!spans().some((s) => s.traceId === hushed));
});

await check('a collector that is busy is tried again; what it refuses is counted', async () => {
  status = 503;
  const usage = await chat();
  await sleep(1500);
  status = 200;
  await trace((s) => value(s, 'whimbrel.turn') === usage.whimbrel.turn);
  status = 400;
  await chat();
  for (let i = 0; i < 100 && !(await metric(server.admin, 'whimbrel_otlp_failed_total')); i++) await sleep(50);
  assert.equal(await metric(server.admin, 'whimbrel_otlp_failed_total'), 1);
  assert.equal(await metric(server.admin, 'whimbrel_otlp_dropped_total'), 0);
  status = 200;
});

await check('what waits is sent when the server stops', async () => {
  const usage = await chat();
  await server.stop();
  assert.ok(spans().some((s) => s.kind === 2 && value(s, 'whimbrel.turn') === usage.whimbrel.turn));
});

await check('a collector that is not there costs nobody anything; what is no URL is refused at the start', async () => {
  const lonely = await startServer({ set: { 'otlp.endpoint': 'http://127.0.0.1:9/v1/traces' } });
  const r = await post(lonely.url, '/v1/completions', { model: 'nano', prompt: said, max_tokens: 4 });
  assert.equal(r.status, 200);
  const begin = Date.now();
  await lonely.stop();
  assert.ok(Date.now() - begin < 20000);
  const wrong = await runToExit(['--model', 'config/models/nano', '--listen', '127.0.0.1:0', '--set', 'otlp.endpoint=collector:4318']);
  assert.equal(wrong.code, 2);
  assert.match(wrong.log, /otlp\.endpoint collector:4318 is no URL/);
});

collector.close();
finish();
