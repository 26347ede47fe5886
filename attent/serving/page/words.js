// Words of a text, as the server counts them for alignments: separated by Python's whitespace.

import { h } from "./dom.js";

const PIECES = /(?:[^\s\x1c-\x1f\x85]|\ufeff)+|[\s\x1c-\x1f\x85]+/gu;
const MAX_CHARACTERS = 100_000; // with spans
const SPACE = /^[\s\x1c-\x1f\x85]/u;

/** [{text, start, word}] in the order of the text; `word` counts from 0 and is null for whitespace. */
export function splitPieces(text) {
  let count = 0;
  return Array.from(text.matchAll(PIECES), ({ 0: piece, index }) => {
    const isSpace = SPACE.test(piece) && piece[0] !== "\ufeff";
    return { text: piece, start: index, word: isSpace ? null : count++ };
  });
}

export const countWords = (text) => splitPieces(text).filter(({ word }) => word !== null).length;

/** Show a text with a span for each word; a text that is too long to be translated stays plain. */
export function renderWords(element, text, attributes = {}) {
  if (text.length > MAX_CHARACTERS) return element.replaceChildren(text);
  const nodes = splitPieces(text).map((piece) => (
    piece.word === null ? piece.text : h("span", { ...attributes, "data-word": piece.word, "data-start": piece.start }, piece.text)
  ));
  element.replaceChildren(...nodes);
}

/** The index of the word that contains a position of the text, or ends there; null in whitespace. */
export function findWord(text, position) {
  const piece = splitPieces(text).find((each) => each.word !== null && each.start <= position && position <= each.start + each.text.length);
  return piece?.word ?? null;
}
