// Sessions of all tenants, and of one: the tree of its turns, what of each was cached and why no more, its items, its exact tokens.
import { h, fill, table, panel, facts, bar, count, seconds, percent, ago, when, none, notice, confirm } from './ui.js';
import { get, post, remove } from './api.js';

const TOKENS = 1000; // of one look
const ITEMS = 200;

/** Why no more of a prompt was cached, in a sentence. */
const reasons = {
  'new session': 'Nothing of it was known: the first turn of a session.',
  'volatile header': 'A line at the front changes from turn to turn: a date, a counter, an id.',
  'tools changed': 'The tools are others than before; they stand first in the prompt.',
  'effort or mode changed': 'Effort or thinking mode changed; it stands first in the prompt.',
  'reasoning dropped and restored': 'The client dropped the reasoning; its tokens were put back.',
  'ambiguous': 'Several stored runs fit what the client sent, so none was taken.',
  'edited history': 'The client changed something that was said before.',
  'evicted': 'The pages had left memory and disk.',
  'tenant boundary': 'The same text is known, but of another tenant.',
  'model changed': 'The tokens were made by another model.',
  'not yet written': 'The turn before was not finished when this one came.',
};
export const explain = (reason) => reasons[reason] ?? reason;

const dates = (ms) => when(ms / 1000);
const path = (session) => `sessions/${encodeURIComponent(session)}`;
const nameOf = (s) => s.label ?? s.metadata?.name ?? s.metadata?.title ?? null;

// ---- the list ----

function openList(main, query) {
  const rows = h('div', { 'aria-live': 'polite' });
  const q = h('input', { type: 'search', name: 'q', value: query.get('q') ?? '', placeholder: 'Name, id or metadata', 'aria-label': 'Search sessions' });
  const tenant = h('input', { name: 'tenant', value: query.get('tenant') ?? '', placeholder: 'Tenant', 'aria-label': 'Tenant', size: '12' });
  const kind = h('select', { name: 'kind', 'aria-label': 'Kind' }, [['', 'all kinds'], ['native', 'native'], ['label', 'label'], ['conversation', 'conversation']].map(([value, name]) => h('option', { value, selected: value === query.get('kind') }, name)));
  const form = h('form.tools', { role: 'search', onsubmit: (e) => { e.preventDefault(); load(); } }, q, tenant, kind, h('button', null, 'Search'));
  const more = h('button', { hidden: true, onclick: () => load(more.next) }, 'More');
  let data = [];
  async function load(after) {
    try {
      const page = await get('sessions', { q: q.value.trim(), tenant: tenant.value.trim(), kind: kind.value, after, limit: 50 });
      data = after ? data.concat(page.data) : page.data;
      more.next = page.next;
      more.hidden = page.next === null;
    } catch (error) { fill(rows, h('p.bad', null, error.message)); return; }
    fill(rows, table('Sessions', [
      { name: 'Session', cell: (s) => h('a', { href: `#/sessions/${encodeURIComponent(s.id)}` }, nameOf(s) ?? s.id) },
      { name: 'Kind', cell: (s) => s.kind },
      { name: 'Tenant', cell: (s) => s.tenant },
      { name: 'Turns', num: true, cell: (s) => count(s.usage.turns) },
      { name: 'Prompt', num: true, cell: (s) => count(s.usage.prompt_tokens) },
      { name: 'Cached', num: true, cell: (s) => percent(s.usage.cached_tokens, s.usage.prompt_tokens) },
      { name: 'Lost', num: true, cell: (s) => count(s.usage.lost_tokens) },
      { name: 'Output', num: true, cell: (s) => count(s.usage.output_tokens) },
      { name: 'Used', num: true, cell: (s) => ago(s.used_at) },
    ], data, { empty: q.value || tenant.value || kind.value ? 'No session fits.' : 'No sessions yet.' }));
  }
  fill(main, h('h1.away', null, 'Sessions'), panel('Sessions', form, rows, more));
  load();
}

