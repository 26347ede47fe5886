// One row of attention, worked out: softmax(q k^T / sqrt(d_k)) V for one head and one word, with the numbers that the
// model had. It computes the row again from q, k and v and lays it beside the weights that were recorded.

import { h, clear, shown, quoted } from "./dom.js";
import { cssColour } from "./colours.js";
import { groupName, groupsOf, nameRows } from "./data.js";
import { barOf, decimal, directionOf, furthest, paintMatrix, paintStrength, picker, pointedAt, press, share } from "./paint.js";

const EQ_ALL = 24; // up to so many words each has its line
const EQ_FIRST = 14; // of more words, those with the most weight
const EQ_MORE = 200; // and so many more each time they are asked for
const EQ_WRITTEN = 40; // numbers of a head that fit side by side as text
const EQ_APART = 0.01; // a difference between computed and recorded weights that rounding does not explain
const EQ_MATH = "http://www.w3.org/1998/Math/MathML";

export function equationView(store) {
  const parts = eqParts(store);
  const life = { visible: false, stale: true, turn: 0, most: EQ_FIRST };
  const draw = async () => {
    life.stale = false;
    const turn = ++life.turn;
    const chosen = eqChosen(store.get());
    const vectors = chosen && (await chosen.doc.vectors(chosen.layer));
    if (turn === life.turn) eqDraw(parts, store, life, chosen, vectors);
  };
  store.on(["doc", "path", "heads", "query", "theme"], (_, news) => {
    life.stale = true;
    if (!news || news.has("doc") || news.has("path")) life.most = EQ_FIRST;
    if (life.visible) draw();
  });
  parts.more.addEventListener("click", () => {
    life.most += EQ_MORE;
    draw();
  });
  return {
    element: parts.element,
    show() {
      life.visible = true;
      if (life.stale) draw();
    },
    hide() {
      life.visible = false;
    },
  };
}

// --- what is chosen, and the arithmetic ------------------------------------------------------------------------------

function eqChosen({ doc, path, heads, query, rows }) {
  const layer = doc?.layer(path) ?? doc?.layers[0];
  const weights = layer?.weightsNow;
  if (!weights?.H || !weights.Tq || !weights.Tk) return null;
  const head = Math.min(heads?.[0] ?? 0, weights.H - 1);
  nameRows(doc, layer, head, rows);
  return {
    doc,
    layer,
    weights,
    head,
    query: Math.max(0, Math.min(query ?? 0, weights.Tq - 1)),
    queries: doc.tokens(layer.queries),
    keys: doc.tokens(layer.keys),
  };
}

/** The row of one query worked out: {q, rows: [{key, value, dot, scaled, bias, score, hidden, weight}], output, apart}. */
export function eqCompute({ layer, weights, head, query }, { q, k, v, bias, D, Hkv }) {
  const { H, Tq, Tk } = weights;
  const slice = (all, T, h, t) => all.subarray((h * T + t) * D, (h * T + t + 1) * D);
  const shared = Math.floor((head * Hkv) / H); // several query heads may look through one key head
  const own = slice(q, Tq, head, query);
  const rows = Array.from({ length: Tk }, (_, j) => {
    const [key, value] = [slice(k, Tk, shared, j), slice(v, Tk, shared, j)];
    const dot = key.reduce((sum, number, i) => sum + number * own[i], 0);
    const added = bias ? bias[(head * Tq + query) * Tk + j] : 0;
    const hidden = Boolean(layer.causal) && j > query + Tk - Tq;
    const scaled = dot * layer.scale;
    return { j, key, value, dot, scaled, bias: added, hidden, score: hidden ? -Infinity : scaled + added };
  });
  eqSoftmax(rows);
  const recorded = weights.row(head, query);
  for (const row of rows) row.recorded = recorded[row.j];
  const mixed = (i) => rows.reduce((sum, row) => sum + row.recorded * row.value[i], 0);
  const output = Float32Array.from({ length: D }, (_, i) => mixed(i));
  return { q: own, rows, output, D, apart: Math.max(...rows.map((row) => Math.abs(row.weight - row.recorded))) };
}

function eqSoftmax(rows) {
  const top = Math.max(...rows.map((row) => row.score));
  const powers = rows.map((row) => (row.hidden ? 0 : Math.exp(row.score - top)));
  const sum = powers.reduce((a, b) => a + b, 0);
  rows.forEach((row, j) => { row.weight = sum > 0 ? powers[j] / sum : 0; });
}

