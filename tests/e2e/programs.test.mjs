// Agent programs as their users run them, headless, with their own prompts and tools: two turns each, the session resumed. What the little model
// says does not matter; that nothing breaks, and that the second turn finds the first one in the cache, does. Those that are not installed are
// skipped. To have them all: npm install --ignore-scripts --prefix DIR PACKAGE…, and WHIMBREL_E2E_PROGRAMS=DIR. Names on the command line choose.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { check, finish, root, sleep, startServer } from './lib.mjs';

const LIMIT_MS = 120000;
const folders = [process.env.WHIMBREL_E2E_PROGRAMS, join(root, 'tests/e2e')].filter(Boolean).map((dir) => join(dir, 'node_modules'));
const cpu = { x64: 'x64', arm64: 'arm64' }[process.arch];

const server = await startServer({ set: { 'limits.output_tokens_max': 256, 'model.aliases': '*' } });
const v1 = `${server.url}/v1`;

const programs = [
  {
    name: 'claude-code', package: '@anthropic-ai/claude-code', file: `@anthropic-ai/claude-code-linux-${cpu}/claude`,
    env: { ANTHROPIC_BASE_URL: server.url, ANTHROPIC_AUTH_TOKEN: 'none', ANTHROPIC_MODEL: 'nano', ANTHROPIC_DEFAULT_HAIKU_MODEL: 'nano', CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1' },
    first: (prompt) => ['-p', prompt, '--output-format', 'json'],
    again: (prompt, { session_id }) => ['-p', prompt, '--resume', session_id, '--output-format', 'json'],
    read(out) {
      const result = JSON.parse(out);
      assert.equal(result.type, 'result');
      // A model that talks past its limit is told so; that is no fault of the protocol. The program then counts nothing.
      if (result.is_error) assert.equal(result.api_error, 'max_output_tokens', out);
      else assert.ok(result.usage.input_tokens + result.usage.cache_creation_input_tokens + result.usage.cache_read_input_tokens > 4000, out);
      return result;
    },
  },
  {
    name: 'codex', package: '@openai/codex', file: `@openai/codex-linux-${cpu}/vendor/${{ x64: 'x86_64', arm64: 'aarch64' }[cpu]}-unknown-linux-musl/bin/codex`,
    files: { '.codex/config.toml': `model = "nano"\nmodel_provider = "whimbrel"\nmodel_context_window = 32768\ncheck_for_update_on_startup = false\n` +
      `[analytics]\nenabled = false\n[model_providers.whimbrel]\nname = "Whimbrel"\nbase_url = "${v1}"\nwire_api = "responses"\n` },
    first: (prompt) => ['exec', '--json', '--skip-git-repo-check', prompt],
    again: (prompt, { thread_id }) => ['exec', 'resume', thread_id, '--json', '--skip-git-repo-check', prompt],
    read(out) {
      const events = out.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));
      const end = events.at(-1);
      if (end.type === 'turn.failed') assert.equal(end.error.message, 'Incomplete response returned, reason: max_output_tokens');
      else assert.equal(end.type, 'turn.completed', out);
      if (end.usage) assert.ok(end.usage.input_tokens > 4000 && end.usage.cached_input_tokens <= end.usage.input_tokens);
      return events.find((e) => e.type === 'thread.started');
    },
  },
  {
    name: 'opencode', package: 'opencode-ai', file: `opencode-linux-${cpu}/bin/opencode`,
    env: { OPENCODE_DISABLE_MODELS_FETCH: '1', OPENCODE_DISABLE_AUTOUPDATE: '1', OPENCODE_DISABLE_LSP_DOWNLOAD: '1', OPENCODE_DISABLE_DEFAULT_PLUGINS: '1' },
    files: { 'project/opencode.json': JSON.stringify({ model: 'whimbrel/nano', small_model: 'whimbrel/nano', autoupdate: false, share: 'disabled',
      provider: { whimbrel: { npm: '@ai-sdk/openai-compatible', name: 'Whimbrel', options: { baseURL: v1, apiKey: 'none' },
        models: { nano: { name: 'nano', limit: { context: 32768, output: 4096 } } } } } }) },
    first: (prompt) => ['run', '--format', 'json', prompt],
    again: (prompt, { sessionID }) => ['run', '--session', sessionID, '--format', 'json', prompt],
    read(out) {
      const events = out.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));
      assert.ok(!events.some((e) => e.type === 'error'), out);
      const end = events.findLast((e) => e.type === 'step_finish');
      assert.ok(end && end.part.tokens.input + end.part.tokens.cache.read > 4000, out);
      return end;
    },
  },
  {
    name: 'qwen-code', package: '@qwen-code/qwen-code', file: ['@qwen-code/qwen-code/cli-entry.js', '@qwen-code/qwen-code/cli.js'], script: true,
    // It sends everything through a proxy that is set, whatever NO_PROXY says, and would not reach the server.
    env: { OPENAI_BASE_URL: v1, OPENAI_API_KEY: 'none', OPENAI_MODEL: 'nano', QWEN_TELEMETRY_ENABLED: 'false', HTTPS_PROXY: '' },
    files: { '.qwen/settings.json': JSON.stringify({ privacy: { usageStatisticsEnabled: false }, general: { enableAutoUpdate: false } }) },
    first: (prompt) => ['-p', prompt, '--auth-type', 'openai', '--output-format', 'json'],
    again: (prompt, { session_id }) => ['-p', prompt, '--resume', session_id, '--auth-type', 'openai', '--output-format', 'json'],
    read(out) {
      const events = JSON.parse(out.slice(out.indexOf('[{')));
      const end = events.at(-1);
      assert.equal(end.type, 'result', out);
      assert.ok(!end.is_error, JSON.stringify(end));
      assert.ok(end.usage.input_tokens > 4000, JSON.stringify(end.usage));
      return end;
    },
  },
  {
    name: 'cline', package: 'cline', file: `@cline/cli-linux-${cpu}/bin/cline`,
    files: { '.cline/data/settings/providers.json': JSON.stringify({ version: 1, lastUsedProvider: 'openai-compatible', modes: {},
      providers: { 'openai-compatible': { settings: { provider: 'openai-compatible', apiKey: 'none', model: 'nano', baseUrl: v1 }, updatedAt: new Date().toISOString(), tokenSource: 'manual' } } }) },
    first: (prompt) => ['--json', prompt],
    // It resumes on a terminal only, so this is another session with the same instructions and tools.
    again: (prompt) => ['--json', prompt],
    read(out) {
      const end = out.split('\n').filter((line) => line.startsWith('{"ts"')).map((line) => JSON.parse(line)).findLast((e) => e.type === 'run_result');
      assert.ok(end, out);
      assert.equal(end.finishReason, 'completed', out);
      assert.ok(end.usage.inputTokens > 4000 && end.usage.cacheReadTokens <= end.usage.inputTokens);
      return end;
    },
  },
];

