// The frame: which view is shown, who is logged in, and what stands in the header.
import { h, fill, say, seconds, notice } from './ui.js';
import { call, get, whenLoggedOut } from './api.js';
import * as live from './live.js';

// A view is {open(main, path, query) -> close()}, a file that is loaded when it is first shown; `path` are the parts of the address behind its name.
const views = {
  now: ['Now', () => import('./view_now.js')],
  requests: ['Requests', () => import('./view_requests.js')],
  sessions: ['Sessions', () => import('./view_sessions.js')],
  cache: ['Cache', () => import('./view_cache.js')],
  keys: ['Tenants & keys', () => import('./view_keys.js')],
  usage: ['Usage', () => import('./view_usage.js')],
  config: ['Configuration', () => import('./view_config.js')],
  model: ['Model', () => import('./view_model.js')],
};
const main = document.getElementById('main'), nav = document.getElementById('nav');
const status = document.getElementById('state'), feed = document.getElementById('feed'), leave = document.getElementById('leave');
let close = null, shown = '', turn = 0;

const links = Object.entries(views).map(([name, [title]]) => h('a', { href: `#/${name}` }, title));
fill(nav, links);

async function show() {
  const [where, search = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [asked, ...path] = where.split('/').map(decodeURIComponent), name = Object.hasOwn(views, asked) ? asked : 'now';
  const own = ++turn, [title, load] = views[name];
  close?.();
  close = null;
  for (const link of links) link.hash === `#/${name}` ? link.setAttribute('aria-current', 'page') : link.removeAttribute('aria-current');
  nav.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'center' });
  document.title = `${title} · Whimbrel`;
  const moved = shown !== '' && shown !== asked;
  shown = asked;
  const body = h('div.view');
  fill(main, body);
  let view;
  try { view = (await load()).default; } catch { notice('this view could not be loaded', 'bad'); return; }
  if (own !== turn) return; // another was wanted meanwhile
  close = view.open(body, path, new URLSearchParams(search)) ?? null;
  if (moved) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function header() {
  const o = live.state.overview;
  if (o) {
    fill(status, h(`span.dot.${o.status}`), ` ${o.status} `, h('span.more', null, `· ${o.model} on ${o.backend} · up ${seconds(o.uptime_seconds)}`));
  }
  say(feed, { events: 'live', polling: 'polling', off: '', lost: 'no answer, trying again' }[live.state.feed]);
  feed.className = `feed ${live.state.feed}`;
}
live.watch(header);

// ---- logging in ----

let asking = false;
function logIn() {
  if (asking) return;
  asking = true;
  live.stop();
  turn++;
  close?.();
  close = null;
  nav.hidden = leave.hidden = true;
  document.title = 'Log in · Whimbrel';
  const key = h('input', { id: 'key', type: 'password', autocomplete: 'current-password', spellcheck: 'false', required: true, 'aria-describedby': 'why' });
  const why = h('p.bad', { id: 'why', role: 'alert' });
  const form = h('form.login.panel', {
    onsubmit: async (event) => {
      event.preventDefault();
      fill(why);
      try {
        await call('POST', '/admin/v1/session', { key: key.value });
        key.value = '';
        asking = false;
        begin();
      } catch (error) {
        fill(why, error.status === 401 ? 'This key is not valid.' : error.status === 403 ? 'This key lacks the scope admin.' : error.message);
        key.select();
      }
    },
  }, h('h1', null, 'Log in'), h('p.hint', null, 'The server has keys, so these pages ask for one with the scope admin.'),
  h('label', { for: 'key' }, 'Admin key'), key, h('button.main', null, 'Log in'), why);
  fill(main, form);
  key.focus();
}
whenLoggedOut(logIn);

leave.addEventListener('click', async () => {
  try { await call('DELETE', '/admin/v1/session'); } catch { /* it is gone either way */ }
  logIn();
});

function begin() {
  nav.hidden = false;
  live.start(); // first: the first view waits for it alone
  show();
  get('session').then((who) => { leave.hidden = who.via !== 'cookie'; }, (error) => { if (error.status !== 401) notice(error.message, 'bad'); });
}

addEventListener('hashchange', () => { if (!asking) show(); });
begin();
