// Requests over time: one lane a session, a bar a request (waiting, prefill, decode), and the pause while the agent runs a tool.
import { h, fill, say, liveTable, panel, count, seconds, percent, id, none, notice, when } from './ui.js';
import { post } from './api.js';
import { state, watch, serverNow } from './live.js';

const LANE = 24, BAR = 12, LANES_MAX = 40, ROWS_MAX = 60, LABEL = 168, AXIS = 22;
const dark = matchMedia('(prefers-color-scheme: dark)');
const colours = () => {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(['text', 'muted', 'line', 'prepare', 'queue', 'prefill', 'decode', 'commit', 'pause', 'bad'].map((n) => [n, get(n)]));
};

/** The parts of a request's bar: [[kind, from, to], …] in server milliseconds. */
export function parts(r, now) {
  const end = r.ended_ms ?? now, out = [];
  const step = (kind, from, to) => { if (from !== null && to > from) out.push([kind, from, to]); };
  step('prepare', r.received_ms, r.queued_ms ?? end);
  step('queue', r.queued_ms, r.started_ms ?? end);
  step('prefill', r.started_ms, r.first_ms ?? end);
  step('decode', r.first_ms, end);
  return out;
}

/** It ended as a model ends. */
const went = (r) => ['stop', 'tool_calls', 'length'].includes(r.finish);
const outcome = (r) => r.finish ?? (r.phase === 'done' ? 'refused' : r.phase);

/** Sessions as lanes, newest activity first; requests without one share nothing and stand alone. */
function lanes(requests, from) {
  const all = new Map();
  for (const r of requests) {
    if ((r.ended_ms ?? Infinity) < from) continue;
    const key = r.session ?? r.id;
    const lane = all.get(key) ?? { name: r.label ?? (r.session ? `…${r.session.slice(-8)}` : `…${r.id.slice(-8)}`), tenant: r.tenant, list: [] };
    lane.list.push(r);
    lane.last = r.received_ms;
    all.set(key, lane);
  }
  return [...all.values()].sort((a, b) => b.last - a.last);
}

