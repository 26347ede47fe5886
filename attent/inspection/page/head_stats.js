// The head statistics view: a table of all heads with measured values and ablation costs, to sort and filter. A click
// selects the head.

import { h, clear } from "./dom.js";
import { groupLayers } from "./data.js";
import { formatDecimal, maxAbs, paintStrength, makeButton } from "./paint.js";

export function headStatsView(store) {
  const state = { visible: false, stale: true, sort: { key: "index", down: false }, group: "" };
  const parts = propParts();
  const view = { store, state, parts };
  store.on(["doc"], () => {
    state.stale = true;
    if (state.visible) propDraw(view);
  });
  store.on(["path", "heads"], () => propHighlight(view));
  return {
    element: parts.element,
    show() {
      state.visible = true;
      if (state.stale) propDraw(view);
      propHighlight(view);
    },
    hide() {
      state.visible = false;
    },
  };
}

function propParts() {
  const about = h("p", { class: "muted prop-about" });
  const groups = h("div", { class: "prop-groups", role: "group", "aria-label": "attention kind" });
  const table = h("div", { class: "prop-box", tabindex: 0, role: "region", "aria-label": "head statistics" });
  const terms = h("dl", { class: "prop-terms" });
  const maps = h("div", { class: "prop-maps" });
  const help = h("details", { class: "prop-help", open: true }, h("summary", {}, "What the columns mean"), terms);
  return { element: h("section", { class: "prop" }, about, groups, table, help, maps), about, groups, table, terms, maps };
}

function propDraw(view) {
  const { store, state, parts } = view;
  state.stale = false;
  const { doc } = store.get();
  state.columns = propColumns(doc.json);
  state.rows = propRows(doc);
  state.names = propLayerGroups(doc).map((group) => group.name);
  if (!state.names.includes(state.group)) state.group = "";
  parts.about.textContent = propAbout(doc.json);
  propLines(view);
  propGroups(view);
  propTable(view);
  propHighlight(view);
  clear(parts.maps).append(...propCostMaps(view));
}

function propAbout({ head_stats: stats, ablation, layers }) {
  const notes = [];
  if (stats) notes.push(`Measured on ${propDataset(stats)}.`);
  if (ablation) {
    const whole = `the unmasked model has BLEU ${formatDecimal(ablation.bleu, 1)} and loss ${formatDecimal(ablation.loss, 3)}`;
    notes.push(`Ablation on ${propCount(ablation.sentences)}; ${whole}.`);
  }
  if (layers?.length) notes.push("Select a head to see its attention.");
  return notes.join(" ");
}

function propDataset({ sentences, dataset }) {
  if (sentences === 1 && dataset) return dataset;
  return dataset ? `${propCount(sentences)}, ${dataset}` : propCount(sentences);
}

function propCount(number) {
  return number === 1 ? "one sentence" : `${(number ?? 0).toLocaleString("en")} sentences`;
}

// --- the rows and columns --------------------------------------------------------------------------------------------

/** Sortable columns: {key, label, help, unit, value(row)}. */
function propColumns({ head_stats: stats, ablation }) {
  const measured = (stats?.columns ?? []).map((column) => ({ ...column, value: (row) => row.values[column.key] ?? null }));
  if (!ablation) return measured;
  const cost = (key, label, bad, digits, name) => ({
    key, label, bad, digits, unit: "change", value: (row) => row[key], help: `change of ${name} when the head is masked`,
  });
  return [...measured, cost("bleu", "Δ BLEU", -1, 1, "BLEU"), cost("loss", "Δ loss", 1, 3, "the loss")];
}

/** Layers by group; before the first request, derived from the measured heads. */
function propLayerGroups(doc) {
  if (doc.layers.length) return groupLayers(doc);
  const parts = (doc.json.ablation?.parts ?? []).filter(({ kind }) => kind === "head").map(({ part }) => part);
  const names = [...(doc.json.head_stats?.heads ?? []).map(({ path, head }) => `${path}:${head}`), ...parts];
  const layers = new Map();
  for (const [, path, head] of names.map((name) => /^(.*):(\d+)$/.exec(name) ?? [])) {
    const known = layers.get(path)?.heads ?? 0;
    const kind = path.endsWith(".cross_attn") ? "cross" : "self";
    const number = Number(/\.(\d+)\./.exec(path)?.[1] ?? 0);
    layers.set(path, { path, stack: path.split(".")[0], layer: number, kind, heads: Math.max(known, Number(head) + 1), masked_heads: [] });
  }
  return groupLayers({ layers: [...layers.values()] });
}

