// The decoding view: output tokens with their probabilities and alternatives, the beam search as a tree, and the n-best
// list. On the live page an alternative token can be forced.

import { h, s, boldToken, clear, keepPunctuation, tokenSpan, tokenText, quoteToken, renderDiff } from "./dom.js";
import { barStyle, formatDecimal, textDirection, makeButton, formatShare } from "./paint.js";

const DEC_ROW = 26; // pixels per row of the tree
const DEC_TOP = 24; // room for the step numbers
const DEC_GAP = 30; // between two steps
const DEC_STEPS = 120; // steps drawn at once: the last ones before the current step
const DEC_PACE = 550; // milliseconds per step while playing

export function decodingView(store, actions) {
  const state = { visible: false, stale: true, word: null, step: 0, node: null, timer: null, history: [], base: null };
  const parts = decParts();
  const view = { store, actions, state, parts };
  store.on(["doc", "base"], () => {
    state.stale = true;
    if (state.visible) decDraw(view);
  });
  store.on(["busy"], () => decBusy(view));
  decControls(view);
  return {
    element: parts.element,
    show() {
      state.visible = true;
      if (state.stale) decDraw(view);
    },
    hide() {
      state.visible = false;
      decStop(view);
    },
  };
}

function decParts() {
  const button = (text, label) => h("button", { class: "button", type: "button", "aria-label": label }, text);
  const dropped = h("input", { type: "checkbox", checked: true });
  const parts = {
    change: h("div", { class: "dec-change" }),
    words: h("div", { class: "dec-words", role: "group", "aria-label": "output tokens" }),
    options: h("div", { class: "dec-options" }),
    intro: h("p", { class: "muted" }),
    slider: h("input", { type: "range", min: 1, max: 1, class: "dec-slider", "aria-label": "search step" }),
    back: button("‹", "previous step"), on: button("›", "next step"), play: button("Play", null),
    count: h("output", { class: "dec-count" }),
    dropped,
    tree: h("div", { class: "dec-tree", tabindex: 0, role: "group", "aria-label": "Search tree: arrow keys move through it" }),
    about: h("p", { class: "dec-about", "aria-live": "polite" }),
    results: h("div", { class: "dec-results" }),
  };
  const bar = h("div", { class: "controls" }, parts.back, parts.slider, parts.on, parts.play, parts.count,
    h("label", { class: "field" }, dropped, "pruned hypotheses"));
  const [legend, resultsTitle] = [decLegend(), h("h2", {}, "N-best list")];
  const element = h("section", { class: "dec" },
    h("h2", {}, "Token by token"), parts.change, parts.words, parts.options,
    h("h2", {}, "Beam search"), parts.intro, bar, parts.tree, legend, parts.about, resultsTitle, parts.results);
  return { ...parts, element, bar, legend, resultsTitle };
}

function decLegend() {
  const kinds = { best: "best hypothesis", other: "other results", dead: "expanded, later pruned", pruned: "pruned at once" };
  const path = (kind) => s("path", { d: "M1 6H25", class: `dec-edge dec-${kind}` });
  const line = (kind) => s("svg", { width: 26, height: 12, "aria-hidden": "true" }, path(kind));
  return h("p", { class: "dec-legend" }, Object.entries(kinds).map(([kind, words]) => h("span", { class: "dec-key" }, line(kind), words)));
}

function decDraw(view) {
  const { store, state, parts } = view;
  state.stale = false;
  const { doc, base } = store.get();
  const decoding = doc?.json.decoding;
  parts.element.hidden = !decoding;
  if (!decoding) return;
  if (base !== state.base) Object.assign(state, { base, history: [], word: null });
  decStop(view);
  state.steps = decSteps(decoding.nodes ?? []);
  state.step = state.steps.length;
  state.node = decoding.results?.[0]?.node ?? null;
  state.word = Math.min(state.word ?? decLeastLikely(decoding), (decoding.choices?.length ?? 0) - 1);
  parts.slider.max = Math.max(1, state.steps.length);
  parts.intro.textContent = decIntro(decoding);
  decChange(view);
  decWords(view);
  decOptions(view);
  decTree(view);
  decResults(view);
  decBusy(view);
}

