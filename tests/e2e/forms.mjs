// Fifty schemas, of every kind that structured output enforces.
export const object = (properties, required = Object.keys(properties)) => ({ type: 'object', properties, required, additionalProperties: false });
const text = (maxLength) => ({ type: 'string', maxLength });
const list = (items, minItems, maxItems) => ({ type: 'array', items, minItems, maxItems });
const tree = { $ref: '#/$defs/node', $defs: { node: object({ name: text(8), kids: { type: 'array', maxItems: 2, items: { $ref: '#/$defs/node' } } }) } };
const maybe = (schema) => ({ anyOf: [schema, { type: 'null' }] });

export const schemas = [
  object({ city: text(12), days: { type: 'integer', minimum: 3, maximum: 120 } }),
  object({ v: { enum: ['später', '東京', 'a"b\\c', 1, null, true, [1, 'x']] } }),
  object({ at: { type: 'string', pattern: '^[0-9]{4}-(0[1-9]|1[0-2])$' }, ok: { type: 'boolean' } }),
  object({ list: list({ type: 'number', multipleOf: 0.1, minimum: 0, maximum: 5 }, 1, 3) }),
  object({ a: { anyOf: [{ type: 'integer', minimum: 10, maximum: 20 }, object({ deep: { type: 'boolean' } })] } }),
  object({ tags: { type: 'array', items: { enum: ['x', 'y', 'z'] }, uniqueItems: true }, maybe: { type: ['string', 'null'], maxLength: 5 } }, ['tags']),
  tree,
  // numbers
  object({ n: { type: 'integer', minimum: -5, exclusiveMaximum: 5 } }),
  object({ n: { type: 'number', exclusiveMinimum: 0, maximum: 1 } }),
  object({ n: { type: 'integer', multipleOf: 7, minimum: 0, maximum: 1000 } }),
  object({ n: { type: 'number', multipleOf: 0.25, minimum: -2, maximum: 2 } }),
  object({ low: { type: 'integer', maximum: -1, minimum: -99 }, high: { type: 'integer', minimum: 1000000, maximum: 9999999 } }),
  { type: 'integer', minimum: 0, maximum: 255 },
  // strings
  object({ s: { type: 'string', minLength: 3, maxLength: 6 } }),
  object({ code: { type: 'string', pattern: '^[A-Z]{2}[0-9]{3}$' }, hex: { type: 'string', pattern: '^#([0-9a-f]{3}|[0-9a-f]{6})$' } }),
  object({ day: { type: 'string', format: 'date' } }),
  object({ at: { type: 'string', format: 'date-time' } }),
  object({ id: { type: 'string', format: 'uuid' } }),
  object({ ip: { anyOf: [{ type: 'string', format: 'ipv4' }, { type: 'string', format: 'ipv6' }] } }),
  object({ mail: { type: 'string', format: 'email', maxLength: 30 } }),
  object({ path: { type: 'string', pattern: '^(/[a-z]{1,8}){1,3}$' } }),
  { type: 'string', pattern: '^[A-Z][a-z]+( [A-Z][a-z]+)?$', maxLength: 24 },
  object({ a: { const: 'the one text' }, b: { const: 3 }, c: { const: { x: [null, false] } } }),
  // objects
  object({ a: text(4), b: text(4), c: text(4) }, []),
  { type: 'object', properties: { id: { type: 'integer', minimum: 0, maximum: 99 } }, required: ['id'], additionalProperties: { type: 'boolean' }, maxProperties: 3 },
  { type: 'object', additionalProperties: false, patternProperties: { '^x-[a-z]{1,4}$': { type: 'integer', minimum: 0, maximum: 9 } }, minProperties: 1, maxProperties: 2 },
  { type: 'object', propertyNames: { enum: ['red', 'green', 'blue'] }, additionalProperties: { type: 'integer', minimum: 0, maximum: 255 }, maxProperties: 3 },
  { type: 'object', properties: { card: text(4), billing: text(4) }, dependentRequired: { card: ['billing'] }, additionalProperties: false },
  { type: 'object', properties: { kind: { enum: ['a', 'b'] } }, required: ['kind'], if: { properties: { kind: { const: 'a' } } }, then: { properties: { n: { type: 'integer', minimum: 0, maximum: 9 } }, required: ['n'] }, else: { properties: { n: { type: 'boolean' } } }, unevaluatedProperties: false },
  object({ point: object({ x: { type: 'integer', minimum: 0, maximum: 9 }, y: { type: 'integer', minimum: 0, maximum: 9 } }), label: maybe(text(6)) }),
  // arrays
  list({ type: 'boolean' }, 2, 4),
  { type: 'array', prefixItems: [{ type: 'integer', minimum: 0, maximum: 9 }, text(3), { type: 'boolean' }], items: false, minItems: 3 },
  { type: 'array', items: { type: 'integer', minimum: 0, maximum: 20 }, contains: { minimum: 15 }, minItems: 1, maxItems: 4 },
  { type: 'array', items: { enum: ['a', 'b', 'c', null] }, contains: { const: 'a' }, minContains: 1, maxContains: 2, maxItems: 5 },
  list(object({ key: text(3), value: { type: ['integer', 'null'], minimum: 0, maximum: 9 } }), 1, 2),
  list(list({ enum: [0, 1] }, 2, 2), 2, 2),
  // several at once
  { oneOf: [object({ kind: { const: 'cat' }, lives: { type: 'integer', minimum: 1, maximum: 9 } }), object({ kind: { const: 'dog' }, tricks: list(text(5), 0, 2) })] },
  { allOf: [{ type: 'object', properties: { a: { type: 'integer', minimum: 0 } }, required: ['a'] }, { properties: { a: { maximum: 7 }, b: { type: 'boolean' } }, required: ['b'] }], unevaluatedProperties: false },
  object({ n: { allOf: [{ type: 'integer', minimum: 0, maximum: 100 }, { not: { enum: [13, 42] } }, { multipleOf: 3 }] } }),
  object({ s: { type: 'string', not: { pattern: 'a' }, minLength: 1, maxLength: 5 } }),
  { anyOf: [{ type: 'null' }, { type: 'boolean' }, object({ again: { anyOf: [{ type: 'null' }, { type: 'boolean' }] } })] },
  { $ref: '#/$defs/expr', $defs: { expr: { anyOf: [{ type: 'integer', minimum: 0, maximum: 9 }, object({ op: { enum: ['+', '*'] }, left: { $ref: '#/$defs/small' }, right: { $ref: '#/$defs/small' } })] }, small: { type: 'integer', minimum: 0, maximum: 9 } } },
  object({ next: { $ref: '#/$defs/chain' } }, []),
  // as agents send them
  object({ steps: list(object({ thought: text(20), done: { type: 'boolean' } }), 1, 2), answer: text(20) }),
  object({ name: text(10), score: { type: 'number', minimum: 0, maximum: 1, multipleOf: 0.01 }, reason: maybe(text(20)) }),
  object({ intent: { enum: ['buy', 'sell', 'hold'] }, symbol: { type: 'string', pattern: '^[A-Z]{1,5}$' }, amount: { type: 'integer', minimum: 1, maximum: 10000 } }),
  object({ people: list(object({ first: text(8), born: { type: 'integer', minimum: 1900, maximum: 2026 }, roles: list({ enum: ['admin', 'user', 'guest'] }, 0, 2) }), 0, 2) }),
  object({ file: { type: 'string', pattern: '^[a-z]{1,8}\\.(c|h|js)$' }, line: { type: 'integer', minimum: 1, maximum: 2000 }, severity: { enum: ['info', 'warning', 'error'] }, fix: maybe(text(16)) }),
  object({ from: { type: 'string', format: 'time' }, every: { type: 'string', format: 'duration' } }),
  object({ matrix: { type: 'array', minItems: 2, maxItems: 2, prefixItems: [list({ type: 'integer', minimum: 0, maximum: 1 }, 2, 2)], items: list({ type: 'integer', minimum: 2, maximum: 3 }, 2, 2) } }),
];
schemas.find((s) => s.properties?.next).$defs = { chain: object({ value: { type: 'integer', minimum: 0, maximum: 9 }, next: { $ref: '#/$defs/chain' } }, ['value']) };