// --- the parts of the page -------------------------------------------------------------------------------------------

function eqParts(store) {
  const layer = picker("layer", "eq-layer", (path) => store.set({ path }));
  const head = picker("head", "eq-head", (number) => store.set({ heads: [Number(number)] }));
  const words = h("div", { class: "eq-words", role: "group", "aria-label": "the word that looks" });
  const says = h("p", { class: "eq-says" });
  const note = h("div", { class: "eq-notes" });
  const formula = h("div", { class: "eq-formula" });
  const steps = h("ol", { class: "eq-steps" });
  const table = h("div", { class: "eq-box" });
  const more = h("button", { class: "button eq-more", type: "button" });
  const panel = h("div", { class: "eq-panel", "aria-live": "polite" });
  const after = h("p", { class: "eq-after" });
  const body = h("div", { class: "eq-body" }, steps, note, panel, table, more, after);
  const pickers = h("div", { class: "eq-pickers" }, layer.frame, head.frame);
  const element = h("section", { class: "eq" }, pickers, words, h("div", { class: "eq-top" }, says, formula), body);
  return { element, layer, head, words, says, note, formula, steps, table, more, panel, after, body };
}

function eqDraw(parts, store, life, chosen, vectors) {
  parts.body.hidden = true;
  clear(parts.formula);
  if (!chosen) {
    clear(parts.words);
    parts.says.textContent = "There is nothing to work out here: no word looks at another.";
    return;
  }
  eqFillPickers(parts, chosen);
  eqFillWords(parts.words, store, chosen);
  clear(parts.says).append(...eqSentence(chosen));
  if (!vectors) {
    parts.says.append(` ${eqAbsent(chosen)}`);
    return;
  }
  parts.body.hidden = false;
  const sum = eqCompute(chosen, vectors);
  parts.formula.append(eqFormula(chosen, sum, vectors));
  clear(parts.steps).append(...eqSteps(chosen, sum, vectors));
  clear(parts.note).append(...eqNotes(chosen, sum));
  const panel = eqPanel(parts.panel, chosen, sum, Boolean(vectors.bias));
  const table = eqTable(chosen, sum, vectors, eqVisible(sum, life.most), panel);
  clear(parts.table).append(table);
  parts.table.classList.toggle("eq-long", table.dataset.rows > EQ_ALL);
  const left = sum.rows.length - table.dataset.rows;
  parts.more.hidden = left <= 0;
  parts.more.textContent = `Show ${Math.min(left, EQ_MORE)} more of ${left} words that are left out`;
  clear(parts.after).append(...eqAfter(chosen, store));
  panel.key(sum.rows.reduce((best, row) => (row.recorded > best.recorded ? row : best)));
}

function eqAbsent({ doc, layer }) {
  if (doc.layers.some((other) => other.q)) return `The queries, keys and values of ${layer.path} are not in this page.`;
  const large = `With the queries, keys and values of ${doc.tokens(layer.queries).length} words the page would be too large`;
  if (doc.json.live) return `${large}: ask for a shorter sentence and they are here.`;
  return `${large}, so they were left out; the live page (attent look MODEL) shows them for a shorter sentence.`;
}

function eqFillPickers(parts, { doc, layer, head, weights }) {
  const groups = groupsOf(doc).map((group) => ({
    group: group.name,
    choices: group.layers.map((one) => ({ value: one.path, label: `${group.name} ${one.layer}` })),
  }));
  parts.layer.fill(groups, layer.path);
  const numbers = Array.from({ length: weights.H }, (_, number) => number);
  const silent = (number) => (layer.silent.includes(number) ? " (silent)" : "");
  parts.head.fill(numbers.map((number) => ({ value: number, label: `${number}${silent(number)}` })), head);
}