/** One row per head, in document order. */
function propRows(doc) {
  const { head_stats: stats, ablation } = doc.json;
  const measured = new Map((stats?.heads ?? []).map((entry) => [`${entry.path}:${entry.head}`, entry]));
  const costs = new Map((ablation?.parts ?? []).map((entry) => [entry.part, entry]));
  return propLayerGroups(doc).flatMap((group) => group.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => {
    const part = `${layer.path}:${head}`;
    const cost = costs.get(part);
    return {
      path: layer.path, layer: layer.layer, head, group: group.name, masked: layer.masked_heads.includes(head),
      description: measured.get(part)?.description ?? "", values: measured.get(part)?.values ?? {},
      bleu: cost ? cost.bleu - ablation.bleu : null, loss: cost ? cost.loss - ablation.loss : null,
    };
  }))).map((row, index) => ({ ...row, index }));
}

function propSorted({ rows, sort, columns, group }) {
  const column = columns.find(({ key }) => key === sort.key);
  const value = column?.value ?? ((row) => row[sort.key]);
  const sign = sort.down ? -1 : 1;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index; // missing values go last
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a.index - b.index;
  };
  return rows.filter((row) => !group || row.group === group).sort(order);
}

function propText(number, { unit, digits }) {
  if (number === null || number === undefined) return "–";
  if (unit === "share") return `${Math.round(100 * number)}%`;
  if (unit === "percent") return `${formatDecimal(number, 1)}%`;
  if (unit === "change") return `${number > 0 && Number(number.toFixed(digits)) !== 0 ? "+" : ""}${formatDecimal(number, digits)}`;
  return formatDecimal(number, 1);
}

// --- the table -------------------------------------------------------------------------------------------------------

function propGroups(view) {
  const { state, parts } = view;
  const choose = (group) => {
    state.group = group;
    propGroups(view);
    propTable(view);
    parts.groups.querySelector("[aria-pressed=true]").focus();
  };
  const button = (group) => makeButton("button", () => choose(group), group || "all heads", { "aria-pressed": String(group === state.group) });
  clear(parts.groups).append(...(state.names.length > 1 ? ["", ...state.names] : []).map(button));
}

/** Rows are created once; sorting and filtering reorder them. */
function propTable(view) {
  const { state, parts } = view;
  const rows = propSorted(state);
  const empty = state.columns.map((column) => rows.every((row) => column.value(row) === null)); // e.g. alignment outside cross-attention
  for (const row of rows) row.cells.forEach((cell, i) => { cell.hidden = empty[i]; });
  const heads = h("thead", {}, h("tr", {}, propHeads(view, empty)));
  clear(parts.table).append(h("table", { class: "prop-table" }, heads, h("tbody", {}, rows.map((row) => row.line))));
  const explained = state.columns.filter((column, i) => column.help && !empty[i]);
  clear(parts.terms).append(...explained.map(({ label, help }) => h("div", {}, h("dt", {}, label), h("dd", {}, help))));
}

function propLines(view) {
  const { columns, rows } = view.state;
  const maxima = columns.map((column) => (column.unit === "share" ? 1 : maxAbs(rows.map((row) => column.value(row) ?? 0))));
  for (const row of rows) {
    row.cells = columns.map((column, i) => propCell(column, column.value(row), maxima[i]));
    row.line = propRow(view, row);
  }
}

function propHeads(view, empty) {
  const { key, down } = view.state.sort;
  const columns = [{ key: "index", label: "head" }, { key: "description", label: "pattern" }, ...view.state.columns];
  const order = down ? "descending" : "ascending";
  return columns.map((column, i) => {
    const now = key === column.key;
    const arrow = h("span", { "aria-hidden": "true" }, now ? (down ? " ↓" : " ↑") : "");
    const button = makeButton("prop-sort", () => propSort(view, column), [column.label, arrow], { "data-key": column.key });
    const about = { title: column.help ?? null, class: column.value ? "prop-n" : null, hidden: Boolean(empty[i - 2]) };
    return h("th", { scope: "col", "aria-sort": now ? order : "none", ...about }, button);
  });
}

/** The first click sorts descending, except BLEU differences: the largest loss first. */
function propSort(view, column) {
  const { state, parts } = view;
  const first = Boolean(column.value) && column.bad !== -1;
  state.sort = { key: column.key, down: state.sort.key === column.key ? !state.sort.down : first };
  propTable(view);
  parts.table.querySelector(`[data-key="${column.key}"]`)?.focus();
}

