// What heads do: every head with what was measured of it, to sort and to filter, and what it cost to silence it. A
// click on a head goes to its picture. Measuring is done before the page is written.

import { h, clear } from "./dom.js";
import { groupsOf } from "./data.js";
import { decimal, furthest, paintStrength, press } from "./paint.js";

export function propertiesView(store) {
  const state = { visible: false, stale: true, sort: { key: "place", down: false }, group: "" };
  const parts = propParts();
  const view = { store, state, parts };
  store.on(["doc"], () => {
    state.stale = true;
    if (state.visible) propDraw(view);
  });
  store.on(["path", "heads"], () => propMark(view));
  return {
    element: parts.element,
    show() {
      state.visible = true;
      if (state.stale) propDraw(view);
      propMark(view);
    },
    hide() {
      state.visible = false;
    },
  };
}

function propParts() {
  const about = h("p", { class: "muted prop-about" });
  const groups = h("div", { class: "prop-groups", role: "group", "aria-label": "which heads" });
  const table = h("div", { class: "prop-box", tabindex: 0, role: "region", "aria-label": "what each head does" });
  const maps = h("div", { class: "prop-maps" });
  return { element: h("section", { class: "prop" }, about, groups, table, maps), about, groups, table, maps };
}

function propDraw(view) {
  const { store, state, parts } = view;
  state.stale = false;
  const { doc } = store.get();
  state.columns = propColumns(doc.json);
  state.rows = propRows(doc);
  state.names = propKinds(doc).map((group) => group.name);
  if (!state.names.includes(state.group)) state.group = "";
  parts.about.textContent = propAbout(doc.json);
  propLines(view);
  propGroups(view);
  propTable(view);
  propMark(view);
  clear(parts.maps).append(...propMaps(view));
}

function propAbout({ properties, ablation, layers }) {
  const said = [];
  if (properties) said.push(`Measured on ${propOn(properties)}.`);
  if (ablation) {
    const whole = `with all of them BLEU is ${decimal(ablation.bleu, 1)} and the loss ${decimal(ablation.loss, 3)}`;
    said.push(`What each part is worth was measured on ${propCount(ablation.sentences)}; ${whole}.`);
  }
  if (layers?.length) said.push("Choose a head to see it at work.");
  return said.join(" ");
}

function propOn({ sentences, of }) {
  if (sentences === 1 && of) return of;
  return of ? `${propCount(sentences)}, ${of}` : propCount(sentences);
}

function propCount(number) {
  return number === 1 ? "one sentence" : `${(number ?? 0).toLocaleString("en")} sentences`;
}

// --- the rows and columns --------------------------------------------------------------------------------------------

/** What can be sorted by: {key, label, help, unit, of(row)}. */
function propColumns({ properties, ablation }) {
  const measured = (properties?.columns ?? []).map((column) => ({ ...column, of: (row) => row.values[column.key] ?? null }));
  if (!ablation) return measured;
  const cost = (key, label, bad, digits, name) => ({
    key, label, bad, digits, unit: "change", of: (row) => row[key], help: `how much ${name} changes when the head is silenced`,
  });
  return [...measured, cost("bleu", "Δ BLEU", -1, 1, "BLEU"), cost("loss", "Δ loss", 1, 3, "the loss")];
}

/** The layers by group; without a sentence there are none, but their names are known from what was measured. */
function propKinds(doc) {
  if (doc.layers.length) return groupsOf(doc);
  const parts = (doc.json.ablation?.parts ?? []).filter(({ kind }) => kind === "head").map(({ part }) => part);
  const names = [...(doc.json.properties?.heads ?? []).map(({ path, head }) => `${path}:${head}`), ...parts];
  const layers = new Map();
  for (const [, path, head] of names.map((name) => /^(.*):(\d+)$/.exec(name) ?? [])) {
    const known = layers.get(path)?.heads ?? 0;
    const kind = path.endsWith(".cross_attn") ? "cross" : "self";
    const number = Number(/\.(\d+)\./.exec(path)?.[1] ?? 0);
    layers.set(path, { path, stack: path.split(".")[0], layer: number, kind, heads: Math.max(known, Number(head) + 1), silent: [] });
  }
  return groupsOf({ layers: [...layers.values()] });
}

/** One for each head of the document, in its order. */
function propRows(doc) {
  const { properties, ablation } = doc.json;
  const measured = new Map((properties?.heads ?? []).map((entry) => [`${entry.path}:${entry.head}`, entry]));
  const costs = new Map((ablation?.parts ?? []).map((entry) => [entry.part, entry]));
  return propKinds(doc).flatMap((group) => group.layers.flatMap((layer) => Array.from({ length: layer.heads }, (_, head) => {
    const part = `${layer.path}:${head}`;
    const cost = costs.get(part);
    return {
      path: layer.path, layer: layer.layer, head, group: group.name, silent: layer.silent.includes(head),
      says: measured.get(part)?.says ?? "", values: measured.get(part)?.values ?? {},
      bleu: cost ? cost.bleu - ablation.bleu : null, loss: cost ? cost.loss - ablation.loss : null,
    };
  }))).map((row, place) => ({ ...row, place }));
}

function propSorted({ rows, sort, columns, group }) {
  const column = columns.find(({ key }) => key === sort.key);
  const value = column?.of ?? ((row) => row[sort.key]);
  const sign = sort.down ? -1 : 1;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place; // what was not measured goes last
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a.place - b.place;
  };
  return rows.filter((row) => !group || row.group === group).sort(order);
}

