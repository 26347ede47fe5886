// Color scales for canvas drawing, interpolated in OKLab between custom properties of the style sheet, so that they
// follow the light and dark themes.

export const OVERLAYS = 6;
const LEVELS = 256;
const SCALE_CACHE = new Map();
const COLOR_CACHE = new Map();

/** Level of a weight on the scale; the exponent below 1 makes small weights visible. */
export function heatLevel(weight) {
  return weight <= 0 ? 0 : Math.min(LEVELS - 1, Math.round(Math.pow(weight, 0.65) * (LEVELS - 1)));
}

/** The weight at full strength: 1, so that heads of a text compare; for patches, whose weights are small, the largest of the layer. */
export function maxWeight(doc, layer) {
  if (!doc.side(layer.keys)?.image) return 1;
  layer.most ??= layer.attention.data.reduce((most, weight) => Math.max(most, weight), 1e-6);
  return layer.most;
}

/** 256 colors as 32-bit numbers for ImageData, for weights 0 to 1 of the n-th selected head. */
export function heatScale(n = 0) {
  return colorScale("--raised", `--head-${n % OVERLAYS}`);
}

/** 256 colors between two custom properties. */
export function colorScale(from, to) {
  const ends = [from, to].map(cssColor);
  const key = ends.join("|");
  if (!SCALE_CACHE.has(key)) SCALE_CACHE.set(key, makeScale(...ends));
  return SCALE_CACHE.get(key);
}

/** A custom property as [red, green, blue], 0 to 255. Cached: reading it costs a layout. */
export function cssColor(name) {
  if (!COLOR_CACHE.has(name)) COLOR_CACHE.set(name, computeColor(name));
  return COLOR_CACHE.get(name);
}

/** Call when the theme changes. */
export function clearColorCache() {
  COLOR_CACHE.clear();
}

function computeColor(name) {
  const probe = document.createElement("i");
  probe.style.setProperty("color", `var(${name})`);
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function makeScale(from, to) {
  const [a, b] = [toLab(from), toLab(to)];
  const out = new Uint32Array(LEVELS);
  for (let level = 0; level < LEVELS; level++) {
    const t = level / (LEVELS - 1);
    const [red, green, blue] = fromLab(a.map((x, i) => x + (b[i] - x) * t));
    out[level] = 0xff000000 | (blue << 16) | (green << 8) | red; // little-endian
  }
  return out;
}

function toLab(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const n = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * n,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * n,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * n,
  ];
}

function fromLab([L, A, B]) {
  const l = (L + 0.3963377774 * A + 0.2158037573 * B) ** 3;
  const m = (L - 0.1055613458 * A - 0.0638541728 * B) ** 3;
  const n = (L - 0.0894841775 * A - 1.291485548 * B) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * n,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * n,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * n,
  ];
  return linear.map((c) => {
    const x = Math.min(1, Math.max(0, c));
    return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
  });
}
