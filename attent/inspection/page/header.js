// The page header: model, theme, input and output (on the live page a text box), and the difference from the baseline
// if tokens are forced or parts are masked.

import { h, clear, isTouch, renderDiff } from "./dom.js";
import { clearColorCache } from "./colors.js";
import { barStyle, formatShare } from "./paint.js";

const LABELS_SHOWN = 3;
const KEYS = [
  ["← →", "previous head, next head"],
  ["↑ ↓", "previous layer, next layer"],
  ["Shift and click", "overlay a head in another color"],
  ["Tab, then ↑ ↓", "move through the tokens of a side; Enter pins one"],
  ["Esc", "unpin the token"],
  ["?", "show these keys"],
];

export function pageHeader(store) {
  const { model } = store.get().doc.json;
  const about = model ? [h("b", {}, model.name), [model.name && " · ", model.summary].filter(Boolean).join("")] : [];
  const keys = keysDialog();
  const help = h("button", { class: "button plain", type: "button", "aria-haspopup": "dialog", hidden: isTouch() }, "Keys");
  help.addEventListener("click", () => keys.showModal());
  return h("header", { class: "page-header" },
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
    const input = h("input", { type: "radio", name: "theme", checked: name === storedTheme(), value: name });
    input.addEventListener("change", () => setTheme(store, name));
    return h("label", {}, input, name);
  });
  return h("div", { class: "themes", role: "radiogroup", "aria-label": "Theme" }, options);
}

export function storedTheme() {
  try {
    return localStorage.getItem("attent-theme") ?? "auto";
  } catch {
    return "auto"; // browsers may refuse storage to local files
  }
}

export function setTheme(store, name) {
  try {
    localStorage.setItem("attent-theme", name);
  } catch {
    // valid until the page is closed
  }
  applyTheme(name);
  store.set({ theme: effectiveTheme(name) });
}

export function applyTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  clearColorCache();
}