/** A run with nothing of this process's environment, and no way out but to this machine. */
function runner(program, path, home) {
  const [command, ...before] = program.script ? [process.execPath, path] : [path];
  const env = { HOME: home, PATH: `${dirname(process.execPath)}:/usr/bin:/bin`, TERM: 'dumb', HTTPS_PROXY: 'http://127.0.0.1:9', NO_PROXY: '127.0.0.1', ...program.env };
  return (args) => new Promise((resolve, reject) => {
    const child = spawn(command, [...before, ...args], { cwd: join(home, 'project'), env, stdio: ['ignore', 'pipe', 'pipe'], detached: true });
    let out = '', log = '';
    child.stdout.on('data', (bytes) => (out += bytes));
    child.stderr.on('data', (bytes) => (log += bytes));
    const timer = setTimeout(() => { process.kill(-child.pid, 'SIGKILL'); reject(new Error(`no end after ${LIMIT_MS} ms:\n${out}\n${log}`)); }, LIMIT_MS);
    child.on('error', reject);
    child.on('exit', () => { clearTimeout(timer); resolve({ out, log }); });
  });
}

/** Ends what a program left behind (one keeps a daemon in a session of its own): every process whose HOME is the one made for it. */
async function endAll(home) {
  const left = () => readdirSync('/proc').filter((pid) => /^\d+$/.test(pid)).filter((pid) => {
    try { return readFileSync(`/proc/${pid}/environ`, 'latin1').split('\0').includes(`HOME=${home}`); } catch { return false; } // gone, or not ours to read
  });
  for (let i = 0; i < 50 && left().length; i++) {
    for (const pid of left()) try { process.kill(Number(pid), 'SIGKILL'); } catch { /* it ended by itself */ }
    await sleep(20);
  }
  assert.deepEqual(left(), [], 'processes that do not end');
}

/** What the server wrote of the turns since `mark`. */
const turns = (mark) => server.log().slice(mark).split('\n').filter((line) => line.includes(' turn_over '))
  .map((line) => Object.fromEntries(line.split(' ').map((pair) => pair.split('='))));

/** Two turns; the cached share of each one's long requests. */
async function play(program, path, home) {
  const start = runner(program, path, home), shares = [];
  let session;
  for (const prompt of ['hello there', 'hello again']) {
    const mark = server.log().length, began = Date.now();
    const { out, log } = await start(session ? program.again(prompt, session) : program.first(prompt));
    let end;
    try { end = program.read(out); } catch (error) { error.message += `\n${log}`; throw error; }
    session ??= end;
    for (let i = 0; i < 100 && turns(mark).length === 0; i++) await sleep(20);
    await sleep(50); // its last line may still be on its way
    const made = turns(mark);
    assert.ok(made.length > 0);
    for (const turn of made) assert.ok(turn.status === '200' && !turn.error, JSON.stringify(turn));
    // Beside the conversation some ask for a title or the like.
    const long = made.filter((turn) => Number(turn.prompt) > 4000);
    assert.ok(long.length > 0, JSON.stringify(made));
    const sum = (key) => long.reduce((all, turn) => all + Number(turn[key]), 0);
    shares.push(sum('cached') / sum('prompt'));
    console.log(`  ${program.name}: ${made.length} requests, prompts of up to ${Math.max(...made.map((t) => Number(t.prompt)))} tokens, ` +
      `cached share ${shares.at(-1).toFixed(3)}, ${((Date.now() - began) / 1000).toFixed(1)} s`);
  }
  return shares;
}

for (const program of programs.filter(({ name }) => process.argv.length < 3 || process.argv.includes(name))) {
  const path = folders.flatMap((folder) => [program.file].flat().map((file) => join(folder, file))).find(existsSync);
  if (!path) {
    console.log(`[skip] ${program.name} is not installed (${program.package})`);
    continue;
  }
  await check(`${program.name}: two turns, the session resumed; the second finds the first in the cache`, async () => {
    const home = mkdtempSync(join(tmpdir(), 'whimbrel-home-'));
    mkdirSync(join(home, 'project'));
    for (const [file, text] of Object.entries(program.files ?? {})) {
      mkdirSync(dirname(join(home, file)), { recursive: true });
      writeFileSync(join(home, file), text);
    }
    try {
      const shares = await play(program, path, home);
      assert.ok(shares[1] >= 0.95, `cached share ${shares[1]}`);
    } finally {
      await endAll(home);
      rmSync(home, { recursive: true, force: true });
    }
  });
}

await server.stop();
finish();
