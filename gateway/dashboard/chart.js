// Charts on uPlot, in the page's colours. Each has a sentence for those who cannot see it, and its legend is ours, with the newest or the pointed-at value.
import { h, say, none } from './ui.js';

const HEIGHT = 132;
const dark = matchMedia('(prefers-color-scheme: dark)');
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const alive = new Set();
// The library comes with the first chart, so that figures need not wait for it; its style sheet holds its places of canvases.
let asked = false;
function fetchLibrary() {
  if (asked) return;
  asked = true;
  document.head.append(h('link', { rel: 'stylesheet', href: 'vendor/uplot.css' }),
    h('script', { src: 'vendor/uplot.js', onload: () => alive.forEach((chart) => chart.draw()) }));
}
dark.addEventListener('change', () => alive.forEach((chart) => chart.restart()));
const resized = new ResizeObserver((entries) => entries.forEach((e) => e.target.chart?.fit(e.contentRect.width)));

const clock = (seconds) => {
  const t = new Date(seconds * 1000), two = (n) => String(n).padStart(2, '0');
  return `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
};

/** series: [{name, color: '--decode', fill?: true, value(point)}]; format(value) -> text; `whole`: values are counts. update(points) draws
 *  [{at, …}]. */
export function chart(title, series, format, whole = false) {
  const labels = series.map(() => h('b', null, none));
  const at = h('span.at');
  const legend = h('p.legend', null, series.map((s, i) => h('span', null, h(`i.${s.color.slice(2)}`), `${s.name} `, labels[i])), at);
  const box = h('div.plot', { role: 'img' });
  const node = h('figure.chart', null, h('figcaption', null, title), legend, box);
  let plot = null, data = [[], ...series.map(() => [])];

  const show = (index) => {
    const pointed = index !== null && index !== undefined;
    const i = pointed ? index : data[0].length - 1;
    labels.forEach((label, n) => say(label, data[n + 1][i] == null ? none : format(data[n + 1][i])));
    say(at, pointed ? clock(data[0][i]) : '');
  };
  const width = () => Math.max(160, Math.floor(box.clientWidth));
  const make = () => {
    const muted = colour('--muted'), line = colour('--line');
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
    plot = new window.uPlot({
      width: width(), height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { y: { range: (u, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      series: [{}, ...series.map((s) => ({
        stroke: colour(s.color), width: 1.5, points: { show: false }, spanGaps: false,
        fill: s.fill ? `${colour(s.color)}26` : undefined,
      }))],
      axes: [
        { ...axis, space: 70, size: 22, values: (u, list) => list.map((t) => (list.length > 1 && list[1] - list[0] < 60 ? clock(t) : clock(t).slice(0, 5))) },
        { ...axis, size: 58, space: 34, ...(whole && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }), values: (u, list) => list.map((v) => (v === null ? '' : v === 0 ? '0' : format(v))) },
      ],
      hooks: { setCursor: [(u) => show(u.cursor.idx)] },
    }, data, box);
  };
  const self = {
    node,
    update(points) {
      data = [points.map((p) => p.at), ...series.map((s) => points.map((p) => s.value(p) ?? null))];
      fetchLibrary();
      self.draw();
    },
    draw() {
      if (!plot && box.isConnected && window.uPlot) { make(); resized.observe(box); }
      plot?.setData(data);
      show(plot?.cursor.idx);
      box.setAttribute('aria-label', `${title}: ${series.map((s, i) => `${s.name} ${labels[i].textContent}`).join(', ')}`);
    },
    restart() { if (plot) { plot.destroy(); make(); } },
    fit() { if (plot && width() !== plot.width) plot.setSize({ width: width(), height: HEIGHT }); },
    destroy() { alive.delete(self); resized.unobserve(box); plot?.destroy(); plot = null; },
  };
  box.chart = self;
  alive.add(self);
  return self;
}
