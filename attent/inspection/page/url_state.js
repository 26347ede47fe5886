// The selection (tab, layer, heads, tokens) and its URL fragment: views can be linked and Back works. Values that the
// document does not have fall back to defaults.

/** The initial selection: the cross-attention head with the best alignment, else the most focused self-attention head. */
export function defaultSelection(doc) {
  const cross = doc.layers.filter((layer) => layer.kind === "cross");
  const headsOf = (layer) => Array.from({ length: layer.heads }, (_, head) => ({ layer, head }));
  const alone = Object.keys(doc.json.sides ?? {}).length === 1 && doc.json.head_stats; // no decoder
  const score = ({ layer, head }) => (cross.length ? alignmentScore(doc, layer, head) : focusScore(doc, layer, head));
  const candidates = cross.length ? cross : alone ? doc.layers : [];
  const scored = candidates.flatMap(headsOf).map((entry) => ({ ...entry, score: score(entry) }));
  const best = scored.reduce((a, b) => (a && a.score >= b.score ? a : b), null) ?? { layer: doc.layers[0], head: 0 };
  return { path: best.layer?.path ?? null, heads: [best.head], query: null, pinnedKey: null };
}

/** Alignment quality of a head: the measured value if the document has it, else the mean of each row's maximum weight. */
function alignmentScore(doc, layer, head) {
  const { alignment, confidence = 1, same_token: same } = doc.headStats(layer.path, head)?.values ?? {};
  if (typeof alignment === "number") return alignment * confidence; // without confidence, links are chance
  if (typeof same === "number") return same; // single words: copied or not
  const words = doc.tokens(layer.keys).map((token) => !token.special);
  const maxima = new Float32Array(layer.attention.Tq);
  layer.attention.each(head, (q, k, weight) => { if (words[k] && weight > maxima[q]) maxima[q] = weight; });
  return maxima.reduce((sum, weight) => sum + weight, 0) / Math.max(1, maxima.length);
}

/** High for heads where each query attends to one key, another key for each query, and not to itself. */
function focusScore(doc, layer, head) {
  const { confidence = 0, top_key: topKey = 0, current = 0 } = doc.headStats(layer.path, head)?.values ?? {};
  return confidence * (1 - topKey) * (1 - current);
}

/** The requested selection, with unknown layers, heads and tokens replaced by defaults. */
export function clampSelection(doc, wish) {
  const layer = doc.layer(wish.path);
  if (!layer) return defaultSelection(doc);
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

/** The API key in the URL of a link of the translation page; it is moved to the storage of this tab, for reloads. */
export function takeKey() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const key = parameters.get("api_key");
  parameters.delete("api_key");
  try {
    if (key === null) return sessionStorage.getItem("attent-key");
    history.replaceState(null, "", `#${parameters}`);
    sessionStorage.setItem("attent-key", key);
  } catch {
    // browsers may refuse storage
  }
  return key;
}

export function readUrl(doc, state, tabs, address = location.hash) {
  const parameters = new URLSearchParams(address.slice(1));
  const number = (name) => (parameters.has(name) ? Number(parameters.get(name)) : null);
  const selection = clampSelection(doc, {
    path: parameters.get("layer") ?? state.path,
    heads: parameters.has("heads") ? parameters.get("heads").split(",").map(Number) : state.heads,
    query: number("query"),
    pinnedKey: number("key"),
  });
  const available = tabs.filter(({ has }) => has(doc.json));
  const first = doc.layers.length || doc.json.live ? "heads" : available.find(({ id }) => id === "positions")?.id ?? "heads";
  const tab = available.find(({ id }) => id === parameters.get("tab"))?.id ?? first;
  return { ...selection, tab };
}

function formatUrl({ doc, text, to, tab, path, heads, query, pinnedKey }) {
  const parts = [`tab=${tab}`, path && `layer=${encodeURIComponent(path)}`, `heads=${heads.join(",")}`];
  if (query !== null) parts.push(`query=${query}`);
  if (pinnedKey !== null) parts.push(`key=${pinnedKey}`);
  if (doc.json.live && doc.layers.length) parts.push(`text=${encodeURIComponent(text)}`, to && `to=${encodeURIComponent(to)}`);
  return `#${parts.filter(Boolean).join("&")}`;
}

/** Write the selection to the URL. Rapid changes (a slider moving) replace the history entry instead of adding one. */
export function syncUrl(store, tabs) {
  if (location.protocol === "about:") return; // in a notebook: a srcdoc frame may not change its URL
  let last = 0;
  store.on(["doc", "tab", "path", "heads", "query", "pinnedKey"], (state, news) => {
    const address = formatUrl(state);
    if (address === location.hash) return;
    const step = (news.has("tab") || news.has("path") || news.has("heads")) && performance.now() - last > 800;
    if (step) last = performance.now();
    history[step ? "pushState" : "replaceState"](null, "", address);
  });
  window.addEventListener("popstate", () => store.set(readUrl(store.get().doc, store.get(), tabs)));
}