function eqFillWords(words, store, { queries, query, layer, doc }) {
  const focused = words.contains(document.activeElement);
  const rtl = directionOf(doc.side(layer.queries)?.text) === "rtl";
  const move = (event) => {
    const step = { ArrowLeft: rtl ? 1 : -1, ArrowRight: rtl ? -1 : 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere on the page these keys go from head to head
    store.set({ query: Math.max(0, Math.min(queries.length - 1, query + step)) });
  };
  const button = (token, i) => h("button", {
    class: "eq-word", type: "button", "aria-pressed": String(i === query), tabindex: i === query ? 0 : -1,
    on: { click: () => store.set({ query: i }), keydown: move },
  }, shown(token));
  clear(words).append(...queries.map(button));
  words.dir = rtl ? "rtl" : "ltr";
  if (focused) words.children[query]?.focus();
}

function eqSentence({ doc, layer, head, query, queries }) {
  const where = `Head ${head} of layer ${layer.layer}, ${groupName(layer)}: `;
  const word = h("b", {}, shown(queries[query]));
  const read = layer.queries === "target" ? doc.tokens("read")[query] : null;
  if (layer.queries === "read") {
    const next = h("b", {}, shown(doc.tokens("target")[query]));
    return [where, "having read ", word, ", to write ", next, ", the decoder looks at ", eqWhom(doc, layer)];
  }
  if (!read) return [where, "how ", word, " looks at ", eqWhom(doc, layer)];
  const before = h("b", {}, shown(read));
  return [where, "while the decoder writes ", word, ", having just read ", before, ", it looks at ", eqWhom(doc, layer)];
}

function eqWhom(doc, layer) {
  if (layer.kind === "cross") return "the words of the source.";
  if (doc.side(layer.keys)?.image) return "all patches of the picture.";
  if (layer.causal && layer.queries === layer.keys) return "itself and the words before it.";
  return layer.causal ? "what is written so far." : "all words of the text.";
}

function eqAfter({ weights, doc }, store) {
  const all = `The outputs of all ${weights.H} heads of this layer are laid side by side and`;
  const order = press("button plain", () => store.set({ tab: "positions" }), "Where the order of the words enters");
  return [
    `${weights.H === 1 ? "The output of this head is" : all} multiplied with one matrix, W`, h("sup", {}, "O"),
    "; what comes out is added to the word’s vector and goes on to the next part of the model. ",
    doc.json.positions?.length ? order : "",
  ];
}

function eqNotes({ layer, head }, sum) {
  const notes = [];
  const silent = "This head is silent: its columns of Wᴼ are zero, so of the output below nothing reaches the rest of the model.";
  const apart = `The weights worked out here differ from the recorded ones by up to ${decimal(sum.apart, 3)}`;
  if (layer.silent.includes(head)) notes.push(silent);
  if (sum.apart > EQ_APART) notes.push(`${apart}; the recorded ones are shown.`);
  return notes.map((text) => h("p", { class: "eq-note" }, text));
}

// --- the formula and its steps ---------------------------------------------------------------------------------------

function eqm(tag, ...children) {
  const element = document.createElementNS(EQ_MATH, tag);
  element.append(...children);
  return element;
}

function eqFormula({ layer }, { D }, { bias }) {
  const name = (letter) => eqm("mi", letter);
  const product = eqm("mrow", name("q"), eqm("msup", name("K"), name("T")));
  const scaled = eqRoot(layer, D) ? eqm("mfrac", product, eqm("msqrt", eqm("mn", String(D)))) : product;
  const added = bias ? [eqm("mo", "+"), name("b")] : [];
  const inner = eqm("mrow", eqm("mo", "("), scaled, ...added, eqm("mo", ")"));
  const math = eqm("math", name("output"), eqm("mo", "="), name("softmax"), inner, name("V"));
  math.setAttribute("display", "block");
  return math;
}

/** Whether the scale is the paper's 1 / sqrt(d_k). */
function eqRoot(layer, D) {
  return Math.abs(layer.scale * Math.sqrt(D) - 1) < 0.001;
}

function eqScaleName(layer, D) {
  if (eqRoot(layer, D)) return `÷ √${D}`;
  return layer.scale === 1 ? "not scaled" : `× ${decimal(layer.scale, 3)}`;
}

function eqSteps(chosen, sum, { bias }) {
  const { layer, keys } = chosen;
  const best = sum.rows.reduce((a, b) => (b.recorded > a.recorded ? b : a));
  const steps = [
    ["Compare", "q · k", eqCompareWords(chosen, sum)],
    ["Scale", eqScaleName(layer, sum.D), eqScaleWords(layer, sum.D)],
    bias && ["Place", "+ b", "How far away a word stands adds to its score or takes from it: here order enters."],
    layer.causal && ["Mask", "−∞", eqMaskWords(sum)],
    ["Softmax", "eˣ ÷ Σ eˣ", `Scores become shares of one whole: ${share(best.recorded)} for ${quoted(keys[best.j])}.`],
    ["Mix", "Σ weight × v", "The value of each word, as much of it as its share, is added to the output."],
  ];
  return steps.filter(Boolean).map(([name, formula, words], i) => h("li", { class: "eq-step" },
    h("span", { class: "eq-number", "aria-hidden": "true" }, i + 1), h("b", {}, name),
    h("span", { class: "eq-what" }, formula), h("span", { class: "eq-why" }, words)));
}

function eqCompareWords({ layer, queries, query }, { D }) {
  const whose = `${layer.queries === "target" ? "made while writing" : "of"} ${quoted(queries[query])}`;
  return `The query ${whose} is multiplied with the key of each word, number by number, and added up: ${D} products each.`;
}

function eqMaskWords({ rows }) {
  const hidden = rows.filter((row) => row.hidden).length;
  if (!hidden) return "Later words may not be looked at; here there are none.";
  return hidden === 1 ? "One word comes later and may not be looked at." : `${hidden} words come later and may not be looked at.`;
}

function eqScaleWords(layer, D) {
  const factor = decimal(layer.scale, 3);
  if (eqRoot(layer, D)) return `A head is ${D} numbers wide; × ${factor} keeps the scores from growing with that.`;
  return layer.scale === 1 ? "This model takes the scores as they are." : "This model’s own factor.";
}

// --- the table: a line for each word that is looked at ---------------------------------------------------------------

/** Which rows get a line: all of a few, else those with the most weight, in the order of the text. */
function eqVisible({ rows }, most) {
  if (rows.length <= EQ_ALL) return rows;
  const seen = new Set([...rows].sort((a, b) => b.recorded - a.recorded).slice(0, most));
  return rows.filter((row) => seen.has(row));
}

function eqTable(chosen, sum, { bias, k }, visible, panel) {
  const most = {
    key: furthest(k),
    value: Math.max(furthest(sum.output), furthest(sum.rows.map((row) => row.recorded * furthest(row.value)))),
    bar: Math.max(...sum.rows.map((row) => row.recorded)),
  };
  const biased = Boolean(bias);
  const body = h("tbody", {}, visible.map((row) => eqRow(chosen, sum, row, most, biased, panel)));
  const foot = h("tfoot", {}, eqOthers(sum, visible, biased), eqSum(sum, biased, eqOutput(sum, most.value, panel)));
  panel.table = h("table", { class: biased ? "eq-table eq-biased" : "eq-table", dataset: { rows: visible.length } },
    eqHead(chosen, sum, biased), body, foot);
  return panel.table;
}

function eqStrip(numbers, most, label) {
  const canvas = h("canvas", { class: "eq-strip", role: "img", "aria-label": label });
  paintMatrix(canvas, numbers, 1, numbers.length, most);
  return canvas;
}

function eqHead({ queries, query, layer, doc }, sum, biased) {
  const columns = [
    ["word-cell", doc.side(layer.keys)?.image ? "patch" : "word"], ["key", "its key k"], ["dot", "q · k"], ["scaled", eqScaleName(layer, sum.D)],
    biased && ["bias", "+ b"], ["weight", "softmax: the weight"], ["value", "weight × its value v"],
  ];
  const names = columns.filter(Boolean).map(([kind, name]) => h("th", { scope: "col", class: `eq-${kind}` }, name));
  // The query is that of what stands at this place: in a decoder, of what it has just read.
  const token = (layer.queries === "target" && doc.tokens("read")[query]) || queries[query];
  const asks = h("tr", { class: "eq-asks" },
    h("th", { scope: "row", class: "eq-word-cell" }, h("span", { class: "eq-small" }, "query q of "), shown(token)),
    h("td", { class: "eq-key" }, eqStrip(sum.q, furthest(sum.q), `the query: ${sum.D} numbers`)),
    h("td", { colspan: biased ? 5 : 4, class: "eq-small eq-hint" }, "Point at a line: each product of q · k shows above."));
  return h("thead", {}, h("tr", { class: "eq-names" }, names), asks);
}

function eqRow({ keys }, sum, row, most, biased, panel) {
  const show = () => panel.key(row);
  const number = (kind, text) => h("td", { class: `eq-${kind} eq-n` }, text);
  const word = h("button", { type: "button", class: "eq-pick", on: { focus: show, click: show } }, shown(keys[row.j]));
  const signed = `${row.bias < 0 ? "" : "+"}${decimal(row.bias)}`;
  const weight = row.hidden ? h("span", { class: "eq-masked" }, "may not look") : eqBar(row.recorded, most.bar);
  const mixed = row.value.map((one) => one * row.recorded);
  return h("tr", { class: row.hidden ? "eq-row eq-hidden" : "eq-row", dataset: { key: row.j }, on: { pointerenter: show } },
    h("th", { scope: "row", class: "eq-word-cell" }, word),
    h("td", { class: "eq-key" }, eqStrip(row.key, most.key, `the key: ${sum.D} numbers`)),
    number("dot", decimal(row.dot)),
    number("scaled", row.hidden && !biased ? "−∞" : decimal(row.scaled)),
    biased && number("bias", row.hidden ? "−∞" : signed),
    h("td", { class: "eq-weight" }, weight),
    h("td", { class: "eq-value" }, eqStrip(mixed, most.value, `the value times ${share(row.recorded)}`)));
}

function eqBar(weight, most) {
  const bar = h("span", { class: "eq-bar", "aria-hidden": "true" }, h("span", { style: barOf(weight, most) }));
  return h("span", { class: "eq-share" }, bar, h("span", { class: "eq-n" }, share(weight)));
}

/** What is left out, in one line. */
function eqOthers(sum, visible, biased) {
  const left = sum.rows.length - visible.length;
  if (!left) return null;
  const rest = Math.max(0, 1 - visible.reduce((total, row) => total + row.recorded, 0));
  return h("tr", { class: "eq-others" },
    h("th", { scope: "row", class: "eq-word-cell eq-small" }, `${left} more`), h("td", { colspan: biased ? 4 : 3 }),
    h("td", { class: "eq-weight" }, eqShare("", share(rest))), h("td", {}));
}

function eqSum(sum, biased, output) {
  const total = decimal(sum.rows.reduce((a, row) => a + row.recorded, 0), 3);
  return h("tr", { class: "eq-sum" },
    h("th", { scope: "row", class: "eq-word-cell" }, "output"),
    h("td", { colspan: biased ? 4 : 3, class: "eq-small eq-hint" }, "Point at the output: which words each number came from."),
    h("td", { class: "eq-weight" }, eqShare("sum", h("b", { class: "eq-total" }, total))),
    h("td", { class: "eq-value" }, output));
}

function eqShare(label, number) {
  return h("span", { class: "eq-share" }, h("span", { class: "eq-small" }, label), h("span", { class: "eq-n" }, number));
}

/** The output as a strip; the pointer or the arrow keys choose one of its numbers. */
function eqOutput(sum, most, panel) {
  const strip = eqStrip(sum.output, most, `the output: ${sum.D} numbers`);
  const slider = h("div", {
    class: "eq-output", role: "slider", tabindex: 0, "aria-label": "a number of the output",
    "aria-valuemin": 0, "aria-valuemax": sum.D - 1, "aria-valuenow": 0,
  }, strip);
  const go = (i) => {
    if (i === null) return;
    slider.setAttribute("aria-valuenow", i);
    slider.setAttribute("aria-valuetext", `number ${i}: ${decimal(sum.output[i], 3)}`);
    panel.output(i);
  };
  pointedAt(strip, (_, i) => go(i));
  slider.addEventListener("keydown", (event) => eqSlide(event, slider, sum.D, go));
  slider.addEventListener("focus", () => go(Number(slider.getAttribute("aria-valuenow"))));
  return slider;
}

function eqSlide(event, slider, D, go) {
  const now = Number(slider.getAttribute("aria-valuenow"));
  const [less, more] = [now - 1, now + 1];
  const next = { ArrowLeft: less, ArrowDown: less, ArrowRight: more, ArrowUp: more, Home: 0, End: D - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  go(Math.max(0, Math.min(D - 1, next)));
}

// --- the panel: one dot product, or one number of the output ---------------------------------------------------------

/** {key(row), output(i)}: what the pointer is on, worked out in full. Elements are made once and then only filled. */
function eqPanel(element, chosen, sum, biased) {
  const cells = { q: eqCells("q", sum.D), k: eqCells("× k", sum.D), product: eqCells("= q × k", sum.D) };
  const title = h("p", { class: "eq-title" });
  const line = h("p", { class: "eq-line" });
  const grid = h("div", { class: "eq-cells", style: { "--cells": sum.D } }, Object.values(cells).map((one) => one.row));
  const sources = h("ol", { class: "eq-sources" });
  clear(element).append(title, grid, sources, line);
  const panel = { table: null, row: null, number: null };
  eqFill(cells.q, sum.q, furthest(sum.q));
  const most = { k: furthest(sum.rows.map((row) => furthest(row.key))), product: eqMostProduct(sum) };
  panel.key = (row) => {
    if (panel.row === row) return;
    eqMark(panel, row, null);
    const products = row.key.map((number, i) => number * sum.q[i]);
    clear(title).append("q · k for ", shown(chosen.keys[row.j]), `: ${sum.D} products and their sum`);
    eqFill(cells.k, row.key, most.k);
    eqFill(cells.product, products, most.product);
    [grid.hidden, sources.hidden] = [false, true];
    line.textContent = eqLine(chosen.layer, row, biased, sum.D);
  };
  panel.output = (i) => {
    if (panel.number === i) return;
    eqMark(panel, null, (i + 0.5) / sum.D);
    panel.number = i;
    clear(title).append(`Number ${i} of the output is ${decimal(sum.output[i], 3)}. It came from`);
    clear(sources).append(...eqSources(chosen, sum, i));
    [grid.hidden, sources.hidden] = [true, false];
    line.textContent = "weight × the word’s own number; the greatest first";
  };
  grid.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined || !panel.row) return;
    const [a, b] = [sum.q[i], panel.row.key[i]];
    line.textContent = `number ${i} of both: ${decimal(a, 3)} × ${decimal(b, 3)} = ${decimal(a * b, 3)}`;
  });
  grid.addEventListener("pointerleave", () => {
    if (panel.row) line.textContent = eqLine(chosen.layer, panel.row, biased, sum.D);
  });
  return panel;
}

