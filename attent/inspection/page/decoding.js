// How the translation came about: the words with their probabilities and what else could have stood there, the beam
// search step by step with what lived and died, and what it found. On the live page another word can be forced.

import { h, s, clear, shown, plain, quoted, shownDifference } from "./dom.js";
import { barOf, decimal, directionOf, press, share } from "./paint.js";

const DEC_ROW = 26; // height of a line of the tree
const DEC_TOP = 24; // above the lines, where the steps are numbered
const DEC_GAP = 30; // between two steps: room for the branches
const DEC_STEPS = 120; // steps drawn at once; of a longer search those before the step that is looked at
const DEC_PACE = 550; // milliseconds of a step while it plays

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
    words: h("div", { class: "dec-words", role: "group", "aria-label": "the words of the translation" }),
    options: h("div", { class: "dec-options" }),
    intro: h("p", { class: "muted" }),
    slider: h("input", { type: "range", min: 1, max: 1, class: "dec-slider", "aria-label": "step of the search" }),
    back: button("‹", "one step back"), on: button("›", "one step on"), play: button("Play", null),
    count: h("output", { class: "dec-count" }),
    dropped,
    tree: h("div", { class: "dec-tree", tabindex: 0, role: "group", "aria-label": "The tree of the search: arrow keys move through it" }),
    about: h("p", { class: "dec-about", "aria-live": "polite" }),
    results: h("div", { class: "dec-results" }),
  };
  const bar = h("div", { class: "controls" }, parts.back, parts.slider, parts.on, parts.play, parts.count,
    h("label", { class: "field" }, dropped, "what was dropped at once"));
  const [legend, found] = [decLegend(), h("h2", {}, "What it found")];
  const element = h("section", { class: "dec" },
    h("h2", {}, "Word by word"), parts.change, parts.words, parts.options,
    h("h2", {}, "The search"), parts.intro, bar, parts.tree, legend, parts.about, found, parts.results);
  return { ...parts, element, bar, legend, found };
}

function decLegend() {
  const kinds = { won: "the translation", alive: "other results", dead: "went on, then died", dropped: "dropped at once" };
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
  state.word = Math.min(state.word ?? decUnsure(decoding), (decoding.choices?.length ?? 0) - 1);
  parts.slider.max = Math.max(1, state.steps.length);
  parts.intro.textContent = decIntro(decoding);
  decChange(view);
  decWords(view);
  decOptions(view);
  decTree(view);
  decResults(view);
  decBusy(view);
}

/** The first word to look at: the one that the model was least sure of. */
function decUnsure({ choices = [], forced = 0 }) {
  let least = Math.min(forced, choices.length - 1);
  choices.forEach((choice, i) => { if (i >= forced && choice.p < choices[least].p) least = i; });
  return Math.max(0, least);
}

function decIntro({ beam_size: size, nodes = [], given = false, no_loops: looped = false }) {
  if (given) return "This translation was given, not searched for: above is how likely the model holds each of its words.";
  if (!nodes.length) return "How the search went was not kept.";
  const again = looped ? " The first search went in circles: in this one no sequence of tokens may come again and again." : "";
  if (size === 1) return `At each step the likeliest token is taken.${again}`;
  return `At each step the ${size} best beginnings are kept and every way to go on from them is looked at; the best stands at the top.${again}`;
}

// --- the words, and what else could have stood there -----------------------------------------------------------------

function decWords(view) {
  const { doc } = view.store.get();
  const { choices = [], forced = 0 } = doc.json.decoding;
  const tokens = doc.tokens("target");
  const words = view.parts.words;
  words.dir = directionOf(doc.targetText);
  const kind = (i) => (i < forced ? `dec-word dec-forced${i === forced - 1 ? " dec-taken" : ""}` : "dec-word");
  clear(words).append(...choices.map((choice, i) => press(
    kind(i), () => decPick(view, i),
    [shown(tokens[i]), h("span", { class: "dec-p" }, share(choice.p))],
    { "aria-pressed": String(i === view.state.word), title: i < forced ? "you forced this one" : null, style: { "--p": choice.p } },
  )));
  const now = words.children[view.state.word];
  if (now) words.scrollTop = now.offsetTop - words.offsetTop - words.clientHeight / 2; // in sight, without moving the page
}

function decPick(view, word) {
  view.state.word = word;
  [...view.parts.words.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === word)));
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
  const most = Math.max(...options.map((option) => option.p));
  const why = state.word < forced ? ", since you forced it" : "";
  const hint = doc.json.live
    ? "Take another one and see how the translation goes on from there."
    : "On the live page (attent look MODEL) any of these can be forced, to see how the translation goes on from there.";
  parts.options.append(
    h("p", {}, h("b", {}, shown(token)), ` was written with a probability of ${share(choice.p)}${why}. What could have stood here:`),
    h("ol", { class: "dec-list" }, options.map((option) => h("li", {}, decOption(view, choice, option, most)))),
    h("p", { class: "muted small" }, hint),
  );
}

