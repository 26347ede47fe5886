// One or several heads as lines between words: those who look on the left, what they look at on the right. Pointing
// at a word touches only its own lines and the words at their other ends; the rest fades by one class.

import { h, s, clear, shown, percent } from "./dom.js";
import { OVERLAYS } from "./colours.js";
import { focusOf, topEntries, sameWord } from "./sentence.js";

const MOST_LINES = 400;
const FAINTEST = 0.02;
const LEVELS_OF_LINES = 10;
const ENDS_AT_ONCE = 120;

/** {element, build(), draw(), focus()}: build for other words, draw for other heads, focus for another word. */
export function linesPanel(store) {
  const note = h("small", {});
  const all = s("g", { class: "all" });
  const focused = s("g", { class: "now" });
  const other = s("g", { class: "other" });
  const svg = s("svg", { preserveAspectRatio: "none", "aria-hidden": "true" }, all, other, focused);
  const labels = { queries: h("div", { class: "side-label queries" }), keys: h("div", { class: "side-label" }) };
  const lists = { queries: wordList(store, "queries"), keys: wordList(store, "keys") };
  const cells = [labels.queries, h("span", {}), labels.keys, lists.queries, svg, lists.keys];
  const lines = h("div", { class: "lines" }, cells);
  const element = h("section", { class: "panel", "aria-label": "Lines between words" },
    h("header", {}, h("h3", {}, "Lines between words"), note), h("div", { class: "lines-box" }, lines));
  const touched = new Set();
  let [row, sides] = [26, null];

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    if (sides?.doc !== doc || sides.queries !== layer.queries || sides.keys !== layer.keys) refill(doc, layer);
    draw();
  }

  function refill(doc, layer) {
    sides = { doc, queries: layer.queries, keys: layer.keys };
    const length = Math.max(doc.tokens(layer.queries).length, doc.tokens(layer.keys).length, 1);
    row = length <= 12 ? 32 : length <= 24 ? 26 : length <= 44 ? 21 : 18;
    lines.style.setProperty("--row", `${row}px`);
    svg.setAttribute("viewBox", `0 0 100 ${length * row}`);
    svg.style.setProperty("height", `${length * row}px`);
    fillWords(lists.queries, doc.tokens(layer.queries));
    fillWords(lists.keys, doc.tokens(layer.keys));
    labels.queries.textContent = ({ target: "while it writes …", read: "having read …" })[layer.queries] ?? "each word …";
    labels.keys.textContent = keysLabel(layer);
    touched.clear();
  }

  function draw() {
    const { doc, path, heads } = store.get();
    const { drawn, among } = drawAll(all, doc.layer(path).weightsNow, heads, row);
    note.textContent = drawn < among ? `the ${drawn} strongest of ${among} lines` : "";
    focus();
  }

  function focus() {
    const state = store.get();
    const now = focusOf(state);
    lines.classList.toggle("focused", Boolean(now));
    untouch(touched);
    clear(focused);
    clear(other);
    if (now) drawFocus({ state, now, groups: { focused, other }, lists, row, touched });
    markPins(lists, state, touched);
  }

  return { element, build, draw, focus };
}

function keysLabel({ keys, kind }) {
  if (keys === "read") return "… it looks at what it has read";
  return kind === "cross" ? "… it looks at the source" : "… looks at";
}

// --- words ---

function wordList(store, side) {
  const list = h("ul", {
    class: `words ${side}`, role: "listbox", tabindex: 0,
    "aria-label": side === "queries" ? "words that look" : "words that are looked at",
  });
  const indexOf = (event) => {
    const word = event.target.closest("[data-index]");
    return word ? Number(word.dataset.index) : null;
  };
  list.addEventListener("pointerover", (event) => {
    const index = indexOf(event);
    if (index !== null) store.set({ hover: { side, index } });
  });
  list.addEventListener("pointerleave", () => store.set({ hover: null }));
  list.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index !== null) pinWord(store, side, index);
  });
  list.addEventListener("keydown", (event) => walkWords(event, store, side, list));
  list.addEventListener("blur", () => store.set({ hover: null }));
  return list;
}

/** Pin a word, or let it go when it is pinned already. */
export function pinWord(store, side, index) {
  const { query, pinnedKey } = store.get();
  if (side === "queries") store.set({ query: query === index ? null : index, pinnedKey: null, hover: null });
  else store.set({ pinnedKey: pinnedKey === index ? null : index, query: null, hover: null });
}

function walkWords(event, store, side, list) {
  const state = store.get();
  const now = focusOf(state);
  const at = now?.side === side ? now.index : -1;
  const last = list.childElementCount - 1;
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
  if (to !== undefined) {
    event.preventDefault();
    const index = Math.max(0, Math.min(last, to));
    store.set({ hover: { side, index } });
    list.children[index]?.scrollIntoView({ block: "nearest" });
  } else if ((event.key === "Enter" || event.key === " ") && at >= 0) {
    event.preventDefault();
    pinWord(store, side, at);
  } else if (event.key === "Escape") store.set({ query: null, pinnedKey: null, hover: null });
}

