// A side that is an image: the picture with each patch tinted by how much it is looked at. It stands where the lines
// between words would; words, where the other side has them, become a row to choose from.

import { h, clear, shown, percent } from "./dom.js";
import { cssColour, OVERLAYS } from "./colours.js";
import { focusOf } from "./sentence.js";
import { pinWord } from "./lines.js";

const SMALL_PICTURE = 128; // pixels of a side, below which they are to be seen as such
const TINT = 0.82; // of the patch that is looked at most

/** {element, build(), draw(), focus()}, as the panel of lines. */
export function picturePanel(store) {
  const words = h("div", { class: "picture-words", role: "group", "aria-label": "Who looks" });
  const img = h("img", { alt: "the picture that the model was shown" });
  const canvas = h("canvas", { "aria-hidden": "true" });
  const [mark, best] = ["picture-mark", "picture-best"].map((name) => h("div", { class: name, hidden: true }));
  const frame = h("div", { class: "picture-frame" }, img, canvas, mark, best);
  const note = h("small", {});
  const strength = h("input", { type: "range", min: 0, max: 100, value: 100, "aria-label": "how strongly the picture is tinted" });
  const foot = h("label", { class: "field picture-tint" }, "tint", strength);
  const header = h("header", {}, h("h3", {}, "On the picture"), note);
  const element = h("section", { class: "panel", "aria-label": "Picture" }, header, words, frame, foot);
  const parts = { words, img, canvas, mark, best, frame, note, strength };
  img.addEventListener("load", () => img.classList.toggle("few-pixels", img.naturalWidth < SMALL_PICTURE));

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const image = doc.side(layer.keys).image;
    if (image.src.startsWith("data:image/")) img.src = image.src; // anything else would leave the page
    frame.style.setProperty("--ratio", `${image.columns} / ${image.rows}`);
    fillChoices(parts.words, doc, layer);
    focus();
  }

  function focus() {
    const state = store.get();
    const layer = state.doc.layer(state.path);
    const image = state.doc.side(layer.keys).image;
    const now = focusOf(state);
    const query = queryOf(state.doc, layer, now);
    const rows = now?.side === "keys" ? [] : state.heads.map((head) => patchWeights(layer, head, query, image));
    tintPatches(canvas, image, rows);
    placeMark(mark, state.doc.side(layer.queries).image, query === null ? -1 : query);
    placeBest(best, image, rows[0]);
    markChoices(words, query);
    note.textContent = rows.length ? noteOf(rows[0], image) : "";
  }

  strength.addEventListener("input", () => canvas.style.setProperty("opacity", strength.value / 100));
  listenToPicture(store, parts);
  return { element, build, draw: focus, focus };
}

/** Who looks: what is pointed at or pinned, else the first (the class token); null: all patches together. */
export function queryOf(doc, layer, now) {
  if (now?.side === "queries") return now.index;
  const image = doc.side(layer.queries).image;
  return image && !(image.before ?? 0) ? null : 0;
}

/** How much each patch is looked at, row by row. */
export function patchWeights({ weightsNow }, head, query, { rows, columns, before = 0 }) {
  const count = rows * columns;
  if (query !== null) return Float32Array.from(weightsNow.row(head, query).subarray(before, before + count));
  const out = new Float32Array(count);
  weightsNow.each(head, (_, k, weight) => { if (k >= before) out[k - before] += weight / weightsNow.Tq; });
  return out;
}

function noteOf(weights, { before = 0 }) {
  const on = weights.reduce((sum, weight) => sum + weight, 0);
  const apart = before && on < 0.995 ? `, ${percent(1 - on)} on no patch` : "";
  return `up to ${percent(Math.max(...weights))} on one patch${apart}`;
}

function fillChoices(words, doc, layer) {
  const image = doc.side(layer.queries).image;
  const tokens = doc.tokens(layer.queries).slice(0, image ? image.before ?? 0 : undefined);
  const choice = (token, index) => h("button", { type: "button", class: "button", dataset: { index } }, shown(token));
  clear(words).append(...tokens.map(choice));
  const all = tokens.length ? "or point at a patch, to see what that one looks at" : "All patches together; point at one to see what it looks at";
  if (image) words.append(h("span", { class: "quiet-text small" }, all));
}

function markChoices(words, query) {
  for (const button of words.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.index) === query));
  }
}

/** A veil in the head's colour; of several heads each patch has the colour of the one that looks there most. */
function tintPatches(canvas, image, rows) {
  canvas.width = image.columns;
  canvas.height = image.rows;
  if (!rows.length) return;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(image.columns, image.rows);
  const alone = rows.length === 1; // several heads at once: only what each looks at most, or one would hide the other
  const colours = rows.map((_, place) => cssColour(alone ? "--tint-alone" : `--tint-${place % OVERLAYS}`));
  const most = rows.map((row) => Math.max(1e-6, ...row));
  for (let i = 0; i < image.rows * image.columns; i++) {
    const shares = rows.map((row, n) => row[i] / most[n]);
    const first = shares.indexOf(Math.max(...shares));
    pixels.data.set([...colours[first], 255 * TINT * shares[first] ** (alone ? 0.7 : 1.7)], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

function placeMark(mark, image, query) {
  const patch = query - (image?.before ?? 0);
  mark.hidden = !image || query < 0 || patch < 0;
  if (!mark.hidden) putOnPatch(mark, image, patch);
}

/** Where it looks most, if anywhere more than elsewhere. */
function placeBest(best, image, weights) {
  const most = weights ? Math.max(...weights) : 0;
  best.hidden = !(most > 2 / (image.rows * image.columns));
  if (!best.hidden) putOnPatch(best, image, weights.indexOf(most));
}

function putOnPatch(element, image, patch) {
  element.style.setProperty("width", `${100 / image.columns}%`);
  element.style.setProperty("height", `${100 / image.rows}%`);
  element.style.setProperty("left", `${(100 * (patch % image.columns)) / image.columns}%`);
  element.style.setProperty("top", `${(100 * Math.floor(patch / image.columns)) / image.rows}%`);
}

function listenToPicture(store, { words, canvas }) {
  const patchAt = (event) => {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const image = doc.side(layer.keys).image;
    const frame = canvas.getBoundingClientRect();
    const place = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
    const column = place((event.clientX - frame.left) / frame.width, image.columns);
    const row = place((event.clientY - frame.top) / frame.height, image.rows);
    const side = layer.queries === layer.keys ? "queries" : "keys";
    return { side, index: (image.before ?? 0) + row * image.columns + column };
  };
  canvas.addEventListener("pointermove", (event) => {
    const place = patchAt(event);
    if (place.side === "queries" && store.get().hover?.index !== place.index) store.set({ hover: place });
  });
  canvas.addEventListener("pointerleave", () => store.set({ hover: null }));
  canvas.addEventListener("click", (event) => pinWord(store, ...Object.values(patchAt(event))));
  words.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-index]");
    if (button) pinWord(store, "queries", Number(button.dataset.index));
  });
}
