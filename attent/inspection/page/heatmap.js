// Heat map of one or several heads with token labels. The canvas covers only the visible part and is redrawn when the
// box scrolls, so 2,000 tokens cost as much as 60.

import { h, clear, tokenSpan, tokenText, formatPercent } from "./dom.js";
import { heatScale, heatLevel, maxWeight } from "./colors.js";
import { getFocus, patchName } from "./description.js";
import { pinToken } from "./lines.js";

const ALL_LABELS = 160;
const SMALLEST_CELL = 10; // only if all columns then fit
const EASY_CELL = 14;
const LARGEST_CELL = 44;
const RULER = new OffscreenCanvas(1, 1);

/** {element, build(), draw(), focus()}, like linesPanel. */
export function heatMap(store) {
  const parts = mapParts();
  const { box, field, canvas } = parts;
  const view = { cell: 20, font: 12, left: 90, top: 70, labelled: null };

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    if (!layer || !box.clientWidth) return;
    measure(view, box, doc, layer);
    applySize(parts, view, doc, layer);
    view.labelled = null;
    draw();
  }

  function draw() {
    const state = store.get();
    const layer = state.doc.layer(state.path);
    if (!box.clientWidth || !layer) return;
    view.most = maxWeight(state.doc, layer);
    paintVisible(canvas, box, view, layer, state.heads);
    labelVisible(parts, box, view, state.doc, layer);
    drawLegend(parts.legend, view.most);
    focus();
  }

  function focus() {
    const state = store.get();
    const now = getFocus(state);
    placeBands(parts, view, now, state.doc.layer(state.path).attention);
    if (!now || now.other === null) parts.tip.hidden = true;
  }

  box.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  bindHeatMap(store, parts, view, box, field);
  new ResizeObserver(() => requestAnimationFrame(build)).observe(parts.element);
  return { element: parts.element, build, draw, focus };
}

function mapParts() {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const [row, column] = [1, 2].map(() => h("div", { class: "map-band", hidden: true }));
  const bands = { row, column };
  const field = h("div", { class: "map-field" }, canvas, bands.row, bands.column);
  const [corner, top, left] = ["map-corner", "map-top", "map-left"].map((name) => h("div", { class: name }));
  const space = h("div", { class: "map-space" }, corner, top, left, field);
  const box = h("div", {
    class: "map-box", tabindex: 0, role: "region", dataset: { ownKeys: "" },
    "aria-label": "Heat map; described in words below",
  }, space);
  const tip = h("div", { class: "tip", hidden: true });
  const scale = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
  const legend = h("span", { class: "legend" }, "0", scale, h("span", {}));
  const header = h("header", {}, h("h3", {}, "Heat map"), legend);
  const element = h("section", { class: "panel", "aria-label": "Heat map" }, header, box, tip);
  return { canvas, bands, field, corner, top, left, space, box, tip, legend, element };
}

// --- sizes ---

function measure(view, box, doc, layer) {
  const [rows, columns] = [labelTexts(doc, layer.queries), labelTexts(doc, layer.keys)];
  const narrow = box.clientWidth < 480;
  view.left = Math.min(narrow ? 84 : 120, 18 + longest(rows, 13, box));
  view.top = Math.max(36, Math.min(narrow ? 84 : 110, 16 + longest(columns, 14, box)));
  const room = (box.clientWidth || 640) - view.left - 2;
  const fits = Math.floor(room / Math.max(1, doc.tokens(layer.keys).length));
  const below = innerHeight - (box.getBoundingClientRect().top + scrollY) - view.top - 12; // down to the window's edge
  const whole = Math.max(22, Math.floor(below / Math.max(1, doc.tokens(layer.queries).length)));
  view.cell = fits >= SMALLEST_CELL ? Math.min(LARGEST_CELL, fits, whole) : EASY_CELL;
  view.font = Math.min(14, Math.max(10, view.cell - 3));
  view.left = Math.min(view.left, 18 + longest(rows, view.font, box));
  view.top = Math.max(36, Math.min(narrow ? 84 : 110, 16 + longest(columns, view.font, box)));
}

export function labelTexts(doc, side) {
  return doc.tokens(side).slice(0, 400).map((token, index) => shortPatchName(doc, side, index) ?? tokenText(token));
}

/** "row,column" for patches, else null. */
function shortPatchName(doc, side, index) {
  return patchName(doc, side, index)?.replace(/\D+(\d+)\D+(\d+)/, "$1,$2") ?? null;
}

/** Width of the longest label in pixels, at least that of the corner. */
export function longest(texts, size, box) {
  const context = RULER.getContext("2d");
  context.font = `${size}px ${getComputedStyle(box).fontFamily}`;
  return texts.reduce((most, text) => Math.max(most, context.measureText(text).width), 48);
}

