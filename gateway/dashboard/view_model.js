// The model's card.
import { h, fill, panel, facts, count, bytes } from './ui.js';
import { get } from './api.js';

export default {
  open(main) {
    const card = h('div.view');
    fill(main, h('h1.away', null, 'Model'), card);
    get('model').then((m) => fill(card, panel(m.name, null, facts([
      ['Backend', m.backend], ['Keys and values', m.kv], ['Weights', bytes(m.weight_bytes)], ['Window', `${count(m.context_max)} tokens`], ['Vocabulary', count(m.vocabulary)],
      ['Layers', count(m.layers)], ['Hidden', count(m.hidden)], ['Draft', m.draft_block ? `${count(m.draft_block)} tokens a pass` : 'none'], ['Thinking', m.thinking],
    ])), panel('Pages', null, facts([
      ['Page', `${count(m.page_tokens)} tokens, ${bytes(m.page_bytes)}`], ['Pages', count(m.pages)], ['In all', bytes(m.pages * m.page_bytes)], ['Room for', `${count(m.pages * m.page_tokens)} tokens`],
    ])), panel('Identity', null, facts([
      ['Directory', h('code', null, m.path)], ['Fingerprint', h('code', null, m.fingerprint)], ['Numerics', h('code', null, m.numerics)], ['Template', h('code', null, m.template)],
    ]), h('p.hint', null, 'Pages are taken over a restart only where fingerprint, numerics and the type of keys and values are the same.'))))
      .catch((error) => fill(card, panel('Model', null, h('p.bad', null, error.message))));
  },
};
