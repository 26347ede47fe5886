// The predictions view: next-token predictions of a decoder, masked-token predictions of an encoder. On the live page
// a prediction can be inserted into the text.

import { h, boldToken, clear, keepPunctuation, tokenSpan } from "./dom.js";
import { barStyle, formatDecimal, textDirection, makeButton, formatShare } from "./paint.js";

const PREDICTION_TEXTS = {
  next: {
    title: "Next-token predictions",
    about: "Probability of each token given the tokens before it.",
    stood: "has a probability of",
    open: "Most probable next tokens:",
  },
  masked: {
    title: "Masked tokens",
    about: "Predictions for each masked token given the rest of the text.",
    stood: "has a probability of",
    open: "Most probable tokens:",
  },
};

export function predictionsView(store, actions) {
  const parts = {
    title: h("h2", {}),
    about: h("p", { class: "muted" }),
    words: h("div", { class: "dec-words", role: "group", "aria-label": "tokens of the text" }),
    options: h("div", { class: "dec-options", "aria-live": "polite" }),
  };
  const view = { store, actions, parts, state: { visible: false, stale: true, place: null } };
  const element = h("section", { class: "dec pred" }, parts.title, parts.about, parts.words, parts.options);
  store.on(["doc"], () => {
    Object.assign(view.state, { stale: true, place: null });
    if (view.state.visible) predDraw(view);
  });
  store.on(["busy"], ({ busy }) => {
    for (const button of parts.options.querySelectorAll("button")) button.disabled = busy;
  });
  return {
    element,
    show() {
      view.state.visible = true;
      if (view.state.stale) predDraw(view);
    },
    hide() {
      view.state.visible = false;
    },
  };
}

function predDraw(view) {
  const { store, state, parts } = view;
  const { predictions: guesses } = store.get().doc.json;
  state.stale = false;
  if (!guesses) return;
  const { title, about } = PREDICTION_TEXTS[guesses.kind];
  state.places = new Map(guesses.positions.map((entry) => [entry.position, entry]));
  if (!state.places.has(state.place)) state.place = predFirst(guesses);
  parts.title.textContent = title;
  parts.about.textContent = [about, predPerplexity(guesses)].join(" ");
  predTokens(view);
  predOptions(view);
}

/** The position after the text, else a masked position, else the least probable token. */
function predFirst({ positions: places }) {
  const open = places.filter(({ chosen }) => chosen === null);
  if (open.length) return open.at(-1).position;
  return places.reduce((least, entry) => (entry.p < least.p ? entry : least)).position;
}

/** The perplexity, as a sentence. */
function predPerplexity({ positions: places }) {
  const scored = places.filter(({ p }) => p !== null && p > 0);
  if (scored.length < 2) return "";
  const mean = scored.reduce((sum, { p }) => sum - Math.log(p), 0) / scored.length;
  const perplexity = Math.exp(mean);
  const text = perplexity < 100 ? formatDecimal(perplexity, 1) : Math.round(perplexity).toLocaleString("en");
  return `Perplexity: ${text}.`;
}

function predTokens(view) {
  const { store, state, parts } = view;
  const { doc } = store.get();
  const { side } = doc.json.predictions;
  const tokens = doc.tokens(side);
  parts.words.dir = textDirection(doc.side(side)?.text);
  const all = Array.from({ length: Math.max(tokens.length, 1 + Math.max(...state.places.keys())) }, (_, i) => i);
  const words = all.map((i) => predToken(state, tokens[i], i, (place) => {
    state.place = place;
    words.forEach((word, at) => word.setAttribute("aria-pressed", String(at === place)));
    predOptions(view);
  }));
  clear(parts.words).append(...keepPunctuation(tokens, words));
  const now = words[state.place];
  if (now) parts.words.scrollTop = now.offsetTop - parts.words.offsetTop - parts.words.clientHeight / 2;
}

function predToken(state, token, i, pick) {
  const entry = state.places.get(i);
  const name = token ? tokenSpan(token) : h("span", { class: "token pred-next" }, "?");
  if (!entry) return h("span", { class: "dec-word pred-given", title: "no prediction" }, name);
  const p = entry.chosen === null ? entry.options[0]?.p ?? 0 : entry.p;
  const label = entry.chosen === null ? [h("span", { class: "dec-p" }, tokenSpan(entry.options[0]))] : [h("span", { class: "dec-p" }, formatShare(p))];
  return makeButton(entry.chosen === null ? "dec-word pred-open" : "dec-word", () => pick(i), [name, ...label], {
    "aria-pressed": String(i === state.place), style: { "--p": p },
  });
}

function predOptions({ store, state, parts, actions }) {
  const { doc } = store.get();
  const { kind, side } = doc.json.predictions;
  const entry = state.places.get(state.place);
  clear(parts.options);
  if (!entry) return;
  const token = doc.tokens(side)[state.place];
  const { stood, open } = PREDICTION_TEXTS[kind];
  const listed = entry.chosen === null || entry.options.some((option) => option.token === entry.chosen);
  const options = listed ? entry.options : [...entry.options, { ...token, token: entry.chosen, p: entry.p }];
  const takes = doc.json.live && actions && entry.chosen === null ? (option) => predTake({ store, actions, kind, entry }, option) : null;
  const about = entry.chosen === null ? [open] : [boldToken(token), ` ${stood} ${formatShare(entry.p)}. Most probable tokens:`];
  parts.options.append(
    h("p", {}, about),
    h("ol", { class: "dec-list" }, options.map((option) => h("li", {}, predOption(entry, option, takes)))),
    takes ? h("p", { class: "muted small" }, "Select one to insert it.") : "",
  );
}

function predOption(entry, option, take) {
  const here = option.token === entry.chosen;
  const inside = [
    tokenSpan(option), h("span", { class: "dec-bar", "aria-hidden": "true" }, h("span", { style: barStyle(option.p, 1) })),
    h("span", { class: "dec-n" }, formatShare(option.p)), h("span", { class: "dec-chosen" }, here ? "in the text" : ""),
  ];
  const taken = take && !option.special; // partial characters cannot be inserted
  return taken ? makeButton("dec-option", () => take(option), inside) : h("div", { class: here ? "dec-option dec-is" : "dec-option" }, inside);
}

/** Request the text with this token appended, or in place of the mask. */
function predTake({ store, actions, kind, entry }, option) {
  const { doc, text } = store.get();
  if (kind === "next") return actions.ask({ text: `${text}${option.space ? " " : ""}${option.text}` });
  const marks = [doc.json.model.mask_token, "[MASK]", "<mask>"].map((mark) => mark.replace(/[^\w]/g, "\\$&"));
  let left = doc.json.predictions.positions.indexOf(entry);
  return actions.ask({ text: text.replace(new RegExp(marks.join("|"), "g"), (mark) => (left-- === 0 ? option.text : mark)) });
}
