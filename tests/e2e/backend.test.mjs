// A backend that is a module with memory of its own serves what the cpu serves. The module is the tests' own: the cpu's
// operations on memory that faults when the host touches it.
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { build, check, finish, post, startServer, word } from './lib.mjs';

const modules = join(build, 'tests/engine');
if (!existsSync(join(modules, 'whimbrel-hip.so'))) {
  console.log('[skip] backend: this build has no tests/engine/whimbrel-hip.so');
  finish();
}
const prompts = [word(), `List three ${word()} facts.`, 'What is 12 times 7?'];
async function answers(backend) {
  const server = await startServer({ args: ['--backend', backend], env: { WHIMBREL_MODULES: modules } });
  const texts = [];
  for (const content of prompts) {
    const answer = await post(server.url, '/v1/chat/completions', { model: 'nano', temperature: 0, max_tokens: 24, messages: [{ role: 'user', content }] });
    assert.equal(answer.status, 200, answer.text);
    texts.push(answer.json.choices[0].message.content);
  }
  await server.stop();
  return { texts, line: server.line };
}

await check('a module answers as the cpu does', async () => {
  const cpu = await answers('cpu'), module = await answers('hip');
  assert.ok(cpu.texts.every((text) => text.length > 0));
  assert.deepEqual(module.texts, cpu.texts);
  assert.match(cpu.line, / backend=cpu-/);
  assert.match(module.line, / backend=guard /);
});
finish();
