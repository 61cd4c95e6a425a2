// The frame: which view is shown, who is logged in, and what stands in the header.
import { h, fill, say, seconds, notice } from './ui.js';
import { call, get, whenLoggedOut } from './api.js';
import * as live from './live.js';
import now from './view_now.js';
import requests from './view_requests.js';
import sessions from './view_sessions.js';
import cache from './view_cache.js';
import keys from './view_keys.js';
import usage from './view_usage.js';
import config from './view_config.js';
import model from './view_model.js';

// A view: {name, title, open(main, path, query) -> close()}; `path` are the parts of the address behind its name.
const views = { now, requests, sessions, cache, keys, usage, config, model };
const main = document.getElementById('main'), nav = document.getElementById('nav');
const status = document.getElementById('state'), feed = document.getElementById('feed'), leave = document.getElementById('leave');
let close = null, shown = '';

const links = Object.entries(views).map(([name, view]) => h('a', { href: `#/${name}` }, view.title));
fill(nav, links);

function show() {
  const [where, search = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [name, ...path] = where.split('/').map(decodeURIComponent);
  const view = views[name] ?? now;
  close?.();
  close = null;
  links.forEach((link, i) => (Object.values(views)[i] === view ? link.setAttribute('aria-current', 'page') : link.removeAttribute('aria-current')));
  nav.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'center' });
  document.title = `${view.title} · Whimbrel`;
  const moved = shown !== '' && shown !== name;
  shown = name;
  const body = h('div.view');
  fill(main, body);
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
