// Tenants with their limits, and keys. A new key's text is shown once and held nowhere.
import { h, fill, table, panel, count, bytes, when, ago, none, notice, confirm } from './ui.js';
import { get, post, patch, remove } from './api.js';

const limits = [['requests_max', 'At once'], ['requests_per_minute', 'Requests a minute'], ['tokens_per_minute', 'Tokens a minute']];
const field = (label, control) => h('label.field', null, h('span', null, label), control);

function showKey(answer) {
  const text = h('code.secret', { tabindex: '0' }, answer.key);
  const copy = h('button', { type: 'button', onclick: async () => {
    try { await navigator.clipboard.writeText(answer.key); notice('copied'); } catch { getSelection().selectAllChildren(text); notice('selected; copy it with the keyboard'); }
  } }, 'Copy');
  const box = h('dialog', { 'aria-label': 'The new key' }, h('h2', null, 'The new key'), h('p', null, `Of tenant ${answer.tenant}. It is shown this once and cannot be read again.`), text,
    h('form.tools', { method: 'dialog' }, copy, h('button.main', null, 'Done')));
  box.addEventListener('close', () => { fill(text); box.remove(); });
  document.body.append(box);
  box.showModal();
}

export default {
  open(main) {
    const tenants = h('div'), keys = h('div');
    async function loadTenants() {
      try {
        const { data } = await get('tenants');
        fill(tenants, table('Tenants', [
          { name: 'Tenant', cell: (t) => t.id }, { name: 'Group', cell: (t) => t.group ?? none }, { name: 'Keys', num: true, cell: (t) => count(t.keys) },
          { name: 'Running', num: true, cell: (t) => count(t.running) }, { name: 'Stored', num: true, cell: (t) => bytes(t.stored_bytes) },
          ...limits.map(([key, name]) => ({ name, num: true, cell: (t) => (t.limits[key] === null ? 'no bound' : count(t.limits[key])) })),
          { name: 'Made', num: true, cell: (t) => when(t.created_at) },
          { name: '', cell: (t) => h('button.small', { onclick: () => editLimits(t), 'aria-label': `Limits of ${t.id}` }, 'Limits') },
        ], data));
      } catch (error) { fill(tenants, h('p.bad', null, error.message)); }
    }
    function editLimits(t) {
      const inputs = limits.map(([key, name]) => [key, h('input', { type: 'number', min: '1', step: '1', value: t.limits[key] ?? '', placeholder: 'no bound', 'aria-label': name })]);
      const why = h('p.bad', { role: 'alert' });
      const box = h('dialog', { 'aria-label': `Limits of ${t.id}` }, h('h2', null, `Limits of ${t.id}`),
        h('form.stack', { onsubmit: async (event) => {
          event.preventDefault();
          try {
            await patch(`tenants/${encodeURIComponent(t.id)}`, { limits: Object.fromEntries(inputs.map(([key, input]) => [key, input.value === '' ? null : Number(input.value)])) });
            box.close();
            notice(`limits of ${t.id} are set`);
            loadTenants();
          } catch (error) { fill(why, error.message); }
        } }, inputs.map(([, input], i) => field(limits[i][1], input)), why, h('div.tools', null, h('button', { type: 'button', onclick: () => box.close() }, 'Cancel'), h('button.main', null, 'Save'))));
      box.addEventListener('close', () => box.remove());
      document.body.append(box);
      box.showModal();
    }
    async function loadKeys() {
      try {
        const { data } = await get('keys');
        fill(keys, table('Keys', [
          { name: 'Label', cell: (k) => k.label || none }, { name: 'Tenant', cell: (k) => k.tenant }, { name: 'Scopes', cell: (k) => k.scopes.join(', ') },
          { name: 'Restores', cell: (k) => k.restore ?? 'as configured' }, { name: 'Hash', cell: (k) => h('code', null, k.hint) }, { name: 'Made', num: true, cell: (k) => ago(k.created_at) },
          { name: '', cell: (k) => h('button.small.bad', { onclick: () => revoke(k), 'aria-label': `Revoke ${k.label || k.hint}` }, 'Revoke') },
        ], data, { empty: 'No keys: whoever is on this machine may call everything, and nobody else anything.' }));
      } catch (error) { fill(keys, h('p.bad', null, error.message)); }
    }
    async function revoke(k, force) {
      if (!force && !(await confirm(`Revoke ${k.label || k.hint}?`, `A key of tenant ${k.tenant} with ${k.scopes.join(', ')}. Whoever uses it is refused from then on.`, 'Revoke'))) return;
      try {
        await remove(`keys/${encodeURIComponent(k.id)}${force ? '?force=true' : ''}`);
        notice('revoked');
        loadKeys();
        loadTenants();
      } catch (error) {
        if (error.status === 409 && !force && (await confirm('The last admin key', error.message, 'Revoke all the same'))) await revoke(k, true);
        else notice(error.message, 'bad');
      }
    }
    const name = h('input', { name: 'tenant', required: true, value: 'default', maxlength: '64', pattern: '[A-Za-z0-9._\\-]+' }), label = h('input', { name: 'label', maxlength: '64' });
    const restore = h('select', null, [['', 'as configured'], ['auto', 'auto'], ['linked', 'linked'], ['off', 'off']].map(([value, text]) => h('option', { value }, text)));
    const scopes = [['inference', 'Inference', true], ['raw', 'Raw tokens', false], ['admin', 'Admin', false]].map(([value, text, on]) => [value, text, h('input', { type: 'checkbox', checked: on })]);
    const why = h('p.bad', { role: 'alert' });
    const make = h('form.row', { onsubmit: async (event) => {
      event.preventDefault();
      fill(why);
      try {
        showKey(await post('keys', { tenant: name.value, label: label.value, scopes: scopes.filter(([, , box]) => box.checked).map(([value]) => value), ...(restore.value && { restore: restore.value }) }));
        label.value = '';
        loadKeys();
        loadTenants();
      } catch (error) { fill(why, error.message); }
    } }, field('Tenant', name), field('Label', label), field('Hidden reasoning', restore),
    h('fieldset', null, h('legend', null, 'Scopes'), scopes.map(([, text, box]) => h('label.tick', null, box, text))), h('button.main', null, 'Make a key'), why);
    const tenantName = h('input', { required: true, maxlength: '64', pattern: '[A-Za-z0-9._\\-]+' }), group = h('input', { maxlength: '64', pattern: '[A-Za-z0-9._\\-]*' }), tenantWhy = h('p.bad', { role: 'alert' });
    const add = h('form.row', { onsubmit: async (event) => {
      event.preventDefault();
      fill(tenantWhy);
      try {
        await post('tenants', { name: tenantName.value, ...(group.value && { group: group.value }) });
        notice(`tenant ${tenantName.value} is made`);
        tenantName.value = group.value = '';
        loadTenants();
      } catch (error) { fill(tenantWhy, error.message); }
    } }, field('Name', tenantName), field('Sharing group (shares cached pages alone)', group), h('button', null, 'Make a tenant'), tenantWhy);
    fill(main, h('h1.away', null, 'Tenants and keys'), panel('Tenants', null, tenants, add), panel('Keys', null, keys), panel('New key', null, make));
    loadTenants();
    loadKeys();
  },
};
