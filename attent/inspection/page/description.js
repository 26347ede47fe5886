// The selection in words: the head's pattern, and for the token under the pointer or pinned, what it attends to and
// what attends to it.

import { h, boldToken, spokenToken, formatPercent, wordIndices } from "./dom.js";
import { groupName, hasDecoderInput } from "./data.js";

const NAMED = 3;

/** The token under the pointer, else the pinned one, else null: {side, index, other, pinned}. */
export function getFocus({ hover, query, pinnedKey }) {
  if (hover) return { other: null, ...hover, pinned: false };
  if (query !== null) return { side: "queries", index: query, other: null, pinned: true };
  return pinnedKey === null ? null : { side: "keys", index: pinnedKey, other: null, pinned: true };
}

/** Index of a token on the other side, or null; an output token is decoder input one step later. */
export function sameTokenIndex(layer, side, index) {
  if (layer.queries === layer.keys) return index;
  if (layer.queries !== "target" || layer.keys !== "decoder_input") return null;
  const at = side === "queries" ? index + 1 : index - 1;
  return at < 0 ? null : at;
}

/** The n largest entries of a row or column, [{index, weight}]. */
export function topEntries(values, n) {
  const entries = [];
  values.forEach((weight, index) => { if (weight > 0) entries.push({ index, weight }); });
  return entries.sort((a, b) => b.weight - a.weight).slice(0, n);
}

/** The description as a list of nodes and strings. */
export function describeSelection(state) {
  const { doc, path, heads } = state;
  const layer = doc.layer(path);
  if (!layer) return ["Nothing is selected."];
  const where = h("span", { class: "where" }, `${describeLocation(layer, heads)} ${describeRows(doc, layer)}`);
  const first = doc.side(layer.queries)?.image?.num_prefix_tokens ? { side: "queries", index: 0, other: null } : null; // the class token
  const focus = getFocus(state) ?? first;
  const masked = layer.masked_heads.includes(heads[0]) ? " This head is masked: its output is zero." : "";
  const body = focus ? describeToken(doc, layer, heads[0], focus) : capitalize(describeHeadPattern(doc, layer, heads[0]));
  return [where, h("br", {}), ...body, masked];
}

/** Capitalize the first phrase, but not a token of the text. */
function capitalize(parts) {
  const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  if (typeof parts[0] === "string") parts[0] = upper(parts[0]);
  else if (parts[0]?.dataset.place) parts[0].textContent = upper(parts[0].textContent);
  return parts;
}

function describeLocation(layer, heads) {
  const name = heads.length === 1 ? `Head ${heads[0]}` : `Heads ${heads.slice(0, -1).join(", ")} and ${heads.at(-1)}`;
  const first = heads.length === 1 ? "" : ` (described: head ${heads[0]})`;
  return `${name} of layer ${layer.layer}, ${groupName(layer)}${first}.`;
}

/** What the rows of a decoder stand for. */
function describeRows(doc, layer) {
  if (!hasDecoderInput(doc, layer)) return "";
  const step = "A row is a decoder step, labeled by the token that it";
  return layer.queries === "decoder_input" ? `${step} reads (input); it predicts the next one. ` : `${step} predicts (output); it reads the one before. `;
}

function describeHeadPattern(doc, layer, head) {
  const { attention: weights } = layer;
  const summary = headSummary(doc, layer, head);
  const best = strongest(weights, head);
  const out = summary ? [summary] : [];
  if (!best) return [...out, "There are no tokens here."];
  const link = [...queryPhrase(doc, layer, best.q), " to ", word(doc, layer.keys, best.k), ` (${formatPercent(best.weight)}).`];
  return [...out, "Largest weight here: ", ...link];
}

function headSummary(doc, layer, head) {
  const description = doc.headStats(layer.path, head)?.description;
  const { sentences, dataset } = doc.json.head_stats ?? {};
  if (!description) return "";
  return `${sentences > 1 ? `On ${sentences} sentences` : `In ${dataset ?? "this input"}`}: ${description}. `;
}

function strongest(weights, head) {
  let best = null;
  weights.each(head, (q, k, weight) => {
    if (!best || weight > best.weight) best = { q, k, weight };
  });
  return best;
}

function describeToken(doc, layer, head, focus) {
  const twin = sameTokenIndex(layer, focus.side, focus.index);
  const q = focus.side === "queries" ? focus.index : twin;
  const k = focus.side === "keys" ? focus.index : twin;
  const { Tq, Tk } = layer.attention;
  const attended = q !== null && q < Tq ? capitalize(describeAttended(doc, layer, head, q, focus.other)) : [];
  const attending = k !== null && k < Tk ? capitalize(describeAttending(doc, layer, head, k)) : [];
  return focus.side === "queries" ? [...attended, " ", ...attending] : [...attending, " ", ...attended];
}