// ---- one turn ----

function item(one, index, fresh) {
  const calls = one.tool_calls ?? [];
  const text = typeof one.content === 'string' ? one.content : one.content == null ? '' : JSON.stringify(one.content, null, 1);
  return h(fresh ? 'li.item.fresh' : 'li.item', null,
    h('div.role', null, h('b', null, one.role ?? one.type ?? 'item'), one.tool_call_id && h('code.id', null, one.tool_call_id), h('span.hint', null, `#${index}`)),
    one.reasoning_content && h('pre.reasoning', null, one.reasoning_content),
    text && h('pre', null, text),
    calls.map((c) => h('pre.call', null, h('b', null, c.function?.name ?? c.custom?.name ?? c.type), ` ${c.function?.arguments ?? c.custom?.input ?? ''}`)));
}

/** Exact tokens, each in a box: what was cached, what was computed, what was made. */
function tokenView(turn) {
  const text = h('div.tokens', { tabindex: '0', role: 'region', 'aria-label': 'Exact tokens' }), range = h('span.hint');
  const load = async (from) => {
    try {
      const { tokens } = await get(`turns/${encodeURIComponent(turn.id)}`, { include: 'tokens', from, limit: TOKENS });
      if (!tokens) { fill(text, h('p.empty', null, 'This turn keeps no tokens.')); return; }
      const kind = (at) => (at < tokens.cached_tokens ? 'was' : at < tokens.prompt_tokens ? 'new' : 'out');
      fill(text, tokens.ids.map((token, i) => {
        const at = tokens.from + i, piece = tokens.pieces[i] ?? '';
        return h(`span.${kind(at)}`, { title: `${at}: token ${token}` }, piece === '' ? `⟨${token}⟩` : piece.replaceAll('\n', '⏎\n'));
      }));
      const end = tokens.from + tokens.ids.length;
      fill(range, `${count(tokens.from)} to ${count(end)} of ${count(tokens.total)}`);
      back.disabled = tokens.from === 0;
      on.disabled = end >= tokens.total;
      back.onclick = () => load(Math.max(0, tokens.from - TOKENS));
      on.onclick = () => load(end);
    } catch (error) { fill(text, h('p.bad', null, error.message)); }
  };
  const back = h('button.small', { disabled: true }, 'Earlier'), on = h('button.small', { disabled: true }, 'Later');
  load(0);
  return h('div', null, h('p.key', null, [['was', 'cached'], ['new', 'computed'], ['out', 'made']].map(([kind, name]) => h('span', null, h(`i.${kind}`), name)), range, back, on), text);
}

function turnBody(turn) {
  const u = turn.usage, items = h('div'), tokens = h('div');
  const show = async (all) => {
    try {
      const full = await get(`turns/${encodeURIComponent(turn.id)}`, { include: 'items', items_limit: ITEMS });
      if (!full.items) { fill(items, h('p.empty', null, 'This turn keeps no items, counts alone.')); return; }
      const { data, from, fresh_from, total } = full.items, skip = all ? 0 : Math.max(0, fresh_from - from);
      fill(items, h('ol.items', null, data.slice(skip).map((one, i) => item(one, from + skip + i, from + skip + i >= fresh_from))),
        skip > 0 ? h('button.small', { onclick: () => show(true) }, `Show the ${count(skip)} before`) : from > 0 && h('p.hint', null, `The last ${count(data.length)} of ${count(total)} items.`));
    } catch (error) { fill(items, h('p.bad', null, error.message)); }
  };
  show(false);
  const why = turn.cache.reason;
  return h('div.inside', null,
    why && h('p', null, h('b', null, `${why}. `), explain(why) === why ? '' : explain(why),
      turn.cache.first_diff && ` It departs at item ${turn.cache.first_diff.item}, token ${count(turn.cache.first_diff.token)}.`,
      turn.cache.lost > 0 && ` ${count(turn.cache.lost)} known tokens were computed again.`),
    facts([
      ['Turn', h('code', null, turn.id)], turn.response && ['Response', h('code', null, turn.response)], turn.request && ['Request', h('code', null, turn.request)],
      ['Dialect', turn.dialect ?? none], ['Model', turn.model ?? none], ['Kept', turn.retention], ['Ended', turn.finish_reason ?? turn.status],
      ['Prompt', `${count(u.prompt_tokens)} tokens`], ['Cached', `${count(u.cached_tokens)} · ${count(u.restored_tokens)} from disk`],
      ['Output', `${count(u.output_tokens)} · ${count(u.reasoning_tokens)} reasoning`],
      ['Drafted · accepted', `${count(u.drafted_tokens)} · ${count(u.accepted_tokens)}`],
      ['Queue', seconds(u.queue_ms / 1000)], ['Prefill', seconds(u.prefill_ms / 1000)], ['First token', seconds(u.ttft_ms / 1000)], ['Decode', seconds(u.decode_ms / 1000)],
    ]), items,
    h('p', null, h('button.small', { onclick: (e) => { e.target.hidden = true; fill(tokens, tokenView(turn)); } }, 'Exact tokens')), tokens);
}

