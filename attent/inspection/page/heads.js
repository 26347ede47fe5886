// The view of heads: the grid of all of them, and the chosen ones large, as lines and as a heat map, with a sentence
// that says what one sees. The parts draw themselves; this file says when.

import { h, clear } from "./dom.js";
import { groupsOf, hasTwoNames, nameRows } from "./data.js";
import { OVERLAYS } from "./colours.js";
import { sayWhatIsSeen } from "./sentence.js";
import { headGrid, chosenHeads } from "./headgrid.js";
import { linesPanel } from "./lines.js";
import { heatMap } from "./heatmap.js";
import { picturePanel } from "./picture.js";

export function headsView(store) {
  const grid = headGrid(store);
  const panels = { lines: linesPanel(store), map: heatMap(store), picture: picturePanel(store) };
  const saying = h("p", { class: "saying", "aria-live": "polite", id: "saying" });
  const controls = h("div", { class: "controls" });
  const pictures = h("div", { class: "pictures" }, panels.lines.element, panels.picture.element, panels.map.element);
  const nothing = h("p", { class: "waiting", hidden: true });
  const large = h("div", { class: "large" }, controls, pictures, saying);
  const both = h("div", { class: "heads" }, grid.element, large);
  const element = h("div", {}, both, nothing);
  let [isShown, width, used] = [false, 0, []];

  function build() {
    if (!isShown) return;
    const { doc, path, heads, rows } = store.get();
    const layer = doc.layer(path);
    if (layer) nameRows(doc, layer, heads[0], rows);
    both.hidden = !layer;
    nothing.hidden = Boolean(layer);
    if (!layer) return sayNothing(nothing, doc);
    used = panelsFor(panels, doc, layer);
    drawControls(controls, store);
    for (const panel of used) panel.build();
    say();
  }

  function say() {
    clear(saying).append(...sayWhatIsSeen(store.get()));
  }

  function refocus() {
    if (!isShown || !store.get().path) return;
    for (const panel of used) panel.focus();
    say();
  }

  store.on(["doc", "path", "heads", "rows", "comparing", "theme"], (_, news) => {
    if (news.has("theme") && isShown) grid.draw();
    build();
  });
  store.on(["hover", "query", "pinnedKey"], (_, news) => {
    if (!["doc", "path", "heads", "rows", "theme"].some((key) => news.has(key))) refocus();
  });
  new ResizeObserver(() => {
    if (grid.element.clientWidth === width) return;
    width = grid.element.clientWidth;
    grid.draw();
  }).observe(grid.element);

  function show() {
    isShown = true;
    grid.draw();
    width = grid.element.clientWidth;
    build();
  }
  return { element, show, hide: () => { isShown = false; } };
}

function sayNothing(nothing, doc) {
  nothing.textContent = doc.json.live
    ? "Type a sentence above: every head of every layer will show what it looks at."
    : "This document holds no attention weights: there is no head to look at.";
}

/** Lines between words, or the picture where what is looked at is one. */
function panelsFor(panels, doc, layer) {
  const image = Boolean(doc.side(layer.keys)?.image);
  panels.lines.element.hidden = image;
  panels.picture.element.hidden = !image;
  panels.map.element.parentElement.classList.toggle("of-picture", image);
  return [image ? panels.picture : panels.lines, panels.map];
}

// --- the controls: which head ---

function drawControls(controls, store) {
  const { doc, path, heads } = store.get();
  const groups = groupsOf(doc);
  const group = groups.find(({ layers }) => layers.some((layer) => layer.path === path));
  const shape = [group.key, group.layers.length, doc.layer(path).heads];
  const key = JSON.stringify([shape, groups.map(({ key: name }) => name)]);
  if (controls.dataset.key !== key) {
    controls.dataset.key = key; // a slider that is being moved must stay the same element
    const chips = h("div", { class: "chips", role: "group", "aria-label": "Heads shown" });
    clear(controls).append(...makeControls(store, groups, group), rowsControl(store), chips);
  }
  const row = group.layers.findIndex((layer) => layer.path === path);
  setSlider(controls.querySelector(".layer-slider"), row, group.layers[row].layer);
  setSlider(controls.querySelector(".head-slider"), heads[0], heads[0]);
  setRows(controls.querySelector(".rows"), doc, doc.layer(path));
  fillChips(controls.querySelector(".chips"), store, doc.layer(path), heads);
}