/** Parameters of tools: what the notation of calls writes in each of its ways. */
export const tools = {
  book: object({
    guests: { type: 'integer', minimum: 2, maximum: 9 },
    names: list(text(8), 1, 2),
    place: object({ kind: { enum: ['inn', 'camp'] }, note: { type: ['string', 'null'], maxLength: 6 } }),
    paid: { type: 'boolean' },
  }),
  look: object({ q: text(20) }),
  move: object({ path: { type: 'array', items: object({ x: { type: 'integer', minimum: -9, maximum: 9 }, y: { type: 'number', multipleOf: 0.5, minimum: 0, maximum: 4 } }), minItems: 1, maxItems: 3 }, speed: { enum: [1, 2, 'fast', null] } }),
  file: object({ name: { type: 'string', pattern: '^[a-z]{1,8}\\.(c|h)$' }, mode: { const: 'w' }, size: { anyOf: [{ type: 'integer', minimum: 0, maximum: 99 }, text(4)] }, tags: { type: 'array', items: { enum: ['a', 'b', 'c'] }, uniqueItems: true } }, ['name', 'mode']),
  set: object({ key: { type: 'string', format: 'uuid' }, values: { type: 'object', additionalProperties: { type: 'integer', minimum: 0, maximum: 9 }, maxProperties: 2 }, deep: { $ref: '#/$defs/deep' } }, ['key']),
  none: { type: 'object', properties: {}, additionalProperties: false },
};
tools.set.$defs = { deep: object({ more: { $ref: '#/$defs/deep' }, leaf: text(3) }, ['leaf']) };
