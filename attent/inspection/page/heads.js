// The heads view: the grid of all heads, and the selected heads as lines, as a heat map and in words.

import { h, clear } from "./dom.js";
import { groupLayers, hasDecoderInput, isFormed, setRowLabels } from "./data.js";
import { OVERLAYS } from "./colors.js";
import { describeSelection } from "./description.js";
import { headGrid, selectHead } from "./head_grid.js";
import { linesPanel } from "./lines.js";
import { heatMap } from "./heatmap.js";
import { imagePanel } from "./image.js";
import { soundPanel } from "./sound.js";

export function headsView(store) {
  const grid = headGrid(store);
  const picture = Object.values(store.get().doc.json.sides ?? {}).some((side) => side.audio) ? soundPanel : imagePanel;
  const panels = { lines: linesPanel(store), picture: picture(store), map: heatMap(store) };
  const description = h("p", { class: "saying", "aria-live": "polite", id: "saying" });
  const controls = h("div", { class: "controls" });
  const pictures = h("div", { class: "pictures" }, Object.values(panels).map((panel) => panel.element));
  const nothing = h("p", { class: "waiting", hidden: true });
  const unformed = unformedNotice(() => { showsUnformed = true; build(); });
  const large = h("div", { class: "large" }, controls, description, unformed, pictures);
  const both = h("div", { class: "heads" }, grid.element, large);
  const element = h("div", {}, both, nothing);
  let [isShown, width, used, showsUnformed] = [false, 0, [], false];

  function build() {
    if (!isShown) return;
    const { doc, path, heads, rows } = store.get();
    const layer = doc.layer(path);
    if (layer) setRowLabels(doc, layer, heads[0], rows);
    both.hidden = !layer;
    nothing.hidden = Boolean(layer);
    if (!layer) return describeEmpty(nothing, doc);
    used = choosePanels(panels, doc, layer);
    drawControls(controls, store);
    describe();
    unformed.hidden = layer.kind !== "cross" || isFormed(doc) || showsUnformed;
    pictures.hidden = !unformed.hidden;
    for (const panel of used) panel.build();
  }

  function describe() {
    clear(description).append(...describeSelection(store.get()));
  }

  function refocus() {
    if (!isShown || !store.get().path) return;
    for (const panel of used) panel.focus();
    describe();
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

function describeEmpty(nothing, doc) {
  nothing.textContent = doc.json.live
    ? "Type a sentence above to see the attention of every head."
    : "This document has no attention weights.";
}

/** Shown instead of pale pictures while cross-attention is uniform. */
function unformedNotice(showAnyway) {
  const show = h("button", { type: "button", class: "button", on: { click: showAnyway } }, "Show the weights anyway");
  return h("div", { class: "notice unformed" },
    h("p", {}, h("b", {}, "Cross-attention has not formed yet: "), "every head spreads its weight evenly over the source. ",
      "It forms late, often after the loss has fallen for a while: train longer."), show);
}

/** Lines between tokens, the image if the keys are patches, or the recording, which has its own heat map. */
function choosePanels(panels, doc, layer) {
  const { image, audio } = doc.side(layer.keys) ?? {};
  const used = [image ? panels.picture : panels.lines, ...(audio ? [] : [panels.map])];
  for (const panel of Object.values(panels)) panel.element.hidden = !used.includes(panel);
  const { classList } = panels.map.element.parentElement;
  classList.toggle("of-picture", Boolean(image && !audio));
  classList.toggle("of-sound", Boolean(audio));
  return used;
}

// --- the controls: which head ---

function drawControls(controls, store) {
  const { doc, path, heads } = store.get();
  const groups = groupLayers(doc);
  const group = groups.find(({ layers }) => layers.some((layer) => layer.path === path));
  const shape = [group.key, group.layers.length, doc.layer(path).heads];
  const key = JSON.stringify([shape, groups.map(({ key: name }) => name)]);
  if (controls.dataset.key !== key) {
    controls.dataset.key = key; // a slider that is being dragged must stay the same element
    const chips = h("div", { class: "chips", role: "group", "aria-label": "Heads shown" });
    clear(controls).append(...makeControls(store, groups, group), rowLabelControl(store), chips);
  }
  const row = group.layers.findIndex((layer) => layer.path === path);
  setSlider(controls.querySelector(".layer-slider"), row, group.layers[row].layer);
  setSlider(controls.querySelector(".head-slider"), heads[0], heads[0]);
  setRowControl(controls.querySelector(".rows"), doc, doc.layer(path));
  fillHeadChips(controls.querySelector(".chips"), store, doc.layer(path), heads);
}

/** Choose the row labels of a decoder: the output token or the decoder input of each step. */
function rowLabelControl(store) {
  const choice = (value, label) => {
    const input = h("input", { type: "radio", name: "rows", value, on: { change: () => store.set({ rows: value }) } });
    return h("label", {}, input, label);
  };
  const label = "Label each step by";
  const choices = [choice("target", "output"), choice("decoder_input", "input")];
  return h("div", { class: "field rows", title: label }, "rows",
    h("div", { class: "themes", role: "radiogroup", "aria-label": label }, choices));
}

function setRowControl(control, doc, layer) {
  control.hidden = !hasDecoderInput(doc, layer);
  for (const input of control.querySelectorAll("input")) input.checked = input.value === layer.queries;
}

function makeControls(store, groups, group) {
  const goTo = (path, head) => store.set(selectHead(store.get(), path, head));
  const nearest = (layers) => layers[Math.min(layerIndex(store.get(), group), layers.length - 1)];
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

const layerIndex = ({ path }, group) => Math.max(0, group.layers.findIndex((layer) => layer.path === path));

function slider(label, name, last, change) {
  const input = h("input", { type: "range", class: name, min: 0, max: last, step: 1, disabled: last < 1 });
  input.addEventListener("input", () => change(Number(input.value)));
  return h("label", { class: "field" }, label, input, h("output", {}));
}

function setSlider(input, at, text) {
  input.value = at;
  input.nextElementSibling.textContent = text;
}

function fillHeadChips(chips, store, layer, heads) {
  const leave = (head) => store.set(selectHead(store.get(), layer.path, head, { shiftKey: true }));
  const chip = (head, place) => h("button", {
    type: "button", class: "chip", title: "remove", style: { "--chosen": `var(--head-${place % OVERLAYS})` },
    on: { click: () => leave(head) },
  }, `head ${head}`);
  const all = layer.heads > 1 ? [compareButton(store), allHeadsButton(store, layer, heads)] : [];
  clear(chips).append(...(heads.length > 1 ? heads.map(chip) : []), ...all);
}

/** While pressed, clicks in the grid toggle heads of this layer. */
function compareButton(store) {
  const { comparing } = store.get();
  const change = () => store.set({ comparing: !comparing });
  return h("button", { type: "button", class: "button plain", "aria-pressed": String(comparing), on: { click: change } },
    comparing ? "comparing: select heads of this layer" : "compare heads");
}

/** Overlay all heads of the layer, up to the number of colors; or go back to one. */
function allHeadsButton(store, layer, heads) {
  const others = Array.from({ length: layer.heads }, (_, head) => head).filter((head) => head !== heads[0]);
  const all = [heads[0], ...others].slice(0, OVERLAYS);
  const many = heads.length > 1;
  const more = all.length < layer.heads ? `overlay ${OVERLAYS} heads` : "overlay all heads";
  const change = () => store.set({ heads: many ? [heads[0]] : all });
  const label = many ? `only head ${heads[0]}` : more;
  return h("button", { type: "button", class: "button plain", on: { click: change } }, label);
}
