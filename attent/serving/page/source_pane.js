// The source text: a textarea over a layer with the same words, which gives it its height and shows highlights.

import { byId } from "./dom.js";
import { countCharacters } from "./live.js";
import { renderWords } from "./words.js";

const LONG_TEXT = 400; // characters from which both sides use smaller type

export function setUpSourcePane(store, translateNow) {
  const box = byId("source-text");
  const clear = byId("clear");

  function draw({ text, info }) {
    if (box.value !== text) box.value = text;
    renderWords(byId("source-words"), text);
    byId("source-words").append("\u200b"); // gives a last empty line its height
    const count = countCharacters(text);
    const limit = info.limits.characters;
    byId("count").textContent = `${count.toLocaleString("en")} / ${limit.toLocaleString("en")}`;
    byId("count").classList.toggle("over", count > limit);
    byId("translator").classList.toggle("long", count > LONG_TEXT);
    clear.hidden = !text;
  }

  box.addEventListener("input", () => store.set({ text: box.value }));
  clear.addEventListener("click", () => {
    store.set({ text: "" });
    box.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    translateNow();
  });
  store.on(["text"], draw);
  draw(store.get());
  box.focus({ preventScroll: true });
}