function eqMostProduct(sum) {
  return furthest(sum.rows.map((row) => furthest(row.key.map((number, i) => number * sum.q[i]))));
}

function eqMark(panel, row, dimension) {
  [panel.row, panel.number] = [row, null];
  if (!panel.table) return;
  panel.table.querySelector(".eq-now")?.classList.remove("eq-now");
  if (row) panel.table.querySelector(`[data-key="${row.j}"]`)?.classList.add("eq-now");
  panel.table.classList.toggle("eq-dimension", dimension !== null);
  if (dimension !== null) panel.table.style.setProperty("--eq-share", dimension);
}

function eqLine(layer, row, biased, D) {
  const start = `Their sum is ${decimal(row.dot, 3)}; ${eqScaleName(layer, D)} is ${decimal(row.scaled, 3)}`;
  if (row.hidden) return `${start}. It comes later and may not be looked at: −∞, so its weight is 0.`;
  const bias = biased ? `; with the bias of ${decimal(row.bias, 3)} it is ${decimal(row.score, 3)}` : "";
  return `${start}${bias}; after the softmax its weight is ${share(row.recorded)}.`;
}

function eqCells(label, count) {
  const cells = Array.from({ length: count }, (_, i) => h("span", { class: "eq-cell", dataset: { i } }));
  const box = h("span", { class: "eq-cellbox", "aria-hidden": "true" }, cells);
  return { cells, row: h("div", { class: "eq-cellrow" }, h("span", { class: "eq-celllabel" }, label), box) };
}