function turnRow(turn, isHead) {
  const u = turn.usage, fresh = u.prompt_tokens - u.cached_tokens, body = h('div');
  const label = `${count(u.cached_tokens)} cached, ${count(fresh)} computed, ${count(u.output_tokens)} made`;
  return h('details.turn', { ontoggle: (e) => { if (e.target.open && !body.firstChild) body.append(turnBody(turn)); } },
    h('summary', null,
      h(`span.dot.${turn.status}`, { title: turn.status }), h('span.clock', null, dates(turn.created_ms)),
      bar([{ size: u.cached_tokens, kind: 'was' }, { size: fresh, kind: 'new' }, { size: u.output_tokens, kind: 'out' }], u.prompt_tokens + u.output_tokens, label),
      h('span.num', null, `${count(u.cached_tokens)} / ${count(u.prompt_tokens)}`), h('span.num', null, `+${count(u.output_tokens)}`),
      h('span.num', null, seconds(u.ttft_ms / 1000)),
      h('span.why', null, isHead && h('b', null, 'head '), turn.tool && h('span.tool', null, `after ${turn.tool} `), turn.status !== 'completed' && `${turn.status} `, turn.cache.reason ?? '')),
    body);
}

/** Turns as the tree that `parent` makes: what follows alone stays in line, every other branch is a list inside. */
function tree(turns, head) {
  const known = new Set(turns.map((t) => t.id)), children = new Map(), roots = [];
  for (const t of turns) {
    if (!known.has(t.parent)) roots.push(t);
    else if (children.has(t.parent)) children.get(t.parent).push(t);
    else children.set(t.parent, [t]);
  }
  const root = h('ol.tree'), todo = roots.map((turn) => ({ turn, list: root }));
  while (todo.length) {
    const { turn, list } = todo.shift();
    for (let at = turn; at;) {
      const [next, ...others] = children.get(at.id) ?? [];
      const li = h('li', null, !known.has(at.parent) && at.parent_session && h('p.hint', null, 'continues ', h('a', { href: `#/sessions/${encodeURIComponent(at.parent_session)}` }, at.parent_session)), turnRow(at, at.id === head));
      list.append(li);
      for (const other of others) {
        const branch = h('ol.tree.branch', { 'aria-label': 'A fork' });
        li.append(branch);
        todo.push({ turn: other, list: branch });
      }
      at = next;
    }
  }
  return root;
}

// ---- one session ----