function propText(number, { unit, digits }) {
  if (number === null || number === undefined) return "–";
  if (unit === "share") return `${Math.round(100 * number)}%`;
  if (unit === "percent") return `${decimal(number, 1)}%`;
  if (unit === "change") return `${number > 0 && Number(number.toFixed(digits)) !== 0 ? "+" : ""}${decimal(number, digits)}`;
  return decimal(number, unit === "correlation" ? 2 : 1);
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
  const button = (group) => press("button", () => choose(group), group || "all heads", { "aria-pressed": String(group === state.group) });
  clear(parts.groups).append(...(state.names.length > 1 ? ["", ...state.names] : []).map(button));
}

/** The lines are made once; sorting and choosing a group only put them in another order. */
function propTable(view) {
  const { state, parts } = view;
  const rows = propSorted(state);
  const empty = state.columns.map((column) => rows.every((row) => column.of(row) === null)); // such as alignment outside cross-attention
  for (const row of rows) row.cells.forEach((cell, i) => { cell.hidden = empty[i]; });
  const heads = h("thead", {}, h("tr", {}, propHeads(view, empty)));
  clear(parts.table).append(h("table", { class: "prop-table" }, heads, h("tbody", {}, rows.map((row) => row.line))));
}

function propLines(view) {
  const { columns, rows } = view.state;
  const most = columns.map((column) => (column.unit === "share" ? 1 : furthest(rows.map((row) => column.of(row) ?? 0))));
  for (const row of rows) {
    row.cells = columns.map((column, i) => propCell(column, column.of(row), most[i]));
    row.line = propRow(view, row);
  }
}

function propHeads(view, empty) {
  const { key, down } = view.state.sort;
  const ones = [{ key: "place", label: "head" }, { key: "says", label: "what it does" }, ...view.state.columns];
  const order = down ? "descending" : "ascending";
  return ones.map((column, i) => {
    const now = key === column.key;
    const arrow = h("span", { "aria-hidden": "true" }, now ? (down ? " ↓" : " ↑") : "");
    const button = press("prop-sort", () => propSort(view, column), [column.label, arrow], { "data-key": column.key });
    const about = { title: column.help ?? null, class: column.of ? "prop-n" : null, hidden: Boolean(empty[i - 2]) };
    return h("th", { scope: "col", "aria-sort": now ? order : "none", ...about }, button);
  });
}

/** A first click brings what people look for to the top: the greatest of what was measured, the worst loss of BLEU. */
function propSort(view, column) {
  const { state, parts } = view;
  const first = Boolean(column.of) && column.bad !== -1;
  state.sort = { key: column.key, down: state.sort.key === column.key ? !state.sort.down : first };
  propTable(view);
  parts.table.querySelector(`[data-key="${column.key}"]`)?.focus();
}

function propRow({ store }, row) {
  const there = Boolean(store.get().doc.layer(row.path));
  const go = () => store.set({ path: row.path, heads: [row.head], query: null, tab: "heads" });
  const label = `${row.group.replace("-attention", "")} ${row.layer}:${row.head}`;
  const name = there ? h("button", { class: "prop-go", type: "button", title: `${row.path}, head ${row.head}` }, label) : label;
  const silent = row.silent ? h("span", { class: "prop-silent" }, "silent") : "";
  return h("tr", { class: there ? "prop-there" : null, dataset: { part: `${row.path}:${row.head}` }, on: there ? { click: go } : {} },
    h("th", { scope: "row" }, name, silent), h("td", { class: "prop-says" }, row.says), row.cells);
}

function propCell(column, number, most) {
  const below = number * (column.bad ?? -1) > 0 && (column.bad || column.unit === "correlation");
  const strength = number === null || !(most > 0) ? 0 : Math.min(1, Math.abs(number) / most);
  const name = below ? "prop-n prop-below" : "prop-n";
  return h("td", { class: name, style: { "--bar": `${100 * strength}%` } }, propText(number, column));
}

function propMark({ store, state }) {
  const { path, heads } = store.get();
  for (const row of state.rows ?? []) row.line.classList.toggle("prop-now", row.path === path && row.head === heads?.[0]);
}

// --- what each part is worth -----------------------------------------------------------------------------------------

function propMaps(view) {
  const { doc } = view.store.get();
  const { ablation } = doc.json;
  if (!ablation?.parts?.length) return [];
  const most = furthest(ablation.parts.filter(({ kind }) => kind === "head").map((part) => part.bleu - ablation.bleu));
  const heads = propKinds(doc).map((group) => propHeadMap(view, group, ablation, most)).filter(Boolean);
  const parts = propPartMap(ablation);
  return [
    h("h2", {}, "What each part is worth"),
    h("p", { class: "muted" }, "The change of BLEU when it is silenced: the stronger the colour, the more it was needed."),
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

/** Whole sub-layers and layers, which are worth much more: with a scale of their own. */
function propPartMap(ablation) {
  const wide = ablation.parts.filter(({ kind }) => kind !== "head");
  if (!wide.length) return null;
  const most = furthest(wide.map((part) => part.bleu - ablation.bleu));
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
  const inside = go ? press("", go, text, { "aria-label": title }) : text;
  return h("td", { class: change > 0 ? "prop-cost prop-gain" : "prop-cost", title, dataset: { part }, style }, inside);
}

function propGrid(caption, corner, names, rows) {
  const heads = [h("th", {}, corner), ...names.map((name) => h("th", { scope: "col" }, name))];
  const table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
  return h("div", { class: "prop-map" }, table);
}
