// The operator's pages: as files, and in a browser against a live server, with names and texts that would run if they were taken for markup.
// A browser is not installed for this: where Debian's chromium (or WHIMBREL_CHROMIUM) is missing, that part is skipped. WHIMBREL_E2E_SHOTS names a
// folder for the pictures of every view.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync, readdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { check, finish, post, root, sleep, startServer, word } from './lib.mjs';

const server = await startServer();
const page_ = (path, headers) => fetch(`${server.admin}${path}`, { headers, redirect: 'manual' });
const files = readdirSync(join(root, 'gateway/dashboard'), { recursive: true }).filter((f) => /\.\w+$/.test(f));

await check('every file of the folder is served, with its type, a policy and an entity tag that saves the second time', async () => {
  const types = { html: 'text/html; charset=utf-8', css: 'text/css; charset=utf-8', js: 'text/javascript; charset=utf-8', svg: 'image/svg+xml', txt: 'text/plain; charset=utf-8' };
  for (const file of files) {
    const response = await page_(`/dashboard/${file}`), etag = response.headers.get('etag');
    assert.equal(response.status, 200, file);
    assert.equal(response.headers.get('content-type'), types[file.split('.').pop()], file);
    assert.match(response.headers.get('content-security-policy'), /^default-src 'self'; /);
    assert.equal(response.headers.get('x-content-type-options'), 'nosniff');
    assert.deepEqual(Buffer.from(await response.arrayBuffer()), readFileSync(join(root, 'gateway/dashboard', file)), file);
    const again = await page_(`/dashboard/${file}`, { 'if-none-match': `"other", ${etag}` });
    assert.equal(again.status, 304);
    assert.equal(again.headers.get('etag'), etag);
    assert.equal(await again.text(), '');
    assert.equal((await page_(`/dashboard/${file}`, { 'if-none-match': '"other"' })).status, 200);
  }
  const { status, headers } = await page_('/dashboard');
  assert.deepEqual([status, headers.get('location')], [302, '/dashboard/']);
  assert.match(await (await page_('/dashboard/')).text(), /<title>Whimbrel<\/title>/);
  for (const path of ['/dashboard/nothing.js', '/dashboard/..%2fserver.c', '/dashboard/vendor/', '/dashboard/index.html/']) assert.equal((await page_(path)).status, 404, path);
  assert.equal((await fetch(`${server.url}/dashboard/`)).status, 404, 'not on the public port');
});

await check('the pages hold nothing inline, ask no other host and have no way to make markup of a text', () => {
  const own = files.filter((f) => !f.startsWith('vendor/'));
  for (const file of own) {
    const text = readFileSync(join(root, 'gateway/dashboard', file), 'utf8');
    assert.doesNotMatch(text, /innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|createContextualFragment/, file);
    assert.doesNotMatch(text.replaceAll('http://www.w3.org/2000/svg', ''), /https?:\/\//, file);
  }
  const html = readFileSync(join(root, 'gateway/dashboard/index.html'), 'utf8');
  assert.doesNotMatch(html, /\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)/);
});

// ---- in a browser ----

const chromium = [process.env.WHIMBREL_CHROMIUM, '/usr/bin/chromium'].find((path) => path && existsSync(path));
if (!chromium) {
  console.log('[skip] dashboard in a browser: no Chromium (apt-get install chromium)');
  await server.stop();
  finish();
}
const folder = join(root, 'tests/e2e/browser');
if (!existsSync(join(folder, 'node_modules'))) execFileSync('npm', ['ci', '--no-audit', '--no-fund', '--ignore-scripts'], { cwd: folder, stdio: 'ignore' });
const require = createRequire(join(folder, 'package.json'));
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
const browser = await require('playwright-core').chromium.launch({ executablePath: chromium, args: ['--no-sandbox', '--disable-dev-shm-usage'] });
const shots = process.env.WHIMBREL_E2E_SHOTS;
if (shots) mkdirSync(shots, { recursive: true });

const evil = `<img src=x onerror="window.hacked=1">`;
const rest = async (path) => (await fetch(`${server.admin}/admin/v1/${path}`)).json();

