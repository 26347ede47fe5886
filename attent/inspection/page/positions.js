// The positions view: the values of the positional encoding and its pairwise products or biases, for any scheme.

import { h, s, clear, keepPunctuation, pointAt, tokenSpan, quoteToken } from "./dom.js";
import { unpackArray } from "./data.js";
import { formatDecimal, maxAbs, paintMatrix, picker, onPointer, makeButton } from "./paint.js";

const POS_MASKED = 60000; // a bias this negative is a mask
const POS_WORDS = 200; // maximum number of tokens to choose from

export function positionsView(store) {
  const state = { visible: false, stale: true, entry: 0, at: 4, head: 0, turn: 0 };
  const parts = posParts();
  const view = { store, state, parts };
  parts.head = picker("head", "pos-head", (head) => {
    state.head = Number(head);
    posShow(view);
  });
  store.on(["doc", "theme"], () => {
    state.stale = true;
    if (state.visible) posDraw(view);
  });
  return {
    element: parts.element,
    show() {
      state.visible = true;
      if (state.stale) posDraw(view);
    },
    hide() {
      state.visible = false;
    },
  };
}

function posParts() {
  const stacks = h("div", { class: "pos-stacks", role: "group", "aria-label": "stack" });
  const about = h("div", { class: "pos-about" });
  const words = h("div", { class: "pos-words", role: "group", "aria-label": "tokens" });
  const pictures = h("div", { class: "pos-pictures" });
  return { element: h("section", { class: "pos" }, stacks, about, words, pictures), stacks, about, words, pictures };
}

/** Equal entries of several stacks are shown once: [{entry, stacks}]. */
function posEntries(positions) {
  const seen = new Map();
  for (const entry of positions) {
    const key = JSON.stringify([entry.scheme, entry.applied_as, entry.formula, entry.values?.data, entry.pairwise?.data]);
    if (!seen.has(key)) seen.set(key, { entry, stacks: [] });
    seen.get(key).stacks.push(entry.stack);
  }
  return [...seen.values()];
}

async function posDraw(view) {
  const { store, state, parts } = view;
  state.stale = false;
  const turn = ++state.turn;
  const { doc } = store.get();
  state.entries = posEntries(doc.json.positions ?? []);
  state.entry = Math.min(state.entry, state.entries.length - 1);
  const selected = state.entries[state.entry];
  parts.element.hidden = !selected;
  if (!selected) return;
  const arrays = [selected.entry.values, selected.entry.pairwise];
  const [values, pairwise] = await Promise.all(arrays.map((array) => (array ? unpackArray(array) : null)));
  if (turn !== state.turn) return;
  Object.assign(state, { selected, values, pairwise: posHeads(pairwise), tokens: posSide(doc, selected)?.tokens ?? [], doc });
  state.head = Math.min(state.head, Math.max(0, (state.pairwise?.heads ?? 1) - 1));
  state.at = Math.max(0, Math.min(state.at, posLength(state) - 1, Math.max(0, state.tokens.length - 1)));
  posStacks(view);
  clear(parts.about).append(...posAbout(state));
  posShow(view);
}

/** Pairwise values, one matrix or one per head: {heads, rows, columns, data, many}. */
function posHeads(pairwise) {
  if (!pairwise) return null;
  const shape = pairwise.shape.length === 2 ? [1, ...pairwise.shape] : pairwise.shape;
  const data = pairwise.data.map((number) => (Math.abs(number) >= POS_MASKED ? NaN : number));
  return { heads: shape[0], rows: shape[1], columns: shape[2], data, many: pairwise.shape.length === 3 };
}

/** The side whose positions a stack encodes. */
function posSide(doc, { stacks }) {
  const layer = doc.layers.find((entry) => entry.stack === stacks[0] && entry.kind === "self") ?? doc.layers[0];
  return doc.side(layer?.keys);
}

function posLength({ values, pairwise }) {
  return values?.shape[0] ?? pairwise?.rows ?? 0;
}

// --- text ------------------------------------------------------------------------------------------------------------

function posStacks(view) {
  const { state, parts } = view;
  const choose = (i) => {
    state.entry = i;
    posDraw(view);
  };
  clear(parts.stacks);
  if (state.entries.length < 2) return;
  parts.stacks.append(...state.entries.map(({ stacks }, i) =>
    makeButton("button", () => choose(i), stacks.join(" and "), { "aria-pressed": String(i === state.entry) })));
}

