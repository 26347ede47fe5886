// A side that is an image: the picture with each patch tinted by how much it is looked at. It stands where the lines
// between words would; words, where the other side has them, become a row to choose from.

import { h, clear, shown } from "./dom.js";
import { cssColour } from "./colours.js";
import { focusOf } from "./sentence.js";
import { pinWord } from "./lines.js";

/** {element, build(), draw(), focus()}, as the panel of lines. */
export function picturePanel(store) {
  const words = h("div", { class: "picture-words", role: "group", "aria-label": "Who looks" });
  const img = h("img", { alt: "the picture that the model was shown" });
  const canvas = h("canvas", { "aria-hidden": "true" });
  const mark = h("div", { class: "picture-mark", hidden: true });
  const frame = h("div", { class: "picture-frame" }, img, canvas, mark);
  const note = h("small", {});
  const header = h("header", {}, h("h3", {}, "On the picture"), note);
  const element = h("section", { class: "panel", "aria-label": "Picture" }, header, words, frame);
  const parts = { words, img, canvas, mark, frame, note };

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const image = doc.side(layer.keys).image;
    if (image.src.startsWith("data:image/")) img.src = image.src; // anything else would leave the page
    frame.style.setProperty("--ratio", `${image.columns} / ${image.rows}`);
    fillChoices(parts.words, doc, layer);
    draw();
  }

  function draw() {
    focus();
  }

  function focus() {
    const state = store.get();
    const layer = state.doc.layer(state.path);
    const image = state.doc.side(layer.keys).image;
    const now = focusOf(state);
    const query = queryOf(now);
    const values = now?.side === "keys" ? null : layer.weightsNow.row(state.heads[0], query);
    tintPatches(canvas, image, values);
    placeMark(mark, state.doc, layer, query);
    markChoices(words, query);
    note.textContent = values ? "the stronger the tint, the more it is looked at" : "";
  }

  listenToPicture(store, parts);
  return { element, build, draw, focus };
}

const queryOf = (now) => (now?.side === "queries" ? now.index : 0);

function fillChoices(words, doc, layer) {
  const image = doc.side(layer.queries).image;
  const tokens = doc.tokens(layer.queries).slice(0, image ? image.before ?? 0 : undefined);
  const choice = (token, index) => h("button", { type: "button", class: "button", dataset: { index } }, shown(token));
  clear(words).append(...tokens.map(choice));
  if (image) words.append(h("span", { class: "quiet-text small" }, "or point at a patch: what it looks at lights up"));
}

function markChoices(words, query) {
  for (const button of words.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.index) === query));
  }
}

/** What is looked at shows; what is not lies under a veil of the paper's colour. */
function tintPatches(canvas, image, values) {
  canvas.width = image.columns;
  canvas.height = image.rows;
  if (!values) return;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(image.columns, image.rows);
  const [red, green, blue] = cssColour("--paper");
  const before = image.before ?? 0;
  const most = Math.max(1e-6, ...values.subarray(before));
  for (let i = 0; i < image.rows * image.columns; i++) {
    pixels.data.set([red, green, blue, 225 * (1 - Math.sqrt((values[before + i] ?? 0) / most))], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

function placeMark(mark, doc, layer, query) {
  const image = doc.side(layer.queries).image;
  const patch = query - (image?.before ?? 0);
  mark.hidden = !image || patch < 0;
  if (mark.hidden) return;
  mark.style.setProperty("width", `${100 / image.columns}%`);
  mark.style.setProperty("height", `${100 / image.rows}%`);
  mark.style.setProperty("left", `${(100 * (patch % image.columns)) / image.columns}%`);
  mark.style.setProperty("top", `${(100 * Math.floor(patch / image.columns)) / image.rows}%`);
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