/** The token with the lowest probability, selected initially. */
function decLeastLikely({ choices = [], forced = 0 }) {
  let lowest = Math.min(forced, choices.length - 1);
  choices.forEach((choice, i) => { if (i >= forced && choice.p < choices[lowest].p) lowest = i; });
  return Math.max(0, lowest);
}

function decIntro({ beam_size: size, nodes = [], given = false, forbid_loops: looped = false }) {
  if (given) return "This translation was given, not searched for: the probabilities above are those of its tokens.";
  if (!nodes.length) return "The search was not recorded.";
  const again = looped ? " The first search repeated itself, so this one suppresses repeated n-grams." : "";
  if (size === 1) return `Greedy search takes the most probable token at each step.${again}`;
  return `At each step the ${size} best hypotheses are expanded with every token; the best is at the top.${again}`;
}

// --- output tokens and alternatives ----------------------------------------------------------------------------------

function decWords(view) {
  const { doc } = view.store.get();
  const { choices = [], forced = 0 } = doc.json.decoding;
  const tokens = doc.tokens("target");
  const words = view.parts.words;
  words.dir = textDirection(doc.targetText);
  const kind = (i) => (i < forced ? `dec-word dec-forced${i === forced - 1 ? " dec-taken" : ""}` : "dec-word");
  const buttons = choices.map((choice, i) => makeButton(
    kind(i), () => decPick(view, i),
    [tokenSpan(tokens[i]), h("span", { class: "dec-p" }, formatShare(choice.p))],
    { "aria-pressed": String(i === view.state.word), title: i < forced ? "forced" : null, style: { "--p": choice.p } },
  ));
  clear(words).append(...keepPunctuation(tokens, buttons));
  const now = buttons[view.state.word];
  if (now) words.scrollTop = now.offsetTop - words.offsetTop - words.clientHeight / 2; // scroll into view without moving the page
}

function decPick(view, word) {
  view.state.word = word;
  view.parts.words.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === word)));
  decOptions(view);
}

function decOptions(view) {
  const { store, state, parts } = view;
  const { doc } = store.get();
  const { choices = [], forced = 0 } = doc.json.decoding;
  const choice = choices[state.word];
  clear(parts.options);
  if (!choice) return;
  const token = doc.tokens("target")[state.word];
  const listed = choice.options.some((option) => option.token === choice.chosen);
  const options = listed ? choice.options : [...choice.options, { ...token, token: choice.chosen, p: choice.p }];
  const why = state.word < forced ? " (forced)" : "";
  const elsewhere = doc.inputSide?.image ? "" : "On the live page (attent look MODEL) any of these can be forced.";
  const hint = doc.json.live ? "Select another token to force it." : elsewhere;
  parts.options.append(
    h("p", {}, boldToken(token), ` has a probability of ${formatShare(choice.p)}${why}. Most probable tokens:`),
    h("ol", { class: "dec-list" }, options.map((option) => h("li", {}, decOption(view, choice, option)))),
    h("p", { class: "muted small" }, hint),
  );
}

function decOption(view, choice, option) {
  const { doc, busy } = view.store.get();
  const chosen = option.token === choice.chosen;
  const inside = [
    tokenSpan(option), h("span", { class: "dec-bar", "aria-hidden": "true" }, h("span", { style: barStyle(option.p, 1) })),
    h("span", { class: "dec-n" }, formatShare(option.p)), h("span", { class: "dec-chosen" }, chosen ? "output" : ""),
  ];
  if (!doc.json.live || chosen) return h("div", { class: chosen ? "dec-option dec-is" : "dec-option" }, inside);
  return makeButton("dec-option", () => decForceToken(view, option.token), inside, { disabled: busy, "data-token": option.token });
}

/** Request the translation with this token at this position, keeping the tokens before it. */
function decForceToken({ store, state, actions }, token) {
  const { doc, text, prefix } = store.get();
  const before = doc.json.decoding.choices.slice(0, state.word).map((choice) => choice.chosen);
  state.history.push(prefix ?? []);
  actions.ask({ text: text ?? doc.sourceText, prefix: [...before, token] });
}