/** Numbers are written into the cells only where they have room. */
function eqFill({ cells }, numbers, most) {
  const colours = [cssColour("--positive"), cssColour("--negative")].map((colour) => colour.join(" "));
  const written = cells.length <= EQ_WRITTEN;
  cells.forEach((cell, i) => {
    const strength = (0.5 * paintStrength(numbers[i], most)).toFixed(2);
    cell.style.setProperty("background-color", `rgb(${colours[numbers[i] < 0 ? 1 : 0]} / ${strength})`);
    if (written) cell.textContent = decimal(numbers[i], 1);
  });
}

function eqSources({ keys }, sum, i) {
  const all = sum.rows.map((row) => ({ row, amount: row.recorded * row.value[i] })).filter(({ row }) => row.recorded > 0);
  const first = all.sort((a, b) => Math.abs(b.amount) - Math.abs(a.amount)).slice(0, 8);
  const most = Math.abs(first[0]?.amount ?? 0);
  return first.map(({ row, amount }) => h("li", {},
    shown(keys[row.j]),
    h("span", { class: "eq-n eq-small" }, `${share(row.recorded)} × ${decimal(row.value[i])}`),
    h("span", { class: amount < 0 ? "eq-part eq-below" : "eq-part", style: barOf(amount, most) }),
    h("span", { class: "eq-n" }, decimal(amount, 3))));
}
