// The translation: its words, confidence, and the links that copy it and show its attention.

import { readKey } from "./api.js";
import { byId } from "./dom.js";
import { findSegment, pairSegments } from "./segments.js";
import { renderWords } from "./words.js";

const UNSURE = 0.4; // confidence below which a translation is marked
const COPIED_MS = 1500;
const ANNOUNCE_MS = 1200; // a pause in typing, before a screen reader is told
const WORD = { role: "button", "aria-haspopup": "menu", tabindex: -1 };

export function setUpTargetPane(store) {
  let announcing = 0;
  const element = byId("translation");
  byId("copy").addEventListener("click", () => copyTranslation(store.get().translation.text));
  element.addEventListener("keydown", (event) => moveFocus(event, element));
  element.addEventListener("focusin", ({ target }) => setTabStop(element, target));

  store.on(["translation"], ({ translation }) => {
    renderWords(element, translation?.text ?? "", WORD);
    setTabStop(element, element.querySelector("[data-word]"));
    byId("copy").disabled = !translation?.text;
    drawConfidence(translation);
    clearTimeout(announcing);
    announcing = setTimeout(() => { byId("announcement").textContent = translation?.text ?? ""; }, ANNOUNCE_MS);
  });
  store.on(["busy"], ({ busy }) => byId("target-pane").classList.toggle("working", busy));
  store.on(["message"], ({ message }) => { byId("message").textContent = message; });
  store.on(["translation"], () => drawAttention(store));
  byId("source-text").addEventListener("blur", () => drawAttention(store));
  drawAttention(store);
}

// --- the words: one of them is in the Tab order, arrow keys move to the others ---

function setTabStop(element, word) {
  for (const other of element.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  if (word) word.tabIndex = 0;
}

function moveFocus(event, element) {
  const words = [...element.querySelectorAll("[data-word]")];
  const at = words.indexOf(event.target);
  const forward = element.dir === "rtl" ? -1 : 1;
  const to = { ArrowRight: at + forward, ArrowLeft: at - forward, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: words.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  words[Math.min(words.length - 1, Math.max(0, to))].focus();
}

// --- below the translation ---

function drawConfidence(translation) {
  const element = byId("confidence");
  element.hidden = !translation?.text;
  if (!translation) return;
  const percent = Math.round(100 * translation.confidence);
  const isUnsure = translation.confidence < UNSURE;
  element.classList.toggle("unsure", isUnsure);
  element.title = `Confidence ${percent}%: the mean probability that the model gives to the tokens of this translation. `
    + `Below ${100 * UNSURE}% it is often wrong.`;
  element.ariaLabel = element.title;
  byId("confidence-note").textContent = isUnsure ? "unsure" : "";
  byId("confidence-bar").style.setProperty("width", `${percent}%`);
}

async function copyTranslation(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // the clipboard needs HTTPS or localhost
    getSelection().selectAllChildren(byId("translation"));
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  byId("copy").textContent = "Copied";
  setTimeout(() => { byId("copy").textContent = "Copy"; }, COPIED_MS);
}

/** Link to the attention of the sentence with the cursor. */
function drawAttention(store) {
  const { translation, info } = store.get();
  const link = byId("attention");
  const { text: shown, model, source, target } = translation ?? {};
  const canShow = Boolean(shown) && source !== target; // a text in the target language is not translated
  link.ariaDisabled = String(!canShow);
  if (!canShow) return link.removeAttribute("href");
  const { text } = findSegment(pairSegments(translation), "source", byId("source-text").selectionStart).source;
  const { tag } = info.directions.find((each) => each.model === model && each.source === source && each.target === target) ?? {};
  const key = readKey() ? `&api_key=${encodeURIComponent(readKey())}` : ""; // fragments are not sent, so that no log has it
  const language = tag ? `&to=${encodeURIComponent(tag)}` : "";
  link.href = `look/${encodeURIComponent(model)}/#text=${encodeURIComponent(text)}${language}${key}`;
}
