// The admin REST. The key never reaches this code again after the log-in: it lives in a cookie that scripts cannot read.

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code;
    this.param = error?.param;
  }
}

let onLoggedOut = () => {};
export const whenLoggedOut = (run) => (onLoggedOut = run);

export async function call(method, path, body) {
  let response;
  try {
    response = await fetch(path, {
      method, credentials: 'same-origin', cache: 'no-store',
      headers: body === undefined ? {} : { 'content-type': 'application/json' },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, { message: 'the server does not answer' });
  }
  const text = await response.text();
  let json = null;
  try { json = text ? JSON.parse(text) : null; } catch { /* told below */ }
  if (response.ok && (json !== null || !text)) return json;
  if (response.status === 401) onLoggedOut();
  throw new Refused(response.status, json?.error ?? { message: text.slice(0, 200) || undefined });
}

export const get = (name, query) => {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== '');
  return call('GET', `/admin/v1/${name}${pairs.length ? `?${new URLSearchParams(pairs)}` : ''}`);
};
export const post = (name, body) => call('POST', `/admin/v1/${name}`, body ?? {});
export const patch = (name, body) => call('PATCH', `/admin/v1/${name}`, body);
export const remove = (name, body) => call('DELETE', `/admin/v1/${name}`, body);
