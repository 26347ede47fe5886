// Helpers that create elements. Text enters only through text nodes and setAttribute, so a token that looks like HTML
// is shown as its characters.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const SCRIPTS_WITHOUT_SPACES = /^[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]/u;
const SPECIAL_DESCRIPTIONS = {
  start: "start of the text",
  end: "end of the text",
  pad: "padding",
  unknown: "unknown token",
  tag: "language tag",
  byte: "one byte of a character",
  mask: "masked token",
  class: "class token, which represents the whole image",
};

/** An HTML element: h("button", {class: "quiet", on: {click: f}}, "Go"). Null, undefined and false are left out. */
export function h(tag, attributes, ...children) {
  return setAttributes(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return setAttributes(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function setAttributes(element, attributes, children) {
  const { on = {}, style = {}, dataset = {}, value, ...plainAttributes } = attributes ?? {};
  for (const [name, content] of Object.entries(plainAttributes)) {
    if (content === null || content === undefined || content === false) continue;
    element.setAttribute(name, content === true ? "" : String(content));
  }
  for (const [name, content] of Object.entries(dataset)) element.dataset[name] = content;
  for (const [name, content] of Object.entries(style)) element.style.setProperty(name, content);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  addChildren(element, children);
  if (value !== undefined && value !== null) element.value = value; // after a select has its options
  return element;
}

function addChildren(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function clear(element) {
  element.replaceChildren();
  return element;
}

/** Display text of a token; ␣ for a space. */
export function tokenText(token) {
  if (!token) return "";
  return token.text === "" || /^\s+$/.test(token.text) ? "␣" : token.text;
}

/** A token quoted for use in a sentence, special tokens in brackets. */
export function quoteToken(token) {
  if (!token) return "nothing";
  return token.special === "start" || token.special === "end" ? `[${token.special}]` : `“${tokenText(token)}”`;
}

/** A span for a token, with its own text direction. */
export function tokenSpan(token) {
  const special = token?.special ?? null;
  const classes = special ? `token special special-${special}` : isContinuation(token) ? "token continued" : "token";
  const title = special ? `${token.piece} (${SPECIAL_DESCRIPTIONS[special] ?? special})` : null;
  return h("span", { class: classes, title }, h("bdi", { dir: "auto" }, tokenText(token)));
}

/** True if a token continues a word: a letter without a space before it, in a script with spaces. */
function isContinuation(token) {
  return token?.space === false && !token.special && /^[\p{L}\p{M}\p{N}]/u.test(token.text) && !SCRIPTS_WITHOUT_SPACES.test(token.text);
}

/** Indices of the tokens of the word that contains the one at `index`. */
export function wordIndices(tokens, index) {
  let [from, to] = [index, index + 1];
  while (from > 0 && isContinuation(tokens[from])) from--;
  while (to < tokens.length && isContinuation(tokens[to])) to++;
  return Array.from({ length: to - from }, (_, i) => from + i);
}

/** True for tokens of closing punctuation, which never begin a line. */
const isClosing = (token) => !token?.special && /^[\p{Pe}\p{Pf}\p{Po}]+$/u.test(token?.text ?? "") && !/^[¿¡]/.test(token.text);

/** Token elements for a row that wraps: closing punctuation stays with the token before it. */
export function keepPunctuation(tokens, elements) {
  const groups = [];
  elements.forEach((element, i) => {
    if (i && isClosing(tokens[i])) groups.at(-1).push(element);
    else groups.push([element]);
  });
  return groups.map((group) => (group.length > 1 ? h("span", { class: "together" }, group) : group[0]));
}

/** A token in a sentence; punctuation in quotes, so that it does not read as that of the sentence. */
export const spokenToken = (token) => (isClosing(token) ? ["“", tokenSpan(token), "”"] : [tokenSpan(token)]);

export const boldToken = (token) => h("b", {}, spokenToken(token));

/** True on touch screens: "tap" instead of "point at", and no keyboard. */
export const isTouch = () => matchMedia("(hover: none)").matches;

/** "Point at" or "Tap". */
export const pointAt = () => (isTouch() ? "Tap" : "Point at");

/** 0.8712 -> "87%", 0.004 -> "<1%". */
export function formatPercent(weight) {
  if (!(weight > 0)) return "0%";
  if (weight < 0.01) return "<1%";
  return weight > 0.99 && weight < 0.9995 ? ">99%" : `${Math.round(weight * 100)}%`;
}

/** A word diff: [{text, change: "same" | "removed" | "added"}]. */
export function diffWords(before, after) {
  const a = splitWords(before);
  const b = splitWords(after);
  const common = lcsTable(a, b);
  const out = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const gone = j >= b.length || removesFirst(common, i, j);
    const change = i < a.length && a[i] === b[j] ? "same" : gone ? "removed" : "added";
    out.push({ text: change === "added" ? b[j] : a[i], change });
    if (change !== "added") i++;
    if (change !== "removed") j++;
  }
  return out;
}

/** True if removing word i of the old text keeps more words in common than adding word j of the new one. */
const removesFirst = (common, i, j) => i + 1 < common.length && common[i + 1][j] >= common[i][j + 1];

function splitWords(text) {
  const words = new Intl.Segmenter(undefined, { granularity: "word" }).segment(text ?? "");
  return Array.from(words, (word) => word.segment).slice(0, 3000);
}

function lcsTable(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  return table;
}

/** The new text with insertions marked; with `old`, deletions too. */
export function renderDiff(before, after, { old = false } = {}) {
  const parts = diffWords(before, after).filter((part) => old || part.change !== "removed");
  const tags = { same: null, added: "ins", removed: "del" };
  const marked = parts.map(({ text, change }) => (tags[change] && text.trim() ? h(tags[change], {}, text) : text));
  return h("span", { class: "difference", dir: "auto" }, marked);
}
