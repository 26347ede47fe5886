// The document as the page uses it: arrays out of base64, weights that answer alike whether they came whole or as
// the greatest few of each row. It draws nothing and keeps no state of the page.

const HALF = { table: null };

/** The shape of an ARRAY and its numbers as Float32Array. */
export async function unpackArray(array) {
  const { shape, data } = await unpackRaw(array);
  return { shape, data: data instanceof Float32Array ? data : Float32Array.from(data) };
}

async function unpackRaw(array) {
  const packed = bytesOf(array.data);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  return { shape: array.shape, data: numbersOf(array.type, planes) };
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

function numbersOf(type, planes) {
  if (type === "float32") return joinedFloats(planes);
  const integers = joinedPairs(planes);
  if (type === "uint16") return integers;
  if (type === "unit16") return Float32Array.from(integers, (n) => n / 65535);
  if (type === "float16") return Float32Array.from(integers, (n) => halfTable()[n]);
  throw new Error(`An array is of the type "${type}", which this page cannot read: write it anew.`);
}

function joinedPairs(planes) {
  const n = planes.length >> 1;
  const out = new Uint16Array(n);
  for (let i = 0; i < n; i++) out[i] = planes[i] | (planes[n + i] << 8);
  return out;
}

function joinedFloats(planes) {
  const n = planes.length >> 2;
  const bits = new Uint32Array(n);
  for (let i = 0; i < n; i++) {
    bits[i] = planes[i] | (planes[n + i] << 8) | (planes[2 * n + i] << 16) | (planes[3 * n + i] << 24);
  }
  return new Float32Array(bits.buffer);
}

/** All 65536 half-precision numbers: a look-up is quicker than bit work on a million numbers. */
function halfTable() {
  if (HALF.table) return HALF.table;
  const table = new Float32Array(65536);
  for (let n = 0; n < 65536; n++) {
    const [sign, exponent, fraction] = [n >> 15 ? -1 : 1, (n >> 10) & 31, n & 1023];
    if (exponent === 31) table[n] = fraction ? NaN : sign * Infinity;
    else table[n] = sign * 2 ** Math.max(exponent - 15, -14) * ((exponent ? 1 : 0) + fraction / 1024);
  }
  HALF.table = table;
  return table;
}

/** The weights of one layer, [H, Tq, Tk], held whole. */
class DenseWeights {
  constructor({ shape, data }) {
    [this.H, this.Tq, this.Tk] = shape;
    this.data = data;
    this.sparse = false;
  }

  at(head, q, k) {
    return this.data[(head * this.Tq + q) * this.Tk + k];
  }

  row(head, q) {
    const start = (head * this.Tq + q) * this.Tk;
    return this.data.subarray(start, start + this.Tk);
  }

  column(head, k) {
    const out = new Float32Array(this.Tq);
    for (let q = 0; q < this.Tq; q++) out[q] = this.at(head, q, k);
    return out;
  }

  matrix(head) {
    const size = this.Tq * this.Tk;
    return this.data.subarray(head * size, (head + 1) * size);
  }

  /** f(q, k, weight) for every weight of a head that is not nothing, in the rows from..to. */
  each(head, f, from = 0, to = this.Tq) {
    for (let q = from; q < to; q++) {
      const start = (head * this.Tq + q) * this.Tk;
      for (let k = 0; k < this.Tk; k++) if (this.data[start + k] > 0) f(q, k, this.data[start + k]);
    }
  }
}

/** The n greatest weights of each row; whatever is not among them counts as nothing. */
class SparseWeights {
  constructor(places, weights, Tk) {
    [this.H, this.Tq, this.n] = places.shape;
    this.Tk = Tk;
    this.places = places.data;
    this.data = weights.data;
    this.sparse = true;
  }

  at(head, q, k) {
    const start = (head * this.Tq + q) * this.n;
    for (let i = start; i < start + this.n; i++) if (this.places[i] === k && this.data[i] > 0) return this.data[i];
    return 0;
  }

  row(head, q) {
    const out = new Float32Array(this.Tk);
    this.each(head, (_, k, weight) => { out[k] = weight; }, q, q + 1);
    return out;
  }

  column(head, k) {
    const out = new Float32Array(this.Tq);
    for (let q = 0; q < this.Tq; q++) out[q] = this.at(head, q, k);
    return out;
  }

  matrix(head) {
    const out = new Float32Array(this.Tq * this.Tk);
    this.each(head, (q, k, weight) => { out[q * this.Tk + k] = weight; });
    return out;
  }

  each(head, f, from = 0, to = this.Tq) {
    for (let q = from; q < to; q++) {
      const start = (head * this.Tq + q) * this.n;
      for (let i = start; i < start + this.n; i++) if (this.data[i] > 0) f(q, this.places[i], this.data[i]);
    }
  }
}

/** A document that is open: the JSON as `.json`, and its layers with their weights decoded. */
class Doc {
  constructor(json) {
    this.json = json;
    this.layers = (json.layers ?? []).map((layer) => ({ ...layer, silent: layer.silent ?? [], weightsNow: null }));
    this.byPath = new Map(this.layers.map((layer) => [layer.path, layer]));
    this.vectorsKept = new Map();
  }

  layer(path) {
    return this.byPath.get(path) ?? null;
  }

  side(name) {
    return this.json.sides?.[name] ?? null;
  }

  tokens(name) {
    return this.side(name)?.tokens ?? [];
  }

  async weights(layer) {
    layer.weightsNow ??= await this.decodeWeights(layer);
    return layer.weightsNow;
  }

  async decodeWeights(layer) {
    if (layer.weights) return new DenseWeights(await unpackArray(layer.weights));
    const [places, weights] = await Promise.all([unpackRaw(layer.sparse.places), unpackArray(layer.sparse.weights)]);
    return new SparseWeights(places, weights, this.tokens(layer.keys).length);
  }

  /** {q, k, v, bias, D, Hkv}: queries [H, Tq, D], keys and values [Hkv, Tk, D]; null where the document has none. */
  async vectors(layer) {
    if (!layer.q || !layer.k || !layer.v) return null;
    if (!this.vectorsKept.has(layer.path)) this.vectorsKept.set(layer.path, decodeVectors(layer));
    return this.vectorsKept.get(layer.path);
  }

  /** What the heads are called and measured to do: {says, values} or null. */
  property(path, head) {
    return this.json.properties?.heads?.find((entry) => entry.path === path && entry.head === head) ?? null;
  }

  /** What the model read: of a translation the source, else the one side that there is; null where nothing was read. */
  get readSide() {
    return this.side("source") ?? Object.values(this.json.sides ?? {})[0] ?? null;
  }

  /** The text of the sentence and of its translation (of another model: what it says), "" where there is none. */
  get sourceText() {
    return this.readSide?.text ?? this.json.title ?? "";
  }

  get targetText() {
    return this.side("target")?.text ?? this.json.outcome?.text ?? "";
  }

  /** Is it one of those that translate? A document that does not tell is. */
  get translates() {
    return (this.json.model?.kind ?? "seq2seq") === "seq2seq" && !this.json.outcome;
  }
}

async function decodeVectors(layer) {
  const [q, k, v, bias] = await Promise.all(
    [layer.q, layer.k, layer.v, layer.bias].map((array) => (array ? unpackArray(array) : null)),
  );
  return { q: q.data, k: k.data, v: v.data, bias: bias?.data ?? null, D: q.shape[2], Hkv: k.shape[0] };
}

/** The document opened, all its weights decoded. */
export async function openDocument(json) {
  const { format, version } = json ?? {};
  if (format !== "attent-trace") throw new Error("its format must be attent-trace: it is no document of attent look.");
  if (version !== 1) throw new Error(`its version must be 1, but is ${version}: write it anew with this attent.`);
  const doc = new Doc(json);
  await Promise.all(doc.layers.map((layer) => doc.weights(layer)));
  return doc;
}

/** May the rows of a layer be named in two ways? At each step a decoder reads a token and then writes the next. */
export const hasTwoNames = (doc, layer) => Boolean(doc.side("read")) && ["target", "read"].includes(layer.queries);

/** Names the rows of a layer by what is written or what was read; "auto": a head that looks at a word only when its
 * translation has been read is shown by that. */
export function nameRows(doc, layer, head, rows) {
  if (!hasTwoNames(doc, layer)) return;
  const { read = 0, written = 0 } = doc.property(layer.path, head)?.values ?? {};
  const late = layer.kind === "cross" && read > written;
  layer.queries = rows === "auto" ? (late ? "read" : "target") : rows;
}

/** "encoder self-attention", "decoder self-attention", "cross-attention": a group of heads, as the grid shows them. */
export function groupName(layer) {
  if (layer.kind === "cross") return "cross-attention";
  return ["encoder", "decoder"].includes(layer.stack) ? `${layer.stack} self-attention` : "self-attention";
}

/** The layers by group, in the order of the document: [{name, kind, stack, layers}]. */
export function groupsOf(doc) {
  const groups = new Map();
  for (const layer of doc.layers) {
    const { stack, kind } = layer;
    const key = `${stack}/${kind}`;
    if (!groups.has(key)) groups.set(key, { key, name: groupName(layer), kind, stack, layers: [] });
    groups.get(key).layers.push(layer);
  }
  const rank = (group) => (group.kind === "cross" ? 2 : group.stack === "decoder" ? 1 : 0);
  return [...groups.values()].sort((a, b) => rank(a) - rank(b));
}
