// Translation while typing. A newer request aborts the older one, whose answer is never shown.

import { detect, translate } from "./api.js";
import { AUTO, hasDirection, listSources, listTargets } from "./languages.js";

const DELAY = 300; // milliseconds without a key
const MIN_DETECTED = 0.5; // below it, the text may be in a language that is not translated into the target
const MIN_DETECT_CONFIDENCE = 80; // percent, to change the languages

export const countCharacters = (text) => Array.from(text).length;

/** Start to translate whenever the text, the languages or the glossary change; returns a function that does it now. */
export function startLiveTranslation(store) {
  let timer = 0;
  let pending = new AbortController();

  /** The answer to the last request is still shown if it arrives while typing goes on. */
  function schedule({ delay = DELAY, keepPending = true } = {}) {
    clearTimeout(timer);
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
      store.set({ busy: false, message: error.message });
      if (error.retryAfter) timer = setTimeout(run, 1000 * error.retryAfter);
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

/** Translate; a detected language is checked if the answer is doubtful. */
async function translateState({ text, source, target, glossary, info }, signal) {
  const request = { text, split_sentences: true, ...(Object.keys(glossary).length ? { glossary } : {}) };
  const translation = await translate({ ...request, source, target }, signal);
  if (source !== AUTO || translation.detected >= MIN_DETECTED || listSources(info).length < 2) return translation;
  const language = await detectSource(info, text, signal);
  if (!language || language === translation.source) return translation;
  const other = hasDirection(info, language, target) ? target : listTargets(info, language)[0];
  return translate({ ...request, source: language, target: other }, signal);
}

/** The language of a text if the server translates from it; the detection among sources of one target cannot say so. */
async function detectSource(info, text, signal) {
  const [best] = await detect(text, signal).catch(() => []);
  const isSure = best && best.confidence >= MIN_DETECT_CONFIDENCE;
  return isSure && listSources(info).includes(best.language) ? best.language : null;
}
