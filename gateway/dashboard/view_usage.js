// What was used: since the start exactly as /metrics counts, and from the ledger by day, tenant, tool or session.
import { h, fill, table, panel, count, seconds, percent, when, none } from './ui.js';
import { get } from './api.js';

const ns = (value) => seconds(value / 1e9);
const columns = [
  { name: 'Turns', key: 'turns' }, { name: 'Prompt', key: 'prompt_tokens' }, { name: 'Cached', key: 'cached_tokens' },
  { name: 'From disk', key: 'restored_tokens' }, { name: 'Output', key: 'output_tokens' }, { name: 'Reasoning', key: 'reasoning_tokens' }, { name: 'Drafted', key: 'drafted_tokens' }, { name: 'Accepted', key: 'accepted_tokens' },
].map(({ name, key }) => ({ name, num: true, cell: (r) => count(r[key]) })).concat([
  { name: 'Hit', num: true, cell: (r) => percent(r.cached_tokens, r.prompt_tokens) },
  { name: 'Queue', num: true, cell: (r) => ns(r.queue_ns) }, { name: 'Prefill', num: true, cell: (r) => ns(r.prefill_ns) }, { name: 'Decode', num: true, cell: (r) => ns(r.decode_ns) },
  { name: 'Saved', num: true, cell: (r) => seconds(r.saved_seconds) },
  { name: 'Cancelled · failed', num: true, cell: (r) => `${count(r.cancelled)} · ${count(r.failed)}` },
]);
const withTotal = (rows, totals) => (rows.length ? [...rows, { total: true, ...totals }] : rows);
const mark = (tr, row) => { if (row.total) tr.className = 'total'; };

export default {
  open(main) {
    const since = h('div'), report = h('div');
    const by = h('select', { 'aria-label': 'By' }, [['day', 'day'], ['day,tenant', 'day and tenant'], ['tenant', 'tenant'], ['tool', 'tool'], ['tenant,tool', 'tenant and tool'], ['session', 'session']].map(([value, name]) => h('option', { value }, name)));
    const from = h('input', { type: 'date', 'aria-label': 'From day' }), to = h('input', { type: 'date', 'aria-label': 'To day' }), tenant = h('input', { placeholder: 'Tenant', 'aria-label': 'Tenant', size: '12' });
    const csv = h('a', { download: 'usage.csv' }, 'CSV');
    const query = () => ({ by: by.value, from: from.value, to: to.value, tenant: tenant.value.trim() });
    async function load() {
      const pairs = Object.entries(query()).filter(([, value]) => value);
      csv.href = `/admin/v1/usage?${new URLSearchParams([...pairs, ['format', 'csv']])}`;
      try {
        const r = await get('usage', query());
        const names = { day: 'Day', tenant: 'Tenant', tool: 'After tool', session: 'Session' };
        const head = r.by.map((key, i) => ({ name: names[key], cell: (row) => (row.total ? (i === 0 ? 'All' : '') : key === 'session' && row.session ? h('a', { href: `#/sessions/${encodeURIComponent(row.session)}` }, row.session) : row[key] ?? none) }));
        fill(report, table('Usage from the ledger', [...head, ...columns, { name: 'Lost', num: true, cell: (row) => count(row.lost_tokens) }], withTotal(r.data, r.totals), { empty: 'No turns were committed in this time.', dense: true, row: mark }),
          r.has_more && h('p.hint', null, 'More rows were left out; the last line counts them all.'));
      } catch (error) { fill(report, h('p.bad', null, error.message)); }
    }
    async function loadSince() {
      try {
        const u = await get('usage');
        const saved = u.data.reduce((sum, r) => sum + (r.saved_seconds ?? 0), 0);
        fill(since, h('p.hint', null, `Since ${when(u.since)}, exactly what /metrics says.`),
          table('Usage since the start', [{ name: 'Tenant', cell: (r) => (r.total ? 'All' : r.tenant) }, ...columns], withTotal(u.data, { ...u.totals, saved_seconds: saved }), { dense: true, row: mark }));
      } catch (error) { fill(since, h('p.bad', null, error.message)); }
    }
    fill(main, h('h1.away', null, 'Usage'), panel('Since the start', h('a', { href: '/admin/v1/usage?format=csv', download: 'usage.csv' }, 'CSV'), since),
      panel('Report', csv, h('form.tools', { onsubmit: (e) => { e.preventDefault(); load(); }, onchange: load }, 'by', by, 'from', from, 'to', to, tenant, h('button', null, 'Show')),
        h('p.hint', null, 'From the ledger: turns that were committed, of all starts. Days are UTC.'), report));
    load();
    loadSince();
  },
};