// Three sessions: one by a header, one native with turns, a fork and a tool's result, one that is about to run while the pages are looked at.
const label = `${evil} ${word()}`, text = `${evil} ${word()}`;
const chat = { model: 'nano', max_tokens: 12, messages: [{ role: 'system', content: text }, { role: 'user', content: text }] };
const ask = async (path, body, headers) => {
  const { status, json, text: said } = await post(server.url, path, body, headers);
  assert.equal(status, 200, said);
  return json;
};
const first = await ask('/v1/chat/completions', chat, { 'x-session-id': label });
await ask('/v1/chat/completions', { ...chat, messages: [...chat.messages, first.choices[0].message, { role: 'user', content: text }] }, { 'x-session-id': label });
const tool = { type: 'function', function: { name: 'read_file', description: evil, parameters: { type: 'object', properties: { path: { type: 'string', description: evil } } } } };
const native = await ask('/v1/sessions', { model: 'nano', system: text, tools: [tool], metadata: { name: label, note: evil } });
const turn = (items, more) => ask(`/v1/sessions/${native.id}/turns`, { items, max_output_tokens: 12, tool_choice: 'none', ...more });
const one = await turn([{ role: 'user', content: text }]);
const call = { id: 'call_1', type: 'function', function: { name: 'read_file', arguments: JSON.stringify({ path: evil }) } };
await turn([{ role: 'user', content: text }, { role: 'assistant', content: '', tool_calls: [call] }, { role: 'tool', tool_call_id: 'call_1', content: evil }]);
await turn([{ role: 'user', content: text }], { parent: one.id });

/** A page with what it complained about; `at` opens a view and waits for what it must show. */
async function open(width, scheme) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
  const page = await context.newPage(), said = [];
  page.on('console', (m) => m.type() === 'error' && said.push(m.text()));
  page.on('pageerror', (e) => said.push(String(e)));
  const at = async (hash, wait) => {
    await page.goto(`${server.admin}/dashboard/#/${hash}`);
    await page.locator(wait).first().waitFor({ timeout: 15000 });
  };
  return { context, page, said, at };
}

/** What every view must be, now that it is shown. */
async function sound({ page, said }, name) {
  assert.deepEqual(said, [], name);
  assert.equal(await page.evaluate('window.hacked'), undefined, `${name}: something ran`);
  assert.equal(await page.locator('img[onerror]').count(), 0);
  assert.ok(await page.evaluate('document.documentElement.scrollWidth <= innerWidth'), `${name} is wider than the screen`);
  await page.evaluate(axe);
  const { violations } = await page.evaluate(`axe.run(document, {resultTypes: ['violations']})`);
  const serious = violations.filter((v) => ['serious', 'critical'].includes(v.impact)).map((v) => `${v.id}: ${v.nodes[0].html.slice(0, 200)}`);
  assert.deepEqual(serious, [], name);
}

const views = [
  ['now', 'now', '.figures .value'], ['requests', 'requests', 'table td'], ['sessions', 'sessions', 'table td'], ['session', `sessions/${native.id}`, 'details.turn'],
  ['cache', 'cache', 'table td'], ['keys', 'keys', 'table td'], ['usage', 'usage', 'tr.total'], ['config', 'config', 'table td'], ['model', 'model', '.facts dd'],
];
// What the views show meanwhile: requests that come, run and end, one after the other.
let loaded = true;
const load = (async () => {
  for (let i = 0; loaded; i++, await sleep(100)) await ask('/v1/chat/completions', { ...chat, max_tokens: 60, messages: [{ role: 'user', content: `${evil} ${word()}` }] }, { 'x-session-id': `${evil} load ${i % 3}` });
})();
for (const [width, scheme] of [[1440, 'light'], [390, 'dark'], [1440, 'dark'], [390, 'light']].slice(0, shots ? 4 : 2)) {
  const tab = await open(width, scheme);
  for (const [name, hash, wait] of views)
    await check(`${name}, ${width} px, ${scheme}: shown, quiet, not wider than the screen, no serious axe violation, no text taken for markup`, async () => {
      await tab.at(hash, wait);
      if (name === 'now') await tab.page.locator('.u-wrap').first().waitFor();
      if (name === 'session') {
        await tab.page.locator('details.turn summary').last().click();
        await tab.page.getByRole('button', { name: 'Exact tokens' }).click();
        await tab.page.locator('.tokens span').first().waitFor();
      }
      await sound(tab, name);
      if (shots) await tab.page.screenshot({ path: join(shots, `${name}-${width}-${scheme}.png`), fullPage: true });
    });
  await tab.context.close();
}
loaded = false;
await load;