export default {
  open(main) {
    let span = 60, needle = '', boxes = [], palette = colours();
    const canvas = h('canvas', { role: 'img', 'aria-label': 'Timeline of requests; the table below says the same in words.' });
    const tip = h('div.tip', { hidden: true });
    const lane = h('div.lanes', null, canvas, tip), more = h('p.hint'), rest = h('p.hint');
    const window_ = h('select', { 'aria-label': 'Span of the timeline', onchange: (e) => { span = Number(e.target.value); draw(); } },
      [[60, '1 minute'], [300, '5 minutes'], [900, '15 minutes'], [3600, '1 hour']].map(([value, name]) => h('option', { value }, name)));
    const search = h('input', { type: 'search', placeholder: 'Tenant, session, tool, id', 'aria-label': 'Filter requests', oninput: (e) => { needle = e.target.value.trim().toLowerCase(); draw(); } });
    const cancel = async (r) => {
      try {
        await post(`requests/${encodeURIComponent(r.id)}/cancel`);
        notice(`${r.id} is being cancelled`);
      } catch (error) { notice(error.message, 'bad'); }
    };
    const lines = liveTable('Requests, newest first', [
      { name: 'Received', cell: (r) => when(r.received_ms / 1000) },
      { name: 'State', cell: (r) => [
        h(`span.phase.${r.phase === 'done' ? (went(r) ? 'done' : 'bad') : r.phase}`, null, outcome(r), r.status && r.status !== 200 && r.status !== 499 ? ` ${r.status}` : ''),
        !['done', 'commit'].includes(r.phase) && h('button.small', { onclick: (e) => { e.target.blur(); cancel(r); }, 'aria-label': `Cancel ${r.id}` }, 'Cancel')] },
      { name: 'Session', cell: (r) => (r.session ? h('a', { href: `#/sessions/${encodeURIComponent(r.session)}` }, r.label ?? `…${r.session.slice(-8)}`) : r.label ?? none) },
      { name: 'Prompt', num: true, cell: (r) => count(r.prompt_tokens) },
      { name: 'Cached', num: true, cell: (r) => (r.cached_tokens === null ? none : percent(r.cached_tokens, r.prompt_tokens)) },
      { name: 'Output', num: true, cell: (r) => count(r.output_tokens) },
      { name: 'First token', num: true, cell: (r) => (r.first_ms === null ? none : seconds((r.first_ms - r.received_ms) / 1000)) },
      { name: 'Whole', num: true, cell: (r) => seconds(((r.ended_ms ?? serverNow()) - r.received_ms) / 1000) },
      { name: 'Calls', cell: (r) => r.tool ?? none },
      { name: 'Tenant', cell: (r) => r.tenant },
      { name: 'Dialect', cell: (r) => r.dialect },
      { name: 'Request', cell: (r) => id(r.id) },
    ], { empty: 'No requests yet.', dense: true, fixed: (r) => r.phase === 'done' });
    fill(main, h('h1.away', null, 'Requests'),
      panel('Timeline', [search, window_],
        h('p.key', null, [['prepare', 'prepare'], ['queue', 'queue'], ['prefill', 'prefill'], ['decode', 'decode'], ['pause', 'tool pause'], ['bad', 'failed or cancelled']].map(([kind, name]) => h('span', null, h(`i.${kind}`), name))),
        lane, more),
      panel('Requests', null, lines.node, rest));

    const chosen = () => [...state.requests.values()].filter((r) =>
      !needle || [r.id, r.tenant, r.session, r.label, r.tool, r.dialect, r.turn, r.model].some((text) => text?.toLowerCase().includes(needle)));

    function drawLanes() {
      const now = serverNow(), from = now - span * 1000, all = lanes(chosen(), from), shown = all.slice(0, LANES_MAX);
      const wide = lane.clientWidth, narrow = wide < 560, left = narrow ? 0 : LABEL, lift = narrow ? 14 : 0, step = LANE + lift;
      const height = AXIS + Math.max(1, shown.length) * step, ratio = devicePixelRatio || 1;
      if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(wide * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.height = `${height}px`;
      }
      const g = canvas.getContext('2d'), x = (t) => left + ((Math.max(t, from) - from) / (span * 1000)) * (wide - left);
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.clearRect(0, 0, wide, height);
      g.font = '12px system-ui, sans-serif';
      g.textBaseline = 'middle';
      const tick = span / (narrow ? 3 : 6);
      for (let t = 0; t <= span; t += tick) {
        const at = x(from + t * 1000);
        g.fillStyle = palette.line;
        g.fillRect(Math.min(Math.round(at), wide - 1), AXIS - 4, 1, height);
        g.fillStyle = palette.muted;
        g.textAlign = t === 0 ? 'left' : t >= span ? 'right' : 'center';
        g.fillText(t >= span ? 'now' : `−${seconds(Math.round(span - t)).replace('.0', '')}`, at, 8);
      }
      boxes = [];
      shown.forEach((one, row) => {
        const top = AXIS + row * step + lift + (LANE - BAR) / 2;
        g.textAlign = 'left';
        g.fillStyle = palette.text;
        let name = one.name;
        const room = (narrow ? wide : left) - 8;
        if (g.measureText(name).width > room) {
          while (name.length > 1 && g.measureText(`${name}…`).width > room) name = name.slice(0, -1);
          name += '…';
        }
        g.fillText(name, 0, narrow ? top - 9 : top + BAR / 2);
        one.list.forEach((r, i) => {
          const before = one.list[i - 1];
          if (before?.tool && before.ended_ms && r.received_ms > before.ended_ms && r.received_ms > from) {
            g.fillStyle = palette.pause;
            g.fillRect(x(before.ended_ms), top + BAR / 2 - 1, Math.max(1, x(r.received_ms) - x(before.ended_ms)), 2);
          }
          const steps = parts(r, now);
          for (const [kind, a, b] of steps) {
            if (b < from) continue;
            g.fillStyle = palette[kind];
            g.fillRect(x(a), top, Math.max(1, x(b) - x(a)), BAR);
          }
          const a = x(r.received_ms), b = Math.max(a + 2, x(r.ended_ms ?? now));
          if (r.phase === 'done' && !went(r)) {
            g.fillStyle = palette.bad;
            g.fillRect(b - 2, top - 3, 3, BAR + 6);
          }
          boxes.push({ r, a, b, top });
        });
      });
      if (!shown.length) {
        g.fillStyle = palette.muted;
        g.textAlign = 'left';
        g.fillText('No requests in this span.', left, AXIS + LANE / 2);
      }
      say(more, all.length > LANES_MAX ? `${count(all.length - LANES_MAX)} more sessions; filter to see them.` : '');
    }

    canvas.addEventListener('pointermove', (event) => {
      const hit = boxes.find((b) => event.offsetX >= b.a - 2 && event.offsetX <= b.b + 2 && event.offsetY >= b.top - 4 && event.offsetY <= b.top + BAR + 4);
      tip.hidden = !hit;
      if (!hit) return;
      const r = hit.r, now = serverNow();
      fill(tip, h('strong', null, r.label ?? r.id), h('div', null, `${r.tenant} · ${r.dialect} · ${outcome(r)}`),
        parts(r, now).map(([kind, a, b]) => h('div', null, h(`i.${kind}`), ` ${kind} ${seconds((b - a) / 1000)}`)),
        h('div', null, `${count(r.cached_tokens)} of ${count(r.prompt_tokens)} cached, ${count(r.output_tokens)} out`));
      tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, lane.clientWidth - 240))}px`;
      tip.style.top = `${event.offsetY + 14}px`;
    });
    canvas.addEventListener('pointerleave', () => { tip.hidden = true; });

    function drawList() {
      const rows = chosen().reverse();
      lines.update(rows.slice(0, ROWS_MAX));
      say(rest, rows.length > ROWS_MAX ? `The newest ${ROWS_MAX} of ${count(rows.length)}; the filter looks at all of them.` : '');
    }
    const draw = () => { drawLanes(); drawList(); };
    const recolour = () => { palette = colours(); drawLanes(); };
    const size = new ResizeObserver(drawLanes);
    dark.addEventListener('change', recolour);
    draw();
    size.observe(lane);
    const unwatch = watch(draw);
    return () => { unwatch(); size.disconnect(); dark.removeEventListener('change', recolour); };
  },
};
