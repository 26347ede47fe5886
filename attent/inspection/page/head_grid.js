// All heads as thumbnails: one canvas of small heat maps per stack and attention kind, layers down, heads across, with
// a button over each.

import { h, clear, isTouch } from "./dom.js";
import { groupLayers } from "./data.js";
import { heatScale, heatLevel, maxWeight, OVERLAYS } from "./colors.js";
import { patchWeights, queryIndex } from "./image.js";
import { getFocus } from "./description.js";

const GAP = 3;
const LARGEST = 52;
const SMALLEST = 15;
const COMFORTABLE = 30; // pixels at which patterns are still recognizable
const COLUMN = 368;
const LABELS = 20;
const HINT = "Layers down, heads across.";
const MOUSE_HINT = "Point at a head for its description; Shift-click overlays heads.";
const TOUCH_HINT = "Tap a head to see it; “compare heads” overlays several.";
const IMAGE_HINT = "Each thumbnail shows the patches that a head attends to.";

/** {element, draw()}: call draw after a change of document, size or theme. */
export function headGrid(store) {
  const element = h("div", { class: "grids" });
  const caption = h("p", { class: "grid-caption" });
  let groups = [];

  function build() {
    groups = groupLayers(store.get().doc).map((group) => makeGroup(group));
    clear(element).append(...groups.map((group) => group.figure), caption);
    const hints = [isPicture(store.get().doc) && IMAGE_HINT, HINT, isTouch() ? TOUCH_HINT : MOUSE_HINT];
    caption.textContent = hints.filter(Boolean).join(" ");
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "All heads");
    draw();
  }

  function draw() {
    const width = element.clientWidth;
    if (!width) return;
    const cell = cellSize(element, groups);
    const state = store.get();
    for (const group of groups) drawGroup(group, cell, state);
    for (const { body } of groups) body.querySelector(".grid-cells").classList.toggle("of-picture", isPicture(state.doc));
    mark();
  }

  function mark() {
    const { path, heads } = store.get();
    for (const group of groups) group.buttons.forEach((button) => updateButton(button, path, heads));
  }

  element.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-head]");
    if (!button) return;
    const along = store.get().comparing ? { shiftKey: true } : event; // touch screens have no Shift key
    store.set(selectHead(store.get(), button.dataset.path, Number(button.dataset.head), along));
  });
  const describe = (event) => describeHead(caption, store.get().doc, event.target.closest("button[data-head]"));
  for (const kind of ["pointerover", "focusin"]) element.addEventListener(kind, describe);
  store.on(["doc"], build);
  store.on(["path", "heads"], () => {
    mark();
    followFocus(element);
  });
  store.on(["hover", "query"], ({ doc }) => { if (isPicture(doc)) draw(); }); // each query patch has its own weights
  build();
  return { element, draw };
}

/** A click selects one head; with Shift, Ctrl or Command it toggles a head among those of the layer. */
export function selectHead(state, path, head, { shiftKey = false, ctrlKey = false, metaKey = false } = {}) {
  const along = (shiftKey || ctrlKey || metaKey) && path === state.path;
  const moved = path === state.path ? {} : { query: keepQuery(state, path), pinnedKey: null, hover: null };
  if (!along) return { path, heads: [head], ...moved };
  if (!state.heads.includes(head)) return { path, heads: [...state.heads, head].slice(-OVERLAYS) };
  return { path, heads: state.heads.length > 1 ? state.heads.filter((other) => other !== head) : state.heads };
}

/** A pinned query stays pinned in another layer with the same query side. */
function keepQuery({ doc, path, query }, next) {
  return querySide(doc, path) === querySide(doc, next) ? query : null;
}

/** Side of a layer's queries; output and decoder input are two labels of one step. */
const querySide = (doc, path) => doc.layer(path)?.queries?.replace("decoder_input", "target");

function makeGroup(group) {
  const columns = Math.max(1, ...group.layers.map((layer) => layer.heads));
  const canvas = h("canvas", { "aria-hidden": "true" });
  const buttons = group.layers.flatMap((layer, row) =>
    Array.from({ length: layer.heads }, (_, head) => headButton(group, layer, row, head)));
  const cells = h("div", { class: "grid-cells", style: { "--heads": columns } }, canvas, buttons);
  const numbers = Array.from({ length: columns }, (_, head) => h("span", {}, head));
  const body = h("div", { class: "grid-body", style: { "--cell-gap": `${GAP}px` } },
    h("div", { class: "grid-columns", "aria-hidden": "true" }, numbers),
    h("div", { class: "grid-rows", "aria-hidden": "true" }, group.layers.map((layer) => h("span", {}, layer.layer))),
    cells,
  );
  const caption = h("figcaption", {}, group.name);
  return { ...group, columns, canvas, buttons, body, figure: h("figure", { class: "grid-group" }, caption, body) };
}

function headButton(group, layer, row, head) {
  const masked = layer.masked_heads.includes(head);
  return h("button", {
    type: "button",
    class: masked ? "masked" : null,
    "aria-label": `${group.name}, layer ${layer.layer}, head ${head}${masked ? ", masked" : ""}`,
    style: { "grid-row": row + 1, "grid-column": head + 1 },
    dataset: { path: layer.path, head },
  });
}