await check('the first view: its figures, and what it costs to keep them new', async () => {
  const ms = [];
  for (let i = 0; i < 3; i++) {
    const { context, page } = await open(1440, 'light');
    await page.addInitScript(() => new MutationObserver(() => { window.usable ??= document.querySelector('.figures .value')?.textContent ? performance.now() : undefined; })
      .observe(document, { childList: true, subtree: true, characterData: true }));
    await page.goto(`${server.admin}/dashboard/`);
    ms.push(await (await page.waitForFunction(() => window.usable)).jsonValue());
    if (i === 2) {
      const cdp = await context.newCDPSession(page);
      await cdp.send('Performance.enable');
      const spent = async () => [(await cdp.send('Performance.getMetrics')).metrics.find((m) => m.name === 'TaskDuration').value, (await rest('overview')).process.cpu_seconds];
      await sleep(2500);
      const before = await spent(), begin = Date.now();
      await sleep(6000);
      const share = (await spent()).map((v, k) => ((v - before[k]) / (Date.now() - begin)) * 1e5);
      console.log(`  figures after ${ms.map((t) => t.toFixed(0)).join(', ')} ms; updates take ${share[0].toFixed(2)} % of a core in the page, ${share[1].toFixed(2)} % in the server`);
    }
    await context.close();
  }
});

