// Requests to the server. Addresses are relative, so that the page also works below a path of a proxy.

import { toSentence } from "./dom.js";

const KEY_NAME = "attent-key";
const UNREACHABLE_RETRY = 5; // seconds

export class RequestError extends Error {
  /** `retryAfter`: seconds after which the same request may succeed; null: never. */
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }

  /** What to show instead of the message while the request is repeated. */
  get retryMessage() {
    const reason = { 429: "Too many requests", 503: "The server is busy" }[this.status] ?? "The server does not respond";
    return `${reason}; retrying in ${this.retryAfter} s.`;
  }
}

export const readKey = () => sessionStorage.getItem(KEY_NAME) ?? "";
export const storeKey = (key) => sessionStorage.setItem(KEY_NAME, key);
export const keyHeaders = () => (readKey() ? { Authorization: `Bearer ${readKey()}` } : {});

/** The error of a response that is not OK, as one sentence. */
export function toError(status, retryAfter, body) {
  let sentence = null;
  try {
    sentence = JSON.parse(body).error;
  } catch {
    // an error of a proxy
  }
  const isBusyProxy = sentence === null && [429, 503].includes(status);
  const seconds = Number(retryAfter ?? (isBusyProxy ? 2 : 0)) || null;
  return new RequestError(toSentence(sentence ?? `the server answered with status ${status}`), status, seconds);
}

async function send(path, options = {}) {
  const headers = { ...keyHeaders(), ...options.headers };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server does not respond.", 0, UNREACHABLE_RETRY);
  });
  if (!response.ok) throw toError(response.status, response.headers.get("retry-after"), await response.text());
  return response;
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await send(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

export const fetchInfo = async () => (await send("v1/info")).json();

/** {text, source, target, model, confidence, detected, alignment}. */
export async function translate(request, signal) {
  return (await post("v1/translate", { alignment: true, ...request }, signal)).translations[0];
}

/** Translations that begin with a prefix, best first. */
export async function suggest(request, signal) {
  const { suggestions } = await post("v1/suggest", request, signal);
  return [...new Set(suggestions.map(({ text }) => text))];
}

export const fetchFile = async (path, signal) => (await send(path, { signal })).blob();
