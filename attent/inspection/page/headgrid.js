// All heads at once: for each stack and kind one canvas of small heat maps, layers down, heads across, with a real
// button over each. Which head is looked at is the store's; what it looks like large is left to the other views.

import { h, clear } from "./dom.js";
import { groupsOf } from "./data.js";
import { heatScale, heatLevel, OVERLAYS } from "./colours.js";
import { patchWeights, queryOf } from "./picture.js";
import { focusOf } from "./sentence.js";

const GAP = 3;
const LARGEST = 52;
const SMALLEST = 15;
const EASY = 30; // pixels at which a pattern is still told at a glance
const COLUMN = 368;
const LABELS = 20;
const HINT = "Layers down, heads across. Point at a head for its name; Shift and click lays one over another.";
const PICTURED = "Each head as the patches that it looks at.";

/** {element, draw()}: draw after a change of document, size or theme. */
export function headGrid(store) {
  const element = h("div", { class: "grids" });
  const says = h("p", { class: "grid-says" });
  let groups = [];

  function build() {
    groups = groupsOf(store.get().doc).map((group) => makeGroup(group));
    clear(element).append(...groups.map((group) => group.figure), says);
    says.textContent = isPicture(store.get().doc) ? `${PICTURED} ${HINT}` : HINT;
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
    for (const group of groups) group.buttons.forEach((button) => markButton(button, path, heads));
  }

  element.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-head]");
    if (!button) return;
    const along = store.get().comparing ? { shiftKey: true } : event; // fingers have no Shift
    store.set(chosenHeads(store.get(), button.dataset.path, Number(button.dataset.head), along));
  });
  const tell = (event) => tellHead(says, store.get().doc, event.target.closest("button[data-head]"));
  for (const kind of ["pointerover", "focusin"]) element.addEventListener(kind, tell);
  store.on(["doc"], build);
  store.on(["path", "heads"], () => {
    mark();
    followFocus(element);
  });
  store.on(["hover", "query"], ({ doc }) => { if (isPicture(doc)) draw(); }); // another patch looks elsewhere, in every head
  build();
  return { element, draw };
}

/** A plain click shows a head alone; with Shift, Ctrl or Command it joins the others of its layer, or leaves them. */
export function chosenHeads(state, path, head, { shiftKey = false, ctrlKey = false, metaKey = false } = {}) {
  const along = (shiftKey || ctrlKey || metaKey) && path === state.path;
  const moved = path === state.path ? {} : { query: keptQuery(state, path), pinnedKey: null, hover: null };
  if (!along) return { path, heads: [head], ...moved };
  if (!state.heads.includes(head)) return { path, heads: [...state.heads, head].slice(-OVERLAYS) };
  return { path, heads: state.heads.length > 1 ? state.heads.filter((other) => other !== head) : state.heads };
}

/** A pinned word stays pinned in another layer as long as it stands on the same side there. */
function keptQuery({ doc, path, query }, next) {
  const side = (name) => doc.layer(name)?.queries?.replace("read", "target"); // one step, whatever it is called by
  return side(path) === side(next) ? query : null;
}

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
  const silent = layer.silent.includes(head);
  return h("button", {
    type: "button",
    class: silent ? "silent" : null,
    "aria-label": `${group.name}, layer ${layer.layer}, head ${head}${silent ? ", silenced" : ""}`,
    style: { "grid-row": row + 1, "grid-column": head + 1 },
    dataset: { path: layer.path, head },
  });
}

/** Beside the large view all grids share a column no higher than the window; above it as many stand in a row as can. */
function cellSize(element, groups) {
  const columns = Math.max(...groups.map((group) => group.columns));
  const across = (width) => Math.floor((width - LABELS - GAP * (columns - 1)) / columns);
  if (matchMedia("(min-width: 68.01rem)").matches) {
    const layers = groups.reduce((sum, group) => sum + group.layers.length, 0);
    const room = innerHeight - 220 - 44 * groups.length;
    return within(Math.min(across(COLUMN), Math.max(EASY, Math.floor(room / layers) - GAP)));
  }
  const width = element.clientWidth;
  const inRow = [3, 2, 1].find((n) => n <= groups.length && across((width - 16 * (n - 1)) / n) >= 22) ?? 1;
  return within(across((width - 16 * (inRow - 1)) / inRow));
}

const within = (cell) => Math.max(SMALLEST, Math.min(LARGEST, cell));

function markButton(button, path, heads) {
  const place = button.dataset.path === path ? heads.indexOf(Number(button.dataset.head)) : -1;
  button.classList.toggle("chosen", place >= 0);
  button.setAttribute("aria-pressed", String(place >= 0));
  button.tabIndex = place === 0 ? 0 : -1;
  if (place >= 0) button.style.setProperty("--chosen", `var(--head-${place % OVERLAYS})`);
}

/** When the keyboard walks the grid, the focus goes along. */
function followFocus(element) {
  if (!element.contains(document.activeElement)) return;
  element.querySelector("button[tabindex='0']")?.focus({ preventScroll: false });
}

function tellHead(says, doc, button) {
  if (!button) return;
  const { path, head } = button.dataset;
  const property = doc.property(path, Number(head));
  clear(says).append(h("code", {}, `${path}:${head}`), property?.says ? ` ${property.says}` : "");
}

// --- drawing ---

const isPicture = (doc) => doc.layers.some((layer) => doc.side(layer.keys)?.image);

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
      const picture = state.doc.side(layer.keys)?.image;
      if (picture) paintPatches(pixels, side, layer, head, picture, state);
      else paintSmall(pixels, side, layer.weightsNow, head, heatScale(0));
      context.putImageData(image, head * step, row * step);
    }
  });
}

/** One head in side x side pixels; where many weights share a pixel the greatest is seen. */
function paintSmall(pixels, side, weights, head, scale) {
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
    for (let x = 0; x < side; x++) pixels[y * side + x] = scale[heatLevel(pool[start + across[x]])];
  }
}

/** What is looked at, laid out as the picture is: the patch that is looked at most at full strength. */
function paintPatches(pixels, side, layer, head, image, state) {
  const weights = patchWeights(layer, head, queryOf(state.doc, layer, focusOf(state)), image);
  const most = Math.max(1e-6, ...weights);
  const scale = heatScale(0);
  for (let y = 0; y < side; y++) {
    const start = Math.floor((y * image.rows) / side) * image.columns;
    for (let x = 0; x < side; x++) {
      pixels[y * side + x] = scale[heatLevel(weights[start + Math.floor((x * image.columns) / side)] / most)];
    }
  }
}
