// Requests to the live server: another sentence, forced tokens, masked parts. The output without forced tokens and
// masked parts is kept as the baseline for comparison.

import { openDocument } from "./data.js";
import { clampSelection, takeKey } from "./url_state.js";

const apiKey = takeKey();

async function fetchDocument(request, signal) {
  const response = await fetch("api/look", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...(apiKey ? { Authorization: `Bearer ${apiKey}` } : {}) },
    body: JSON.stringify(request),
  }).catch(() => {
    throw new Error("The server does not respond. Is attent look still running?");
  });
  const json = await response.json().catch(() => null);
  if (!response.ok) throw new Error(json?.error ?? `The server returned status ${response.status} without a message.`);
  return openDocument({ ...json, live: true });
}

/** Actions that need the server. The last request wins; responses to earlier ones are dropped. */
export function makeActions(store) {
  let latest = 0;
  let pending = new AbortController();
  let lastGood = requestState(store.get());

  async function ask(changes = {}) {
    const request = buildRequest(store.get(), changes);
    if (!request.text.trim()) return store.set({ error: "Type a sentence first." });
    const number = ++latest;
    pending.abort(); // the server cancels the computation when the connection closes
    pending = new AbortController();
    const { signal } = pending;
    const { text, prefix, masked_parts: maskedParts, beam_size, to } = request;
    store.set({ busy: true, error: null, text, prefix, maskedParts, beamSize: beam_size ?? null, to: to ?? null });
    try {
      const base = await fetchBaseline(store.get(), request, signal);
      const doc = base.key === requestKey(request) ? base.doc : await fetchDocument(request, signal);
      if (number !== latest) return;
      lastGood = requestState(store.get());
      store.set({ busy: false, doc, base: base.doc, baseKey: base.key, ...clampSelection(doc, store.get()) });
    } catch (error) {
      if (number === latest) store.set({ busy: false, error: toSentence(error.message), ...lastGood });
    }
  }

  return { ask, reset: () => ask({ prefix: [], maskedParts: [] }) };
}

/** The request that produced the current document, restored when the next one fails. */
const requestState = ({ text, prefix, maskedParts, beamSize, to }) => ({ text, prefix, maskedParts, beamSize, to });

const toSentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function buildRequest(state, changes) {
  const text = changes.text ?? state.text;
  const to = changes.to ?? state.to;
  const prefix = changes.prefix ?? (text === state.text && to === state.to ? state.prefix : []);
  const request = { text, prefix, masked_parts: changes.maskedParts ?? state.maskedParts };
  const beamSize = changes.beam_size ?? state.beamSize;
  return { ...request, ...(beamSize ? { beam_size: beamSize } : {}), ...(to ? { to } : {}) };
}

/** A string that is equal for equal requests. */
export function requestKey({ text, prefix, masked_parts, beam_size = null, to = null }) {
  return JSON.stringify([text, prefix, masked_parts, beam_size, to]);
}

/** The document of the same text without forced tokens and masked parts, fetched once. */
async function fetchBaseline(state, request, signal) {
  const plainRequest = { ...request, prefix: [], masked_parts: [] };
  const key = requestKey(plainRequest);
  if (state.baseKey === key) return { doc: state.base, key };
  return { doc: await fetchDocument(plainRequest, signal), key };
}