function posAbout(state) {
  const { entry, stacks } = state.selected;
  return [
    h("h2", {}, `${entry.scheme[0].toUpperCase()}${entry.scheme.slice(1)} positions in the ${stacks.join(" and the ")}`),
    entry.note ? h("p", {}, entry.note) : "",
    posDrawing(state),
    entry.formula ? h("p", { class: "pos-formula" }, entry.formula) : "",
  ];
}

/** The path of a token through the stack, with the point marked where its position enters. */
function posDrawing({ doc, selected: { entry, stacks } }) {
  const box = (...inside) => h("span", { class: "pos-node" }, inside);
  const here = (text) => h("span", { class: "pos-node pos-here" }, text);
  const arrow = () => h("span", { class: "pos-arrow", "aria-hidden": "true" }, "→");
  const layers = doc.layers.filter((layer) => layer.stack === stacks[0]);
  const { image, audio } = posSide(doc, { stacks }) ?? {};
  const count = new Set(layers.map((layer) => layer.layer)).size;
  const cross = layers.some((layer) => layer.kind === "cross");
  const inside = { angles: here("q and k rotated by position"), bias: here("scores + position bias") }[entry.applied_as];
  const block = h("span", { class: "pos-block" }, h("span", { class: "pos-times" }, count ? `${count} ×` : "each layer"),
    box("self-attention", inside ?? ""), arrow(), cross ? [box("cross-attention"), arrow()] : "", box("feed-forward"));
  const added = entry.applied_as === "embed" ? [h("span", { class: "pos-plus" }, "+"), here("position")] : "";
  return h("p", { class: "pos-drawing" }, box(audio ? "frames" : image ? "patches" : "tokens"), arrow(), box("embedding"), added, arrow(), block);
}

function posWords(view) {
  const { state, parts } = view;
  const image = posImage(state); // patches are chosen in the image
  const fit = state.tokens.slice(0, image ? image.num_prefix_tokens ?? 0 : Math.min(POS_WORDS, posLength(state)));
  const choose = (i) => {
    state.at = i;
    posShow(view);
    parts.words.querySelectorAll("button")[i]?.focus();
  };
  const button = (token, i) =>
    makeButton("pos-word", () => choose(i), [h("small", {}, i), tokenSpan(token)], { "aria-pressed": String(i === state.at) });
  clear(parts.words).append(...keepPunctuation(fit, fit.map(button)));
  parts.words.hidden = !fit.length;
}

// --- figures ---------------------------------------------------------------------------------------------------------

function posShow(view) {
  const { state, parts } = view;
  posWords(view);
  clear(parts.pictures).append(...[posPatches(view), posValues(state), posPairwise(view)].filter(Boolean));
}

function posName(state, i) {
  return state.tokens[i] ? `position ${i} (${quoteToken(state.tokens[i])})` : `position ${i}`;
}

function posValues(state) {
  const { values, selected } = state;
  if (!values) return null;
  const [T, E] = values.shape;
  const row = (i) => values.data.subarray(i * E, (i + 1) * E);
  const turned = "Rotation of each pair of dimensions: cosines and sines";
  const title = selected.entry.applied_as === "angles" ? turned : "Values added to the embedding";
  const tell = (i, d) => `${posName(state, i)}, dimension ${d}: ${formatDecimal(values.data[i * E + d], 3)}`;
  return posPicture(state, {
    kind: "values", title, down: "position", across: `dimension, 0 to ${E - 1}`, numbers: values.data, rows: T, columns: E,
    tell, curve: row, label: `${T} positions down, ${E} dimensions across`,
  });
}