/** The shortest part of a recording with half of the shown weight of a query, or of all tokens of its word. */
export function attendedSpan(doc, { attention, queries, keys }, head, q) {
  const rows = doc.side(queries).audio ? [q] : wordIndices(doc.tokens(queries), q);
  const weights = new Float32Array(attention.Tk);
  for (const row of rows) attention.row(head, row).forEach((weight, k) => { weights[k] += weight / rows.length; });
  const half = weights.reduce((sum, weight) => sum + weight, 0) / 2;
  let best = { first: 0, count: weights.length, share: 2 * half };
  for (let [first, end, share] = [0, 0, 0]; first < weights.length; share -= weights[first++]) {
    while (end < weights.length && share < half) share += weights[end++];
    if (share >= half && end - first < best.count) best = { first, count: end - first, share };
  }
  const { step } = doc.side(keys).audio;
  return { ...best, from: best.first * step, to: (best.first + best.count) * step };
}

export const formatSpan = ({ from, to }) => `${from.toFixed(2)}–${to.toFixed(2)}\u00a0s`;

function describeAttended(doc, layer, head, q, other) {
  if (doc.side(layer.keys).audio && other === null) {
    const span = attendedSpan(doc, layer, head, q);
    const rest = 1 - span.share >= 0.02 ? `; ${formatPercent(1 - span.share)} elsewhere.` : ".";
    return [...queryPhrase(doc, layer, q), " to ", h("b", {}, formatSpan(span)), ` (${formatPercent(span.share)})`, rest];
  }
  const row = layer.attention.row(head, q);
  const largest = () => topEntries(row, NAMED).filter(({ weight }) => weight >= 0.02);
  const named = other === null ? largest() : [{ index: other, weight: row[other] }];
  const rest = 1 - named.reduce((sum, { weight }) => sum + weight, 0);
  const parts = named.map(({ index, weight }) => [word(doc, layer.keys, index), ` (${formatPercent(weight)})`]);
  if (!parts.length) return [...queryPhrase(doc, layer, q), " evenly to all tokens."];
  return [...queryPhrase(doc, layer, q), " to ", ...joinPhrases(parts), rest >= 0.02 ? `; ${formatPercent(rest)} elsewhere.` : "."];
}

function describeAttending(doc, layer, head, k) {
  const named = topEntries(layer.attention.column(head, k), NAMED).filter(({ weight }) => weight >= 0.02);
  if (!named.length) return [word(doc, layer.keys, k), " receives hardly any attention."];
  const parts = named.map(({ index, weight }) => [word(doc, layer.queries, index), ` (${formatPercent(weight)})`]);
  const steps = { target: " receives most attention when the output is ", decoder_input: " receives most attention when the input is " };
  const how = steps[layer.queries] ?? " receives most attention from ";
  return [word(doc, layer.keys, k), how, ...joinPhrases(parts), "."];
}

/** "output Mann (input Ein) attends", "input Ein (output Mann) attends", or "man attends". */
function queryPhrase(doc, layer, q) {
  if (!hasDecoderInput(doc, layer)) return [word(doc, layer.queries, q), " attends"];
  if (layer.queries === "decoder_input") {
    return ["input ", word(doc, "decoder_input", q), " (output ", ...spokenToken(doc.tokens("target")[q]), ") attends"];
  }
  const read = doc.tokens("decoder_input")[q];
  const after = read ? [" (input ", ...spokenToken(read), ")"] : [];
  return ["output ", word(doc, layer.queries, q), ...after, " attends"];
}

function word(doc, side, index) {
  const place = patchName(doc, side, index);
  return place ? h("b", { dataset: { place: index } }, place) : boldToken(doc.tokens(side)[index]);
}

/** Name of a patch by row and column; null for other tokens. */
export function patchName(doc, side, index) {
  const { image, audio } = doc.side(side) ?? {};
  if (!image || audio || index < (image.num_prefix_tokens ?? 0)) return null;
  const patch = index - (image.num_prefix_tokens ?? 0);
  return `the patch in row ${Math.floor(patch / image.columns)}, column ${patch % image.columns}`;
}

function joinPhrases(parts) {
  return parts.flatMap((part, i) => (i === 0 ? part : [i === parts.length - 1 ? " and " : ", ", ...part]));
}