const tab = await open(1440, 'light'), { page } = tab;
/** The value beside a name, its digits alone. */
const fact = async (name) => Number((await page.locator('.facts > div', { has: page.locator(`dt:text-is("${name}")`) }).first().locator('dd').innerText()).replace(/ ?\(.*| ·.*/s, '').replaceAll(/[^\d.]/g, ''));
const cells = async (row) => (await row.locator('td').allInnerTexts()).map((t) => t.trim());

await check('numbers are the ones of the REST: totals, cache, usage by tenant and tool, model', async () => {
  await tab.at('now', '.facts dd');
  const { totals } = await rest('overview');
  assert.ok(totals.turns >= 5 && totals.cached_tokens > 0, 'there is something to show');
  assert.equal(await fact('Turns'), totals.turns);
  assert.equal(await fact('Prompt tokens'), totals.prompt_tokens);
  assert.equal(await fact('Cached tokens'), totals.cached_tokens);
  assert.equal(await fact('Output tokens'), totals.output_tokens);
  await tab.at('cache', 'table td');
  const cache = await rest('cache');
  assert.equal(await fact('Prompt tokens'), cache.prompt_tokens);
  assert.equal(await fact('From the cache'), cache.cached_tokens);
  const reasons = page.locator('section', { has: page.locator('h2:text-is("Why no more was cached")') }).locator('tbody tr');
  const shown = await Promise.all((await reasons.all()).map(cells));
  assert.deepEqual(shown.map((r) => Number(r[1].replaceAll(/\s/g, ''))).sort(), Object.values(cache.reasons).map((r) => r.turns).filter(Boolean).sort());
  await tab.at('usage', 'tr.total');
  const usage = await rest('usage'), total = await cells(page.locator('tr.total').first());
  assert.deepEqual([total[1], total[2], total[3], total[5]].map((t) => Number(t.replaceAll(/\s/g, ''))), ['turns', 'prompt_tokens', 'cached_tokens', 'output_tokens'].map((k) => usage.totals[k]));
  await page.getByLabel('By', { exact: true }).selectOption('tool');
  await page.locator('td:text-is("read_file")').waitFor();
  const report = await rest('usage?by=tool'), row = report.data.find((r) => r.tool === 'read_file');
  assert.equal(Number((await cells(page.locator('tr', { has: page.locator('td:text-is("read_file")') })))[1]), row.turns);
  await tab.at('model', '.facts dd');
  assert.equal(await fact('Window'), (await rest('model')).context_max);
});

await check('sessions: search finds by name, the tree has the fork, a turn tells what was cached and why, its items and exact tokens', async () => {
  await tab.at('sessions', 'table td');
  await page.getByLabel('Search sessions').fill(label.slice(-6));
  await page.getByRole('button', { name: 'Search' }).click();
  await page.waitForFunction(() => document.querySelectorAll('tbody tr').length === 2);
  await page.locator('tbody tr', { hasText: 'native' }).locator('a').click();
  await page.locator('details.turn').nth(2).waitFor();
  assert.equal(await page.locator('.branch details.turn').count(), 1, 'the fork is a branch');
  const { data } = await rest(`sessions/${native.id}/turns?order=asc`);
  const rows = await page.locator('details.turn summary').allInnerTexts();
  for (const t of data) assert.ok(rows.some((r) => r.replaceAll(/\s/g, '').includes(`${t.usage.cached_tokens}/${t.usage.prompt_tokens}`)), t.id);
  for (const t of data) if (t.cache.reason) assert.ok(rows.some((r) => r.includes(t.cache.reason)), t.cache.reason);
  assert.ok(rows.some((r) => r.includes('after read_file')));
  const answered = page.locator('details.turn', { hasText: 'after read_file' });
  await answered.locator('summary').click();
  await answered.locator('.call').waitFor();
  assert.ok((await answered.locator('.items').innerText()).includes(evil), 'texts are shown as they are');
  await answered.getByRole('button', { name: 'Exact tokens' }).click();
  await answered.locator('.tokens span').first().waitFor();
  const full = await rest(`turns/${data[1].id}?include=tokens&limit=1000`);
  assert.equal(await answered.locator('.tokens span').count(), full.tokens.ids.length);
  assert.equal(await answered.locator('.tokens .was').count(), data[1].usage.cached_tokens);
});

await check('requests that live are told by events, shown in their phase, and can be cancelled', async () => {
  await tab.at('requests', 'canvas');
  await page.locator('#feed.events').waitFor();
  const running = fetch(`${server.url}/v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ model: 'nano', prompt: word(), max_tokens: 20000, ignore_eos: true, stream: true }) }).then((r) => r.text());
  await page.getByRole('button', { name: /^Cancel req_/ }).click();
  await running;
  await page.locator('tbody tr', { hasText: 'cancelled' }).waitFor();
});

await check('configuration: a live key changes, a wrong value is said beside it; draining and back', async () => {
  await tab.at('config', 'table td');
  await page.getByLabel('log.level', { exact: true }).fill('loud');
  await page.getByRole('button', { name: 'Set log.level' }).click();
  await page.locator('td .bad', { hasText: 'log.level' }).waitFor();
  assert.equal((await rest('config')).config.log.level, 'info');
  tab.said.length = 0; // the browser reports the 400 that was wanted
  await page.getByLabel('log.level', { exact: true }).fill('warn');
  await page.getByRole('button', { name: 'Set log.level' }).click();
  await page.locator('#says', { hasText: 'log.level is warn' }).waitFor();
  assert.equal((await rest('config')).config.log.level, 'warn');
  await page.getByRole('button', { name: 'Drain' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Drain' }).click();
  await page.getByRole('button', { name: 'Resume' }).click();
  await page.getByRole('button', { name: 'Drain' }).waitFor();
  assert.equal((await rest('overview')).status, 'ready');
});

await check('a hidden tab asks for nothing; shown again it goes on', async () => {
  await tab.at('now', '.u-wrap');
  const asked = [], hide = (hidden) => page.evaluate((h) => { Object.defineProperty(document, 'hidden', { value: h, configurable: true }); document.dispatchEvent(new Event('visibilitychange')); }, hidden);
  await hide(true);
  await sleep(200);
  page.on('request', (r) => asked.push(r.url()));
  await sleep(2500); // longer than the period
  assert.deepEqual(asked, []);
  const again = page.waitForRequest(/overview/);
  await hide(false);
  await again;
});

await check('keys: one is made and shown once; from then on the pages ask for one, keep it in a cookie that scripts cannot read, and let go of it', async () => {
  await tab.at('keys', 'form');
  await page.getByLabel('Label').fill(evil);
  await page.getByLabel('Admin').check();
  await page.getByRole('button', { name: 'Make a key' }).click();
  const key = await page.locator('.secret').innerText();
  assert.equal((await fetch(`${server.admin}/admin/v1/keys`, { headers: { 'x-api-key': key } })).status, 200);
  await page.getByRole('button', { name: 'Done' }).click();
  await page.getByRole('heading', { name: 'Log in' }).waitFor();
  await page.locator('.secret').waitFor({ state: 'detached' });
  assert.ok(!(await page.content()).includes(key), 'shown once');
  tab.said.length = 0; // the 401 that brought the form
  await page.getByLabel('Admin key').fill('wb_wrong_and_long_enough');
  await page.getByRole('button', { name: 'Log in' }).click();
  await page.getByText('This key is not valid.').waitFor();
  tab.said.length = 0;
  await sound(tab, 'log-in');
  if (shots) await page.screenshot({ path: join(shots, 'login-1440-light.png') });
  await page.getByLabel('Admin key').fill(key);
  await page.keyboard.press('Enter');
  await page.locator('td', { hasText: evil }).waitFor();
  const [cookie] = await tab.context.cookies();
  assert.deepEqual([cookie.httpOnly, cookie.sameSite], [true, 'Strict']);
  assert.ok(!cookie.value.includes(key));
  assert.deepEqual(await page.evaluate('[document.cookie, localStorage.length, sessionStorage.length]'), ['', 0, 0]);
  await page.getByRole('button', { name: `Revoke ${evil}` }).waitFor();
  await sound(tab, 'keys');
  await page.getByRole('button', { name: 'Log out' }).click();
  await page.getByRole('heading', { name: 'Log in' }).waitFor();
  assert.equal((await tab.context.cookies()).length, 0);
});

await browser.close();
await server.stop();
finish();
