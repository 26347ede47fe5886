// The equation view: softmax(q k^T / sqrt(d_k)) V for one head and one query, recomputed from the recorded q, k and v
// and compared with the recorded weights.

import { h, boldToken, clear, keepPunctuation, pointAt, tokenSpan, quoteToken } from "./dom.js";
import { cssColor } from "./colors.js";
import { groupName, groupLayers, setRowLabels } from "./data.js";
import { barStyle, formatDecimal, textDirection, maxAbs, paintMatrix, paintStrength, picker, onPointer, makeButton, formatShare } from "./paint.js";

const EQ_MAX_ROWS = 24; // show all keys up to this number
const EQ_INITIAL_ROWS = 14; // otherwise the keys with the largest weights
const EQ_MORE = 200; // added by each click on the button
const EQ_MAX_WRITTEN = 40; // largest head width written as numbers
const EQ_TOLERANCE = 0.01; // larger differences from the recorded weights are not rounding

export function equationView(store) {
  const parts = eqParts(store);
  const life = { visible: false, stale: true, turn: 0, most: EQ_INITIAL_ROWS };
  const draw = async () => {
    life.stale = false;
    const turn = ++life.turn;
    const chosen = eqSelection(store.get());
    const vectors = chosen && (await chosen.doc.vectors(chosen.layer));
    if (turn === life.turn) eqDraw(parts, store, life, chosen, vectors);
  };
  store.on(["doc", "path", "heads", "query", "theme"], (_, news) => {
    life.stale = true;
    if (!news || news.has("doc") || news.has("path")) life.most = EQ_INITIAL_ROWS;
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

// --- selection and computation ---------------------------------------------------------------------------------------

function eqSelection({ doc, path, heads, query, rows }) {
  const layer = doc?.layer(path) ?? doc?.layers[0];
  const weights = layer?.attention;
  if (!weights?.H || !weights.Tq || !weights.Tk) return null;
  const head = Math.min(heads?.[0] ?? 0, weights.H - 1);
  setRowLabels(doc, layer, head, rows);
  return {
    doc,
    layer,
    weights,
    head,
    query: Math.max(0, Math.min(query ?? eqFirstQuery(doc, layer, head), weights.Tq - 1)),
    queries: doc.tokens(layer.queries),
    keys: doc.tokens(layer.keys),
  };
}

/** The query to open with: the word whose weight is divided between a word and others; else the first token. */
function eqFirstQuery(doc, layer, head) {
  const isWord = (token) => !token.special && /[\p{L}\p{N}]/u.test(token.text);
  const [queries, keys] = [doc.tokens(layer.queries), doc.tokens(layer.keys)];
  const top = new Float32Array(queries.length);
  layer.attention.each(head, (q, k, weight) => {
    if (isWord(queries[q]) && isWord(keys[k])) top[q] = Math.max(top[q], weight);
  });
  const interest = top.map((weight) => weight * (1 - weight));
  return interest.indexOf(Math.max(...interest));
}

/** Attention of one query: {q, rows: [{key, value, dot, scaled, bias, score, hidden, weight}], output, error}. */
export function eqCompute({ layer, weights, head, query }, { q, k, v, bias, D, Hkv }) {
  const { H, Tq, Tk } = weights;
  const slice = (all, T, h, t) => all.subarray((h * T + t) * D, (h * T + t + 1) * D);
  const shared = Math.floor((head * Hkv) / H); // grouped-query attention
  const queryVector = slice(q, Tq, head, query);
  const rows = Array.from({ length: Tk }, (_, j) => {
    const [key, value] = [slice(k, Tk, shared, j), slice(v, Tk, shared, j)];
    const dot = key.reduce((sum, number, i) => sum + number * queryVector[i], 0);
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
  return { q: queryVector, rows, output, D, error: Math.max(...rows.map((row) => Math.abs(row.weight - row.recorded))) };
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
  const words = h("div", { class: "eq-words", role: "group", "aria-label": "query token" });
  const description = h("p", { class: "eq-says" });
  const note = h("div", { class: "eq-notes" });
  const formula = h("div", { class: "eq-formula" });
  const steps = h("ol", { class: "eq-steps" });
  const table = h("div", { class: "eq-box" });
  const more = h("button", { class: "button eq-more", type: "button" });
  const panel = h("div", { class: "eq-panel", "aria-live": "polite" });
  const after = h("p", { class: "eq-after" });
  const body = h("div", { class: "eq-body" }, steps, note, panel, table, more, after);
  const pickers = h("div", { class: "eq-pickers" }, layer.frame, head.frame);
  const element = h("section", { class: "eq" }, pickers, words, h("div", { class: "eq-top" }, description, formula), body);
  return { element, layer, head, words, description, note, formula, steps, table, more, panel, after, body };
}

function eqDraw(parts, store, life, chosen, vectors) {
  parts.body.hidden = true;
  clear(parts.formula);
  if (!chosen) {
    clear(parts.words);
    parts.description.textContent = "This layer has no attention weights.";
    return;
  }
  eqFillPickers(parts, chosen);
  eqFillWords(parts.words, store, chosen);
  clear(parts.description).append(...eqSentence(chosen));
  if (!vectors) {
    parts.description.append(` ${eqMissing(chosen)}`);
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
  parts.table.classList.toggle("eq-long", table.dataset.rows > EQ_MAX_ROWS);
  const left = sum.rows.length - table.dataset.rows;
  parts.more.hidden = left <= 0;
  parts.more.textContent = `Show ${Math.min(left, EQ_MORE)} of ${left} more keys`;
  clear(parts.after).append(...eqAfter(chosen, store));
  panel.key(sum.rows.reduce((best, row) => (row.recorded > best.recorded ? row : best)));
}

function eqMissing({ doc, layer }) {
  if (layer.additive) return "The scores of this layer are additive, vᵀ tanh(q + k); this view shows dot products only.";
  if (doc.layers.some((other) => other.q)) return `The document does not have the queries, keys and values of ${layer.path}.`;
  const large = `Queries, keys and values of ${doc.tokens(layer.queries).length} tokens would make the page too large`;
  if (doc.inputSide?.image) return `${large}.`;
  if (doc.json.live) return `${large}; enter a shorter sentence.`;
  return `${large}; the live page (attent look MODEL) shows them for shorter sentences.`;
}

function eqFillPickers(parts, { doc, layer, head, weights }) {
  const groups = groupLayers(doc).map((group) => ({
    group: group.name,
    choices: group.layers.map((other) => ({ value: other.path, label: `${group.name} ${other.layer}` })),
  }));
  parts.layer.fill(groups, layer.path);
  const numbers = Array.from({ length: weights.H }, (_, number) => number);
  const masked = (number) => (layer.masked_heads.includes(number) ? " (masked)" : "");
  parts.head.fill(numbers.map((number) => ({ value: number, label: `${number}${masked(number)}` })), head);
}

function eqFillWords(words, store, { queries, query, layer, doc }) {
  const focused = words.contains(document.activeElement);
  const rtl = textDirection(doc.side(layer.queries)?.text) === "rtl";
  const move = (event) => {
    const step = { ArrowLeft: rtl ? 1 : -1, ArrowRight: rtl ? -1 : 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere these keys select heads
    store.set({ query: Math.max(0, Math.min(queries.length - 1, query + step)) });
  };
  const button = (token, i) => h("button", {
    class: "eq-word", type: "button", "aria-pressed": String(i === query), tabindex: i === query ? 0 : -1,
    on: { click: () => store.set({ query: i }), keydown: move },
  }, tokenSpan(token));
  const buttons = queries.map(button);
  clear(words).append(...keepPunctuation(queries, buttons));
  words.dir = rtl ? "rtl" : "ltr";
  if (focused) buttons[query]?.focus();
}

function eqSentence({ doc, layer, head, query, queries }) {
  const where = `Head ${head} of layer ${layer.layer}, ${groupName(layer)}: `;
  const word = boldToken(queries[query]);
  const read = layer.queries === "target" ? doc.tokens("decoder_input")[query] : null;
  if (layer.queries === "decoder_input") {
    const next = boldToken(doc.tokens("target")[query]);
    return [where, "decoder input ", word, " (output ", next, ") attends to ", eqKeyPhrase(doc, layer)];
  }
  if (!read) return [where, word, " attends to ", eqKeyPhrase(doc, layer)];
  const before = boldToken(read);
  return [where, "output ", word, " (decoder input ", before, ") attends to ", eqKeyPhrase(doc, layer)];
}

function eqKeyPhrase(doc, layer) {
  const { image, audio } = doc.side(layer.keys) ?? {};
  if (image) return audio ? "all moments of the recording." : "all patches of the image.";
  if (layer.kind === "cross") return "the source tokens.";
  if (layer.causal && layer.queries === layer.keys) return "itself and the tokens before it.";
  return layer.causal ? "the decoder input so far." : "all tokens of the text.";
}

function eqAfter({ weights, doc }, store) {
  const all = `The outputs of all ${weights.H} heads are concatenated and`;
  const order = makeButton("button plain", () => store.set({ tab: "positions" }), "Positional encoding");
  return [
    `${weights.H === 1 ? "The output of this head is" : all} multiplied by W`, h("sup", {}, "O"),
    "; the result is added to the residual stream. ",
    doc.json.positions?.length ? order : "",
  ];
}

function eqNotes({ layer, head }, sum) {
  const notes = [];
  const masked = "This head is masked: its columns of Wᴼ are zero, so its output does not reach the residual stream.";
  const error = `The computed weights differ from the recorded ones by up to ${formatDecimal(sum.error, 3)}`;
  if (layer.masked_heads.includes(head)) notes.push(masked);
  if (sum.error > EQ_TOLERANCE) notes.push(`${error}; the recorded ones are shown.`);
  return notes.map((text) => h("p", { class: "eq-note" }, text));
}

// --- the formula and its steps ---------------------------------------------------------------------------------------

/** Written in HTML: MathML's parentheses grow with the fraction only where a font with a MATH table is installed. */
function eqFormula({ layer }, { D }, { bias }) {
  const name = (letter) => h("i", {}, letter);
  const product = h("span", {}, name("q"), " ", name("K"), h("sup", {}, "T"));
  const root = h("span", {}, "√", h("span", { class: "eq-root" }, D));
  const scaled = eqRoot(layer, D) ? h("span", { class: "eq-fraction" }, product, root) : product;
  const added = bias ? [" + ", name("b")] : [];
  const inner = h("span", { class: "eq-inner" }, scaled, added);
  const said = `output = softmax(q K^T${eqRoot(layer, D) ? ` / sqrt(${D})` : ""}${bias ? " + b" : ""}) V`;
  return h("span", { class: "eq-math", role: "math", "aria-label": said }, "output = softmax", inner, name("V"));
}

/** Whether the scale is the paper's 1 / sqrt(d_k). */
function eqRoot(layer, D) {
  return Math.abs(layer.scale * Math.sqrt(D) - 1) < 0.001;
}

function eqScaleName(layer, D) {
  if (eqRoot(layer, D)) return `÷ √${D}`;
  return layer.scale === 1 ? "not scaled" : `× ${formatDecimal(layer.scale, 3)}`;
}

function eqSteps(chosen, sum, { bias }) {
  const { layer, keys } = chosen;
  const best = sum.rows.reduce((a, b) => (b.recorded > a.recorded ? b : a));
  const steps = [
    ["Scores", "q · k", eqCompareWords(chosen, sum)],
    ["Scale", eqScaleName(layer, sum.D), eqScaleWords(layer, sum.D)],
    bias && ["Bias", "+ b", "The position bias of the model is added to each score."],
    layer.causal && ["Mask", "−∞", eqMaskWords(sum)],
    ["Softmax", "eˣ ÷ Σ eˣ", `Scores become weights that sum to 1: ${formatShare(best.recorded)} for ${quoteToken(keys[best.j])}.`],
    ["Sum", "Σ weight × v", "The output is the weighted sum of the values."],
  ];
  return steps.filter(Boolean).map(([name, formula, words], i) => h("li", { class: "eq-step" },
    h("span", { class: "eq-number", "aria-hidden": "true" }, i + 1), h("b", {}, name),
    h("span", { class: "eq-what" }, formula), h("span", { class: "eq-why" }, words)));
}

function eqCompareWords({ layer, queries, query }, { D }) {
  return `Dot product of the query ${layer.queries === "target" ? "for output" : "of"} ${quoteToken(queries[query])} with each key: ${D} products.`;
}

function eqMaskWords({ rows }) {
  const hidden = rows.filter((row) => row.hidden).length;
  if (!hidden) return "The causal mask hides later tokens; here there are none.";
  return hidden === 1 ? "The causal mask hides one later token." : `The causal mask hides ${hidden} later tokens.`;
}

function eqScaleWords(layer, D) {
  const factor = formatDecimal(layer.scale, 3);
  if (eqRoot(layer, D)) return `The head width is ${D}; the factor ${factor} keeps scores from growing with it.`;
  return layer.scale === 1 ? "This model does not scale the scores." : "The scale of this model.";
}

// --- table: one row per key ------------------------------------------------------------------------------------------

/** Visible rows: all of a few, else those with the largest weights, in text order. */
function eqVisible({ rows }, most) {
  if (rows.length <= EQ_MAX_ROWS) return rows;
  const seen = new Set([...rows].sort((a, b) => b.recorded - a.recorded).slice(0, most));
  return rows.filter((row) => seen.has(row));
}

function eqTable(chosen, sum, { bias, k }, visible, panel) {
  const most = {
    key: maxAbs(k),
    value: Math.max(maxAbs(sum.output), maxAbs(sum.rows.map((row) => row.recorded * maxAbs(row.value)))),
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
    ["word-cell", doc.side(layer.keys)?.audio ? "time" : doc.side(layer.keys)?.image ? "patch" : "token"], ["key", "key k"], ["dot", "q · k"], ["scaled", eqScaleName(layer, sum.D)],
    biased && ["bias", "+ b"], ["weight", "softmax: weight"], ["value", "weight × value v"],
  ];
  const names = columns.filter(Boolean).map(([kind, name]) => h("th", { scope: "col", class: `eq-${kind}` }, name));
  // In a decoder, the query is computed from the decoder input of the step.
  const token = (layer.queries === "target" && doc.tokens("decoder_input")[query]) || queries[query];
  const asks = h("tr", { class: "eq-asks" },
    h("th", { scope: "row", class: "eq-word-cell" }, h("span", { class: "eq-small" }, "query q of "), tokenSpan(token)),
    h("td", { class: "eq-key" }, eqStrip(sum.q, maxAbs(sum.q), `the query: ${sum.D} numbers`)),
    h("td", { colspan: biased ? 5 : 4, class: "eq-small eq-hint" }, `${pointAt()} a row to see the products of q · k.`));
  return h("thead", {}, h("tr", { class: "eq-names" }, names), asks);
}

function eqRow({ keys }, sum, row, most, biased, panel) {
  const show = () => panel.key(row);
  const number = (kind, text) => h("td", { class: `eq-${kind} eq-n` }, text);
  const word = h("button", { type: "button", class: "eq-pick", on: { focus: show, click: show } }, tokenSpan(keys[row.j]));
  const signed = `${row.bias < 0 ? "" : "+"}${formatDecimal(row.bias)}`;
  const weight = row.hidden ? h("span", { class: "eq-masked" }, "masked") : eqBar(row.recorded);
  const mixed = row.value.map((number) => number * row.recorded);
  return h("tr", { class: row.hidden ? "eq-row eq-hidden" : "eq-row", dataset: { key: row.j }, on: { pointerenter: show } },
    h("th", { scope: "row", class: "eq-word-cell" }, word),
    h("td", { class: "eq-key" }, eqStrip(row.key, most.key, `the key: ${sum.D} numbers`)),
    number("dot", formatDecimal(row.dot)),
    number("scaled", row.hidden && !biased ? "−∞" : formatDecimal(row.scaled)),
    biased && number("bias", row.hidden ? "−∞" : signed),
    h("td", { class: "eq-weight" }, weight),
    h("td", { class: "eq-value" }, eqStrip(mixed, most.value, `the value times ${formatShare(row.recorded)}`)));
}

function eqBar(weight) {
  const bar = h("span", { class: "eq-bar", "aria-hidden": "true" }, h("span", { style: barStyle(weight, 1) }));
  return h("span", { class: "eq-share" }, bar, h("span", { class: "eq-n" }, formatShare(weight)));
}

/** The omitted keys, in one row. */
function eqOthers(sum, visible, biased) {
  const left = sum.rows.length - visible.length;
  if (!left) return null;
  const rest = Math.max(0, 1 - visible.reduce((total, row) => total + row.recorded, 0));
  return h("tr", { class: "eq-others" },
    h("th", { scope: "row", class: "eq-word-cell eq-small" }, `${left} more`), h("td", { colspan: biased ? 4 : 3 }),
    h("td", { class: "eq-weight" }, eqShare("", formatShare(rest))), h("td", {}));
}

function eqSum(sum, biased, output) {
  const total = formatDecimal(sum.rows.reduce((a, row) => a + row.recorded, 0), 3);
  return h("tr", { class: "eq-sum" },
    h("th", { scope: "row", class: "eq-word-cell" }, "output"),
    h("td", { colspan: biased ? 4 : 3, class: "eq-small eq-hint" }, `${pointAt()} the output to see the contribution of each key.`),
    h("td", { class: "eq-weight" }, eqShare("sum", h("b", { class: "eq-total" }, total))),
    h("td", { class: "eq-value" }, output));
}

function eqShare(label, number) {
  return h("span", { class: "eq-share" }, h("span", { class: "eq-small" }, label), h("span", { class: "eq-n" }, number));
}

/** The output as a strip; the pointer or the arrow keys select a dimension. */
function eqOutput(sum, most, panel) {
  const strip = eqStrip(sum.output, most, `the output: ${sum.D} numbers`);
  const slider = h("div", {
    class: "eq-output", role: "slider", tabindex: 0, "aria-label": "output dimension",
    "aria-valuemin": 0, "aria-valuemax": sum.D - 1, "aria-valuenow": 0,
  }, strip);
  const go = (i) => {
    if (i === null) return;
    slider.setAttribute("aria-valuenow", i);
    slider.setAttribute("aria-valuetext", `dimension ${i}: ${formatDecimal(sum.output[i], 3)}`);
    panel.output(i);
  };
  onPointer(strip, (_, i) => go(i));
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

// --- detail panel: one dot product, or one output dimension ----------------------------------------------------------

/** {key(row), output(i)}: the computation under the pointer. Elements are created once and refilled. */
function eqPanel(element, chosen, sum, biased) {
  const cells = { q: eqCells("q", sum.D), k: eqCells("× k", sum.D), product: eqCells("= q × k", sum.D) };
  const title = h("p", { class: "eq-title" });
  const line = h("p", { class: "eq-line" });
  const grid = h("div", { class: "eq-cells", style: { "--cells": sum.D } }, Object.values(cells).map((cell) => cell.row));
  const sources = h("ol", { class: "eq-sources" });
  clear(element).append(title, grid, sources, line);
  const panel = { table: null, row: null, number: null };
  eqFill(cells.q, sum.q, maxAbs(sum.q));
  const most = { k: maxAbs(sum.rows.map((row) => maxAbs(row.key))), product: eqMaxProduct(sum) };
  panel.key = (row) => {
    if (panel.row === row) return;
    eqMark(panel, row, null);
    const products = row.key.map((number, i) => number * sum.q[i]);
    clear(title).append("q · k for ", tokenSpan(chosen.keys[row.j]), `: ${sum.D} products and their sum`);
    eqFill(cells.k, row.key, most.k);
    eqFill(cells.product, products, most.product);
    [grid.hidden, sources.hidden] = [false, true];
    line.textContent = eqLine(chosen.layer, row, biased, sum.D);
  };
  panel.output = (i) => {
    if (panel.number === i) return;
    eqMark(panel, null, (i + 0.5) / sum.D);
    panel.number = i;
    clear(title).append(`Output dimension ${i} is ${formatDecimal(sum.output[i], 3)}. Contributions:`);
    clear(sources).append(...eqContributions(chosen, sum, i));
    [grid.hidden, sources.hidden] = [true, false];
    line.textContent = "weight × value; the largest first";
  };
  grid.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined || !panel.row) return;
    const [a, b] = [sum.q[i], panel.row.key[i]];
    line.textContent = `dimension ${i}: ${formatDecimal(a, 3)} × ${formatDecimal(b, 3)} = ${formatDecimal(a * b, 3)}`;
  });
  grid.addEventListener("pointerleave", () => {
    if (panel.row) line.textContent = eqLine(chosen.layer, panel.row, biased, sum.D);
  });
  return panel;
}

function eqMaxProduct(sum) {
  return maxAbs(sum.rows.map((row) => maxAbs(row.key.map((number, i) => number * sum.q[i]))));
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
  const start = `Their sum is ${formatDecimal(row.dot, 3)}; ${eqScaleName(layer, D)} is ${formatDecimal(row.scaled, 3)}`;
  if (row.hidden) return `${start}. The causal mask sets the score to −∞, so the weight is 0.`;
  const bias = biased ? `; plus the bias ${formatDecimal(row.bias, 3)} it is ${formatDecimal(row.score, 3)}` : "";
  return `${start}${bias}; after the softmax the weight is ${formatShare(row.recorded)}.`;
}

function eqCells(label, count) {
  const cells = Array.from({ length: count }, (_, i) => h("span", { class: "eq-cell", dataset: { i } }));
  const box = h("span", { class: "eq-cellbox", "aria-hidden": "true" }, cells);
  return { cells, row: h("div", { class: "eq-cellrow" }, h("span", { class: "eq-celllabel" }, label), box) };
}

/** Fill cells; numbers are written only if they fit. */
function eqFill({ cells }, numbers, most) {
  const colors = [cssColor("--positive"), cssColor("--negative")].map((color) => color.join(" "));
  const written = cells.length <= EQ_MAX_WRITTEN;
  cells.forEach((cell, i) => {
    const strength = (0.5 * paintStrength(numbers[i], most)).toFixed(2);
    cell.style.setProperty("background-color", `rgb(${colors[numbers[i] < 0 ? 1 : 0]} / ${strength})`);
    if (written) cell.textContent = formatDecimal(numbers[i], 1);
  });
}

function eqContributions({ keys }, sum, i) {
  const all = sum.rows.map((row) => ({ row, amount: row.recorded * row.value[i] })).filter(({ row }) => row.recorded > 0);
  const first = all.sort((a, b) => Math.abs(b.amount) - Math.abs(a.amount)).slice(0, 8);
  const most = maxAbs(sum.rows.map((row) => row.recorded * maxAbs(row.value))); // one scale for all dimensions
  return first.map(({ row, amount }) => h("li", {},
    tokenSpan(keys[row.j]),
    h("span", { class: "eq-n eq-small" }, `${formatShare(row.recorded)} × ${formatDecimal(row.value[i])}`),
    h("span", { class: amount < 0 ? "eq-part eq-below" : "eq-part", style: barStyle(amount, most) }),
    h("span", { class: "eq-n" }, formatDecimal(amount, 3))));
}