/** A decoder's step can be called by what it writes or by what it has read just before. */
function rowsControl(store) {
  const choice = (value, label) => {
    const input = h("input", { type: "radio", name: "rows", value, on: { change: () => store.set({ rows: value }) } });
    return h("label", {}, input, label);
  };
  const label = "Name each step by the word that is";
  const choices = [choice("target", "written"), choice("read", "read")];
  return h("div", { class: "field rows", title: label }, "word",
    h("div", { class: "themes", role: "radiogroup", "aria-label": label }, choices));
}

function setRows(control, doc, layer) {
  control.hidden = !hasTwoNames(doc, layer);
  for (const input of control.querySelectorAll("input")) input.checked = input.value === layer.queries;
}

function makeControls(store, groups, group) {
  const goTo = (path, head) => store.set(chosenHeads(store.get(), path, head));
  const nearest = (layers) => layers[Math.min(rowOf(store.get(), group), layers.length - 1)];
  const kinds = h("select", {
    class: "select", "aria-label": "Which attention", value: group.key,
    on: { change: (event) => goTo(nearest(groups.find(({ key }) => key === event.target.value).layers).path, 0) },
  }, groups.map(({ key, name }) => h("option", { value: key }, name)));
  const toRow = (row) => goTo(group.layers[row].path, store.get().heads[0]);
  const layer = slider("layer", "layer-slider", group.layers.length - 1, toRow);
  const last = store.get().doc.layer(store.get().path).heads - 1;
  const head = slider("head", "head-slider", last, (n) => goTo(store.get().path, n));
  return [groups.length > 1 ? kinds : null, layer, head].filter(Boolean);
}

const rowOf = ({ path }, group) => Math.max(0, group.layers.findIndex((layer) => layer.path === path));

function slider(label, name, last, change) {
  const input = h("input", { type: "range", class: name, min: 0, max: last, step: 1, disabled: last < 1 });
  input.addEventListener("input", () => change(Number(input.value)));
  return h("label", { class: "field" }, label, input, h("output", {}));
}

function setSlider(input, at, text) {
  input.value = at;
  input.nextElementSibling.textContent = text;
}

function fillChips(chips, store, layer, heads) {
  const leave = (head) => store.set(chosenHeads(store.get(), layer.path, head, { shiftKey: true }));
  const chip = (head, place) => h("button", {
    type: "button", class: "chip", title: "take it away", style: { "--chosen": `var(--head-${place % OVERLAYS})` },
    on: { click: () => leave(head) },
  }, `head ${head}`);
  const all = layer.heads > 1 ? [compareButton(store), allButton(store, layer, heads)] : [];
  clear(chips).append(...(heads.length > 1 ? heads.map(chip) : []), ...all);
}

/** While it is pressed, a click in the grid lays a head of this layer over the others. */
function compareButton(store) {
  const { comparing } = store.get();
  const change = () => store.set({ comparing: !comparing });
  return h("button", { type: "button", class: "button plain", "aria-pressed": String(comparing), on: { click: change } },
    comparing ? "comparing: choose heads of this layer" : "compare heads");
}

/** All heads of the layer over each other, as many as there are colours; or back to one. */
function allButton(store, layer, heads) {
  const others = Array.from({ length: layer.heads }, (_, head) => head).filter((head) => head !== heads[0]);
  const every = [heads[0], ...others].slice(0, OVERLAYS);
  const many = heads.length > 1;
  const more = every.length < layer.heads ? `${OVERLAYS} heads at once` : "all heads of this layer at once";
  const change = () => store.set({ heads: many ? [heads[0]] : every });
  const label = many ? `only head ${heads[0]}` : more;
  return h("button", { type: "button", class: "button plain", on: { click: change } }, label);
}
