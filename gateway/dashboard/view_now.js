// What the server does at this moment.
import { h, fill, say, liveTable, panel, facts, bar, count, rate, bytes, seconds, percent, id, when, fixed, none } from './ui.js';
import { chart } from './chart.js';
import { state, watch, serverNow } from './live.js';

const LINES_MAX = 12;
const ms = (value) => seconds(value == null ? null : value / 1000);

/** A figure: a name, a large value, a line below. update(value, below). */
function figure(name) {
  const value = h('dd.value'), below = h('dd.below');
  return { node: h('div', null, h('dt', null, name), value, below), update(text, more = '') { say(value, text); say(below, more); } };
}

const tierNames = { memory: 'Memory', disk: 'Disk' };
/** The tiers of the cache, of overview or cache: one line each. */
export const tierTable = () => liveTable('Tiers of the cache', [
  { name: 'Tier', cell: (t) => tierNames[t.name] ?? t.name },
  { name: 'Held', num: true, cell: (t) => bytes(t.bytes) },
  { name: 'Of', num: true, cell: (t) => (t.bytes_max ? bytes(t.bytes_max) : 'no bound') },
  { name: 'Full', num: true, cell: (t) => (t.bytes_max ? percent(t.bytes, t.bytes_max) : none) },
  { name: '', cell: (t) => bar([{ size: t.bytes, kind: 'held' }], t.bytes_max || t.bytes, `${tierNames[t.name] ?? t.name}: ${bytes(t.bytes)}`) },
], { empty: 'No tier is open.' });