function posPairwise(view) {
  const { state, parts } = view;
  const { pairwise, selected } = state;
  if (!pairwise) return null;
  const { rows, columns } = pairwise;
  const numbers = pairwise.data.subarray(state.head * rows * columns, (state.head + 1) * rows * columns);
  const biased = selected.entry.applied_as === "bias";
  const [down, across] = biased ? ["query position", "key position"] : ["position", "position"];
  parts.head.fill(Array.from({ length: pairwise.heads }, (_, head) => ({ value: head, label: String(head) })), state.head);
  return posPicture(state, {
    kind: "pairwise", title: biased ? "Values added to the attention scores" : "Dot products of positions",
    down, across, numbers, rows, columns, label: `${rows} positions down, ${columns} across`,
    tell: (i, j) => `${posName(state, i)} and ${posName(state, j)}: ${posNumber(numbers[i * columns + j])}`,
    curve: (i) => numbers.subarray(i * columns, (i + 1) * columns), above: pairwise.many ? parts.head.frame : null,
  });
}

function posImage({ doc, selected }) {
  const { image, audio } = posSide(doc, selected) ?? {};
  return audio ? null : image;
}

/** One position compared with all patches, in image layout. A click selects another. */
function posPatches(view) {
  const { state } = view;
  const image = posImage(state);
  const { rows, columns, num_prefix_tokens: before = 0 } = image ?? {};
  if (!image || !state.pairwise || state.pairwise.columns !== before + rows * columns) return null;
  const from = (state.head * state.pairwise.rows + state.at) * state.pairwise.columns + before;
  const numbers = state.pairwise.data.subarray(from, from + rows * columns);
  const title = "Selected position and all patches";
  const label = `${rows} x ${columns} patches; press Enter to select one`;
  const canvas = h("canvas", { class: "pos-canvas", role: "img", tabindex: 0, "aria-label": `${title}: ${label}`, "data-own-keys": true });
  paintMatrix(canvas, numbers, rows, columns, maxAbs(numbers));
  const say = h("p", { class: "pos-say", "aria-live": "polite" }, `${posName(state, state.at)}. Select a patch.`);
  let at = null;
  posOnPointer(canvas, (i, j) => {
    at = i === null ? null : before + i * columns + j;
    if (at !== null) say.textContent = `${posName(state, state.at)} and ${posName(state, at)}: ${posNumber(numbers[at - before])}`;
  });
  const choose = () => {
    if (at === null) return;
    state.at = at;
    posShow(view);
  };
  canvas.addEventListener("click", choose);
  canvas.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
  const mark = state.at < before ? null : h("span", { class: "pos-patch", style: {
    left: `${(100 * ((state.at - before) % columns)) / columns}%`, top: `${(100 * Math.floor((state.at - before) / columns)) / rows}%`,
    width: `${100 / columns}%`, height: `${100 / rows}%`,
  } });
  const field = h("div", { class: "pos-field pos-square" }, canvas, mark);
  return h("figure", { class: "pos-figure pos-pairwise" }, h("figcaption", {}, h("b", {}, title)), field, say);
}

function posNumber(number) {
  return Number.isNaN(number) ? "masked" : formatDecimal(number, 3);
}

/** A matrix with axes, the value under the pointer, and the row of the selected token as a curve. */
function posPicture(state, { kind, title, down, across, numbers, rows, columns, tell, curve, label, above = null }) {
  const canvas = h("canvas", {
    class: "pos-canvas", role: "img", tabindex: 0, "aria-label": `${title}: ${label}. Arrow keys move through it.`, "data-own-keys": true,
  });
  paintMatrix(canvas, numbers, rows, columns, maxAbs(numbers));
  const say = h("p", { class: "pos-say", "aria-live": "polite" }, `${pointAt()} the matrix to read a value.`);
  const shape = kind === "pairwise" ? "pos-field pos-square" : "pos-field";
  const field = h("div", { class: shape, style: { "--rows": rows } }, canvas, posMarks(state, rows));
  const cursor = field.appendChild(h("span", { class: "pos-cursor", hidden: true }));
  posOnPointer(canvas, (i, j) => {
    cursor.hidden = i === null;
    if (i === null) return;
    cursor.style.setProperty("left", `${(100 * (j + 0.5)) / columns}%`);
    cursor.style.setProperty("top", `${(100 * (i + 0.5)) / rows}%`);
    say.textContent = tell(i, j);
  });
  const axes = [h("span", { class: "pos-down" }, `${down} ↓`), h("span", { class: "pos-across" }, `${across} →`), posTicks(rows)];
  return h("figure", { class: `pos-figure pos-${kind}` }, h("figcaption", {}, h("b", {}, title), above),
    h("div", { class: "pos-frame" }, axes, field), say, posCurve(state, curve(state.at), numbers, kind, across));
}

