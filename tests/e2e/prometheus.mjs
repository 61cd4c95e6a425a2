// The text format of metrics (0.0.4), read strictly, with the rules that `promtool check metrics` has: a page that passes has no family without
// HELP and TYPE, none in two places, no series twice, names of counters that end in _total and of no others, base units, whole histograms.
import assert from 'node:assert/strict';

const NAME = '[a-zA-Z_:][a-zA-Z0-9_:]*', LABEL = '[a-zA-Z_][a-zA-Z0-9_]*';
const SAMPLE = new RegExp(`^(${NAME})(?:\\{((?:${LABEL}="(?:[^"\\\\\\n]|\\\\[\\\\"n])*",?)*)\\})? (\\S+)$`);
const VALUE = /^(?:[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]Inf|NaN)$/;
const number = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

/** Families by name: {help, type, samples: [{name, labels, value}]}. Throws what is wrong, with its line. */
export function parse(text) {
  assert.ok(text.endsWith('\n'), 'the page ends with a line feed');
  const families = new Map(), series = new Set();
  let current;
  for (const line of text.slice(0, -1).split('\n')) {
    const [, word, name, rest] = line.match(new RegExp(`^# (HELP|TYPE) (${NAME}) (.*)$`)) ?? [];
    if (word === 'HELP') {
      assert.ok(!families.has(name), `${name}: described twice, or in two places`);
      assert.ok(rest && !/\\(?![\\n])/.test(rest), `${name}: help "${rest}"`);
      families.set(name, current = { name, help: rest, samples: [] });
    } else if (word === 'TYPE') {
      assert.ok(current?.name === name && !current.type && !current.samples.length, `TYPE of ${name} stands behind its HELP`);
      assert.match(rest, /^(counter|gauge|histogram)$/, line);
      current.type = rest;
    } else {
      const [, sample, labels, value] = line.match(SAMPLE) ?? [];
      assert.ok(sample && VALUE.test(value), `not a sample: ${line}`);
      const base = current?.type === 'histogram' ? sample.replace(/_(bucket|sum|count)$/, '') : sample;
      assert.equal(base, current?.name, `${line} stands with its family`);
      const pairs = [...(labels ?? '').matchAll(new RegExp(`(${LABEL})="((?:[^"\\\\]|\\\\.)*)"`, 'g'))].map(([, k, v]) => [k, v]);
      assert.equal(new Set(pairs.map(([k]) => k)).size, pairs.length, `a label twice: ${line}`);
      const id = sample + JSON.stringify(pairs.toSorted());
      assert.ok(!series.has(id), `twice: ${line}`);
      series.add(id);
      current.samples.push({ name: sample, labels: Object.fromEntries(pairs), value: number(value) });
    }
  }
  for (const family of families.values()) checkFamily(family);
  return families;
}

function checkFamily({ name, type, samples }) {
  assert.ok(type, `${name} has a TYPE`);
  assert.equal(name.endsWith('_total'), type === 'counter', `${name} is a ${type}`);
  assert.ok(!/_(ms|millis|milliseconds|us|ns|kb|mb|minutes|hours|percent|counter|gauge|histogram)(_total)?$/.test(name), `${name}: base units, no types`);
  if (type !== 'histogram') {
    if (type === 'counter') samples.forEach((s) => assert.ok(s.value >= 0, `${name} ${s.value}`));
    return;
  }
  const groups = Map.groupBy(samples, ({ labels: { le, ...labels } }) => JSON.stringify(labels));
  for (const group of groups.values()) {
    const buckets = group.filter((s) => s.name === `${name}_bucket`), one = (suffix) => group.filter((s) => s.name === `${name}_${suffix}`);
    assert.deepEqual([one('sum').length, one('count').length], [1, 1], `${name}: one sum and one count`);
    const bounds = buckets.map((s) => number(s.labels.le)), counts = buckets.map((s) => s.value);
    assert.equal(bounds.at(-1), Infinity, `${name} ends with +Inf`);
    assert.equal(counts.at(-1), one('count')[0].value, `${name}: +Inf is the count`);
    bounds.forEach((b, i) => assert.ok(i === 0 || (b > bounds[i - 1] && counts[i] >= counts[i - 1]), `${name}: buckets rise`));
  }
}

export const seriesOf = (families) => [...families.values()].flatMap((f) => f.samples).length;
export const valueOf = (families, name, labels = {}) =>
  [...families.values()].flatMap((f) => f.samples).filter((s) => s.name === name && Object.entries(labels).every(([k, v]) => s.labels[k] === v)).reduce((sum, s) => sum + s.value, 0);
