// The input image with each patch tinted by its attention weight. Replaces the lines where keys are patches.

import { h, clear, isTouch, tokenSpan, formatPercent } from "./dom.js";
import { cssColor, OVERLAYS } from "./colors.js";
import { getFocus } from "./description.js";
import { pinToken } from "./lines.js";

const SMALL_PICTURE = 128; // below this width, pixels are drawn sharp
const TINT = 0.6; // opacity of the patch with the largest weight: the picture stays recognizable under it

/** {element, build(), draw(), focus(), parts}, like linesPanel. */
export function imagePanel(store, title = "Image") {
  const words = h("div", { class: "picture-words", role: "group", "aria-label": "Query tokens" });
  const img = h("img", { alt: "the input image" });
  const canvas = h("canvas", { "aria-hidden": "true" });
  const [mark, best] = ["picture-mark", "picture-best"].map((name) => h("div", { class: name, hidden: true }));
  const frame = h("div", { class: "picture-frame" }, img, canvas, mark, best);
  const note = h("small", {});
  const strength = h("input", { type: "range", min: 0, max: 100, value: 100, "aria-label": "tint strength" });
  const foot = h("div", { class: "picture-foot" }, h("label", { class: "field picture-tint" }, "tint", strength));
  const header = h("header", {}, h("h3", {}, title), note);
  const element = h("section", { class: "panel", "aria-label": title }, header, words, frame, foot);
  const parts = { words, img, canvas, mark, best, frame, note, foot };
  img.addEventListener("load", () => img.classList.toggle("few-pixels", img.naturalWidth < SMALL_PICTURE));

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const image = doc.side(layer.keys).image;
    if (image.src.startsWith("data:image/")) img.src = image.src; // no network requests
    frame.style.setProperty("--ratio", `${image.columns} / ${image.rows}`);
    fillTokenButtons(parts.words, doc, layer);
    focus();
  }

  function focus() {
    const state = store.get();
    const layer = state.doc.layer(state.path);
    const image = state.doc.side(layer.keys).image;
    const now = getFocus(state);
    const query = queryIndex(state.doc, layer, now);
    const rows = now?.side === "keys" ? [] : state.heads.map((head) => patchWeights(layer, head, query, image));
    tintPatches(canvas, image, rows);
    placeQueryMarker(mark, state.doc.side(layer.queries).image, query === null ? -1 : query);
    placeTopMarker(best, image, rows[0]);
    markTokenButtons(words, query);
    note.textContent = rows.length ? patchNote(rows[0], image) : "";
  }

  strength.addEventListener("input", () => canvas.style.setProperty("opacity", strength.value / 100));
  bindImage(store, parts);
  return { element, build, draw: focus, focus, parts };
}

/** The query: under the pointer or pinned, else the class token; null: mean over all queries. */
export function queryIndex(doc, layer, now) {
  if (now?.side === "queries") return now.index;
  return doc.side(layer.queries).image?.num_prefix_tokens ? 0 : null;
}

/** Weight of each patch, row by row.*/
export function patchWeights({ attention }, head, query, { rows, columns, num_prefix_tokens: before = 0 }) {
  const count = rows * columns;
  if (query !== null) return Float32Array.from(attention.row(head, query).subarray(before, before + count));
  const out = new Float32Array(count);
  attention.each(head, (_, k, weight) => { if (k >= before) out[k - before] += weight / attention.Tq; });
  return out;
}

function patchNote(weights, { num_prefix_tokens: before = 0 }) {
  const on = weights.reduce((sum, weight) => sum + weight, 0);
  const apart = before && on < 0.995 ? `, ${formatPercent(1 - on)} on other tokens` : "";
  return `up to ${formatPercent(Math.max(...weights))} on one patch${apart}`;
}

function fillTokenButtons(words, doc, layer) {
  const { image, audio } = doc.side(layer.queries);
  const tokens = doc.tokens(layer.queries).slice(0, image ? image.num_prefix_tokens ?? 0 : undefined);
  const choice = (token, index) => h("button", { type: "button", class: "button", dataset: { index } }, tokenSpan(token));
  clear(words).append(...tokens.map(choice));
  const point = isTouch() ? "tap" : "point at";
  const mean = audio ? `Mean over the recording; ${point} a moment` : `Mean over all patches; ${point} one`;
  const hint = tokens.length ? `or ${point} a patch to use it as the query` : `${mean} to use it as the query`;
  if (image) words.append(h("span", { class: "quiet-text small" }, hint));
}

function markTokenButtons(words, query) {
  for (const button of words.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.index) === query));
  }
}

/** Tint patches; with several heads, each patch has the color of the head with the largest weight. */
function tintPatches(canvas, image, rows) {
  canvas.width = image.columns;
  canvas.height = image.rows;
  if (!rows.length) return;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(image.columns, image.rows);
  const alone = rows.length === 1; // with several heads, only the largest weights are visible
  const colors = rows.map((_, place) => cssColor(alone ? "--tint-alone" : `--tint-${place % OVERLAYS}`));
  const most = rows.map((row) => Math.max(1e-6, ...row));
  for (let i = 0; i < image.rows * image.columns; i++) {
    const shares = rows.map((row, n) => row[i] / most[n]);
    const first = shares.indexOf(Math.max(...shares));
    pixels.data.set([...colors[first], 255 * TINT * shares[first] ** (alone ? 0.7 : 1.7)], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

function placeQueryMarker(mark, image, query) {
  const patch = query - (image?.num_prefix_tokens ?? 0);
  mark.hidden = !image || query < 0 || patch < 0;
  if (!mark.hidden) positionOnPatch(mark, image, patch);
}

/** Mark the patch with the largest weight, unless the weights are nearly uniform. */
function placeTopMarker(best, image, weights) {
  const most = weights ? Math.max(...weights) : 0;
  best.hidden = !(most > 2 / (image.rows * image.columns));
  if (!best.hidden) positionOnPatch(best, image, weights.indexOf(most));
}

function positionOnPatch(element, image, patch) {
  element.style.setProperty("width", `${100 / image.columns}%`);
  element.style.setProperty("height", `${100 / image.rows}%`);
  element.style.setProperty("left", `${(100 * (patch % image.columns)) / image.columns}%`);
  element.style.setProperty("top", `${(100 * Math.floor(patch / image.columns)) / image.rows}%`);
}

function bindImage(store, { words, canvas }) {
  const patchAt = (event) => {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const image = doc.side(layer.keys).image;
    const frame = canvas.getBoundingClientRect();
    const place = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
    const column = place((event.clientX - frame.left) / frame.width, image.columns);
    const row = place((event.clientY - frame.top) / frame.height, image.rows);
    const side = layer.queries === layer.keys ? "queries" : "keys";
    return { side, index: (image.num_prefix_tokens ?? 0) + row * image.columns + column };
  };
  canvas.addEventListener("pointermove", (event) => {
    const place = patchAt(event);
    if (place.side === "queries" && store.get().hover?.index !== place.index) store.set({ hover: place });
  });
  canvas.addEventListener("pointerleave", () => store.set({ hover: null }));
  canvas.addEventListener("click", (event) => pinToken(store, ...Object.values(patchAt(event))));
  words.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-index]");
    if (button) pinToken(store, "queries", Number(button.dataset.index));
  });
}