function applySize({ space, field, corner, bands }, view, doc, layer) {
  space.style.setProperty("--map-left", `${view.left}px`);
  space.style.setProperty("--map-top", `${view.top}px`);
  space.style.setProperty("--map-cell", `${view.cell}px`);
  space.style.setProperty("--map-font", `${view.font}px`);
  field.style.setProperty("width", `${doc.tokens(layer.keys).length * view.cell}px`);
  field.style.setProperty("height", `${doc.tokens(layer.queries).length * view.cell}px`);
  clear(corner).append(({ target: "output ↓", decoder_input: "input ↓" })[layer.queries] ?? "query ↓", h("br", {}), "key →");
  bands.row.hidden = bands.column.hidden = true;
}

function visible(box, view, { Tq, Tk }) {
  const first = (scrolled, n) => Math.max(0, Math.min(n, Math.floor(scrolled / view.cell)));
  const end = (scrolled, size, n) => Math.max(0, Math.min(n, Math.ceil((scrolled + size) / view.cell)));
  return {
    q0: first(box.scrollTop, Tq), q1: end(box.scrollTop, box.clientHeight - view.top, Tq),
    k0: first(box.scrollLeft, Tk), k1: end(box.scrollLeft, box.clientWidth - view.left, Tk),
  };
}

// --- drawing ---

function paintVisible(canvas, box, view, layer, heads) {
  const { attention: weights } = layer;
  const { q0, q1, k0, k1 } = visible(box, view, weights);
  const dpr = Math.min(2, window.devicePixelRatio || 1);
  const width = Math.max(1, Math.min(weights.Tk * view.cell, box.clientWidth - view.left));
  const height = Math.max(1, Math.min(weights.Tq * view.cell, box.clientHeight - view.top));
  resizeCanvas(canvas, width, height, dpr);
  if (q1 <= q0 || k1 <= k0) return;
  const small = cellsImage(weights, heads, view.most, q0, q1, k0, k1);
  const context = canvas.getContext("2d");
  context.setTransform(dpr, 0, 0, dpr, 0, 0);
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  const [x, y] = [k0 * view.cell - box.scrollLeft, q0 * view.cell - box.scrollTop];
  context.drawImage(small, x, y, (k1 - k0) * view.cell, (q1 - q0) * view.cell);
  drawRules(context, view, x, y, k1 - k0, q1 - q0);
}

function resizeCanvas(canvas, width, height, dpr) {
  const [w, t] = [Math.round(width * dpr), Math.round(height * dpr)];
  if (canvas.width === w && canvas.height === t) return;
  canvas.width = w;
  canvas.height = t;
  canvas.style.setProperty("width", `${width}px`);
  canvas.style.setProperty("height", `${height}px`);
}

/** One pixel per cell; the canvas scales it. */
export function cellsImage(weights, heads, most, q0, q1, k0, k1) {
  const [rows, columns] = [q1 - q0, k1 - k0];
  const small = new OffscreenCanvas(columns, rows);
  const context = small.getContext("2d");
  const image = context.createImageData(columns, rows);
  const levels = heads.map((head) => levelsOf(weights, head, most, q0, q1, k0, k1));
  fillPixels(new Uint32Array(image.data.buffer), heads.map((_, place) => heatScale(place)), levels);
  context.putImageData(image, 0, 0);
  return small;
}

function levelsOf(weights, head, most, q0, q1, k0, k1) {
  const columns = k1 - k0;
  const out = new Uint8Array((q1 - q0) * columns);
  weights.each(head, (q, k, weight) => {
    if (k >= k0 && k < k1) out[(q - q0) * columns + k - k0] = heatLevel(weight / most);
  }, q0, q1);
  return out;
}

/** With several heads, each cell has the color of the head with the largest weight. */
function fillPixels(pixels, scales, levels) {
  for (let i = 0; i < pixels.length; i++) {
    let most = 0;
    for (let n = 1; n < levels.length; n++) if (levels[n][i] > levels[most][i]) most = n;
    pixels[i] = scales[most][levels[most][i]];
  }
}

/** Thin lines between cells. */
function drawRules(context, view, x, y, columns, rows) {
  context.strokeStyle = getComputedStyle(context.canvas).getPropertyValue("--rule") || "rgb(128 128 128 / 14%)";
  context.lineWidth = 1;
  context.beginPath();
  for (let c = 0; c <= columns; c++) {
    context.moveTo(x + c * view.cell, y);
    context.lineTo(x + c * view.cell, y + rows * view.cell);
  }
  for (let r = 0; r <= rows; r++) {
    context.moveTo(x, y + r * view.cell);
    context.lineTo(x + columns * view.cell, y + r * view.cell);
  }
  context.stroke();
}

