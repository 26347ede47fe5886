// Small helpers that make elements. Text only ever enters through text nodes and setAttribute, so a token that
// looks like HTML shows as the characters it is made of. What is drawn is left to the views.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const UNSPACED = /^[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]/u;
const SPECIAL_WORDS = {
  start: "start of the text",
  end: "end of the text",
  pad: "padding",
  unknown: "a token the model does not know",
  tag: "a tag that tells the model what to do",
  byte: "one byte of a character",
  mask: "a hidden word",
  class: "a vector in which the whole picture gathers",
};

/** An HTML element: h("button", {class: "quiet", on: {click: f}}, "Go"). Null, undefined and false are left out. */
export function h(tag, attributes, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes, ...children) {
  return furnish(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function furnish(element, attributes, children) {
  const { on = {}, style = {}, dataset = {}, value, ...plainOnes } = attributes ?? {};
  for (const [name, content] of Object.entries(plainOnes)) {
    if (content === null || content === undefined || content === false) continue;
    element.setAttribute(name, content === true ? "" : String(content));
  }
  for (const [name, content] of Object.entries(dataset)) element.dataset[name] = content;
  for (const [name, content] of Object.entries(style)) element.style.setProperty(name, content);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  addChildren(element, children);
  if (value !== undefined && value !== null) element.value = value; // after the options of a select are there
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

/** What a person reads for a token; a bare space shows as ␣. */
export function plain(token) {
  if (!token) return "";
  return token.text === "" || /^\s+$/.test(token.text) ? "␣" : token.text;
}

/** What to call a token inside a sentence: special ones by what they are. */
export function quoted(token) {
  if (!token) return "nothing";
  return token.special === "start" || token.special === "end" ? `[${token.special}]` : `“${plain(token)}”`;
}

/** A span for a token. Its direction is its own: an Arabic word among English ones disturbs neither. */
export function shown(token) {
  const special = token?.special ?? null;
  const classes = special ? `token special special-${special}` : isContinued(token) ? "token continued" : "token";
  const title = special ? `${token.piece} (${SPECIAL_WORDS[special] ?? special})` : null;
  return h("span", { class: classes, title }, h("bdi", { dir: "auto" }, plain(token)));
}

/** Whether a token goes on with the word before it: no space, a letter, in a script that puts spaces between words. */
function isContinued(token) {
  return token?.space === false && /^[\p{L}\p{M}\p{N}]/u.test(token.text) && !UNSPACED.test(token.text);
}

/** 0.8712 -> "87%"; what is small but not nothing is told as such. */
export function percent(weight) {
  if (!(weight > 0)) return "0%";
  if (weight < 0.01) return "<1%";
  return weight > 0.99 && weight < 0.9995 ? ">99%" : `${Math.round(weight * 100)}%`;
}

/** The pieces of two texts in order, each {text, change: "same" | "removed" | "added"}. */
export function differences(before, after) {
  const a = wordsOf(before);
  const b = wordsOf(after);
  const common = longestCommon(a, b);
  const out = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const gone = j >= b.length || goesFirst(common, i, j);
    const change = i < a.length && a[i] === b[j] ? "same" : gone ? "removed" : "added";
    out.push({ text: change === "added" ? b[j] : a[i], change });
    if (change !== "added") i++;
    if (change !== "removed") j++;
  }
  return out;
}

/** Whether more stays in common when word i of the old text is let go than when word j of the new one is. */
const goesFirst = (common, i, j) => i + 1 < common.length && common[i + 1][j] >= common[i][j + 1];

function wordsOf(text) {
  const words = new Intl.Segmenter(undefined, { granularity: "word" }).segment(text ?? "");
  return Array.from(words, (word) => word.segment).slice(0, 3000);
}

function longestCommon(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  return table;
}

/** The text as it is now, with what is new marked; with `old`, also what it stands for, struck through. */
export function shownDifference(before, after, { old = false } = {}) {
  const parts = differences(before, after).filter((part) => old || part.change !== "removed");
  const tags = { same: null, added: "ins", removed: "del" };
  const marked = parts.map(({ text, change }) => (tags[change] && text.trim() ? h(tags[change], {}, text) : text));
  return h("span", { class: "difference", dir: "auto" }, marked);
}
