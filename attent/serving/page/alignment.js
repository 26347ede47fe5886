// Highlights of aligned words: pointing at a word, focusing it or moving the cursor into it marks those of the other side.

import { byId } from "./dom.js";
import { findWord } from "./words.js";

const CURSOR_KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"];

export function setUpAlignment(store) {
  const [box, source, target] = ["source-text", "source-words", "translation"].map(byId);
  const point = (side, word) => store.set({ pointed: word === null ? null : `${side} ${word}` });
  const clear = () => { if (!target.querySelector("[aria-expanded]")) point("", null); }; // its menu is open
  const pointAtCursor = () => point("source", findWord(box.value, box.selectionStart));

  target.addEventListener("pointerover", (event) => point("target", wordOf(event.target)));
  target.addEventListener("focusin", (event) => point("target", wordOf(event.target)));
  box.addEventListener("pointermove", (event) => point("source", wordAt(source, event)));
  box.addEventListener("click", pointAtCursor);
  box.addEventListener("keyup", (event) => { if (CURSOR_KEYS.includes(event.key)) pointAtCursor(); });
  for (const element of [target, box]) element.addEventListener("pointerleave", clear);
  for (const element of [target, box]) element.addEventListener("focusout", clear);
  store.on(["text"], clear);
  store.on(["pointed", "translation"], (state) => drawHighlights(state, { source, target }));
}

const wordOf = (element) => (element.dataset.word === undefined ? null : Number(element.dataset.word));

/** The word of the layer below the textarea at a position of the pointer. */
function wordAt(layer, { clientX, clientY }) {
  const word = document.elementsFromPoint(clientX, clientY).find((element) => element.parentElement === layer);
  return word ? wordOf(word) : null;
}

function drawHighlights({ pointed, translation, text }, layers) {
  const [side, word] = (pointed ?? " ").split(" ");
  const isCurrent = translation?.sourceText === text;
  const links = pointed && isCurrent ? (translation.alignment ?? []).map(([from, to]) => ({ source: from, target: to })) : [];
  const linked = links.filter((link) => link[side] === Number(word));
  for (const [name, layer] of Object.entries(layers)) {
    const words = new Set(linked.map((link) => link[name]));
    for (const element of layer.querySelectorAll(".linked")) element.classList.remove("linked");
    for (const index of words) layer.querySelector(`[data-word="${index}"]`)?.classList.add("linked");
  }
}