/** Wide screens: one column no taller than the window. Narrow screens: as many grids side by side as fit. */
function cellSize(element, groups) {
  const columns = Math.max(...groups.map((group) => group.columns));
  const across = (width) => Math.floor((width - LABELS - GAP * (columns - 1)) / columns);
  if (matchMedia("(min-width: 68.01rem)").matches) {
    const layers = groups.reduce((sum, group) => sum + group.layers.length, 0);
    const room = innerHeight - 220 - 44 * groups.length;
    return within(Math.min(across(COLUMN), Math.max(COMFORTABLE, Math.floor(room / layers) - GAP)));
  }
  const width = element.clientWidth;
  const inRow = [3, 2, 1].find((n) => n <= groups.length && across((width - 16 * (n - 1)) / n) >= 22) ?? 1;
  return within(across((width - 16 * (inRow - 1)) / inRow));
}

const within = (cell) => Math.max(SMALLEST, Math.min(LARGEST, cell));

function updateButton(button, path, heads) {
  const place = button.dataset.path === path ? heads.indexOf(Number(button.dataset.head)) : -1;
  button.classList.toggle("chosen", place >= 0);
  button.setAttribute("aria-pressed", String(place >= 0));
  button.tabIndex = place === 0 ? 0 : -1;
  if (place >= 0) button.style.setProperty("--chosen", `var(--head-${place % OVERLAYS})`);
}

/** Move the focus with the selection. */
function followFocus(element) {
  if (!element.contains(document.activeElement)) return;
  element.querySelector("button[tabindex='0']")?.focus({ preventScroll: false });
}

function describeHead(caption, doc, button) {
  if (!button) return;
  const { path, head } = button.dataset;
  const stats = doc.headStats(path, Number(head));
  clear(caption).append(h("code", {}, `${path}:${head}`), stats?.description ? ` ${stats.description}` : "");
}

// --- drawing ---

const isPicture = (doc) => doc.layers.some((layer) => patchImage(doc, layer));

/** The image whose patches are a layer's keys; a recording is drawn as text is. */
const patchImage = (doc, { keys }) => (doc.side(keys)?.audio ? null : doc.side(keys)?.image);

function drawGroup(group, cell, state) {
  const dpr = Math.min(2, window.devicePixelRatio || 1);
  const side = Math.round(cell * dpr);
  const step = Math.round((cell + GAP) * dpr);
  group.body.style.setProperty("--cell", `${cell}px`);
  const { canvas } = group;
  canvas.width = step * group.columns;
  canvas.height = step * group.layers.length;
  canvas.style.setProperty("width", `${canvas.width / dpr}px`);
  canvas.style.setProperty("height", `${canvas.height / dpr}px`);
  const context = canvas.getContext("2d");
  const image = new ImageData(side, side);
  const pixels = new Uint32Array(image.data.buffer);
  group.layers.forEach((layer, row) => {
    for (let head = 0; head < layer.heads; head++) {
      const picture = patchImage(state.doc, layer);
      if (picture) paintPatches(pixels, side, layer, head, picture, state);
      else paintThumbnail(pixels, side, layer.attention, head, maxWeight(state.doc, layer));
      context.putImageData(image, head * step, row * step);
    }
  });
}

/** One head in side x side pixels; each pixel shows the maximum of its weights. */
function paintThumbnail(pixels, side, weights, head, most) {
  const scale = heatScale(0);
  const { Tq, Tk } = weights;
  const rows = Math.max(1, Math.min(Tq, side));
  const columns = Math.max(1, Math.min(Tk, side));
  const pool = new Float32Array(rows * columns);
  weights.each(head, (q, k, weight) => {
    const at = Math.floor((q * rows) / Tq) * columns + Math.floor((k * columns) / Tk);
    if (weight > pool[at]) pool[at] = weight;
  });
  const across = Uint16Array.from({ length: side }, (_, x) => Math.floor((x * columns) / side));
  for (let y = 0; y < side; y++) {
    const start = Math.floor((y * rows) / side) * columns;
    for (let x = 0; x < side; x++) pixels[y * side + x] = scale[heatLevel(pool[start + across[x]] / most)];
  }
}

/** Weights laid out as the image's patches, scaled to the largest. */
function paintPatches(pixels, side, layer, head, image, state) {
  const focus = querySide(state.doc, layer.path) === querySide(state.doc, state.path) ? getFocus(state) : null;
  const weights = patchWeights(layer, head, queryIndex(state.doc, layer, focus), image);
  const most = Math.max(1e-6, ...weights);
  const scale = heatScale(0);
  for (let y = 0; y < side; y++) {
    const start = Math.floor((y * image.rows) / side) * image.columns;
    for (let x = 0; x < side; x++) {
      pixels[y * side + x] = scale[heatLevel(weights[start + Math.floor((x * image.columns) / side)] / most)];
    }
  }
}