/** Markers for the selected token and the length of the sentence. */
function posMarks(state, rows) {
  const part = (count) => `${(100 * count) / rows}%`;
  const words = Math.min(rows, state.tokens.length);
  return [
    h("span", { class: "pos-rowmark", style: { top: part(state.at), height: `max(${part(1)}, 3px)` } }),
    h("span", { class: "pos-reach", title: "this sentence", style: { height: part(words) } }),
  ];
}

function posTicks(rows) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((size) => rows / size <= 8) ?? 1000;
  const tick = (row) => h("span", { style: { top: `${(100 * (row + 0.5)) / rows}%` } }, row);
  return h("span", { class: "pos-ticks", "aria-hidden": "true" }, Array.from({ length: Math.ceil(rows / step) }, (_, i) => tick(i * step)));
}

/** Call read(row, column) for the pointer and the arrow keys. */
function posOnPointer(canvas, read) {
  const at = [0, 0];
  onPointer(canvas, read);
  canvas.addEventListener("keydown", (event) => {
    const [i, j] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
    if (i === undefined) return;
    event.preventDefault();
    at[0] = Math.max(0, Math.min(canvas.height - 1, at[0] + i));
    at[1] = Math.max(0, Math.min(canvas.width - 1, at[1] + j));
    read(...at);
  });
}

function posCurve(state, numbers, all, kind, across) {
  const [low, high] = posRange(all);
  const tall = high - low || 1;
  const waves = kind === "values" && posInterleaved(state.values) ? [" — even dimensions", " — odd dimensions"] : [""];
  const lines = waves.map((_, i) => s("path", { class: `pos-line pos-line-${i}`, d: posLine(numbers, i, waves.length) }));
  const svg = s("svg", {
    class: "pos-curve", preserveAspectRatio: "none", role: "img", "aria-label": `the row of ${posName(state, state.at)} as a curve`,
    viewBox: `0 ${-high - 0.04 * tall} ${Math.max(1, numbers.length)} ${1.08 * tall}`,
  }, s("path", { class: "pos-zero", d: `M0 0H${numbers.length}` }), lines);
  const what = kind === "values" ? "Values of" : "All positions with";
  const names = waves.map((name, i) => h("span", { class: `pos-name-${i}` }, name));
  const said = `${what} ${posName(state, state.at)}`;
  const at = (number) => ({ top: `${(100 * (high + 0.04 * tall - number)) / (1.08 * tall)}%` });
  const levels = [...new Set([high, 0, low])].map((number) => h("span", { style: at(number) }, formatDecimal(number, 1)));
  const ticks = h("span", { class: "pos-ticks", "aria-hidden": "true" }, levels);
  const ends = h("span", { class: "pos-ends" }, h("span", {}, 0), h("span", {}, `${across.replace(/,.*/, "")} →`), h("span", {}, numbers.length - 1));
  const axis = h("span", { class: "pos-down" }, `${kind === "values" ? "value" : biasedName(state)} ↑`);
  return h("div", { class: "pos-curvebox" }, h("p", { class: "small muted" }, said, names),
    h("div", { class: "pos-frame" }, axis, h("span", {}), ticks, svg, h("span", {}), ends));
}

/** The name of pairwise numbers. */
const biasedName = ({ selected }) => (selected.entry.applied_as === "bias" ? "bias" : "dot product");

function posRange(numbers) {
  let [low, high] = [0, 0];
  for (const number of numbers) {
    if (number < low) low = number;
    if (number > high) high = number;
  }
  return [low, high];
}

function posLine(numbers, first, step) {
  const points = [];
  for (let i = first; i < numbers.length; i += step) {
    if (!Number.isNaN(numbers[i])) points.push(`${points.length ? "L" : "M"}${i + 0.5} ${(-numbers[i]).toFixed(4)}`);
  }
  return points.join("");
}

/** True if sines and cosines alternate (position 0 is 0, 1, 0, 1 ...): drawn as two curves. */
function posInterleaved({ shape: [, E], data }) {
  for (let i = 0; i < E; i++) if (Math.abs(data[i] - (i % 2)) > 0.001) return false;
  return E > 3;
}