function decOption(view, choice, option, most) {
  const { doc, busy } = view.store.get();
  const chosen = option.token === choice.chosen;
  const inside = [
    shown(option), h("span", { class: "dec-bar", "aria-hidden": "true" }, h("span", { style: barOf(option.p, most) })),
    h("span", { class: "dec-n" }, share(option.p)), h("span", { class: "dec-chosen" }, chosen ? "written" : ""),
  ];
  if (!doc.json.live || chosen) return h("div", { class: chosen ? "dec-option dec-is" : "dec-option" }, inside);
  return press("dec-option", () => decForce(view, option.token), inside, { disabled: busy, "data-token": option.token });
}

/** Ask for the translation that has this token at this place, and before it what stands there now. */
function decForce({ store, state, actions }, token) {
  const { doc, text, prefix } = store.get();
  const before = doc.json.decoding.choices.slice(0, state.word).map((choice) => choice.chosen);
  state.history.push(prefix ?? []);
  actions.ask({ text: text ?? doc.sourceText, prefix: [...before, token] });
}

/** The translation beside the one that the model writes by itself. */
function decChange({ store, state, parts, actions }) {
  const { doc, base, text, prefix = [], silence = [] } = store.get();
  clear(parts.change);
  if (!prefix.length) state.history = [];
  if (!base || base === doc || !(prefix.length || silence.length)) return;
  const undo = () => actions.ask({ text: text ?? doc.sourceText, prefix: state.history.pop() ?? [] });
  const now = base.targetText === doc.targetText ? "now: the same" : "now";
  const version = (label, kind, content) =>
    h("div", {}, h("span", { class: "label" }, label), h("p", { class: `dec-text ${kind}`, dir: "auto" }, content));
  parts.change.append(
    version("by itself", "dec-before", base.targetText),
    version(now, "dec-after", shownDifference(base.targetText, doc.targetText, { old: true })),
    prefix.length ? press("button", undo, "Undo the last word") : "",
  );
}

function decBusy({ store, parts }) {
  const buttons = [...parts.options.querySelectorAll("button"), ...parts.change.querySelectorAll("button")];
  for (const button of buttons) button.disabled = Boolean(store.get().busy);
}

// --- the tree --------------------------------------------------------------------------------------------------------

/** The nodes by step, each step the best first. */
function decSteps(nodes) {
  const steps = [];
  for (const node of nodes) (steps[node.step] ??= []).push(node);
  return Array.from(steps, (step) => step ?? []);
}

function decKind(node) {
  if (node.won) return "won";
  if (node.alive) return "alive";
  return node.kept || node.ended ? "dead" : "dropped";
}

function decTree(view) {
  const { store, state, parts } = view;
  const { nodes = [] } = store.get().doc.json.decoding;
  state.byId = new Map(nodes.map((node) => [node.id, node]));
  state.first = Math.max(0, state.step - DEC_STEPS);
  const shownSteps = state.steps.slice(state.first, state.first + DEC_STEPS);
  state.places = decPlaces(shownSteps, state.first, parts.dropped.checked);
  const { width, height } = state.places;
  const svg = s("svg", { width, height, class: "dec-svg", direction: "ltr" });
  state.drawn = new Map();
  shownSteps.forEach((step, i) => svg.append(decColumn(state, step, i)));
  clear(parts.tree).append(svg);
  parts.tree.hidden = !nodes.length;
  decStepTo(view, state.step, false);
  decAbout(view, state.node);
}

/** Where each node stands: steps from left to right, as wide as their longest word; ranks from top to bottom. */
function decPlaces(steps, first, withDropped) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `600 14px ${getComputedStyle(document.body).fontFamily}`;
  const at = new Map();
  const columns = [];
  let x = 34;
  let lines = 1;
  steps.forEach((step, i) => {
    const kept = withDropped ? step : step.filter((node) => decKind(node) !== "dropped");
    const wide = Math.max(26, ...kept.map((node) => Math.min(150, pen.measureText(decLabel(node)).width)));
    kept.forEach((node, rank) => {
      at.set(node.id, { x, y: DEC_TOP + (rank + 0.5) * DEC_ROW, wide: pen.measureText(decLabel(node)).width });
    });
    columns.push({ x, wide, step: first + i });
    lines = Math.max(lines, kept.length);
    x += wide + 14 + DEC_GAP;
  });
  return { at, columns, width: x, height: DEC_TOP + lines * DEC_ROW + 6 };
}

function decLabel(node) {
  const text = plain(node);
  const short = [...text].length > 18 ? `${[...text].slice(0, 17).join("")}…` : text;
  return node.ended && node.score !== null ? `${short} ${decimal(node.score)}` : short;
}