function propRow({ store }, row) {
  const available = Boolean(store.get().doc.layer(row.path));
  const go = () => store.set({ path: row.path, heads: [row.head], query: null, tab: "heads" });
  const label = `${row.group.replace("-attention", "")} ${row.layer}:${row.head}`;
  const name = available ? h("button", { class: "prop-go", type: "button", title: `${row.path}, head ${row.head}` }, label) : label;
  const masked = row.masked ? h("span", { class: "prop-masked" }, "masked") : "";
  return h("tr", { class: available ? "prop-there" : null, dataset: { part: `${row.path}:${row.head}` }, on: available ? { click: go } : {} },
    h("th", { scope: "row" }, name, masked), h("td", { class: "prop-description" }, row.description), row.cells);
}

function propCell(column, number, most) {
  const below = column.bad && number * column.bad > 0;
  const strength = number === null || !(most > 0) ? 0 : Math.min(1, Math.abs(number) / most);
  const name = below ? "prop-n prop-below" : "prop-n";
  return h("td", { class: name, style: { "--bar": `${100 * strength}%` } }, propText(number, column));
}

function propHighlight({ store, state }) {
  const { path, heads } = store.get();
  for (const row of state.rows ?? []) row.line.classList.toggle("prop-now", row.path === path && row.head === heads?.[0]);
}

// --- ablation costs --------------------------------------------------------------------------------------------------

function propCostMaps(view) {
  const { doc } = view.store.get();
  const { ablation } = doc.json;
  if (!ablation?.parts?.length) return [];
  const most = maxAbs(ablation.parts.filter(({ kind }) => kind === "head").map((part) => part.bleu - ablation.bleu));
  const heads = propLayerGroups(doc).map((group) => propHeadMap(view, group, ablation, most)).filter(Boolean);
  const parts = propPartMap(ablation);
  return [
    h("h2", {}, "Ablation"),
    h("p", { class: "muted" }, "Change of BLEU when a part is masked."),
    h("div", { class: "prop-row" }, heads, parts),
  ];
}

function propHeadMap({ store }, group, ablation, most) {
  const costs = new Map(ablation.parts.map((entry) => [entry.part, entry]));
  if (!group.layers.some((layer) => costs.has(`${layer.path}:0`))) return null;
  const count = Math.max(...group.layers.map((layer) => layer.heads));
  const numbers = Array.from({ length: count }, (_, head) => head);
  const cell = (layer, head) => {
    const cost = costs.get(`${layer.path}:${head}`);
    if (!cost) return h("td", {});
    const there = store.get().doc.layer(layer.path);
    const go = there && (() => store.set({ path: layer.path, heads: [head], query: null, tab: "heads" }));
    return propCost(cost.bleu - ablation.bleu, most, { go, label: `head ${head} of layer ${layer.layer}`, part: cost.part });
  };
  const line = (layer) => h("tr", {}, h("th", { scope: "row" }, layer.layer), numbers.map((head) => cell(layer, head)));
  return propGrid(`${group.name}: heads`, "layer", numbers, group.layers.map(line));
}

/** Sub-layers and layers, on their own color scale. */
function propPartMap(ablation) {
  const wide = ablation.parts.filter(({ kind }) => kind !== "head");
  if (!wide.length) return null;
  const most = maxAbs(wide.map((part) => part.bleu - ablation.bleu));
  const names = { self_attn: "self", cross_attn: "cross", feedforward: "feed-forward", "": "whole layer" };
  const table = new Map();
  for (const part of wide) {
    const [, layer, kind] = /^(.*\.\d+)(?:\.(\w+))?$/.exec(part.part) ?? [null, part.part, ""];
    if (!table.has(layer)) table.set(layer, {});
    table.get(layer)[kind ?? ""] = part;
  }
  const kinds = Object.keys(names).filter((kind) => [...table.values()].some((row) => row[kind]));
  const cell = (part) => (part ? propCost(part.bleu - ablation.bleu, most, { label: part.part, part: part.part }) : h("td", {}));
  const rows = [...table].map(([layer, row]) =>
    h("tr", {}, h("th", { scope: "row" }, layer.replace(".blocks.", " ")), kinds.map((kind) => cell(row[kind]))));
  return propGrid("sub-layers and layers", "", kinds.map((kind) => names[kind]), rows);
}

function propCost(change, most, { go = null, label, part }) {
  const text = propText(change, { unit: "change", digits: 1 });
  const title = `${label}: ${text} BLEU`;
  const style = { "--strength": `${Math.round(100 * paintStrength(change, most))}%` };
  const inside = go ? makeButton("", go, text, { "aria-label": title }) : text;
  return h("td", { class: change > 0 ? "prop-cost prop-gain" : "prop-cost", title, dataset: { part }, style }, inside);
}

function propGrid(caption, corner, names, rows) {
  const heads = [h("th", {}, corner), ...names.map((name) => h("th", { scope: "col" }, name))];
  const table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
  return h("div", { class: "prop-map" }, table);
}