/** The output beside the baseline. */
function decChange({ store, state, parts, actions }) {
  const { doc, base, text, prefix = [], maskedParts = [] } = store.get();
  clear(parts.change);
  if (!prefix.length) state.history = [];
  if (!base || base === doc || !(prefix.length || maskedParts.length)) return;
  const undo = () => actions.ask({ text: text ?? doc.sourceText, prefix: state.history.pop() ?? [] });
  const now = base.targetText === doc.targetText ? "now: unchanged" : "now";
  const version = (label, kind, content) =>
    h("div", {}, h("span", { class: "label" }, label), h("p", { class: `dec-text ${kind}`, dir: "auto" }, content));
  parts.change.append(
    version("baseline", "dec-before", base.targetText),
    version(now, "dec-after", renderDiff(base.targetText, doc.targetText, { old: true })),
    prefix.length ? makeButton("button", undo, "Undo the last token") : "",
  );
}

function decBusy({ store, parts }) {
  const buttons = [...parts.options.querySelectorAll("button"), ...parts.change.querySelectorAll("button")];
  for (const button of buttons) button.disabled = Boolean(store.get().busy);
}

// --- search tree -----------------------------------------------------------------------------------------------------

/** Nodes by step, best first. */
function decSteps(nodes) {
  const steps = [];
  for (const node of nodes) (steps[node.step] ??= []).push(node);
  return Array.from(steps, (step) => step ?? []);
}

function decKind(node) {
  if (node.on_best_path) return "best";
  if (node.in_results) return "other";
  return node.expanded || node.ended ? "dead" : "pruned";
}

function decTree(view) {
  const { store, state, parts } = view;
  const { nodes = [] } = store.get().doc.json.decoding;
  state.byId = new Map(nodes.map((node) => [node.id, node]));
  state.first = Math.max(0, state.step - DEC_STEPS);
  const shownSteps = state.steps.slice(state.first, state.first + DEC_STEPS);
  state.places = decLayout(shownSteps, state.first, parts.dropped.checked);
  const { width, height } = state.places;
  const svg = s("svg", { width, height, class: "dec-svg", direction: "ltr" });
  state.drawn = new Map();
  shownSteps.forEach((step, i) => svg.append(decColumn(state, step, i)));
  clear(parts.tree).append(svg);
  parts.tree.hidden = !nodes.length;
  decStepTo(view, state.step, false);
  decSelect(view, state.node);
}

/** Node positions: steps from left to right, as wide as their longest token; ranks from top to bottom. */
function decLayout(steps, first, withPruned) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `600 14px ${getComputedStyle(document.body).fontFamily}`;
  const at = new Map();
  const columns = [];
  let x = 34;
  let lines = 1;
  steps.forEach((step, i) => {
    const visible = withPruned ? step : step.filter((node) => decKind(node) !== "pruned");
    const wide = Math.max(26, ...visible.map((node) => Math.min(150, pen.measureText(decLabel(node)).width)));
    visible.forEach((node, rank) => {
      at.set(node.id, { x, y: DEC_TOP + (rank + 0.5) * DEC_ROW, wide: pen.measureText(decLabel(node)).width });
    });
    columns.push({ x, wide, step: first + i });
    lines = Math.max(lines, visible.length);
    x += wide + 14 + DEC_GAP;
  });
  return { at, columns, width: x, height: DEC_TOP + lines * DEC_ROW + 6 };
}

function decLabel(node) {
  const text = tokenText(node);
  const short = [...text].length > 18 ? `${[...text].slice(0, 17).join("")}…` : text;
  return node.ended && node.score !== null ? `${short} ${formatDecimal(node.score)}` : short;
}

function decColumn(state, step, i) {
  const { at, columns } = state.places;
  const column = s("g", { class: "dec-column", "data-step": columns[i].step });
  column.append(s("text", { x: columns[i].x, y: 13, class: "dec-stepname" }, columns[i].step + 1));
  const visible = step.filter((node) => at.has(node.id));
  // The best last, so that they are on top.
  const order = ["pruned", "dead", "other", "best"];
  const drawn = visible.map((node) => decNode(state, node)).sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
  column.append(...drawn.map(({ edge }) => edge), ...drawn.map(({ mark }) => mark));
  return column;
}

