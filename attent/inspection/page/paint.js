// Drawing helpers shared by the views: diverging colors for matrices, number formats, buttons and pickers.

import { h, clear } from "./dom.js";
import { cssColor } from "./colors.js";

/** Paint a matrix, one pixel per number; `most` is the absolute value at full strength. */
export function paintMatrix(canvas, numbers, rows, columns, most) {
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  if (!rows || !columns) return;
  const image = new ImageData(columns, rows);
  const colors = [cssColor("--positive"), cssColor("--negative")];
  for (let i = 0; i < rows * columns; i++) paintPixel(image.data, 4 * i, numbers[i], most, colors);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function paintPixel(pixels, at, number, most, [above, below]) {
  const [red, green, blue] = number < 0 ? below : above;
  pixels[at] = red;
  pixels[at + 1] = green;
  pixels[at + 2] = blue;
  pixels[at + 3] = 255 * paintStrength(number, most);
}

/** Opacity from 0 to 1; the exponent makes small values visible. */
export function paintStrength(number, most) {
  return most > 0 && !Number.isNaN(number) ? Math.min(1, Math.abs(number) / most) ** 0.7 : 0;
}

export function maxAbs(numbers) {
  let most = 0;
  for (const number of numbers) if (Math.abs(number) > most && Number.isFinite(number)) most = Math.abs(number);
  return most;
}

/** 1.2345 -> "1.23", -0.5 -> "−0.50" with a minus sign of digit width. */
export function formatDecimal(number, digits = 2) {
  if (number === -Infinity) return "−∞";
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** A probability with enough digits: "93.1%", "0.4%", "0.002%". */
export function formatShare(number) {
  if (!(number > 0)) return "0%";
  if (number < 0.00001) return "<0.001%";
  return `${(100 * number).toFixed(number < 0.001 ? 3 : 1)}%`;
}

/** "rtl" if the first letter is Hebrew, Arabic or a related script, else "ltr". */
export function textDirection(text) {
  const letter = /\p{L}/u.exec(text ?? "")?.[0] ?? "";
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]|[\ud802-\ud803\ud83a]/.test(letter) ? "rtl" : "ltr";
}

/** A select with its label: {frame, fill(choices, value)}; choices are {value, label} or {group, choices}. */
export function picker(label, name, listener) {
  const select = h("select", { class: "select", name, on: { change: () => listener(select.value) } });
  const fill = (choices, value) => {
    clear(select).append(...choices.map(pickerChoice));
    select.value = value;
  };
  return { frame: h("label", { class: "field" }, label, select), fill };
}

function pickerChoice({ group, choices, value, label }) {
  if (group === undefined) return h("option", { value }, label);
  return h("optgroup", { label: group }, choices.map(pickerChoice));
}

/** Call pointed(row, column) for the pixel under the pointer, pointed(null, null) when it leaves. */
export function onPointer(canvas, pointed) {
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * canvas.width);
    const row = Math.floor(((event.clientY - box.top) / box.height) * canvas.height);
    pointed(paintWithin(row, canvas.height), paintWithin(column, canvas.width));
  });
  canvas.addEventListener("pointerleave", () => pointed(null, null));
}

function paintWithin(index, count) {
  return Math.max(0, Math.min(count - 1, index));
}

/** A button: makeButton("eq-more", listener, "Show more"); `attributes`: further attributes. */
export function makeButton(name, listener, content, attributes = {}) {
  return h("button", { class: name, type: "button", ...attributes, on: { click: listener, ...attributes.on } }, content);
}

/** Width of a bar relative to the longest, as a style. */
export function barStyle(number, most) {
  return { width: `${most > 0 ? Math.min(100, (100 * Math.abs(number)) / most) : 0}%` };
}