export function effectiveTheme(name) {
  if (name !== "auto") return name;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Input and output; on the live page the input is a text box. */
export function sentences(store, actions) {
  const source = h("div", {});
  const translation = h("div", { class: "translation" });
  const notice = h("p", { class: "notice", role: "alert", hidden: true });
  const element = h("section", { class: "sentences", "aria-label": "Input and output" }, source, translation);
  if (store.get().doc.json.live) source.append(requestForm(store, actions));
  const draw = () => {
    const state = store.get();
    if (!state.doc.json.live) clear(source).append(...inputParts(state.doc));
    clear(translation).append(...outputParts(state, actions));
    element.classList.toggle("alone", !state.doc.hasOutput && !state.doc.json.live);
    notice.hidden = !state.error;
    notice.textContent = state.error ?? "";
    document.title = `${state.doc.json.title ? `${state.doc.json.title} · ` : ""}attent look`;
  };
  store.on(["doc", "base", "error"], draw);
  draw();
  return [element, notice];
}

const sideTitle = (side, fallback) => [side?.label ?? fallback, side?.language].filter(Boolean).join(" · ");

function sideLabel(side, fallback) {
  return h("p", { class: "label" }, sideTitle(side, fallback));
}

function textParagraph(text, content) {
  const long = (text?.length ?? 0) > 220;
  return h("p", { class: long ? "text long" : "text", dir: "auto", tabindex: long ? 0 : null }, content);
}

function inputParts(doc) {
  const text = doc.sourceText;
  const label = doc.inputSide ? [sideLabel(doc.inputSide, "text")] : [];
  const src = doc.inputSide?.audio ? "" : doc.inputSide?.image?.src ?? "";
  const seen = src.startsWith("data:image/") ? [h("img", { class: "thumb", alt: "", src })] : [];
  return [...label, h("div", { class: "with-thumb" }, seen, textParagraph(text, text || "(nothing)"))];
}

/** The output: a translation, a prediction or labels. */
function outputParts(state, actions) {
  const { output, labels } = state.doc.json;
  const side = state.doc.side("target") ?? output;
  const bars = labels ? [labelBars(labels)] : [];
  if (labels && side?.label === "label") return [...bars, ...(isModified(state) ? [modifiedLine(state, actions)] : [])];
  return [...(side ? outputText(state, side, actions) : []), ...bars];
}

function labelBars({ best, count }) {
  const shown = best.slice(0, LABELS_SHOWN);
  const more = count > shown.length ? h("li", { class: "more" }, `and ${(count - shown.length).toLocaleString("en")} more`) : null;
  const line = ({ label, p }, i) => h("li", { class: i ? null : "first" }, h("span", { class: "label-name", dir: "auto" }, label),
    h("span", { class: "label-bar", "aria-hidden": "true" }, h("span", { style: barStyle(p, 1) })), h("span", { class: "label-p" }, formatShare(p)));
  return h("div", {}, h("p", { class: "label" }, "label"), h("ol", { class: "labels" }, shown.map(line), more));
}

function outputText(state, side, actions) {
  const modified = isModified(state);
  const changed = modified && state.base.targetText !== side.text;
  const content = changed ? renderDiff(state.base.targetText, side.text) : side.text || "(nothing)";
  const parts = [sideLabel(side, "translation"), textParagraph(side.text, content)];
  if (changed) parts.push(h("p", { class: "was" }, "was: ", h("bdi", { dir: "auto" }, state.base.targetText)));
  if (modified) parts.push(modifiedLine(state, actions));
  return parts;
}

function isModified(state) {
  return state.prefix.length > 0 || state.maskedParts.length > 0;
}

function modifiedLine({ prefix, maskedParts, base, doc }, actions) {
  const notes = [];
  const changed = base.targetText !== doc.targetText;
  if (prefix.length) notes.push(`Forced: the first ${prefix.length === 1 ? "token" : `${prefix.length} tokens`}.`);
  if (maskedParts.length) notes.push(`Masked: ${maskedParts.length > 2 ? `${maskedParts.length} parts` : maskedParts.join(", ")}.`);
  if (!changed) notes.push("The output is unchanged.");
  const back = h("button", { class: "button", type: "button", on: { click: actions.reset } }, "Reset");
  return h("div", { class: "actions" }, h("span", {}, notes.join(" ")), back);
}

function requestForm(store, actions) {
  const box = h("textarea", {
    class: "entry", id: "sentence", rows: 2, dir: "auto", spellcheck: "false",
    placeholder: placeholderText(store.get().doc.json.model), value: store.get().text,
  });
  const button = h("button", { class: "button primary", type: "submit" }, "Inspect");
  const send = (event) => {
    event.preventDefault();
    actions.ask({ text: box.value });
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  store.on(["busy"], ({ busy }) => { button.textContent = busy ? "Running …" : "Inspect"; });
  store.on(["text"], ({ text }) => {
    if (document.activeElement !== box) box.value = text; // a prediction was inserted
    fitHeight(box);
  });
  box.addEventListener("input", () => fitHeight(box));
  new ResizeObserver(() => fitHeight(box)).observe(document.documentElement);
  const label = h("label", { class: "label", for: "sentence" });
  const name = ({ doc }) => { label.textContent = sideTitle(doc.inputSide, doc.translates ? "source" : "text"); };
  store.on(["doc"], name);
  name(store.get());
  const { languages = [], examples = [] } = store.get().doc.json;
  const asking = h("div", { class: "asking" }, box, languages.length ? languagePicker(store, actions, languages) : null, button);
  return h("form", { on: { submit: send } }, label, asking, examplePicker(store, actions, box, examples));
}

/** As high as its text, so that no line is clipped; the style sheet limits it. */
function fitHeight(box) {
  box.style.setProperty("height", "auto");
  box.style.setProperty("height", `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`);
}

function placeholderText(model) {
  if (model?.mask_token) return `Type a sentence; ${model.mask_token} masks a word …`;
  return model?.kind === "causal" ? "Type the beginning of a text …" : "Type a sentence …";
}

/** Target language of a multilingual model. */
function languagePicker(store, actions, languages) {
  const choice = h("select", { class: "select", "aria-label": "Translate into" },
    languages.map((name) => h("option", { value: name }, name)));
  choice.addEventListener("change", () => {
    if (store.get().text) actions.ask({ to: choice.value });
    else store.set({ to: choice.value });
  });
  store.on(["to"], ({ to }) => { choice.value = to; });
  return choice;
}

/** Example sentences, until one is inspected. */
function examplePicker(store, actions, box, examples) {
  const choose = (text) => {
    box.value = text;
    actions.ask({ text });
  };
  const button = (text) => h("button", {
    type: "button", class: "button plain example", dir: "auto", on: { click: () => choose(text) },
  }, text);
  const element = h("div", { class: "examples" }, h("span", {}, "or try"), examples.map(button));
  const draw = ({ doc }) => { element.hidden = !examples.length || doc.layers.length > 0; };
  store.on(["doc"], draw);
  draw(store.get());
  return element;
}
