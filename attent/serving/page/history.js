// The last translations, kept in this browser only. A translation is added when it has been shown for two seconds.

import { byId, h, readStored, writeStored } from "./dom.js";

const STORED = "attent-history";
const MAX_ENTRIES = 20;
const SETTLED_MS = 2000;
const MIN_CHARACTERS = 3;

export function setUpHistory(store) {
  let entries = readStored(STORED, []);
  let timer = 0;

  function update(changed) {
    entries = changed.slice(0, MAX_ENTRIES);
    writeStored(STORED, entries);
    draw();
  }

  /** A text that continues the last one replaces it: it was still being typed. */
  function add({ sourceText, text, source, target }) {
    const entry = { sourceText: sourceText.trim(), text, source, target };
    const isSamePair = (other) => other.source === source && other.target === target;
    const others = entries.filter((other) => !isSamePair(other) || other.sourceText !== entry.sourceText);
    const [last] = others;
    const continues = last && isSamePair(last) && entry.sourceText.startsWith(last.sourceText);
    update([entry, ...others.slice(continues ? 1 : 0)]);
  }

  function draw() {
    const { languages } = store.get().info;
    const nameOf = (tag) => languages[tag] ?? tag;
    byId("history-count").textContent = entries.length || "";
    byId("clear-history").hidden = !entries.length;
    byId("history").replaceChildren(...entries.map(({ sourceText, text, source, target }) => h("li", {},
      h("button", { type: "button", class: "entry", on: { click: () => restore(source, target, sourceText) } },
        h("span", { class: "muted" }, `${nameOf(source)} → ${nameOf(target)}`),
        h("span", { lang: source, dir: "auto" }, sourceText),
        h("span", { lang: target, dir: "auto" }, text)))));
  }

  function restore(source, target, text) {
    const isServed = store.get().info.directions.some((each) => each.source === source && each.target === target);
    store.set({ text, ...(isServed ? { source, target } : {}) });
    byId("source-text").focus();
    scrollTo({ top: 0 });
  }

  store.on(["translation", "text"], ({ translation, text }) => {
    clearTimeout(timer);
    if (!translation?.text || translation.sourceText !== text || text.trim().length < MIN_CHARACTERS) return;
    timer = setTimeout(() => add(translation), SETTLED_MS);
  });
  byId("clear-history").addEventListener("click", () => update([]));
  draw();
}
