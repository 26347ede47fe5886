// A recording as its spectrogram, tinted by attention, above the weights of every query over time. A word plays the part
// of the recording that it attends to.

import { h, clear, formatPercent, isTouch, quoteToken } from "./dom.js";
import { maxWeight } from "./colors.js";
import { decodeBase64 } from "./data.js";
import { attendedSpan, formatSpan, getFocus } from "./description.js";
import { cellsImage, fillLabels, labelTexts, longest } from "./heatmap.js";
import { imagePanel, queryIndex } from "./image.js";
import { pinToken } from "./lines.js";
import { makeButton } from "./paint.js";

const TICK_WIDTH = 56; // pixels between two labels of the time axis, at least
const LABEL_WIDTH = 30;
const TICK_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10];
const SHORTEST_PLAYED = 0.3; // seconds; a shorter span is played with its surroundings
const HEADER_BYTES = 44; // of a WAV file

/** {element, build(), draw(), focus()}, like linesPanel. */
export function soundPanel(store) {
  const picture = imagePanel(store, "Recording");
  const { element, parts } = picture;
  const axis = h("div", { class: "sound-axis", "aria-hidden": "true" });
  const labels = h("div", { class: "sound-labels", "aria-hidden": "true" });
  const canvas = h("canvas", { "aria-hidden": "true" });
  const [row, column] = [1, 2].map(() => h("div", { class: "map-band", hidden: true }));
  const field = h("div", { class: "sound-field" }, canvas, row, column);
  const cursor = h("div", { class: "sound-cursor", hidden: true });
  const player = makePlayer(cursor, (playing) => { whole.textContent = playing ? "■ Stop" : "▶ Play"; });
  const whole = makeButton("button", () => player.toggle(sideAudio(store)), "▶ Play");
  const part = makeButton("button", () => playSpan(), "", { hidden: true });
  element.classList.add("sound");
  parts.frame.append(cursor);
  parts.foot.prepend(whole, part);
  parts.frame.before(parts.foot);
  parts.frame.after(axis, h("div", { class: "sound-map" }, labels, field));

  function build() {
    const { doc, path } = store.get();
    const layer = doc.layer(path);
    const queries = doc.side(layer.queries);
    const rowHeight = queries.audio ? 0 : Math.max(11, Math.min(22, 480 / queries.tokens.length));
    const left = queries.audio ? 44 : Math.min(112, 14 + longest(labelTexts(doc, layer.queries), Math.min(14, rowHeight - 2), element));
    element.style.setProperty("--sound-left", `${left}px`);
    element.style.setProperty("--map-cell", `${rowHeight}px`);
    element.style.setProperty("--map-font", `${Math.min(14, rowHeight - 2)}px`);
    const width = parts.frame.clientWidth || 600;
    field.style.setProperty("height", `${queries.audio ? Math.min(width, 448) : rowHeight * queries.tokens.length}px`);
    fillTicks(axis, layer.attention.Tk * sideAudio(store).step, width, "left");
    if (queries.audio) fillTicks(clear(labels), layer.attention.Tq * queries.audio.step, Math.min(width, 448), "top");
    else fillLabels(labels, doc, layer.queries, 0, queries.tokens.length, rowHeight, "top");
    picture.build();
    const hint = `${isTouch() ? "Tap" : "Click"} a word to hear what it attends to`;
    if (!queries.audio) parts.words.append(h("span", { class: "quiet-text small" }, hint));
    draw();
  }

  function draw() {
    const { doc, path, heads } = store.get();
    const layer = doc.layer(path);
    const { Tq, Tk } = layer.attention;
    [canvas.width, canvas.height] = [Tk, Tq];
    canvas.style.setProperty("image-rendering", Math.max(Tk, Tq) > field.clientWidth ? "auto" : "pixelated"); // smaller: no column is lost
    canvas.getContext("2d").drawImage(cellsImage(layer.attention, heads, maxWeight(doc, layer), 0, Tq, 0, Tk), 0, 0);
    focus();
  }

  function focus() {
    picture.focus();
    const state = store.get();
    const layer = state.doc.layer(state.path);
    const now = getFocus(state);
    const query = now?.side === "keys" ? null : queryIndex(state.doc, layer, now);
    const key = now?.side === "keys" ? now.index : now?.other ?? null;
    parts.canvas.hidden = query === null && !state.doc.side(layer.queries).audio; // the map shows all words
    placeSpan(row, "top", "height", query, 1, layer.attention.Tq);
    placeSpan(column, "left", "width", key, 1, layer.attention.Tk);
    const span = query === null ? null : attendedSpan(state.doc, layer, state.heads[0], query);
    placeSpan(parts.best, "left", "width", span && span.first, span && span.count, layer.attention.Tk);
    parts.note.textContent = span ? `${formatPercent(span.share)} of the weight on ${formatSpan(span)}` : "";
    part.hidden = state.query === null || !span;
    const name = state.doc.side(layer.queries).audio ? "" : ` for ${quoteToken(state.doc.tokens(layer.queries)[query])}`;
    if (span) part.textContent = `▶ Play ${formatSpan(span)}${name}`;
  }

  function playSpan() {
    const { doc, path, heads, query } = store.get();
    const { from, to } = attendedSpan(doc, doc.layer(path), heads[0], query);
    const around = Math.max(0, (SHORTEST_PLAYED - (to - from)) / 2);
    player.play(sideAudio(store), from - around, to + around);
  }

  const playPinned = () => (store.get().query === null ? player.stop() : playSpan());
  parts.words.addEventListener("click", playPinned); // after the image panel has pinned the word
  bindSoundMap(store, field, playPinned);
  new ResizeObserver(() => { if (!element.hidden && element.clientWidth) requestAnimationFrame(build); }).observe(element);
  return { element, build, draw, focus };
}