/** Few tokens: all labels once. Many: the visible ones, after each scroll. */
function labelVisible({ top, left }, box, view, doc, layer) {
  const { attention: weights } = layer;
  const few = Math.max(weights.Tq, weights.Tk) <= ALL_LABELS;
  const { q0, q1, k0, k1 } = few ? { q0: 0, q1: weights.Tq, k0: 0, k1: weights.Tk } : visible(box, view, weights);
  const key = [q0, q1, k0, k1].join();
  if (view.labelled === key) return;
  view.labelled = key;
  fillLabels(left, doc, layer.queries, q0, q1, view.cell, "top");
  fillLabels(top, doc, layer.keys, k0, k1, view.cell, "left");
}

export function fillLabels(strip, doc, side, from, to, cell, edge) {
  const tokens = doc.tokens(side);
  const labels = [];
  for (let index = from; index < to; index++) {
    const place = shortPatchName(doc, side, index);
    const label = place ? h("span", { class: "token" }, place) : tokenSpan(tokens[index]);
    labels.push(h("span", { class: "at", style: { [edge]: `${index * cell}px` } }, label));
  }
  strip.replaceChildren(...labels);
}

function drawLegend(legend, most) {
  legend.lastChild.textContent = `${formatPercent(most)} of the weight`;
  const context = legend.querySelector("canvas").getContext("2d");
  const image = context.createImageData(256, 1);
  const scale = heatScale(0);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < 256; i++) pixels[i] = scale[heatLevel(i / 255)];
  context.putImageData(image, 0, 0);
}

// --- pointing ---

function placeBands({ bands }, view, now, { Tq, Tk }) {
  const q = now?.side === "queries" ? now.index : now?.other ?? null;
  const k = now?.side === "keys" ? now.index : now?.other ?? null;
  placeBand(bands.row, now, q !== null && q < Tq, { y: q * view.cell, width: Tk * view.cell, height: view.cell });
  placeBand(bands.column, now, k !== null && k < Tk, { x: k * view.cell, width: view.cell, height: Tq * view.cell });
}

function placeBand(band, now, there, { x = 0, y = 0, width, height }) {
  band.hidden = !there;
  if (!there) return;
  band.classList.toggle("pinned", now.pinned);
  band.style.setProperty("transform", `translate(${x}px, ${y}px)`);
  band.style.setProperty("width", `${width}px`);
  band.style.setProperty("height", `${height}px`);
}

function bindHeatMap(store, parts, view, box, field) {
  const cellAt = (event) => {
    const { doc, path } = store.get();
    const { Tq, Tk } = doc.layer(path).attention;
    const frame = field.getBoundingClientRect();
    const k = Math.floor((event.clientX - frame.left) / view.cell);
    const q = Math.floor((event.clientY - frame.top) / view.cell);
    return q >= 0 && q < Tq && k >= 0 && k < Tk ? { q, k } : null;
  };
  field.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (!cell) return;
    const { hover } = store.get();
    const moved = hover?.index !== cell.q || hover.other !== cell.k;
    if (moved) store.set({ hover: { side: "queries", index: cell.q, other: cell.k } });
    showTip(parts.tip, store.get(), cell, event);
  });
  field.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch") return; // the tip of a tapped cell stays
    parts.tip.hidden = true;
    store.set({ hover: null });
  });
  field.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell && event.pointerType !== "touch") pinToken(store, "queries", cell.q);
    if (!cell || event.pointerType !== "touch") return;
    store.set({ hover: { side: "queries", index: cell.q, other: cell.k } });
    showTip(parts.tip, store.get(), cell, event);
  });
  document.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" && !field.contains(event.target)) parts.tip.hidden = true;
  });
}

function showTip(tip, { doc, path, heads }, { q, k }, event) {
  const layer = doc.layer(path);
  const name = (side, index) => patchName(doc, side, index) ?? tokenSpan(doc.tokens(side)[index]);
  const value = (head) => `${heads.length > 1 ? `head ${head}: ` : ""}${formatPercent(layer.attention.at(head, q, k))}`;
  const values = h("b", {}, `  ${heads.map(value).join(", ")}`);
  clear(tip).append(name(layer.queries, q), " → ", name(layer.keys, k), values);
  tip.hidden = false;
  const panel = tip.parentElement.getBoundingClientRect(); // the tip moves with its panel
  const flip = event.clientX > innerWidth - 240; // no room to the right
  const left = flip ? Math.max(8, event.clientX - 14 - tip.offsetWidth) : event.clientX + 14;
  tip.style.setProperty("transform", `translate(${left - panel.left}px, ${event.clientY + 18 - panel.top}px)`);
}
