// Translation while typing. A newer request aborts the older one, whose answer is never shown.

import { translate } from "./api.js";
import { AUTO, listTargets } from "./languages.js";

const DELAY = 300; // milliseconds without a key
const MIN_DETECTED = 0.8; // confidence to change the languages
const MAX_RETRIES = 3; // of a request that the server refuses: a text may always take too long

export const countCharacters = (text) => Array.from(text).length;

/** Start to translate whenever the text, the languages or the glossary change; returns a function that does it now. */
export function startLiveTranslation(store) {
  let timer = 0;
  let retries = 0;
  let pending = new AbortController();

  /** The answer to the last request is still shown if it arrives while typing goes on. */
  function schedule({ delay = DELAY, keepPending = true } = {}) {
    clearTimeout(timer);
    retries = 0;
    const { text, info } = store.get();
    const problem = describeLength(text, info.limits.characters);
    if (!keepPending || !text.trim() || problem) pending.abort();
    if (!text.trim() || problem) store.set({ translation: null, busy: false, message: problem ?? "" });
    else timer = setTimeout(run, delay);
  }

  async function run() {
    clearTimeout(timer);
    pending.abort();
    pending = new AbortController();
    const { signal } = pending;
    const { text } = store.get();
    store.set({ busy: true });
    try {
      const translation = await translateState(store.get(), signal);
      if (signal.aborted) return;
      const { target } = translation; // another one if the text turned out to be in the target language
      store.set({ translation: { ...translation, sourceText: text }, target, busy: false, message: "" });
    } catch (error) {
      if (signal.aborted) return;
      if (error.status) retries += 1; // else it does not respond, for example while it is restarted
      const canRetry = error.retryAfter && retries <= MAX_RETRIES;
      store.set({ busy: false, message: canRetry ? error.retryMessage : error.message });
      if (canRetry) timer = setTimeout(run, 1000 * error.retryAfter);
    }
  }

  store.on(["text"], () => schedule());
  store.on(["source", "target", "glossary"], () => { // after the text: all of them change at once when they are swapped
    if (store.get().translation?.target !== store.get().target) store.set({ translation: null });
    schedule({ delay: 0, keepPending: false });
  });
  return () => schedule({ delay: 0 });
}

function describeLength(text, limit) {
  const count = countCharacters(text);
  if (!limit || count <= limit) return null;
  return `The text has ${count.toLocaleString("en")} characters; at most ${limit.toLocaleString("en")} are translated at once.`;
}

/** Translate; a text that turns out to be in the target language is translated into another one. */
async function translateState({ text, source, target, glossary, info }, signal) {
  const request = { text, source, split_sentences: true, ...(Object.keys(glossary).length ? { glossary } : {}) };
  const translation = await translate({ ...request, target }, signal);
  const [other] = listTargets(info, translation.source);
  const isSame = source === AUTO && translation.source === translation.target && translation.detected >= MIN_DETECTED;
  return isSame && other ? translate({ ...request, target: other }, signal) : translation;
}