function decNode(state, node) {
  const { at } = state.places;
  const kind = decKind(node);
  const { x, y, wide } = at.get(node.id);
  const parent = at.get(node.parent);
  const start = parent ? { x: parent.x + parent.wide + 10, y: parent.y } : { x: 6, y: DEC_TOP + DEC_ROW / 2 };
  const whole = `M${start.x} ${start.y}C${(start.x + x) / 2} ${start.y} ${(start.x + x) / 2} ${y} ${x - 4} ${y}`;
  const edge = s("path", { class: `dec-edge dec-${kind}`, d: kind === "pruned" ? `M${x - 14} ${y}H${x - 4}` : whole });
  const mark = s("g", { class: `dec-node dec-${kind}${node.ended ? " dec-ended" : ""}`, "data-node": node.id },
    s("rect", { x: x - 4, y: y - 10.5, width: wide + 12, height: 21, rx: node.ended ? 10.5 : 4 }),
    s("text", { x: x + 2, y: y + 4.5, class: node.special ? "dec-special" : null }, decLabel(node)));
  state.drawn.set(node.id, { edge, mark, whole, short: edge.getAttribute("d") });
  return { edge, mark, kind };
}

function decControls(view) {
  const { state, parts } = view;
  const go = (step) => {
    decStop(view);
    decStepTo(view, step, true);
  };
  parts.slider.addEventListener("input", () => go(Number(parts.slider.value)));
  parts.back.addEventListener("click", () => go(state.step - 1));
  parts.on.addEventListener("click", () => go(state.step + 1));
  parts.play.addEventListener("click", () => (state.timer ? decStop(view) : decPlay(view)));
  parts.dropped.addEventListener("change", () => decTree(view));
  parts.tree.addEventListener("pointerover", (event) => {
    const mark = event.target.closest?.("[data-node]");
    if (mark) decSelect(view, Number(mark.dataset.node));
  });
  parts.tree.addEventListener("keydown", (event) => decKeys(view, event));
}

function decPlay(view) {
  const { state, parts } = view;
  parts.play.textContent = "Pause";
  if (state.step >= state.steps.length) decStepTo(view, 1, true);
  state.timer = setInterval(() => {
    decStepTo(view, state.step + 1, true);
    if (state.step >= state.steps.length) decStop(view);
  }, DEC_PACE);
}

function decStop({ state, parts }) {
  clearInterval(state.timer);
  state.timer = null;
  parts.play.textContent = "Play";
}

/** Show the search after a number of steps. */
function decStepTo(view, step, follow) {
  const { state, parts } = view;
  state.step = Math.max(1, Math.min(state.steps.length, step));
  if (state.step <= state.first || state.step > state.first + DEC_STEPS) {
    decTree(view);
    return;
  }
  parts.slider.value = state.step;
  parts.slider.setAttribute("aria-valuetext", `step ${state.step} of ${state.steps.length}`);
  parts.count.textContent = `step ${state.step} of ${state.steps.length}`;
  for (const column of parts.tree.querySelectorAll(".dec-column")) {
    column.classList.toggle("dec-later", Number(column.dataset.step) >= state.step);
  }
  if (follow) decFollow(parts.tree, state.places.columns[state.step - 1 - state.first]);
}

/** Scroll the tree, not the page, to the step. */
function decFollow(box, column) {
  if (!column) return;
  const right = column.x + column.wide + 60;
  if (right <= box.scrollLeft + box.clientWidth && column.x >= box.scrollLeft) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  box.scrollTo({ left: right - box.clientWidth * 0.75, behavior: calm ? "auto" : "smooth" });
}

/** The nodes from the first step to this one. */
function decPath(state, id) {
  const path = [];
  for (let node = state.byId.get(id); node; node = state.byId.get(node.parent)) path.unshift(node);
  return path;
}

