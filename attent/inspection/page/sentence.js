// What one sees, in words: a sentence about the head, the word that is pointed at or pinned, what it looks at and who
// looks at it. It reads the weights; it draws nothing else.

import { h, shown, percent } from "./dom.js";
import { groupName, hasTwoNames } from "./data.js";

const NAMED = 3;

/** The word in question: the one pointed at, else the pinned one, else null: {side, index, other, pinned}. */
export function focusOf({ hover, query, pinnedKey }) {
  if (hover) return { other: null, ...hover, pinned: false };
  if (query !== null) return { side: "queries", index: query, other: null, pinned: true };
  return pinnedKey === null ? null : { side: "keys", index: pinnedKey, other: null, pinned: true };
}

/** Where the word of one side stands on the other, or null: a word that is written is read one step later. */
export function sameWord(layer, side, index) {
  if (layer.queries === layer.keys) return index;
  if (layer.queries !== "target" || layer.keys !== "read") return null;
  const at = side === "queries" ? index + 1 : index - 1;
  return at < 0 ? null : at;
}

/** The greatest entries of a row or column, [{index, weight}], largest first. */
export function topEntries(values, n) {
  const found = [];
  values.forEach((weight, index) => { if (weight > 0) found.push({ index, weight }); });
  return found.sort((a, b) => b.weight - a.weight).slice(0, n);
}

/** The sentence as a list of nodes and texts. */
export function sayWhatIsSeen(state) {
  const { doc, path, heads } = state;
  const layer = doc.layer(path);
  if (!layer) return ["There is nothing to look at yet."];
  const where = h("span", { class: "where" }, `${whereIsIt(layer, heads)} `);
  const first = doc.side(layer.queries)?.image?.before ? { side: "queries", index: 0, other: null } : null; // the class token
  const focus = focusOf(state) ?? first;
  const silent = layer.silent.includes(heads[0]) ? " This head is silenced: what it looks at goes nowhere." : "";
  const body = focus ? aboutWord(doc, layer, heads[0], focus) : capital(aboutHead(doc, layer, heads[0]));
  return [where, h("br", {}), ...body, silent];
}

/** A sentence begins with a capital; a word of the text stays as it is. */
function capital(parts) {
  const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  if (typeof parts[0] === "string") parts[0] = upper(parts[0]);
  else if (parts[0]?.dataset.place) parts[0].textContent = upper(parts[0].textContent);
  return parts;
}

function whereIsIt(layer, heads) {
  const name = heads.length === 1 ? `Head ${heads[0]}` : `Heads ${heads.slice(0, -1).join(", ")} and ${heads.at(-1)}`;
  const first = heads.length === 1 ? "" : ` (in words: head ${heads[0]})`;
  return `${name} of layer ${layer.layer}, ${groupName(layer)}${first}.`;
}

function aboutHead(doc, layer, head) {
  const { weightsNow: weights } = layer;
  const says = saysOf(doc, layer, head);
  const best = strongest(weights, head);
  const out = says ? [says] : [];
  if (!best) return [...out, "There are no words here to look at."];
  const look = [...actor(doc, layer, best.q), ` ${percent(best.weight)} at `, word(doc, layer.keys, best.k), "."];
  return [...out, "Its strongest look here: ", ...look];
}

function saysOf(doc, layer, head) {
  const says = doc.property(layer.path, head)?.says;
  const { sentences } = doc.json.properties ?? {};
  if (!says) return "";
  return `${sentences > 1 ? `Over ${sentences} sentences` : "In this sentence"}: ${says}. `;
}

function strongest(weights, head) {
  let best = null;
  weights.each(head, (q, k, weight) => {
    if (!best || weight > best.weight) best = { q, k, weight };
  });
  return best;
}

function aboutWord(doc, layer, head, focus) {
  const twin = sameWord(layer, focus.side, focus.index);
  const q = focus.side === "queries" ? focus.index : twin;
  const k = focus.side === "keys" ? focus.index : twin;
  const { Tq, Tk } = layer.weightsNow;
  const looks = q !== null && q < Tq ? capital(whatItLooksAt(doc, layer, head, q, focus.other)) : [];
  const looked = k !== null && k < Tk ? capital(whoLooksAtIt(doc, layer, head, k)) : [];
  return focus.side === "queries" ? [...looks, " ", ...looked] : [...looked, " ", ...looks];
}

function whatItLooksAt(doc, layer, head, q, other) {
  const row = layer.weightsNow.row(head, q);
  const most = () => topEntries(row, NAMED).filter(({ weight }) => weight >= 0.02);
  const named = other === null ? most() : [{ index: other, weight: row[other] }];
  const rest = 1 - named.reduce((sum, { weight }) => sum + weight, 0);
  const parts = named.map(({ index, weight }) => [`${percent(weight)} at `, word(doc, layer.keys, index)]);
  if (!parts.length) return [...actor(doc, layer, q), " a little at every word."];
  return [...actor(doc, layer, q), " ", ...listed(parts), rest >= 0.02 ? ` (${percent(rest)} elsewhere).` : "."];
}

function whoLooksAtIt(doc, layer, head, k) {
  const named = topEntries(layer.weightsNow.column(head, k), NAMED).filter(({ weight }) => weight >= 0.02);
  if (!named.length) return [word(doc, layer.keys, k), doc.side(layer.queries)?.image ? " is hardly looked at by any patch." : " is hardly looked at by any word."];
  const parts = named.map(({ index, weight }) => [word(doc, layer.queries, index), ` (${percent(weight)})`]);
  const steps = { target: " is looked at most while writing ", read: " is looked at most having read " };
  const how = steps[layer.queries] ?? " is looked at most by ";
  return [word(doc, layer.keys, k), how, ...listed(parts), "."];
}

/** "while writing Mann (having just read Ein) it looks", the same the other way round, or "man looks". */
function actor(doc, layer, q) {
  if (!hasTwoNames(doc, layer)) return [word(doc, layer.queries, q), " looks"];
  if (layer.queries === "read") {
    return ["having read ", word(doc, "read", q), " (to write ", shown(doc.tokens("target")[q]), ") it looks"];
  }
  const read = doc.tokens("read")[q];
  const after = read ? [" (having just read ", shown(read), ")"] : [];
  return ["while writing ", word(doc, layer.queries, q), ...after, " it looks"];
}

function word(doc, side, index) {
  const place = placeName(doc, side, index);
  return place ? h("b", { dataset: { place: index } }, place) : h("b", {}, shown(doc.tokens(side)[index]));
}

/** Patches have no text: they are told by where they are. */
export function placeName(doc, side, index) {
  const image = doc.side(side)?.image;
  if (!image || index < (image.before ?? 0)) return null;
  const patch = index - (image.before ?? 0);
  return `the patch in row ${Math.floor(patch / image.columns)}, column ${patch % image.columns}`;
}

function listed(parts) {
  return parts.flatMap((part, i) => (i === 0 ? part : [i === parts.length - 1 ? " and " : ", ", ...part]));
}
