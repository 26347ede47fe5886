// The languages: two selects with the pairs that the server translates, and the button that swaps them.

import { byId, h, readStored, writeStored } from "./dom.js";

export const AUTO = "auto";
const STORED = "attent-languages";
const RIGHT_TO_LEFT = ["Arab", "Hebr", "Syrc", "Thaa", "Nkoo", "Adlm", "Rohg"];

export const listSources = (info) => [...new Set(info.directions.map(({ source }) => source))];

export function listTargets(info, source) {
  const directions = info.directions.filter((each) => source === AUTO || each.source === source);
  return [...new Set(directions.map(({ target }) => target))];
}

export const hasDirection = (info, source, target) => listTargets(info, source).includes(target);

/** The stored languages if the server has them, else detection and the first pair. */
export function chooseLanguages(info) {
  const sources = [...(listSources(info).length > 1 ? [AUTO] : []), ...listSources(info)];
  const stored = readStored(STORED, {});
  const source = sources.includes(stored.source) ? stored.source : sources[0];
  const targets = listTargets(info, source);
  return { source, target: targets.includes(stored.target) ? stored.target : targets[0] };
}

/** The source language that is chosen or detected; null before it is known. */
export const knownSource = ({ source, translation }) => (source === AUTO ? translation?.source ?? null : source);

export function textDirection(tag) {
  try {
    return RIGHT_TO_LEFT.includes(new Intl.Locale(tag).maximize().script) ? "rtl" : "ltr";
  } catch {
    return "auto"; // not a language tag
  }
}

export function setLanguage(element, tag) {
  if (tag) element.lang = tag;
  else element.removeAttribute("lang");
  element.dir = tag ? textDirection(tag) : "auto";
}

export function setUpLanguages(store) {
  const { info } = store.get();
  const [from, into, swap] = ["source-language", "target-language", "swap"].map(byId);
  const nameOf = (tag) => info.languages[tag] ?? tag;
  const byName = (a, b) => nameOf(a).localeCompare(nameOf(b));
  const detectOption = h("option", { value: AUTO });
  const toOption = (tag) => h("option", { value: tag }, nameOf(tag));
  const sources = listSources(info).sort(byName);
  from.append(...(sources.length > 1 ? [detectOption] : []), ...sources.map(toOption));

  function draw(state) {
    const { source, target } = state;
    const detected = source === AUTO && knownSource(state);
    detectOption.textContent = detected ? `${nameOf(detected)} (detected)` : "Detect language";
    into.replaceChildren(...listTargets(info, source).sort(byName).map(toOption));
    from.value = source;
    into.value = target;
    swap.disabled = !canSwap(state);
    setLanguage(byId("source-text"), knownSource(state));
    setLanguage(byId("source-words"), knownSource(state));
    setLanguage(byId("translation"), target);
  }

  from.addEventListener("change", () => {
    const targets = listTargets(info, from.value);
    const { target } = store.get();
    store.set({ source: from.value, target: targets.includes(target) ? target : targets[0] });
  });
  into.addEventListener("change", () => store.set({ target: into.value }));
  swap.addEventListener("click", () => swapLanguages(store));
  store.on(["source", "target", "translation"], draw);
  store.on(["source", "target"], ({ source, target }) => writeStored(STORED, { source, target }));
  draw(store.get());
}

/** True if the known source language is a target of the target language. Without text, detection may become any. */
const canSwap = (state) => hasDirection(state.info, state.target, swapTarget(state));

function swapTarget(state) {
  const known = knownSource(state);
  return known ?? listTargets(state.info, state.target).find((tag) => hasDirection(state.info, tag, state.target));
}

/** Exchange the languages and continue with the translation as the text. */
function swapLanguages(store) {
  const state = store.get();
  if (!canSwap(state)) return;
  store.set({ source: state.target, target: swapTarget(state), text: state.translation?.text ?? state.text });
}
