// What is looked at, and the address of the page: a view can be linked, Back goes to the one before. An address that
// asks for what the document does not have gives way to what there is.

/** To begin with: the head of cross-attention that aligns the words best, else the one that is surest of its own. */
export function firstLook(doc) {
  const cross = doc.layers.filter((layer) => layer.kind === "cross");
  const headsOf = (layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer, head }));
  const alone = Object.keys(doc.json.sides ?? {}).length === 1 && doc.json.properties; // a model that reads one text
  const good = ({ layer, head }) => (cross.length ? alignmentOf(doc, layer, head) : choosiness(doc, layer, head));
  const among = cross.length ? cross : alone ? doc.layers : [];
  const found = among.flatMap(headsOf).map((one) => ({ ...one, good: good(one) }));
  const best = found.reduce((a, b) => (a && a.good >= b.good ? a : b), null) ?? { layer: doc.layers[0], head: 0 };
  return { path: best.layer?.path ?? null, heads: [best.head], query: null, pinnedKey: null };
}

/** How well a head aligns words: measured where the document tells it, else how sure it is of one word in each row. */
function alignmentOf(doc, layer, head) {
  const { alignment, confidence = 1, same } = doc.property(layer.path, head)?.values ?? {};
  if (typeof alignment === "number") return alignment * confidence; // the links of a head that spreads are chance
  if (typeof same === "number") return same; // words that stand alone are copied or not
  const words = doc.tokens(layer.keys).map((token) => !token.special);
  const most = new Float32Array(layer.weightsNow.Tq);
  layer.weightsNow.each(head, (q, k, weight) => { if (words[k] && weight > most[q]) most[q] = weight; });
  return most.reduce((sum, weight) => sum + weight, 0) / Math.max(1, most.length);
}

/** Heads that look at one token, each word at another one and not at itself, are those to look at first. */
function choosiness(doc, layer, head) {
  const { confidence = 0, shared = 0, itself = 0 } = doc.property(layer.path, head)?.values ?? {};
  return confidence * (1 - shared) * (1 - itself);
}

/** `wish` as far as the document has it: an unknown layer, head or word gives way to the first. */
export function fitting(doc, wish) {
  const layer = doc.layer(wish.path);
  if (!layer) return firstLook(doc);
  const isOneOf = (index, length) => Number.isInteger(index) && index >= 0 && index < length;
  const heads = [...new Set(wish.heads ?? [])].filter((head) => isOneOf(head, layer.heads));
  const within = (index, side) => (isOneOf(index, doc.tokens(side).length) ? index : null);
  return {
    path: layer.path,
    heads: heads.length ? heads : [0],
    query: within(wish.query, layer.queries),
    pinnedKey: within(wish.pinnedKey, layer.keys),
  };
}

export function readAddress(doc, state, tabs, address = location.hash) {
  const asked = new URLSearchParams(address.slice(1));
  const number = (name) => (asked.has(name) ? Number(asked.get(name)) : null);
  const look = fitting(doc, {
    path: asked.get("layer") ?? state.path,
    heads: asked.has("heads") ? asked.get("heads").split(",").map(Number) : state.heads,
    query: number("query"),
    pinnedKey: number("key"),
  });
  const there = tabs.filter(({ has }) => has(doc.json));
  const first = doc.layers.length || doc.json.live ? "heads" : there.find(({ id }) => id === "positions")?.id ?? "heads";
  const tab = there.find(({ id }) => id === asked.get("tab"))?.id ?? first;
  return { ...look, tab };
}

function addressOf({ doc, text, tab, path, heads, query, pinnedKey }) {
  const parts = [`tab=${tab}`, path && `layer=${encodeURIComponent(path)}`, `heads=${heads.join(",")}`];
  if (query !== null) parts.push(`query=${query}`);
  if (pinnedKey !== null) parts.push(`key=${pinnedKey}`);
  if (doc.json.live && doc.layers.length) parts.push(`text=${encodeURIComponent(text)}`);
  return `#${parts.filter(Boolean).join("&")}`;
}

/** Back goes to the view before; a slider that passes ten layers leaves one step behind, not ten. */
export function followAddress(store, tabs) {
  let last = 0;
  store.on(["doc", "tab", "path", "heads", "query", "pinnedKey"], (state, news) => {
    const address = addressOf(state);
    if (address === location.hash) return;
    const step = (news.has("tab") || news.has("path") || news.has("heads")) && performance.now() - last > 800;
    if (step) last = performance.now();
    history[step ? "pushState" : "replaceState"](null, "", address);
  });
  window.addEventListener("popstate", () => store.set(readAddress(store.get().doc, store.get(), tabs)));
}
