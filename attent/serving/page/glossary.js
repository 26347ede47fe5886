// The glossary: terms with required translations, sent with each text and kept in this browser.

import { byId, readStored, writeStored } from "./dom.js";

const STORED = "attent-glossary";
const DELAY = 500; // milliseconds without a key
const SEPARATOR = "=";

/** {terms: {term: translation}, problem: a sentence about the first wrong line, or ""}. */
export function parseGlossary(text) {
  const terms = {};
  let problem = "";
  text.split("\n").forEach((line, index) => {
    const at = line.indexOf(SEPARATOR);
    const [term, translation] = [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    if (at > 0 && term && translation) terms[term] = translation;
    else if (line.trim()) problem ||= `Line ${index + 1} is not used: write term = translation.`;
  });
  return { terms, problem };
}

export const readGlossary = () => parseGlossary(readStored(STORED, "")).terms;

export function setUpGlossary(store) {
  const box = byId("glossary");
  let timer = 0;

  function draw() {
    const { terms, problem } = parseGlossary(box.value);
    byId("glossary-count").textContent = Object.keys(terms).length || "";
    byId("glossary-problem").textContent = problem;
    return terms;
  }

  function apply() {
    const terms = draw();
    writeStored(STORED, box.value);
    if (JSON.stringify(terms) !== JSON.stringify(store.get().glossary)) store.set({ glossary: terms });
  }

  box.value = readStored(STORED, "");
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(apply, DELAY);
  });
  box.addEventListener("change", apply);
  draw();
}
