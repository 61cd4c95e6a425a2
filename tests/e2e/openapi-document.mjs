// An OpenAPI 3.1 document: that it is one, and that values are what it says.
import assert from 'node:assert/strict';
import { Validator } from '@seriousme/openapi-schema-validator';
import Ajv2020 from 'ajv/dist/2020.js';

export async function valid(document) {
  assert.match(document.openapi, /^3\.1\./);
  const result = await new Validator().validate(structuredClone(document));
  assert.ok(result.valid, JSON.stringify(result.errors)?.slice(0, 2000));
  const ids = Object.values(document.paths).flatMap((p) => Object.values(p).map((o) => o.operationId));
  assert.equal(new Set(ids).size, ids.length, 'operation ids are unique');
}

export const pointer = (...parts) => 'doc#/' + parts.map((p) => encodeURIComponent(String(p).replaceAll('~', '~0').replaceAll('/', '~1'))).join('/');

/** fits(pointer(…), value, what): the value is as the schema there says. */
export function checker(document) {
  const ajv = new Ajv2020({ strict: false, allErrors: true, validateSchema: false, validateFormats: false });
  ajv.addSchema(document, 'doc');
  return (ref, value, what) => {
    const validate = ajv.getSchema(ref) ?? ajv.compile({ $ref: ref });
    assert.ok(validate(value), `${what}: ${JSON.stringify(validate.errors?.slice(0, 3))} in ${JSON.stringify(value).slice(0, 600)}`);
  };
}
