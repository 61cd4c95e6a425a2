// What every client's tool loop plays: five turns, each a question that the tool answers, with values drawn at run time.
import assert from 'node:assert/strict';
import { randomInt } from 'node:crypto';
import { pick, word } from './lib.mjs';

export const TURNS = 5;
export const city = () => pick(['Oslo', 'Lisbon', 'Nairobi', 'Quito', 'Tallinn', 'Hobart', 'Porto', 'Kyoto']);
export const question = () => `What's the weather in ${city()}?`;
export const forecast = () => ({ temperature: randomInt(-20, 35), condition: pick(['rain', 'snow', 'fog', 'sunny']), station: word() });

/** Checks a client's usage, request after request of one conversation: the totals add up, and the whole previous turn, less at most its last
 * token, is in the cache. Returns the function that takes {prompt, cached, output, total?}. */
export function cacheWatch() {
  let before = 0;
  return ({ prompt, cached, output, total = prompt + output }) => {
    for (const [name, value] of Object.entries({ prompt, cached, output })) assert.ok(Number.isInteger(value) && value >= 0, `${name} is ${value}`);
    assert.equal(total, prompt + output);
    assert.ok(cached <= prompt, `${cached} cached of ${prompt}`);
    assert.ok(cached >= before - 1, `the previous turn's ${before} tokens are cached, less at most one: ${cached}`);
    before = prompt + output;
  };
}
