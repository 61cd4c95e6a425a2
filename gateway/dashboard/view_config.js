// The effective configuration; live keys can be changed. Draining.
import { h, fill, table, panel, count, notice, confirm, none } from './ui.js';
import { get, post, patch } from './api.js';
import { state, watch } from './live.js';

export default {
  open(main) {
    const keys = h('div'), operation = h('div');
    let config = null, needle = '';
    const search = h('input', { type: 'search', placeholder: 'Find a key', 'aria-label': 'Find a key', oninput: (e) => { needle = e.target.value.trim().toLowerCase(); draw(); } });
    const print = (value) => (Array.isArray(value) ? value.join(', ') || none : value === '' ? none : String(value));

    function editor(key, value) {
      const input = typeof value === 'boolean' ? h('input', { type: 'checkbox', checked: value, 'aria-label': key })
        : h('input', { type: typeof value === 'number' ? 'number' : 'text', value: Array.isArray(value) ? value.join(',') : value, 'aria-label': key });
      const why = h('span.bad', { role: 'alert' });
      return h('form.tools', { onsubmit: async (event) => {
        event.preventDefault();
        fill(why);
        const wanted = typeof value === 'boolean' ? input.checked : typeof value === 'number' ? Number(input.value) : Array.isArray(value) ? input.value.split(',').map((s) => s.trim()).filter(Boolean) : input.value;
        try {
          config = await patch('config', { [key]: wanted });
          notice(`${key} is ${print(wanted)}`);
          draw();
        } catch (error) { fill(why, error.message); }
      } }, input, h('button.small', { 'aria-label': `Set ${key}` }, 'Set'), why);
    }
    function draw() {
      if (!config) return;
      const live = new Set(config.live);
      const rows = Object.entries(config.config).flatMap(([section, members]) => Object.entries(members).map(([name, value]) => ({ key: `${section}.${name}`, value })))
        .filter((row) => !needle || row.key.includes(needle)).sort((a, b) => live.has(b.key) - live.has(a.key));
      fill(keys, table('Configuration', [
        { name: 'Key', cell: (r) => h('code', null, r.key) },
        { name: 'Value', cell: (r) => (live.has(r.key) ? editor(r.key, r.value) : h('code', null, print(r.value))) },
        { name: 'Changes', cell: (r) => (live.has(r.key) ? h('b', null, 'at once') : h('span.hint', null, 'at the next start')) },
      ], rows, { empty: 'No key fits.' }));
    }
    async function load() {
      try { config = await get('config'); draw(); } catch (error) { fill(keys, h('p.bad', null, error.message)); }
    }
    async function set(drain) {
      if (drain && !(await confirm('Drain?', 'New work is refused with 503 until it is resumed; what runs goes on.', 'Drain'))) return;
      try {
        const d = await post(drain ? 'drain' : 'resume');
        notice(d.draining ? `draining; ${count(d.running)} run, ${count(d.queued)} wait` : 'new work is taken again');
        state.overview && (state.overview.status = d.draining ? 'draining' : 'ready');
        drawOperation();
      } catch (error) { notice(error.message, 'bad'); }
    }
    let shown = null;
    function drawOperation() {
      const status = state.overview?.status ?? 'ready';
      if (status === shown) return;
      shown = status;
      fill(operation, h('p', null, `The server is ${status}.`), h('p', null, status === 'draining' ? h('button.main', { onclick: () => set(false) }, 'Resume') : h('button', { onclick: () => set(true) }, 'Drain')));
    }
    fill(main, h('h1.away', null, 'Configuration'), panel('Operation', null, operation), panel('Keys', search, keys));
    load();
    drawOperation();
    return watch((of) => { drawOperation(); if (of === 'config' && !keys.contains(document.activeElement)) load(); });
  },
};
