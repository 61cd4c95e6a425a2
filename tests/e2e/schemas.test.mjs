// Grammars of schemas beside an independent validator, ajv: what the grammar writes is valid, and what is changed at
// random is judged as ajv judges it. Schemas: the cases, and some of the public data where WHIMBREL_TEST_DATA holds them.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import Ajv7 from 'ajv';
import Ajv2019 from 'ajv/dist/2019.js';
import Ajv2020 from 'ajv/dist/2020.js';
import Ajv4 from 'ajv-draft-04';
import { build, check, finish, root } from './lib.mjs';

const LONG = process.env.WHIMBREL_LONG === '1';
const COUNT = Number(process.env.WHIMBREL_DOCUMENTS ?? (LONG ? 1000 : 12));
const [FIRST, SCHEMAS] = (process.env.WHIMBREL_SCHEMAS ?? (LONG ? '0,500' : '0,20')).split(',').map(Number);
const program = spawn(join(build, 'tests/engine/grammar-judge'), { stdio: ['pipe', 'pipe', 'inherit'] });
/** Its lines; node:readline would break them at U+2028, too, which a JSON string may hold. */
async function* lines(stream) {
  let rest = '';
  for await (const chunk of stream.setEncoding('utf8')) {
    const parts = (rest + chunk).split('\n');
    rest = parts.pop();
    yield* parts;
  }
}
const answers = lines(program.stdout);
const next = async () => { const { value, done } = await answers.next(); assert.ok(!done, 'grammar-judge ended'); return value; };
const tell = (line) => program.stdin.write(`${line}\n`);

let state = 1;
const random = (n) => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return Math.floor((state / 2 ** 32) * n); };
const pick = (list) => list[random(list.length)];
const odd = () => pick([null, true, false, 0, 1, -1, 7, 0.5, 120, 'a', '', 'id', '2024-02-29', [], [1], ['a', 'a'], {}, { a: 1 }]);

/** One change somewhere in a copy of the value. */
function mutate(value) {
  const places = [];
  const walk = (v, set) => {
    places.push([v, set]);
    if (Array.isArray(v)) v.forEach((x, i) => walk(x, (y) => { v[i] = y; }));
    else if (v && typeof v === 'object') for (const k of Object.keys(v)) walk(v[k], (y) => { v[k] = y; });
  };
  const holder = { v: structuredClone(value) };
  walk(holder.v, (y) => { holder.v = y; });
  const [v, set] = pick(places);
  if (Array.isArray(v) && random(2)) {
    if (random(2) && v.length) v.splice(random(v.length), 1);
    else v.splice(random(v.length + 1), 0, v.length && random(2) ? structuredClone(pick(v)) : odd());
  } else if (v && typeof v === 'object' && !Array.isArray(v) && random(3)) {
    const keys = Object.keys(v);
    if (random(2) && keys.length) delete v[pick(keys)];
    else v[pick(['a', 'x', 'name', 'type', 'x-y', 'zz'])] = odd();
  } else if (typeof v === 'string' && random(2)) set(random(2) ? v.slice(1) : v + pick(['a', '0', ' ', 'é']));
  else if (typeof v === 'number' && random(2)) set(pick([v + 1, v - 1, -v, Math.trunc(v), v * 2]));
  else set(odd());
  return holder.v;
}

// Left out: numbers with exponents or more digits than a double tells apart, and halves of surrogate pairs that a
// change left behind, which no text of ours may hold.
const plain = (text) => !/\\ud[89a-f]/.test(text) && !/"(?:\w*)":-?\d+(?:\.\d+)?[eE]/.test(text) && !/\d{16}/.test(text) && !/\d[eE][+-]?\d/.test(text);
/** Up to draft 7 nothing beside a $ref counts ("All other properties in a "$ref" object MUST be ignored", draft 7,
 * 8.3), but ajv looks at it. */
function withoutSiblings(schema) {
  if (schema === null || typeof schema !== 'object') return schema;
  if (Array.isArray(schema)) return schema.map(withoutSiblings);
  const kept = typeof schema.$ref === 'string' ? ['$ref', 'definitions', '$defs'].filter((k) => k in schema) : Object.keys(schema);
  return Object.fromEntries(kept.map((k) => [k, withoutSiblings(schema[k])]));
}

