// What changes by itself: the overview, asked for every two seconds, and the requests, told by server-sent events. Nothing runs while the tab is
// hidden. Where the event stream fails, the requests are polled with the overview.
import { call, get } from './api.js';

const PERIOD_MS = 2000;
const POINTS_MAX = 300; // of the charts: ten minutes
const REQUESTS_MAX = 512; // those that ended; what the server remembers, too
const BURST_MS = 700; // events within it are one drawing
const RETRY_MS = 10000; // of the event stream

export const state = {
  overview: null,
  history: [], // {at, overview, cpu}: cpu in cores since the point before
  requests: new Map(), // by id, oldest first
  skew_ms: 0, // what to add to this clock for the server's
  feed: 'off', // events, polling, off, lost
};

const listeners = new Set();
/** Calls `run` after every change until the returned function is called. */
export function watch(run) {
  listeners.add(run);
  return () => listeners.delete(run);
}
const tell = (what) => listeners.forEach((run) => run(what));

export const serverNow = () => Date.now() + state.skew_ms;

let timer = 0, source = null, retry_at = 0, wanted = false, round = 0;

function take(request) {
  state.requests.set(request.id, request);
  if (state.requests.size <= 2 * REQUESTS_MAX) return;
  for (const [key, old] of state.requests) {
    if (old.phase === 'done') state.requests.delete(key);
    if (state.requests.size <= REQUESTS_MAX) break;
  }
}

function takeOverview(overview) {
  const before = state.history.at(-1), process = overview.process;
  state.skew_ms = overview.now_ms - Date.now();
  state.overview = overview;
  const span = before ? (overview.now_ms - before.overview.now_ms) / 1000 : 0;
  const same = before && before.overview.started_at === overview.started_at && span > 0;
  const cpu = same && process ? Math.max(0, (process.cpu_seconds - before.overview.process.cpu_seconds) / span) : null;
  if (before && !same) state.history.length = 0; // another start of the server
  state.history.push({ at: overview.now_ms / 1000, overview, cpu });
  if (state.history.length > POINTS_MAX) state.history.shift();
}

async function takeRequests() {
  const { data } = await get('requests', { recent: REQUESTS_MAX });
  state.requests = new Map(data.map((r) => [r.id, r]));
}

function listen() {
  if (source || Date.now() < retry_at) return;
  retry_at = Date.now() + RETRY_MS;
  const stream = new EventSource('/admin/v1/events');
  source = stream;
  const json = (event) => JSON.parse(event.data);
  stream.onopen = () => { state.feed = 'events'; takeRequests().catch(() => {}); };
  stream.onerror = () => { // an error that ends the stream ends it here, too: the next round polls and, later, tries again
    stream.close();
    if (source === stream) { source = null; state.feed = 'polling'; }
  };
  for (const name of ['request.started', 'request.phase', 'request.ended'])
    stream.addEventListener(name, (event) => { take(json(event)); later(); });
  stream.addEventListener('lost', () => takeRequests().catch(() => {}));
  stream.addEventListener('config.changed', () => tell('config'));
  stream.addEventListener('drain.changed', () => tick());
}

let due = 0;
function later() {
  due ||= setTimeout(() => { due = 0; tell('requests'); }, BURST_MS);
}

async function tick() {
  clearTimeout(timer);
  if (!wanted || document.hidden) return;
  const own = ++round;
  try {
    listen();
    takeOverview(await call('GET', '/admin/v1/overview'));
    if (state.feed !== 'events') await takeRequests();
    if (state.feed !== 'events') state.feed = 'polling';
  } catch (error) {
    state.feed = error.status === 401 ? 'off' : 'lost';
    if (error.status === 401) stop();
  }
  if (own !== round) return;
  tell('overview');
  if (wanted) timer = setTimeout(tick, PERIOD_MS);
}

function hush() {
  clearTimeout(timer);
  round++;
  source?.close();
  source = null;
  retry_at = 0;
  state.feed = 'off';
}

export function start() {
  wanted = true;
  return tick();
}
export function stop() {
  wanted = false;
  hush();
}
document.addEventListener('visibilitychange', () => {
  if (document.hidden) hush();
  else if (wanted) tick();
});