function decSelect({ state, parts }, id) {
  for (const { edge, mark, short } of state.lit ?? []) {
    edge.classList.remove("dec-lit");
    mark.classList.remove("dec-lit", "dec-here");
    edge.setAttribute("d", short);
  }
  const path = decPath(state, id);
  state.node = id;
  state.lit = path.map((node) => state.drawn.get(node.id)).filter(Boolean);
  for (const { edge, mark, whole } of state.lit) {
    edge.classList.add("dec-lit");
    mark.classList.add("dec-lit");
    edge.setAttribute("d", whole);
  }
  state.drawn.get(id)?.mark.classList.add("dec-here");
  clear(parts.about).append(...(path.length ? decDescribe(path) : []));
}

function decDescribe(path) {
  const node = path.at(-1);
  const facts = [
    `step ${node.step + 1}`,
    `log-probability of ${quoteToken(node)} ${formatDecimal(node.log_prob, 3)} (${formatShare(Math.exp(node.log_prob))})`,
    `sum ${formatDecimal(node.sum, 3)}`,
    node.score === null ? "" : `score ${formatDecimal(node.score, 3)}`,
    decStatus(node),
  ];
  const text = decText(path) || "(nothing yet)";
  return [h("bdi", { class: "dec-text", dir: "auto" }, text), h("span", { class: "dec-facts" }, facts.filter(Boolean).join(" · "))];
}

function decStatus(node) {
  if (node.on_best_path) return "on the best path";
  if (node.in_results) return "on the path of another result";
  if (node.ended) return "finished, not among the results";
  return node.expanded ? "expanded, later pruned" : "pruned at once";
}

function decText(path) {
  const words = path.filter((node) => !["start", "end", "pad", "tag"].includes(node.special));
  return words.map((node, i) => (node.space && i ? ` ${node.text}` : node.text)).join("");
}

/** Left and right: along the path. Up and down: within the step. */
function decKeys(view, event) {
  const { state } = view;
  const node = state.byId.get(state.node);
  if (!node || !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  event.stopPropagation();
  const siblings = state.steps[node.step].filter((other) => state.places.at.has(other.id));
  const next = {
    ArrowLeft: () => state.byId.get(node.parent),
    ArrowRight: () => decChild(state, node),
    ArrowUp: () => siblings[siblings.indexOf(node) - 1],
    ArrowDown: () => siblings[siblings.indexOf(node) + 1],
  }[event.key]();
  if (!next || !state.drawn.has(next.id)) return;
  decSelect(view, next.id);
  state.drawn.get(next.id).mark.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function decChild(state, node) {
  const children = (state.steps[node.step + 1] ?? []).filter((child) => child.parent === node.id);
  return ["on_best_path", "in_results", "expanded"].map((key) => children.find((child) => child[key])).find(Boolean) ?? children[0];
}

// --- n-best list -----------------------------------------------------------------------------------------------------

function decResults(view) {
  const { results = [], formula, given = false } = view.store.get().doc.json.decoding;
  for (const part of [view.parts.bar, view.parts.resultsTitle, view.parts.legend]) part.hidden = given;
  const rows = results.map((result, i) => decResult(view, results[0].text, result, i));
  const names = ["", "text", "score", "log-probability"];
  const heads = names.map((name, i) => h("th", { scope: "col", class: i === 1 ? null : "dec-n" }, name));
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
  const engine = "Searched in full precision; attent translate uses int8 on a CPU and may differ.";
  clear(view.parts.results).append(table, formula ? h("p", { class: "muted small" }, `${formula}. ${engine}`) : "");
}

function decResult(view, best, result, i) {
  const show = () => decSelect(view, result.node);
  const text = i ? renderDiff(best, result.text) : h("span", { dir: "auto" }, result.text || "(nothing)");
  const cut = result.ended === false ? h("span", { class: "muted small" }, " (stopped at the maximum length)") : null;
  return h("tr", { on: { pointerenter: show } },
    h("td", { class: "dec-n" }, i + 1), h("td", {}, makeButton("dec-result", show, text, { on: { focus: show } }), cut),
    h("td", { class: "dec-n" }, formatDecimal(result.score, 3)), h("td", { class: "dec-n" }, formatDecimal(result.log_prob, 3)));
}