function fillWords(list, tokens) {
  const words = tokens.map((token, index) => h("li", {
    class: "word", role: "option", id: `${list.classList[1]}-${index}`, "aria-selected": "false", dataset: { index },
  }, shown(token)));
  list.replaceChildren(...words);
}

function untouch(touched) {
  for (const word of touched) {
    word.classList.remove("focus", "pinned");
    word.setAttribute("aria-selected", "false");
    word.style.removeProperty("--tint");
    delete word.dataset.share;
  }
  touched.clear();
}

function markPins(lists, state, touched) {
  for (const [side, index] of [["queries", state.query], ["keys", state.pinnedKey]]) {
    const word = index === null ? null : lists[side].children[index];
    if (!word) continue;
    word.classList.add("pinned");
    word.setAttribute("aria-selected", "true");
    touched.add(word);
  }
}

// --- lines ---

/** Heads laid over each other stand a little apart, so that none hides another. */
function curve(row, q, k, place) {
  const aside = place === 0 ? 0 : (place % 2 ? 1 : -1) * 2 * Math.ceil(place / 2);
  const [from, to] = [(q + 0.5) * row + aside, (k + 0.5) * row + aside];
  return `M0 ${from}C45 ${from} 55 ${to} 100 ${to}`;
}

/** All that can be told apart, the strongest first. Lines of like strength share one path: few elements, quick. */
function drawAll(group, weights, heads, row) {
  const found = [];
  heads.forEach((head, place) => weights.each(head, (q, k, weight) => {
    if (weight >= FAINTEST) found.push({ q, k, weight, place });
  }));
  const among = found.length;
  if (among > MOST_LINES) found.sort((a, b) => b.weight - a.weight).length = MOST_LINES;
  clear(group).append(...bundled(found, row));
  return { drawn: found.length, among };
}

function bundled(links, row) {
  const bundles = new Map();
  for (const { q, k, weight, place } of links) {
    const level = Math.ceil(weight * LEVELS_OF_LINES);
    const key = place * 100 + level;
    if (!bundles.has(key)) bundles.set(key, { place, level, curves: [] });
    bundles.get(key).curves.push(curve(row, q, k, place));
  }
  return [...bundles.values()].sort((a, b) => a.level - b.level).map(({ place, level, curves }) => s("path", {
    d: curves.join(""),
    stroke: `var(--head-${place % OVERLAYS})`,
    "stroke-opacity": (0.06 + 0.84 * (level / LEVELS_OF_LINES)).toFixed(2),
    "stroke-width": (0.8 + 2.4 * (level / LEVELS_OF_LINES)).toFixed(1),
  }));
}

/** The lines of one word: what it looks at and, dashed, who looks at it (or the other way round). */
function drawFocus({ state, now, groups, lists, row, touched }) {
  const layer = state.doc.layer(state.path);
  const twin = sameWord(layer, now.side, now.index);
  const opposite = now.side === "queries" ? "keys" : "queries";
  groups.focused.append(...bundled(linksOf(layer, state.heads, now.side, now.index), row));
  if (twin !== null) groups.other.append(...bundled(linksOf(layer, state.heads, opposite, twin), row));
  touchWord(lists[now.side].children[now.index], touched, (word) => word.classList.add("focus"));
  for (const { index, weight } of topEntries(valuesOf(layer, state.heads[0], now.side, now.index), ENDS_AT_ONCE)) {
    if (weight < 0.005) break;
    touchWord(lists[opposite].children[index], touched, (word) => tintWord(word, weight));
  }
  lists[now.side].setAttribute("aria-activedescendant", `${now.side}-${now.index}`);
}

function touchWord(word, touched, change) {
  if (!word) return;
  change(word);
  touched.add(word);
}

function tintWord(word, weight) {
  word.style.setProperty("--tint", Math.sqrt(weight).toFixed(3));
  if (weight >= 0.03) word.dataset.share = percent(weight);
}

function valuesOf(layer, head, side, index) {
  const { weightsNow: weights } = layer;
  const inside = index < (side === "queries" ? weights.Tq : weights.Tk);
  if (!inside) return new Float32Array(0);
  return side === "queries" ? weights.row(head, index) : weights.column(head, index);
}

function linksOf(layer, heads, side, index) {
  const ends = (end) => (side === "queries" ? { q: index, k: end } : { q: end, k: index });
  return heads.flatMap((head, place) =>
    topEntries(valuesOf(layer, head, side, index), ENDS_AT_ONCE)
      .filter(({ weight }) => weight >= 0.005)
      .map(({ index: end, weight }) => ({ ...ends(end), weight, place })));
}
