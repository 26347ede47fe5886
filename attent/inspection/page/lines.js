// Heads as lines between query tokens (left) and key tokens (right). Pointing at a token redraws only its own lines;
// the rest fades by one class.

import { h, s, clear, tokenSpan, formatPercent } from "./dom.js";
import { OVERLAYS } from "./colors.js";
import { getFocus, topEntries, sameTokenIndex } from "./description.js";

const MAX_LINES = 400;
const MIN_WEIGHT = 0.02;
const LEVELS_OF_LINES = 10;
const MAX_ENDS = 120;

/** {element, build(), draw(), focus()}: build for new tokens, draw for new heads, focus for a new token. */
export function linesPanel(store) {
  const note = h("small", {});
  const all = s("g", { class: "all" });
  const focused = s("g", { class: "now" });
  const other = s("g", { class: "other" });
  const svg = s("svg", { preserveAspectRatio: "none", "aria-hidden": "true" }, all, other, focused);
  const labels = { queries: h("div", { class: "side-label queries" }), keys: h("div", { class: "side-label" }) };
  const lists = { queries: tokenList(store, "queries"), keys: tokenList(store, "keys") };
  const cells = [labels.queries, h("span", {}), labels.keys, lists.queries, svg, lists.keys];
  const lines = h("div", { class: "lines" }, cells);
  const element = h("section", { class: "panel", "aria-label": "Lines between tokens" },
    h("header", {}, h("h3", {}, "Lines between tokens"), note), h("div", { class: "lines-box" }, lines));
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
    fillTokens(lists.queries, doc.tokens(layer.queries));
    fillTokens(lists.keys, doc.tokens(layer.keys));
    labels.queries.textContent = ({ target: "output (query)", decoder_input: "decoder input (query)" })[layer.queries] ?? "query";
    labels.keys.textContent = keysLabel(layer);
    touched.clear();
  }

  function draw() {
    const { doc, path, heads } = store.get();
    const { drawn, total } = drawAll(all, doc.layer(path).attention, heads, row);
    note.textContent = drawn < total ? `the ${drawn} strongest of ${total} lines` : "";
    focus();
  }

  function focus() {
    const state = store.get();
    const now = getFocus(state);
    lines.classList.toggle("focused", Boolean(now));
    clearTouched(touched);
    clear(focused);
    clear(other);
    if (now) drawFocus({ state, now, groups: { focused, other }, lists, row, touched });
    markPins(lists, state, touched);
  }

  return { element, build, draw, focus };
}

function keysLabel({ keys, kind }) {
  if (keys === "decoder_input") return "decoder input (key)";
  return kind === "cross" ? "source (key)" : "key";
}

// --- words ---

function tokenList(store, side) {
  const list = h("ul", {
    class: `words ${side}`, role: "listbox", tabindex: 0,
    "aria-label": side === "queries" ? "query tokens" : "key tokens",
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
    if (index !== null) pinToken(store, side, index);
  });
  list.addEventListener("keydown", (event) => moveFocus(event, store, side, list));
  list.addEventListener("blur", () => store.set({ hover: null }));
  return list;
}

/** Pin a token, or unpin it. */
export function pinToken(store, side, index) {
  const { query, pinnedKey } = store.get();
  if (side === "queries") store.set({ query: query === index ? null : index, pinnedKey: null, hover: null });
  else store.set({ pinnedKey: pinnedKey === index ? null : index, query: null, hover: null });
}

function moveFocus(event, store, side, list) {
  const state = store.get();
  const now = getFocus(state);
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
    pinToken(store, side, at);
  } else if (event.key === "Escape") store.set({ query: null, pinnedKey: null, hover: null });
}

function fillTokens(list, tokens) {
  const words = tokens.map((token, index) => h("li", {
    class: "word", role: "option", id: `${list.classList[1]}-${index}`, "aria-selected": "false", dataset: { index },
  }, tokenSpan(token)));
  list.replaceChildren(...words);
}

function clearTouched(touched) {
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

/** Overlaid heads are offset a little, so that none hides another. */
function curve(row, q, k, place) {
  const aside = place === 0 ? 0 : (place % 2 ? 1 : -1) * 2 * Math.ceil(place / 2);
  const [from, to] = [(q + 0.5) * row + aside, (k + 0.5) * row + aside];
  return `M0 ${from}C45 ${from} 55 ${to} 100 ${to}`;
}

/** Draw the strongest lines; lines of similar strength share one path, to keep the number of elements low. */
function drawAll(group, weights, heads, row) {
  const links = [];
  heads.forEach((head, place) => weights.each(head, (q, k, weight) => {
    if (weight >= MIN_WEIGHT) links.push({ q, k, weight, place });
  }));
  const total = links.length;
  if (total > MAX_LINES) links.sort((a, b) => b.weight - a.weight).length = MAX_LINES;
  clear(group).append(...bundleLines(links, row));
  return { drawn: links.length, total };
}

function bundleLines(links, row) {
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

/** The lines of one token as a query and, dashed, as a key (or the reverse). */
function drawFocus({ state, now, groups, lists, row, touched }) {
  const layer = state.doc.layer(state.path);
  const twin = sameTokenIndex(layer, now.side, now.index);
  const opposite = now.side === "queries" ? "keys" : "queries";
  groups.focused.append(...bundleLines(linesOf(layer, state.heads, now.side, now.index), row));
  if (twin !== null) groups.other.append(...bundleLines(linesOf(layer, state.heads, opposite, twin), row));
  touchToken(lists[now.side].children[now.index], touched, (word) => word.classList.add("focus"));
  for (const { index, weight } of topEntries(valuesOf(layer, state.heads[0], now.side, now.index), MAX_ENDS)) {
    if (weight < 0.005) break;
    touchToken(lists[opposite].children[index], touched, (word) => tintToken(word, weight));
  }
  lists[now.side].setAttribute("aria-activedescendant", `${now.side}-${now.index}`);
}

function touchToken(word, touched, change) {
  if (!word) return;
  change(word);
  touched.add(word);
}

function tintToken(word, weight) {
  word.style.setProperty("--tint", Math.sqrt(weight).toFixed(3));
  if (weight >= 0.03) word.dataset.share = formatPercent(weight);
}

function valuesOf(layer, head, side, index) {
  const { attention: weights } = layer;
  const inside = index < (side === "queries" ? weights.Tq : weights.Tk);
  if (!inside) return new Float32Array(0);
  return side === "queries" ? weights.row(head, index) : weights.column(head, index);
}

function linesOf(layer, heads, side, index) {
  const ends = (end) => (side === "queries" ? { q: index, k: end } : { q: end, k: index });
  return heads.flatMap((head, place) =>
    topEntries(valuesOf(layer, head, side, index), MAX_ENDS)
      .filter(({ weight }) => weight >= 0.005)
      .map(({ index: end, weight }) => ({ ...ends(end), weight, place })));
}