function validator(schema) {
  const text = JSON.stringify(schema);
  const named = String(schema.$schema ?? '');
  const options = { strict: false, validateFormats: false, multipleOfPrecision: 9, logger: false };
  if (schema.$async || /draft-03/.test(named)) return null;
  const Ajv = /draft-04/.test(named) || /"exclusiveM(in|ax)imum":(true|false)/.test(text) ? Ajv4.default ?? Ajv4
    : /draft-0[67]/.test(named) ? Ajv7 : /2019-09/.test(named) ? Ajv2019 : Ajv2020;
  const own = /draft-0[467]/.test(named) ? withoutSiblings(schema) : { ...schema };
  delete own.$schema;
  return new Ajv(options).compile(own);
}

const total = { schemas: 0, refused: 0, other: 0, documents: 0, mutated: 0, long: 0 };
const wrong = [];

async function compare(name, schema) {
  if (schema === null || typeof schema !== 'object') return;
  let valid;
  try { valid = validator(schema); } catch { valid = null; }
  if (!valid) { total.other++; return; } // ajv cannot read it
  tell(`S ${JSON.stringify(schema)}`);
  const said = await next();
  if (said !== 'ok') { total.refused++; return; }
  total.schemas++;
  const documents = [];
  tell(`G ${total.schemas} ${COUNT}`);
  for (let i = 0; i < COUNT; i++) {
    const text = await next();
    if (text.startsWith('! ')) { wrong.push(`${name}: stuck after ${text.slice(2, 200)}`); continue; }
    if (text === '') { total.long++; continue; }
    const value = JSON.parse(text);
    total.documents++;
    documents.push(value);
    if (plain(text) && !valid(value)) wrong.push(`${name}: accepts ${text.slice(0, 200)}, ajv: ${JSON.stringify(valid.errors?.[0]).slice(0, 200)}`);
  }
  const expected = [];
  for (let i = 0; documents.length && i < COUNT; i++) {
    const changed = mutate(documents[i % documents.length]), text = JSON.stringify(changed);
    if (text === undefined || !plain(text)) continue;
    expected.push([text, valid(changed)]);
    tell(`D ${text}`);
  }
  for (const [text, is] of expected) {
    total.mutated++;
    if (((await next()) === '1') !== is) wrong.push(`${name}: ${is ? 'refuses' : 'accepts'} ${text.slice(0, 200)}`);
  }
}

const cases = JSON.parse(readFileSync(join(root, 'tests/engine/cases/schema-grammar.json'), 'utf8'));
const find = (o) => (o && typeof o === 'object' ? Object.entries(o).flatMap(([k, v]) => (k === 'schema' ? [v] : find(v))) : []);

await check('cases: what the grammar accepts is valid, what is changed is judged as ajv judges it', async () => {
  for (const one of cases) for (const schema of find(one)) await compare(one.id, schema);
  console.log(JSON.stringify(total));
  assert.deepEqual(wrong.slice(0, 10), []);
  assert.ok(total.documents > 0 && total.mutated > 0);
});

const data = process.env.WHIMBREL_TEST_DATA;
if (!data) console.log('[skip] public schemas: WHIMBREL_TEST_DATA is not set');
else
  await check(`public schemas ${FIRST} to ${FIRST + SCHEMAS}, ${COUNT} documents each: the same`, async () => {
    const lines = execFileSync('xz', ['-dc', join(data, 'jsonschemabench/maskbench_subset.jsonl.xz')], { maxBuffer: 1 << 30 }).toString().split('\n');
    const every = Math.floor(lines.length / 500);
    for (let i = FIRST; i < FIRST + SCHEMAS; i++) {
      const row = JSON.parse(lines[i * every]);
      await compare(row.file, row.case.schema);
    }
    console.log(JSON.stringify(total));
    assert.deepEqual(wrong.slice(0, 10), []);
  });

program.stdin.end();
finish();