function openOne(main, session) {
  const top = h('div'), turns = h('div');
  let data = [], head = null;
  const attempt = (run, said) => async () => {
    try { const answer = await run(); if (said) notice(said(answer)); load(); } catch (error) { notice(error.message, 'bad'); }
  };
  async function download() {
    try {
      const blob = new Blob([JSON.stringify(await get(`${path(session)}/export`))], { type: 'application/json' });
      const link = h('a', { href: URL.createObjectURL(blob), download: `${session}.json` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } catch (error) { notice(error.message, 'bad'); }
  }
  async function load() {
    try {
      const s = await get(path(session)), u = s.usage, native = s.kind === 'native';
      head = s.head;
      fill(top, panel(nameOf(s) ?? s.id, [
        native && h('button', { onclick: attempt(() => post(`${path(session)}/pin`, { seconds: s.pinned_until ? 0 : 600 }), (a) => (a.pinned_until ? `pinned until ${when(a.pinned_until)}` : 'no longer pinned')) }, s.pinned_until ? 'Unpin' : 'Pin for 10 min'),
        native && h('button', { onclick: async () => { try { location.hash = `#/sessions/${(await post(`${path(session)}/fork`)).id}`; } catch (error) { notice(error.message, 'bad'); } } }, 'Fork'),
        native && h('button', { onclick: download }, 'Export'),
        h('button', { onclick: attempt(() => post('cache/prefetch', { session }), (a) => `${count(a.tokens)} tokens are in memory, ${count(a.restored_tokens)} of them from disk`) }, 'Fetch pages'),
        h('button', { onclick: attempt(() => post('cache/flush', { session }), (a) => `${count(a.paths)} paths left the cache`) }, 'Flush pages'),
        native && h('button.bad', { onclick: async () => {
          if (!(await confirm('Delete this session?', 'Its turns, tokens and pages go from memory and disk. What forks stand on stays.', 'Delete'))) return;
          try { await remove(path(session)); notice('deleted'); location.hash = '#/sessions'; } catch (error) { notice(error.message, 'bad'); }
        } }, 'Delete'),
      ], facts([
        ['Session', h('code', null, s.id)], ['Kind', s.kind], ['Tenant', s.tenant], ['Model', s.model ?? none],
        ['Made', when(s.created_at)], ['Used', ago(s.used_at)], ['Turns', count(u.turns)],
        ['Prompt tokens', count(u.prompt_tokens)], ['Cached', `${count(u.cached_tokens)} (${percent(u.cached_tokens, u.prompt_tokens)})`],
        ['Lost', count(u.lost_tokens)], ['Output', count(u.output_tokens)], ['Prefill', seconds(u.prefill_ms / 1000)], ['Decode', seconds(u.decode_ms / 1000)],
        s.pinned_until && ['Pinned until', when(s.pinned_until)],
        s.forked_from && ['Forked from', h('a', { href: `#/sessions/${encodeURIComponent(s.forked_from.session)}` }, s.forked_from.session)],
        ...Object.entries(s.metadata ?? {}).map(([key, value]) => [key, value]),
      ])));
      await loadTurns();
    } catch (error) { fill(top, panel('Session', null, h('p.bad', null, error.message))); }
  }
  async function loadTurns(after) {
    const page = await get(`${path(session)}/turns`, { order: 'asc', limit: 200, after });
    data = after ? data.concat(page.data) : page.data;
    fill(turns, panel('Turns', null,
      h('p.key', null, [['was', 'cached'], ['new', 'computed'], ['out', 'made']].map(([kind, name]) => h('span', null, h(`i.${kind}`), name))),
      data.length ? tree(data, head) : h('p.empty', null, 'No turns.'),
      page.next && h('button', { onclick: () => loadTurns(page.next).catch((error) => notice(error.message, 'bad')) }, 'Later turns')));
  }
  fill(main, h('h1.away', null, 'Session'), h('p.crumb', null, h('a', { href: '#/sessions' }, '← All sessions')), top, turns);
  load();
}

export default {
  open(main, path, query) {
    if (path[0]) openOne(main, path[0]);
    else openList(main, query);
  },
};