export default {
  open(main) {
    const f = Object.fromEntries(Object.entries({
      out: 'Output', ttft: 'First token', itl: 'Between tokens', running: 'Running', queue: 'Queue',
      accepted: 'Accepted length', cached: 'Prompt from cache', cpu: 'CPU', memory: 'Memory', saved: 'Prefill saved',
    }).map(([key, name]) => [key, figure(name)]));
    const win = (key, p) => (point) => point.overview.window[key][p];
    const charts = [
      chart('Output tokens a second', [{ name: 'all streams', color: '--decode', fill: true, value: (p) => p.overview.window.output_tokens_per_second }], rate),
      chart('Time to first token', [{ name: 'p50', color: '--prefill', value: win('ttft_ms', 'p50') }, { name: 'p99', color: '--queue', value: win('ttft_ms', 'p99') }], ms),
      chart('Between tokens', [{ name: 'p50', color: '--prefill', value: win('itl_ms', 'p50') }, { name: 'p99', color: '--queue', value: win('itl_ms', 'p99') }], ms),
      chart('Requests by phase', [
        { name: 'queued', color: '--queue', value: (p) => p.overview.phases.queue },
        { name: 'prefill', color: '--prefill', value: (p) => p.overview.phases.prefill },
        { name: 'decode', color: '--decode', fill: true, value: (p) => p.overview.phases.decode }], count, true),
      chart('CPU, cores', [{ name: 'this process', color: '--accent', fill: true, value: (p) => p.cpu }], (v) => fixed(v, 2)),
      chart('Accepted length', [{ name: 'tokens a pass', color: '--accent', value: (p) => p.overview.window.accepted_length }], (v) => fixed(v, 2)),
    ];
    const held = tierTable(), totals = h('div'), others = h('p.hint');
    const running = liveTable('Requests that live', [
      { name: 'Session', cell: (r) => r.label ?? (r.session ? id(r.session) : none) },
      { name: 'Phase', cell: (r) => h(`span.phase.${r.phase}`, null, r.phase) },
      { name: 'Prompt', num: true, cell: (r) => count(r.prompt_tokens) },
      { name: 'Cached', num: true, cell: (r) => (r.cached_tokens === null ? none : percent(r.cached_tokens, r.prompt_tokens)) },
      { name: 'Output', num: true, cell: (r) => count(r.output_tokens) },
      { name: 'Accepted', num: true, cell: (r) => fixed(r.accepted_length, 2) },
      { name: 'For', num: true, cell: (r) => seconds(Math.max(0, serverNow() - r.received_ms) / 1000) },
      { name: 'Tenant', cell: (r) => r.tenant },
      { name: 'Request', cell: (r) => id(r.id) },
    ], { empty: 'Nothing runs.' });
    fill(main, h('h1.away', null, 'Now'), h('dl.figures', null, Object.values(f).map((one) => one.node)),
      h('div.charts', null, charts.map((c) => c.node)),
      panel('Running', h('a', { href: '#/requests' }, 'Timeline'), running.node, others),
      h('div.pair', null, panel('Tiers', h('a', { href: '#/cache' }, 'Cache'), held.node), panel('Since the start', h('a', { href: '#/usage' }, 'Usage'), totals)));

    let open = true;
    const drawRunning = () => {
      const list = [...state.requests.values()].filter((r) => r.phase !== 'done');
      running.update(list.slice(0, LINES_MAX));
      say(others, list.length > LINES_MAX ? `and ${count(list.length - LINES_MAX)} more` : '');
    };
    const draw = (what) => {
      const o = state.overview;
      drawRunning();
      if (!o || what === 'requests') return;
      const w = o.window, last = state.history.at(-1), oldest = [...state.requests.values()].find((r) => r.phase === 'queue');
      f.out.update(`${rate(w.output_tokens_per_second)} tok/s`, `${count(w.output_tokens)} tokens in ${seconds(w.seconds)}`);
      f.ttft.update(ms(w.ttft_ms.p50), `p99 ${ms(w.ttft_ms.p99)} · ${count(w.ttft_ms.count)} requests`);
      f.itl.update(ms(w.itl_ms.p50), `p99 ${ms(w.itl_ms.p99)}`);
      f.running.update(count(o.phases.prefill + o.phases.decode), `${count(o.phases.prefill)} prefill · ${count(o.phases.decode)} decode`);
      f.queue.update(count(o.phases.queue), oldest ? `oldest ${seconds((serverNow() - (oldest.queued_ms ?? oldest.received_ms)) / 1000)}` : 'nothing waits');
      f.accepted.update(fixed(w.accepted_length, 2), 'tokens a pass');
      f.cached.update(percent(w.cached_tokens, w.prompt_tokens), `${count(w.cached_tokens)} of ${count(w.prompt_tokens)}`);
      f.cpu.update(last.cpu === null ? none : `${fixed(last.cpu, 2)} cores`, `of ${o.process.cores} · ${o.process.threads} threads`);
      f.memory.update(bytes(o.process.memory_bytes), `peak ${bytes(o.process.memory_peak_bytes)}`);
      f.saved.update(seconds(o.saved_seconds), 'estimate, since the start');
      requestAnimationFrame(() => open && charts.forEach((c) => c.update(state.history))); // the figures are not kept waiting for them
      held.update(o.tiers);
      const t = o.totals;
      fill(totals, facts([
        ['Started', when(o.started_at)],
        ['Turns', count(t.turns)],
        ['Cancelled · failed', `${count(t.cancelled)} · ${count(t.failed)}`],
        ['Prompt tokens', count(t.prompt_tokens)],
        ['Cached tokens', `${count(t.cached_tokens)} (${percent(t.cached_tokens, t.prompt_tokens)})`],
        ['Output tokens', count(t.output_tokens)],
        ['Drafted · accepted', `${count(t.drafted_tokens)} · ${count(t.accepted_tokens)}`],
        ['Connections', `${count(o.server.open_connections)} open`],
        ['Ledger', `${bytes(o.ledger.bytes)} · ${count(o.ledger.sessions)} native sessions`],
      ]));
    };
    draw();
    const unwatch = watch(draw);
    return () => { open = false; unwatch(); charts.forEach((c) => c.destroy()); };
  },
};
