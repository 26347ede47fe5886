// The head of the page: which model, which theme, the sentence beside its translation (live, a box to type in), and
// what became different where something was forced or silenced.

import { h, clear, shownDifference } from "./dom.js";
import { forgetColours } from "./colours.js";
import { barOf, share } from "./paint.js";

const LABELS_SHOWN = 3;
const KEYS = [
  ["← →", "the head before, the head after"],
  ["↑ ↓", "the layer above, the layer below"],
  ["Shift and click", "lay a head over the others, in another colour"],
  ["Tab, then ↑ ↓", "walk through the words of a side; Enter pins one"],
  ["Esc", "let go of the pinned word"],
  ["?", "these keys"],
];

export function masthead(store) {
  const { model } = store.get().doc.json;
  const about = model ? [h("b", {}, model.name), model.summary ? ` · ${model.summary}` : ""] : [];
  const keys = keysDialog();
  const help = h("button", { class: "button plain", type: "button", "aria-haspopup": "dialog" }, "Keys");
  help.addEventListener("click", () => keys.showModal());
  return h("header", { class: "masthead" },
    h("p", { class: "wordmark" }, "attent ", h("span", {}, "look")),
    h("p", { class: "model" }, about),
    h("div", { class: "tools" }, help, themeSwitch(store)),
    keys,
  );
}

function keysDialog() {
  const rows = KEYS.map(([key, meaning]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)]);
  const close = h("button", { class: "button", type: "button", on: { click: () => dialog.close() } }, "Close");
  const content = [h("h2", {}, "Keys"), h("dl", {}, rows), close];
  const dialog = h("dialog", { class: "key-help", id: "key-help", "aria-label": "Keys" }, content);
  return dialog;
}

function themeSwitch(store) {
  const options = ["auto", "light", "dark"].map((name) => {
    const input = h("input", { type: "radio", name: "theme", checked: name === keptTheme(), value: name });
    input.addEventListener("change", () => setTheme(store, name));
    return h("label", {}, input, name);
  });
  return h("div", { class: "themes", role: "radiogroup", "aria-label": "Theme" }, options);
}

export function keptTheme() {
  try {
    return localStorage.getItem("attent-theme") ?? "auto";
  } catch {
    return "auto"; // a browser may refuse storage to a page from a file
  }
}

export function setTheme(store, name) {
  try {
    localStorage.setItem("attent-theme", name);
  } catch {
    // it holds for as long as the page is open
  }
  applyTheme(name);
  store.set({ theme: effectiveTheme(name) });
}

export function applyTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  forgetColours();
}

