// The trace document: decodes its arrays and gives dense and sparse attention weights one interface. No drawing, no
// page state.

const HALF = { table: null };

/** {shape, data} of a packed array, data as Float32Array. */
export async function unpackArray(array) {
  const { shape, data } = await unpackRaw(array);
  return { shape, data: data instanceof Float32Array ? data : Float32Array.from(data) };
}

async function unpackRaw(array) {
  const packed = decodeBase64(array.data);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  return { shape: array.shape, data: decodeValues(array.type, planes) };
}

export function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

function decodeValues(type, planes) {
  if (type === "float32") return joinFloat32(planes);
  const integers = joinUint16(planes);
  if (type === "uint16") return integers;
  if (type === "unit16") return Float32Array.from(integers, (n) => n / 65535);
  if (type === "float16") return Float32Array.from(integers, (n) => float16Table()[n]);
  throw new Error(`An array is of the type "${type}", which this page cannot read: create the file again.`);
}

function joinUint16(planes) {
  const n = planes.length >> 1;
  const out = new Uint16Array(n);
  for (let i = 0; i < n; i++) out[i] = planes[i] | (planes[n + i] << 8);
  return out;
}

function joinFloat32(planes) {
  const n = planes.length >> 2;
  const bits = new Uint32Array(n);
  for (let i = 0; i < n; i++) {
    bits[i] = planes[i] | (planes[n + i] << 8) | (planes[2 * n + i] << 16) | (planes[3 * n + i] << 24);
  }
  return new Float32Array(bits.buffer);
}

/** All 65536 float16 values: a lookup is faster than bit arithmetic. */
function float16Table() {
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

/** Dense weights of one layer, [H, Tq, Tk]. */
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

  /** f(q, k, weight) for every positive weight of a head, in rows from..to. */
  each(head, f, from = 0, to = this.Tq) {
    for (let q = from; q < to; q++) {
      const start = (head * this.Tq + q) * this.Tk;
      for (let k = 0; k < this.Tk; k++) if (this.data[start + k] > 0) f(q, k, this.data[start + k]);
    }
  }
}

/** The n largest weights of each row; all others count as 0. */
class SparseWeights {
  constructor(indices, weights, Tk) {
    [this.H, this.Tq, this.n] = indices.shape;
    this.Tk = Tk;
    this.indices = indices.data;
    this.data = weights.data;
    this.sparse = true;
  }

  at(head, q, k) {
    const start = (head * this.Tq + q) * this.n;
    for (let i = start; i < start + this.n; i++) if (this.indices[i] === k && this.data[i] > 0) return this.data[i];
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
      for (let i = start; i < start + this.n; i++) if (this.data[i] > 0) f(q, this.indices[i], this.data[i]);
    }
  }
}

/** An open document: its JSON as `.json`, its layers with decoded weights. */
class Doc {
  constructor(json) {
    this.json = json;
    this.layers = (json.layers ?? []).map((layer) => ({ ...layer, masked_heads: layer.masked_heads ?? [], attention: null }));
    this.byPath = new Map(this.layers.map((layer) => [layer.path, layer]));
    this.qkvCache = new Map();
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
    layer.attention ??= await this.decodeWeights(layer);
    return layer.attention;
  }

  async decodeWeights(layer) {
    if (layer.weights) return new DenseWeights(await unpackArray(layer.weights));
    const [indices, weights] = await Promise.all([unpackRaw(layer.sparse.indices), unpackArray(layer.sparse.weights)]);
    return new SparseWeights(indices, weights, this.tokens(layer.keys).length);
  }

  /** {q, k, v, bias, D, Hkv}: queries [H, Tq, D], keys and values [Hkv, Tk, D]; null where the document has none. */
  async vectors(layer) {
    if (layer.additive || !layer.q || !layer.k || !layer.v) return null;
    if (!this.qkvCache.has(layer.path)) this.qkvCache.set(layer.path, decodeQkv(layer));
    return this.qkvCache.get(layer.path);
  }

  /** Statistics of a head, {description, values}, or null. */
  headStats(path, head) {
    return this.json.head_stats?.heads?.find((entry) => entry.path === path && entry.head === head) ?? null;
  }

  /** The input: the source of a translation, else the only side; null before the first request. */
  get inputSide() {
    return this.side("source") ?? Object.values(this.json.sides ?? {})[0] ?? null;
  }

  /** The input text, "" if there is none. */
  get sourceText() {
    return this.inputSide?.text ?? this.json.title ?? "";
  }

  get targetText() {
    return this.side("target")?.text ?? this.json.output?.text ?? "";
  }

  /** True if there is a translation, a prediction or labels. */
  get hasOutput() {
    return Boolean(this.side("target") || this.json.output || this.json.labels);
  }

  /** True for translation models, and for documents without a model kind. */
  get translates() {
    return (this.json.model?.kind ?? "seq2seq") === "seq2seq" && !this.json.output;
  }
}

async function decodeQkv(layer) {
  const [q, k, v, bias] = await Promise.all(
    [layer.q, layer.k, layer.v, layer.bias].map((array) => (array ? unpackArray(array) : null)),
  );
  return { q: q.data, k: k.data, v: v.data, bias: bias?.data ?? null, D: q.shape[2], Hkv: k.shape[0] };
}

/** Open a document and decode all weights. */
export async function openDocument(json) {
  const { format, version } = json ?? {};
  if (format !== "attent-trace") throw new Error("its format must be attent-trace: this is not a document of attent look.");
  if (version !== 1) throw new Error(`its version must be 1, but is ${version}: create it again with this version of attent.`);
  const doc = new Doc(json);
  await Promise.all(doc.layers.map((layer) => doc.weights(layer)));
  return doc;
}

/** True if a layer's rows can be labeled by the output token or by the decoder input of the same step. */
export const hasDecoderInput = (doc, layer) => Boolean(doc.side("decoder_input")) && ["target", "decoder_input"].includes(layer.queries);

/** Label a layer's rows by output token or decoder input; "auto": by decoder input for heads that align better there. */
export function setRowLabels(doc, layer, head, rows) {
  if (!hasDecoderInput(doc, layer)) return;
  const { aligned_on_input: onInput = 0, aligned_on_output: onOutput = 0 } = doc.headStats(layer.path, head)?.values ?? {};
  const late = layer.kind === "cross" && onInput > onOutput;
  layer.queries = rows === "auto" ? (late ? "decoder_input" : "target") : rows;
}

const UNIFORM_ENTROPY = 0.9; // of the maximum

/** False if the statistics show that no cross-attention head has left the uniform distribution of the first steps. */
export function isFormed(doc) {
  const cross = (doc.json.head_stats?.heads ?? []).filter(({ path }) => path.endsWith(".cross_attn"));
  return !cross.length || cross.some(({ values }) => !(values.normalized_entropy >= UNIFORM_ENTROPY));
}

/** "encoder self-attention", "decoder self-attention" or "cross-attention". */
export function groupName(layer) {
  if (layer.kind === "cross") return "cross-attention";
  return ["encoder", "decoder"].includes(layer.stack) ? `${layer.stack} self-attention` : "self-attention";
}

/** Layers by stack and kind: [{key, name, kind, stack, layers}]. */
export function groupLayers(doc) {
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