const sideAudio = (store) => Object.values(store.get().doc.json.sides).find((side) => side.audio).audio;

/** Place a marker over `count` of `total` cells. */
function placeSpan(element, edge, size, first, count, total) {
  element.hidden = first === null;
  if (element.hidden) return;
  element.style.setProperty(edge, `${(100 * first) / total}%`);
  element.style.setProperty(size, `${(100 * count) / total}%`);
}

/** Seconds along an axis of so many pixels. */
function fillTicks(axis, seconds, pixels, edge) {
  const step = TICK_STEPS.find((size) => (size / seconds) * pixels >= TICK_WIDTH) ?? 20;
  const count = Math.floor((seconds / step) * (1 - LABEL_WIDTH / pixels)) + 1; // the last label must fit
  const times = Array.from({ length: count }, (_, i) => i * step);
  const text = (time) => `${time.toFixed(step < 1 ? 1 : 0)} s`;
  axis.replaceChildren(...times.map((time) => h("span", { style: { [edge]: `${(100 * time) / seconds}%` } }, text(time))));
}

function bindSoundMap(store, field, playPinned) {
  const cellAt = (event) => {
    const { Tq, Tk } = store.get().doc.layer(store.get().path).attention;
    const box = field.getBoundingClientRect();
    const place = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
    return { index: place((event.clientY - box.top) / box.height, Tq), other: place((event.clientX - box.left) / box.width, Tk) };
  };
  field.addEventListener("pointermove", (event) => store.set({ hover: { side: "queries", ...cellAt(event) } }));
  field.addEventListener("pointerleave", () => store.set({ hover: null }));
  field.addEventListener("click", (event) => {
    pinToken(store, "queries", cellAt(event).index);
    playPinned();
  });
}

/** {play(audio, from, to), toggle(audio), stop()}: plays through Web Audio, which needs no URL that a policy must allow. */
function makePlayer(cursor, changed) {
  let [context, buffer, source] = [null, null, null];

  function stop() {
    source?.stop();
    source = null;
    cursor.hidden = true;
    changed(false);
  }

  function play(audio, from, to) {
    stop();
    context ??= new AudioContext();
    context.resume();
    buffer ??= makeBuffer(context, audio.src);
    const [start, end] = [Math.max(0, from), Math.min(buffer.duration, to)];
    const playing = context.createBufferSource();
    source = playing;
    playing.buffer = buffer;
    playing.connect(context.destination);
    playing.onended = () => { if (source === playing) stop(); };
    playing.start(0, start, end - start);
    const begun = context.currentTime;
    const move = () => {
      if (source !== playing) return;
      cursor.style.setProperty("left", `${(100 * Math.min(end, start + context.currentTime - begun)) / audio.seconds}%`);
      requestAnimationFrame(move);
    };
    cursor.hidden = false;
    changed(true);
    move();
  }

  return { play, stop, toggle: (audio) => (source ? stop() : play(audio, 0, audio.seconds)) };
}

/** Decode a data URL of a WAV file of 16-bit mono samples. */
function makeBuffer(context, src) {
  const bytes = decodeBase64(src.slice(src.indexOf(",") + 1));
  const samples = new Int16Array(bytes.buffer, HEADER_BYTES);
  const buffer = context.createBuffer(1, samples.length, new DataView(bytes.buffer).getUint32(24, true));
  buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
  return buffer;
}
