// What each tier holds, what it saved, why turns were not cached, and the prefix tree.
import { h, fill, table, liveTable, panel, facts, bar, count, bytes, seconds, percent, none, notice, confirm } from './ui.js';
import { get, post } from './api.js';
import { tierTable } from './view_now.js';
import { explain } from './view_sessions.js';
import { watch } from './live.js';

export default {
  open(main) {
    const held = tierTable(), pages = h('div'), saved = h('div'), disk = h('div'), edges = h('div');
    let all = 0;
    const why = liveTable('Why no more was cached', [
      { name: 'Reason', cell: (r) => (r.reason === 'none' ? 'nothing was missing' : r.reason) },
      { name: 'Turns', num: true, cell: (r) => count(r.turns) },
      { name: 'Share', num: true, cell: (r) => percent(r.turns, all) },
      { name: 'Lost tokens', num: true, cell: (r) => count(r.lost_tokens) },
      { name: '', cell: (r) => bar([{ size: r.turns, kind: r.reason === 'none' ? 'was' : 'new' }], all, percent(r.turns, all)) },
      { name: 'What it means', cell: (r) => h('span.hint', null, r.reason === 'none' ? 'All that the ledger knew of the prompt came from the cache.' : explain(r.reason)) },
    ], { empty: 'No turns yet.' });
    async function load() {
      try {
        const c = await get('cache');
        const rows = Object.entries(c.reasons).map(([reason, r]) => ({ reason, ...r })).filter((r) => r.turns > 0).sort((a, b) => b.turns - a.turns);
        all = rows.reduce((sum, r) => sum + r.turns, 0);
        why.update(rows);
        held.update(c.tiers);
        fill(pages, facts([
          ['Pages', `${count(c.memory.pages - c.memory.pages_free)} of ${count(c.memory.pages)}`], ['Page', bytes(c.memory.page_bytes)],
          ['Tree', `${count(c.memory.index_nodes)} nodes, ${count(c.memory.index_pages)} pages`], ['Evicted', `${count(c.memory.evicted_pages)} pages`], ['Policy', c.policy]]));
        fill(saved, facts([
          ['Prefill saved', seconds(c.saved_seconds)], ['Prompt tokens', count(c.prompt_tokens)],
          ['From the cache', `${count(c.cached_tokens)} (${percent(c.cached_tokens, c.prompt_tokens)})`],
          ['Of those, from disk', count(c.restored_tokens)], ['Computed', count(c.prompt_tokens - c.cached_tokens)]]),
        bar([{ size: c.cached_tokens - c.restored_tokens, kind: 'was' }, { size: c.restored_tokens, kind: 'disk' }, { size: c.prompt_tokens - c.cached_tokens, kind: 'new' }], c.prompt_tokens,
          `${count(c.cached_tokens - c.restored_tokens)} from memory, ${count(c.restored_tokens)} from disk, ${count(c.prompt_tokens - c.cached_tokens)} computed`),
        h('p.key', null, [['was', 'memory'], ['disk', 'disk'], ['new', 'computed']].map(([kind, name]) => h('span', null, h(`i.${kind}`), name))),
        h('p.hint', null, 'Seconds are cached tokens times the mean prefill time of an uncached one.'));
        const d = c.disk;
        fill(disk, d.open ? facts([
          ['State', d.full ? 'full' : d.paused ? 'paused after an error' : 'writing'], ['Records', count(d.records)], ['Held', bytes(d.bytes)], ['Waiting', count(d.queued)],
          ['Written', bytes(d.written_bytes)], ['Read back', bytes(d.read_bytes)], ['Refused · dropped', `${count(d.refused)} · ${count(d.dropped)}`], ['Corrupt · errors', `${count(d.corrupt)} · ${count(d.errors)}`],
        ]) : h('p.empty', null, 'No disk tier: cache.disk is off.'));
      } catch (error) { fill(pages, h('p.bad', null, error.message)); }
    }
    async function loadTree() {
      try {
        const t = await get('cache/tree', { limit: 40 });
        fill(edges, table('Edges of the prefix tree', [
          { name: 'Edge', num: true, cell: (n) => n.id }, { name: 'On', num: true, cell: (n) => n.parent ?? none }, { name: 'Tenant', cell: (n) => n.tenant ?? none },
          { name: 'From token', num: true, cell: (n) => count(n.start) }, { name: 'Tokens', num: true, cell: (n) => count(n.tokens) }, { name: 'Pages', num: true, cell: (n) => count(n.pages) },
          { name: 'Branches', num: true, cell: (n) => count(n.children) }, { name: 'Held by', cell: (n) => [n.in_use && 'a sequence', n.pinned && 'a pin'].filter(Boolean).join(', ') || none },
          { name: 'Used', num: true, cell: (n) => `${seconds(Math.round(n.used_ms_ago / 1000))} ago` },
        ], t.data, { empty: 'The tree is empty.' }), t.has_more && h('p.hint', null, `The first ${count(t.data.length)} of ${count(t.nodes)} edges, nearest the root first.`));
      } catch (error) { fill(edges, h('p.bad', null, error.message)); }
    }
    const what = h('select', { 'aria-label': 'What to flush', onchange: () => { which.hidden = what.value === 'all'; } }, [['tenant', 'a tenant'], ['session', 'a session'], ['all', 'everything']].map(([value, name]) => h('option', { value }, name)));
    const which = h('input', { 'aria-label': 'Name of the tenant or id of the session', placeholder: 'name or id' });
    const flush = h('form.tools', {
      onsubmit: async (event) => {
        event.preventDefault();
        if (what.value !== 'all' && !which.value.trim()) { which.focus(); return; }
        const name = what.value === 'all' ? 'everything' : `${what.value} ${which.value.trim()}`;
        if (!(await confirm(`Flush ${name}?`, 'Conversations stay. Their next turns are computed again.', 'Flush'))) return;
        try {
          const a = await post('cache/flush', { [what.value]: what.value === 'all' ? true : which.value.trim() });
          notice(`flushed: ${count(a.namespaces)} namespaces, ${count(a.paths)} paths`);
          load();
          loadTree();
        } catch (error) { notice(error.message, 'bad'); }
      },
    }, what, which, h('button', null, 'Flush'));
    fill(main, h('h1.away', null, 'Cache'), h('div.pair', null, panel('Tiers', null, held.node, pages), panel('Savings', null, saved)), panel('Why no more was cached', null, why.node),
      panel('Disk', null, disk), panel('Prefix tree', h('button.small', { onclick: loadTree }, 'Refresh'), edges), panel('Flush', null, h('p.hint', null, 'Drops cached pages; what runs keeps its own until it ends.'), flush));
    load();
    loadTree();
    return watch((of) => { if (of === 'overview') load(); });
  },
};
