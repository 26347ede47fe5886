// Alternatives for a word of the translation: a menu of other continuations of its sentence from this word on.

import { suggest, translate } from "./api.js";
import { byId, h } from "./dom.js";
import { findSegment, pairSegments } from "./segments.js";
import { countWords } from "./words.js";

const COUNT = 6;
const SHOWN_WORDS = 5; // of a continuation

export function setUpAlternatives(store) {
  const menu = byId("alternatives");
  const translation = byId("translation");
  let pending = new AbortController();
  let opener = null; // the word that the menu belongs to

  const open = (word) => {
    pending.abort();
    pending = new AbortController();
    opener = word;
    word.setAttribute("aria-expanded", "true");
    openMenu(store, word, pending.signal, (choice) => choose(choice, word));
  };
  const choose = (choice, word) => {
    const { start } = word.dataset;
    menu.hidePopover();
    applyChoice(store, choice);
    translation.querySelector(`[data-start="${start}"]`)?.focus();
  };

  translation.addEventListener("click", ({ target }) => {
    if (target.dataset.word !== undefined && getSelection().isCollapsed) open(target);
  });
  translation.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || !["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    open(event.target);
  });
  menu.addEventListener("keydown", (event) => moveInMenu(event, menu));
  menu.addEventListener("toggle", ({ newState }) => {
    if (newState !== "closed") return;
    pending.abort();
    opener?.removeAttribute("aria-expanded");
    store.set({ pointed: null });
    if (menu.contains(document.activeElement) || document.activeElement === document.body) opener?.focus();
  });
  for (const event of ["scroll", "resize"]) window.addEventListener(event, () => menu.hidePopover());
  store.on(["translation"], () => menu.hidePopover());
}

async function openMenu(store, word, signal, choose) {
  const menu = byId("alternatives");
  const place = locateWord(store.get(), Number(word.dataset.start));
  menu.lang = place.target;
  menu.dir = byId("translation").dir;
  showItems(menu, word, [h("p", { class: "muted" }, "…")]);
  let items;
  try {
    const { segment, prefix, source, target } = place;
    const request = { text: segment.source.text, prefix, source, target, count: COUNT + 1 };
    const others = (await suggest(request, signal)).filter((text) => text.startsWith(prefix) && text !== segment.target.text);
    items = others.slice(0, COUNT).map((text) => menuItem(text, prefix, () => choose({ ...place, choice: text })));
    if (!items.length) items = [h("p", { class: "muted" }, "There are no alternatives.")];
  } catch (error) {
    if (signal.aborted) return;
    items = [h("p", { class: "muted" }, error.message)];
  }
  if (signal.aborted) return;
  showItems(menu, word, items);
  (menu.querySelector("[role=menuitem]") ?? menu).focus();
}

/** The sentence of a position of the translation, and what precedes the position in it. */
function locateWord({ translation }, position) {
  const segment = findSegment(pairSegments(translation), "target", position);
  const { source, target } = translation;
  return { translation, segment, prefix: translation.text.slice(segment.target.start, position), source, target };
}

/** The words that follow the prefix, the first in bold. */
function menuItem(text, prefix, onChoose) {
  const [first, ...rest] = text.slice(prefix.length).trim().split(/\s+/);
  const more = rest.length >= SHOWN_WORDS ? " …" : "";
  const label = [h("b", {}, first || "(end)"), ` ${rest.slice(0, SHOWN_WORDS - 1).join(" ")}${more}`];
  return h("button", { type: "button", role: "menuitem", tabindex: -1, on: { click: onChoose } }, label);
}

/** Below the word, within the window. */
function showItems(menu, word, items) {
  menu.replaceChildren(...items);
  menu.tabIndex = -1;
  menu.showPopover();
  const [box, size] = [word.getBoundingClientRect(), menu.getBoundingClientRect()];
  const start = menu.dir === "rtl" ? box.right - size.width : box.left;
  const left = Math.max(8, Math.min(start, document.documentElement.clientWidth - size.width - 8));
  const fitsBelow = box.bottom + size.height + 8 <= innerHeight;
  menu.style.setProperty("left", `${left}px`);
  menu.style.setProperty("top", `${fitsBelow ? box.bottom + 4 : Math.max(8, box.top - size.height - 4)}px`);
}

function moveInMenu(event, menu) {
  const items = [...menu.querySelectorAll("[role=menuitem]")];
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
  if (event.key === "Tab") menu.hidePopover();
  if (to === undefined || !items.length) return;
  event.preventDefault();
  items[(to + items.length) % items.length].focus();
}

// --- a chosen alternative ---

/** Replace a sentence; then ask for its alignment, which is that of the translation with it as the prefix. */
async function applyChoice(store, { translation, segment, choice, source, target }) {
  const edited = replaceSegment(translation, segment, choice, []);
  store.set({ translation: edited });
  const request = { text: segment.source.text, source, target, model: translation.model, prefix: choice };
  const checked = await translate(request).catch(() => null);
  if (checked?.text !== choice || store.get().translation !== edited) return;
  const isOnly = translation.text.trim() === segment.target.text;
  const confidence = isOnly ? checked.confidence : translation.confidence;
  const focused = document.activeElement?.dataset.start;
  store.set({ translation: { ...replaceSegment(translation, segment, choice, checked.alignment), confidence } });
  if (focused) byId("translation").querySelector(`[data-start="${focused}"]`)?.focus();
}

/** The translation with another sentence; `links` are the alignment links within this sentence. */
function replaceSegment(translation, { source, target }, choice, links) {
  const [before, after] = [translation.text.slice(0, target.start), translation.text.slice(target.start + target.text.length)];
  const [sourceStart, targetStart] = [countWords(translation.sourceText.slice(0, source.start)), countWords(before)];
  const targetEnd = targetStart + countWords(target.text);
  const shift = targetStart + countWords(choice) - targetEnd;
  const others = (translation.alignment ?? []).filter(([, to]) => to < targetStart || to >= targetEnd);
  const moved = others.map(([from, to]) => [from, to < targetStart ? to : to + shift]);
  const added = links.map(([from, to]) => [from + sourceStart, to + targetStart]);
  return { ...translation, text: `${before}${choice}${after}`, alignment: [...moved, ...added] };
}
