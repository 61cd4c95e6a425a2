// Elements and numbers. Whatever comes from outside enters as a text node: there is no way through this file to give markup.

/** h('td.num', {title: 'x', onclick: fn}, 'text', node, [nodes]): an element. Properties that start with "on" are listeners, `style` is a map of
 *  CSS properties set one by one (the page's policy forbids style attributes), false and null leave an attribute out. */
export function h(what, props, ...children) {
  const [tag, ...classes] = what.split('.');
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(' ');
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === 'value' || name === 'checked') node[name] = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

/** Sets a text only if it differs: no layout for numbers that stand still. */
export function say(node, text) {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
}

// ---- numbers ----

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
export const none = '–';
const known = (value) => typeof value === 'number' && Number.isFinite(value);

/** 12 345: exact, in groups that no line end parts. */
export const count = (value) => (known(value) ? whole.format(value).replaceAll(',', '\u202f') : none);
export const fixed = (value, digits = 1) => (known(value) ? value.toFixed(digits) : none);
/** A rate or a length: three figures or so. */
export const rate = (value) => (!known(value) ? none : value >= 100 ? count(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2));
export const percent = (part, all) => (known(part) && all > 0 ? `${((100 * part) / all).toFixed(part === all || part === 0 ? 0 : 1)} %` : none);

export function bytes(value) {
  if (!known(value)) return none;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at++; }
  return `${at === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
}

/** A duration given in seconds, in the unit that suits it. */
export function seconds(value) {
  if (!known(value)) return none;
  if (value === 0) return '0 s';
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const pair = (big, unit, small, of) => `${big} ${unit}${small ? ` ${small} ${of}` : ''}`;
  if (value < 3600) return pair(Math.floor(value / 60), 'min', Math.floor(value % 60), 's');
  if (value < 86400) return pair(Math.floor(value / 3600), 'h', Math.floor((value % 3600) / 60), 'min');
  return pair(Math.floor(value / 86400), 'd', Math.floor((value % 86400) / 3600), 'h');
}

const two = (n) => String(n).padStart(2, '0');
/** Unix seconds as local time: the hour today, with the date before. */
export function when(unix) {
  if (!known(unix) || unix <= 0) return none;
  const t = new Date(unix * 1000), now = new Date();
  const clock = `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  return t.toDateString() === now.toDateString() ? clock : `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ${clock}`;
}
export const ago = (unix) => (known(unix) && unix > 0 ? `${seconds(Math.max(0, Math.round(Date.now() / 1000 - unix)))} ago` : none);

/** The end of an id tells it from others; the whole is its title. */
export const id = (text) => (text ? h('code.id', { title: text }, text.length > 17 ? `${text.slice(0, text.indexOf('_') + 1)}…${text.slice(-8)}` : text) : none);

// ---- pieces ----

/** columns: [{name, num?, cell(row) -> node|text}]; a column without a name has buttons or bars. The caption is for those who hear the page.
 *  {node, update(rows)}: rows stay in the given order. While the keyboard's focus is in a row they stand still. `row(tr, data)` may mark a row;
 *  rows of which `fixed(row)` holds never change, so each is made once. */
export function liveTable(caption, columns, { empty = 'Nothing yet.', dense, row: mark, fixed: stays } = {}) {
  const body = h('tbody'), none_ = h('p.empty', null, empty), made = new WeakMap();
  const scroll = h('div.scroll', { tabindex: '0', role: 'region', 'aria-label': caption, hidden: true },
    h(dense ? 'table.dense' : 'table', null, h('caption.away', null, caption),
      h('thead', null, h('tr', null, columns.map((c) => (c.name ? h(c.num ? 'th.num' : 'th', { scope: 'col' }, c.name) : h('td'))))), body));
  const line = (row) => {
    const old = stays?.(row) && made.get(row);
    if (old) return old;
    const tr = h('tr', null, columns.map((c) => h(c.num ? 'td.num' : 'td', null, c.cell(row))));
    mark?.(tr, row);
    made.set(row, tr);
    return tr;
  };
  return {
    node: h('div', null, scroll, none_),
    update(rows) {
      if (body.querySelector(':focus-visible')) return;
      scroll.hidden = !rows.length;
      none_.hidden = rows.length > 0;
      const lines = rows.map(line);
      if (lines.length !== body.children.length || lines.some((tr, i) => tr !== body.children[i])) body.replaceChildren(...lines);
    },
  };
}

/** The same once, for rows that are shown and stay. */
export function table(caption, columns, rows, options) {
  const made = liveTable(caption, columns, options);
  made.update(rows);
  return made.node;
}

/** [[term, value], …] as a definition list. */
export const facts = (pairs) => h('dl.facts', null, pairs.filter(Boolean).map(([name, value]) => h('div', null, h('dt', null, name), h('dd', null, value))));

/** A panel with a heading; `tools` stand at its right. */
export const panel = (title, tools, ...body) => h('section.panel', null, h('div.head', null, h('h2', null, title), tools && h('div.tools', null, tools)), body);

/** Parts of a whole side by side: [{size, kind, name}]; kind is a class with a colour. */
export function bar(parts, all, label) {
  const shown = parts.filter((p) => p.size > 0);
  return h('div.bar', { role: 'img', 'aria-label': label, title: label },
    shown.map((p) => h(`span.${p.kind}`, { style: { width: `${all > 0 ? Math.min(100, (100 * p.size) / all) : 0}%` } })));
}

let hushed;
/** A line at the foot of the page, read out, for a few seconds. */
export function notice(text, kind = 'good') {
  const at = document.getElementById('says');
  clearTimeout(hushed);
  fill(at, h(`p.${kind}`, null, text));
  hushed = setTimeout(() => fill(at), 6000);
}

/** Asks before something that cannot be taken back; true if the answer was yes. */
export function confirm(title, text, yes) {
  return new Promise((resolve) => {
    const box = h('dialog', { 'aria-label': title }, h('h2', null, title), h('p', null, text),
      h('form.tools', { method: 'dialog' }, h('button', { value: 'no' }, 'Keep'), h('button.bad', { value: 'yes' }, yes)));
    box.addEventListener('close', () => { box.remove(); resolve(box.returnValue === 'yes'); });
    document.body.append(box);
    box.showModal();
  });
}