function decColumn(state, step, i) {
  const { at, columns } = state.places;
  const column = s("g", { class: "dec-column", "data-step": columns[i].step });
  column.append(s("text", { x: columns[i].x, y: 13, class: "dec-stepname" }, columns[i].step + 1));
  const visible = step.filter((node) => at.has(node.id));
  // The strongest last, so that they lie on top.
  const order = ["dropped", "dead", "alive", "won"];
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
  const edge = s("path", { class: `dec-edge dec-${kind}`, d: kind === "dropped" ? `M${x - 14} ${y}H${x - 4}` : whole });
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
    if (mark) decAbout(view, Number(mark.dataset.node));
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

/** Show the search as it was after so many steps. */
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

/** Scroll the tree, not the page, so that the step is in sight. */
function decFollow(box, column) {
  if (!column) return;
  const right = column.x + column.wide + 60;
  if (right <= box.scrollLeft + box.clientWidth && column.x >= box.scrollLeft) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  box.scrollTo({ left: right - box.clientWidth * 0.75, behavior: calm ? "auto" : "smooth" });
}

/** From the first step to this node. */
function decPath(state, id) {
  const path = [];
  for (let node = state.byId.get(id); node; node = state.byId.get(node.parent)) path.unshift(node);
  return path;
}

function decAbout({ state, parts }, id) {
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
  clear(parts.about).append(...(path.length ? decWordsAbout(path) : []));
}

function decWordsAbout(path) {
  const node = path.at(-1);
  const facts = [
    `step ${node.step + 1}`,
    `log-probability of ${quoted(node)} ${decimal(node.log_prob, 3)} (${share(Math.exp(node.log_prob))})`,
    `sum ${decimal(node.sum, 3)}`,
    node.score === null ? "" : `score ${decimal(node.score, 3)}`,
    decFate(node),
  ];
  const text = decText(path) || "(nothing yet)";
  return [h("bdi", { class: "dec-text", dir: "auto" }, text), h("span", { class: "dec-facts" }, facts.filter(Boolean).join(" · "))];
}

function decFate(node) {
  if (node.won) return "on the way to the translation";
  if (node.alive) return "on the way to another result";
  if (node.ended) return "finished, but others were better";
  return node.kept ? "went on, but nothing came of it" : "dropped at once";
}

function decText(path) {
  const words = path.filter((node) => !["start", "end", "pad", "tag"].includes(node.special));
  return words.map((node, i) => (node.space && i ? ` ${node.text}` : node.text)).join("");
}

/** Left and right along the path, up and down among what was looked at in the same step. */
function decKeys(view, event) {
  const { state } = view;
  const node = state.byId.get(state.node);
  if (!node || !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  event.stopPropagation();
  const mates = state.steps[node.step].filter((one) => state.places.at.has(one.id));
  const next = {
    ArrowLeft: () => state.byId.get(node.parent),
    ArrowRight: () => decChild(state, node),
    ArrowUp: () => mates[mates.indexOf(node) - 1],
    ArrowDown: () => mates[mates.indexOf(node) + 1],
  }[event.key]();
  if (!next || !state.drawn.has(next.id)) return;
  decAbout(view, next.id);
  state.drawn.get(next.id).mark.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function decChild(state, node) {
  const children = (state.steps[node.step + 1] ?? []).filter((one) => one.parent === node.id);
  return children.find((one) => one.won) ?? children.find((one) => one.alive) ?? children.find((one) => one.kept) ?? children[0];
}

// --- what was found --------------------------------------------------------------------------------------------------

function decResults(view) {
  const { results = [], formula, given = false } = view.store.get().doc.json.decoding;
  for (const one of [view.parts.bar, view.parts.found, view.parts.legend]) one.hidden = given;
  const rows = results.map((result, i) => decResult(view, results[0].text, result, i));
  const names = ["", "text", "score", "log-probability"];
  const heads = names.map((name, i) => h("th", { scope: "col", class: i === 1 ? null : "dec-n" }, name));
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
  const engine = "Searched in full precision; attent translate rounds to 8 bits on a CPU and may differ in a word.";
  clear(view.parts.results).append(table, formula ? h("p", { class: "muted small" }, `${formula}. ${engine}`) : "");
}

function decResult(view, best, result, i) {
  const show = () => decAbout(view, result.node);
  const text = i ? shownDifference(best, result.text) : h("span", { dir: "auto" }, result.text || "(nothing)");
  const cut = result.ended === false ? h("span", { class: "muted small" }, " (cut: it came to no end)") : null;
  return h("tr", { on: { pointerenter: show } },
    h("td", { class: "dec-n" }, i + 1), h("td", {}, press("dec-result", show, text, { on: { focus: show } }), cut),
    h("td", { class: "dec-n" }, decimal(result.score, 3)), h("td", { class: "dec-n" }, decimal(result.log_prob, 3)));
}
