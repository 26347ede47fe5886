// Asking the server of the live page for another document: another sentence, forced tokens, silenced parts. Whatever
// is asked, the untouched translation of the same sentence is kept beside it, to compare with.

import { openDocument } from "./data.js";
import { fitting } from "./address.js";

async function fetchDocument(question, signal) {
  const answer = await fetch("api/look", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
  }).catch(() => {
    throw new Error("The server does not answer. Is attent look still running in its terminal?");
  });
  const json = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(json?.error ?? `The server answered with ${answer.status} and no words.`);
  return openDocument({ ...json, live: true });
}

/** Everything a view may do beyond the store. The last question wins: an answer to an earlier one is dropped. */
export function makeActions(store) {
  let asked = 0;
  let waiting = new AbortController();
  let answered = answeredOf(store.get());

  async function ask(wish = {}) {
    const question = questionOf(store.get(), wish);
    if (!question.text.trim()) return store.set({ error: "Type a sentence to look at first." });
    const number = ++asked;
    waiting.abort(); // the server stops when nobody waits for its answer any more
    waiting = new AbortController();
    const { signal } = waiting;
    const { text, prefix, silence, beam_size, to } = question;
    store.set({ busy: true, error: null, text, prefix, silence, beamSize: beam_size ?? null, to: to ?? null });
    try {
      const base = await baseFor(store.get(), question, signal);
      const doc = base.question === keyOf(question) ? base.doc : await fetchDocument(question, signal);
      if (number !== asked) return;
      answered = answeredOf(store.get());
      store.set({ busy: false, doc, base: base.doc, baseQuestion: base.plain, ...fitting(doc, store.get()) });
    } catch (error) {
      if (number === asked) store.set({ busy: false, error: asSentence(error.message), ...answered });
    }
  }

  return { ask, reset: () => ask({ prefix: [], silence: [] }) };
}

/** The question that the document on show answers: what holds again when the next one fails. */
const answeredOf = ({ text, prefix, silence, beamSize, to }) => ({ text, prefix, silence, beamSize, to });

const asSentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function questionOf(state, wish) {
  const text = wish.text ?? state.text;
  const to = wish.to ?? state.to;
  const prefix = wish.prefix ?? (text === state.text && to === state.to ? state.prefix : []);
  const question = { text, prefix, silence: wish.silence ?? state.silence };
  const beamSize = wish.beam_size ?? state.beamSize;
  return { ...question, ...(beamSize ? { beam_size: beamSize } : {}), ...(to ? { to } : {}) };
}

/** The same for the same question. */
export function keyOf({ text, prefix, silence, beam_size = null, to = null }) {
  return JSON.stringify([text, prefix, silence, beam_size, to]);
}

/** The untouched translation of the question's text, asked for once: forced and silenced ones are compared with it. */
async function baseFor(state, question, signal) {
  const untouched = { ...question, prefix: [], silence: [] };
  const plain = keyOf(untouched);
  if (state.baseQuestion === plain) return { doc: state.base, plain, question: plain };
  return { doc: await fetchDocument(untouched, signal), plain, question: plain };
}