export function effectiveTheme(name) {
  if (name !== "auto") return name;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** The sentence and its translation; live, the sentence is a box to type in. */
export function sentences(store, actions) {
  const source = h("div", {});
  const translation = h("div", { class: "translation" });
  const notice = h("p", { class: "notice", role: "alert", hidden: true });
  const element = h("section", { class: "sentences", "aria-label": "Sentence and translation" }, source, translation);
  if (store.get().doc.json.live) source.append(askForm(store, actions));
  const draw = () => {
    const state = store.get();
    if (!state.doc.json.live) clear(source).append(...plainSource(state.doc));
    clear(translation).append(...translationParts(state, actions));
    element.classList.toggle("alone", !saysSomething(state.doc) && !state.doc.json.live);
    notice.hidden = !state.error;
    notice.textContent = state.error ?? "";
    document.title = `${state.doc.json.title ? `${state.doc.json.title} · ` : ""}attent look`;
  };
  store.on(["doc", "base", "error"], draw);
  draw();
  return [element, notice];
}

const sideName = (side, fallback) => [side?.label ?? fallback, side?.language].filter(Boolean).join(" · ");

function sideLabel(side, fallback) {
  return h("p", { class: "label" }, sideName(side, fallback));
}

function bigText(text, content) {
  const long = (text?.length ?? 0) > 220;
  return h("p", { class: long ? "text long" : "text", dir: "auto", tabindex: long ? 0 : null }, content);
}

function plainSource(doc) {
  const text = doc.sourceText;
  const label = doc.readSide ? [sideLabel(doc.readSide, "text")] : [];
  const src = doc.readSide?.image?.src ?? "";
  const seen = src.startsWith("data:image/") ? [h("img", { class: "thumb", alt: "", src })] : [];
  return [...label, h("div", { class: "with-thumb" }, seen, bigText(text, text || "(nothing)"))];
}

const saysSomething = (doc) => Boolean(doc.side("target") || doc.json.outcome || doc.json.labels);

/** What came of it: the translation, or what another model says. */
function translationParts(state, actions) {
  const { outcome, labels } = state.doc.json;
  const side = state.doc.side("target") ?? outcome;
  const told = labels ? [labelBars(labels)] : [];
  if (labels && side?.label === "label") return [...told, ...(isTouched(state) ? [touchedLine(state, actions)] : [])];
  return [...(side ? outcomeParts(state, side, actions) : []), ...told];
}

function labelBars({ best, count }) {
  const shown = best.slice(0, LABELS_SHOWN);
  const more = count > shown.length ? h("li", { class: "more" }, `and ${(count - shown.length).toLocaleString("en")} more`) : null;
  const line = ({ label, p }, i) => h("li", { class: i ? null : "first" }, h("span", { class: "label-name", dir: "auto" }, label),
    h("span", { class: "label-bar", "aria-hidden": "true" }, h("span", { style: barOf(p, 1) })), h("span", { class: "label-p" }, share(p)));
  return h("div", {}, h("p", { class: "label" }, "label"), h("ol", { class: "labels" }, shown.map(line), more));
}

function outcomeParts(state, side, actions) {
  const touched = isTouched(state);
  const changed = touched && state.base.targetText !== side.text;
  const content = changed ? shownDifference(state.base.targetText, side.text) : side.text || "(nothing)";
  const parts = [sideLabel(side, "translation"), bigText(side.text, content)];
  if (changed) parts.push(h("p", { class: "was" }, "was: ", h("bdi", { dir: "auto" }, state.base.targetText)));
  if (touched) parts.push(touchedLine(state, actions));
  return parts;
}

function isTouched(state) {
  return state.prefix.length > 0 || state.silence.length > 0;
}

function touchedLine({ prefix, silence, base, doc }, actions) {
  const what = [];
  const changed = base.targetText !== doc.targetText;
  if (prefix.length) what.push(`Forced: the first ${prefix.length === 1 ? "token" : `${prefix.length} tokens`}.`);
  if (silence.length) what.push(`Silenced: ${silence.length > 2 ? `${silence.length} parts` : silence.join(", ")}.`);
  if (!changed) what.push(doc.translates ? "The translation stays the same." : "What it says stays the same.");
  const back = h("button", { class: "button", type: "button", on: { click: actions.reset } }, "Back to the original");
  return h("div", { class: "actions" }, h("span", {}, what.join(" ")), back);
}

function askForm(store, actions) {
  const box = h("textarea", {
    class: "entry", id: "sentence", rows: 2, dir: "auto", spellcheck: "false",
    placeholder: placeholderOf(store.get().doc.json.model), value: store.get().text,
  });
  const button = h("button", { class: "button primary", type: "submit" }, "Look");
  const send = (event) => {
    event.preventDefault();
    actions.ask({ text: box.value });
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  store.on(["busy"], ({ busy }) => { button.textContent = busy ? "Looking …" : "Look"; });
  store.on(["text"], ({ text }) => { if (document.activeElement !== box) box.value = text; }); // a guess was taken
  const label = h("label", { class: "label", for: "sentence" });
  const name = ({ doc }) => { label.textContent = sideName(doc.readSide, doc.translates ? "source" : "text"); };
  store.on(["doc"], name);
  name(store.get());
  const { languages = [], examples = [] } = store.get().doc.json;
  const asking = h("div", { class: "asking" }, box, languages.length ? languageChoice(store, actions, languages) : null, button);
  return h("form", { on: { submit: send } }, label, asking, exampleChoice(store, actions, box, examples));
}

function placeholderOf(model) {
  if (model?.mask) return `Type a sentence; ${model.mask} hides a word …`;
  return model?.kind === "causal" ? "Type the beginning of a text …" : "Type a sentence …";
}

/** For a model of several languages: into which. */
function languageChoice(store, actions, languages) {
  const choice = h("select", { class: "select", "aria-label": "Translate into" },
    languages.map((name) => h("option", { value: name }, name)));
  choice.addEventListener("change", () => {
    if (store.get().text) actions.ask({ to: choice.value });
    else store.set({ to: choice.value });
  });
  store.on(["to"], ({ to }) => { choice.value = to; });
  return choice;
}

/** Sentences to begin with, until there is one. */
function exampleChoice(store, actions, box, examples) {
  const look = (text) => {
    box.value = text;
    actions.ask({ text });
  };
  const button = (text) => h("button", {
    type: "button", class: "button plain example", dir: "auto", on: { click: () => look(text) },
  }, text);
  const element = h("div", { class: "examples" }, h("span", {}, "or look at"), examples.map(button));
  const draw = ({ doc }) => { element.hidden = !examples.length || doc.layers.length > 0; };
  store.on(["doc"], draw);
  draw(store.get());
  return element;
}
