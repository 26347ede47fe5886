// What a model expected at each place of a text: a decoder, of the next token from those before it; an encoder, of a
// word that is hidden, from those around it. On the live page a guess can be taken into the text.

import { h, clear, shown } from "./dom.js";
import { barOf, decimal, directionOf, press, share } from "./paint.js";

const GUESS_WORDS = {
  next: {
    title: "What it expected, word by word",
    about: "Each token with the probability that the model gave it, having read those before it.",
    stood: "stands here, and was expected with",
    open: "What may come next:",
  },
  masked: {
    title: "The hidden words",
    about: "For each hidden word, what the model would put in its place, having read the rest.",
    stood: "stands here, and would be put here with",
    open: "What it would put here:",
  },
  hidden: {
    title: "Each word, were it hidden",
    about: "Each word was hidden in turn: how likely the model holds it, having read the others.",
    stood: "stands here, and would be put here with",
    open: "What it would put here:",
  },
};

export function guessesView(store, actions) {
  const parts = {
    title: h("h2", {}),
    about: h("p", { class: "muted" }),
    words: h("div", { class: "dec-words", role: "group", "aria-label": "the places of the text" }),
    options: h("div", { class: "dec-options", "aria-live": "polite" }),
  };
  const view = { store, actions, parts, state: { visible: false, stale: true, place: null } };
  const element = h("section", { class: "dec guess" }, parts.title, parts.about, parts.words, parts.options);
  store.on(["doc"], () => {
    Object.assign(view.state, { stale: true, place: null });
    if (view.state.visible) guessDraw(view);
  });
  store.on(["busy"], ({ busy }) => {
    for (const button of parts.options.querySelectorAll("button")) button.disabled = busy;
  });
  return {
    element,
    show() {
      view.state.visible = true;
      if (view.state.stale) guessDraw(view);
    },
    hide() {
      view.state.visible = false;
    },
  };
}

function guessDraw(view) {
  const { store, state, parts } = view;
  const { guesses } = store.get().doc.json;
  state.stale = false;
  if (!guesses) return;
  const { title, about } = GUESS_WORDS[guesses.kind];
  state.places = new Map(guesses.places.map((entry) => [entry.place, entry]));
  if (!state.places.has(state.place)) state.place = guessFirst(guesses);
  parts.title.textContent = title;
  parts.about.textContent = [about, guessSurprise(guesses)].join(" ");
  guessWords(view);
  guessOptions(view);
}

/** The end of a text that may go on, or the place that surprised the model most. */
function guessFirst({ places }) {
  const open = places.filter(({ chosen }) => chosen === null);
  if (open.length) return open.at(-1).place;
  return places.reduce((least, entry) => (entry.p < least.p ? entry : least)).place;
}

/** Among how many tokens, all alike, it would have been as doubtful. */
function guessSurprise({ places }) {
  const told = places.filter(({ p }) => p !== null && p > 0);
  if (told.length < 2) return "";
  const mean = told.reduce((sum, { p }) => sum - Math.log(p), 0) / told.length;
  const among = Math.exp(mean);
  const count = among < 100 ? decimal(among, 1) : Math.round(among).toLocaleString("en");
  return `On average it was as doubtful as among ${count} tokens (its perplexity).`;
}

function guessWords(view) {
  const { store, state, parts } = view;
  const { doc } = store.get();
  const { side } = doc.json.guesses;
  const tokens = doc.tokens(side);
  parts.words.dir = directionOf(doc.side(side)?.text);
  const all = Array.from({ length: Math.max(tokens.length, 1 + Math.max(...state.places.keys())) }, (_, i) => i);
  clear(parts.words).append(...all.map((i) => guessWord(state, tokens[i], i, (place) => {
    state.place = place;
    [...parts.words.children].forEach((word, at) => word.setAttribute("aria-pressed", String(at === place)));
    guessOptions(view);
  })));
  const now = parts.words.children[state.place];
  if (now) parts.words.scrollTop = now.offsetTop - parts.words.offsetTop - parts.words.clientHeight / 2;
}

function guessWord(state, token, i, pick) {
  const entry = state.places.get(i);
  const name = token ? shown(token) : h("span", { class: "token guess-open" }, "?");
  if (!entry) return h("span", { class: "dec-word guess-given", title: "nothing was expected here" }, name);
  const p = entry.chosen === null ? entry.options[0]?.p ?? 0 : entry.p;
  const said = entry.chosen === null ? [h("span", { class: "dec-p" }, shown(entry.options[0]))] : [h("span", { class: "dec-p" }, share(p))];
  return press(entry.chosen === null ? "dec-word guess-asked" : "dec-word", () => pick(i), [name, ...said], {
    "aria-pressed": String(i === state.place), style: { "--p": p },
  });
}

function guessOptions({ store, state, parts, actions }) {
  const { doc } = store.get();
  const { kind, side } = doc.json.guesses;
  const entry = state.places.get(state.place);
  clear(parts.options);
  if (!entry) return;
  const token = doc.tokens(side)[state.place];
  const { stood, open } = GUESS_WORDS[kind];
  const listed = entry.chosen === null || entry.options.some((option) => option.token === entry.chosen);
  const options = listed ? entry.options : [...entry.options, { ...token, token: entry.chosen, p: entry.p }];
  const most = Math.max(...options.map((option) => option.p));
  const takes = doc.json.live && actions && entry.chosen === null ? (option) => guessTake({ store, actions, kind, entry }, option) : null;
  const about = entry.chosen === null ? [open] : [h("b", {}, shown(token)), ` ${stood} ${share(entry.p)}. Likeliest here:`];
  parts.options.append(
    h("p", {}, about),
    h("ol", { class: "dec-list" }, options.map((option) => h("li", {}, guessOption(entry, option, most, takes)))),
    takes ? h("p", { class: "muted small" }, "Press one to take it into the text.") : "",
  );
}

function guessOption(entry, option, most, take) {
  const here = option.token === entry.chosen;
  const inside = [
    shown(option), h("span", { class: "dec-bar", "aria-hidden": "true" }, h("span", { style: barOf(option.p, most) })),
    h("span", { class: "dec-n" }, share(option.p)), h("span", { class: "dec-chosen" }, here ? "stands here" : ""),
  ];
  const taken = take && !option.special; // half a character cannot be typed
  return taken ? press("dec-option", () => take(option), inside) : h("div", { class: here ? "dec-option dec-is" : "dec-option" }, inside);
}

/** The text with this token at its end, or in place of the mask. */
function guessTake({ store, actions, kind, entry }, option) {
  const { doc, text } = store.get();
  if (kind === "next") return actions.ask({ text: `${text}${option.space ? " " : ""}${option.text}` });
  const marks = [doc.json.model.mask, "[MASK]", "<mask>"].map((mark) => mark.replace(/[^\w]/g, "\\$&"));
  let left = doc.json.guesses.places.indexOf(entry);
  return actions.ask({ text: text.replace(new RegExp(marks.join("|"), "g"), (mark) => (left-- === 0 ? option.text : mark)) });
}
