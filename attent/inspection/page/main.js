// The page itself: opens the document, makes the state that all share, shows the tabs and listens to the keyboard.
// What a tab shows is its own.

import { h, clear } from "./dom.js";
import { createStore } from "./store.js";
import { openDocument, groupsOf } from "./data.js";
import { firstLook, fitting, followAddress, readAddress } from "./address.js";
import { keyOf, makeActions } from "./ask.js";
import { applyTheme, effectiveTheme, keptTheme, masthead, sentences, setTheme } from "./header.js";
import { headsView } from "./heads.js";
import { equationView } from "./equation.js";
import { decodingView } from "./decoding.js";
import { guessesView } from "./guesses.js";
import { propertiesView } from "./properties.js";
import { positionsView } from "./positions.js";
import { silenceView } from "./silence.js";

const TABS = [
  { id: "heads", label: "Heads", view: headsView, has: () => true },
  { id: "equation", label: "Equation", view: equationView, has: (json) => (json.layers ?? []).length > 0 },
  { id: "decoding", label: "Decoding", view: decodingView, has: (json) => json.decoding },
  { id: "guesses", label: "Guesses", view: guessesView, has: (json) => json.guesses },
  { id: "properties", label: "What heads do", view: propertiesView, has: (json) => json.properties || json.ablation },
  { id: "positions", label: "Positions", view: positionsView, has: (json) => (json.positions ?? []).length > 0 },
  { id: "silence", label: "Silence", view: silenceView, has: (json) => json.live && json.layers?.length },
];

// --- the tabs ---

function tabs(store, actions) {
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  const panels = h("main", {});
  const made = TABS.map((tab) => makeTab(store, actions, tab));
  list.append(...made.map(({ button }) => button));
  panels.append(...made.map(({ panel }) => panel));
  list.addEventListener("keydown", (event) => walkTabs(event, store, made));
  store.on(["tab", "doc"], () => showTab(store, made));
  return { list, panels, start: () => showTab(store, made) };
}

function makeTab(store, actions, { id, label, view, has }) {
  const button = h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}` }, label);
  button.addEventListener("click", () => store.set({ tab: id }));
  const panel = h("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true });
  return { id, button, panel, has, view: null, isShown: false, make: () => view(store, actions) };
}

/** Views are made when first shown: what nobody opens costs nothing. */
function showTab(store, made) {
  const { doc, tab } = store.get();
  for (const entry of made) {
    const there = Boolean(entry.has(doc.json));
    const chosen = there && entry.id === tab;
    entry.button.hidden = !there;
    entry.button.setAttribute("aria-selected", String(chosen));
    entry.button.tabIndex = chosen ? 0 : -1;
    turn(entry, chosen);
  }
  if (!made.some((entry) => entry.isShown)) store.set({ tab: "heads" });
}

function turn(entry, chosen) {
  if (chosen === entry.isShown) return;
  entry.isShown = chosen;
  entry.panel.hidden = !chosen;
  if (chosen && !entry.view) {
    entry.view = entry.make();
    entry.panel.append(entry.view.element);
  }
  entry.view?.[chosen ? "show" : "hide"]?.();
}

function walkTabs(event, store, made) {
  const there = made.filter((entry) => !entry.button.hidden);
  const at = there.findIndex((entry) => entry.id === store.get().tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: there.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  const next = there[(to + there.length) % there.length];
  store.set({ tab: next.id });
  next.button.focus();
}

// --- keys ---

/** Arrows walk through layers and heads wherever they are not needed for something else. */
function listenToKeys(store) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input, textarea, select, [role=listbox], dialog, [data-own-keys]")) return;
    if (event.key === "Escape") store.set({ query: null, pinnedKey: null, hover: null });
    else if (event.key === "?") document.getElementById("key-help").showModal();
    else if (["heads", "equation"].includes(store.get().tab) && walkHeads(store, event.key)) event.preventDefault();
  });
}

/** Up and down: layers of the same kind. Left and right: heads, and past the last one the next kind. */
function walkHeads(store, key) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  const { doc, path, heads } = store.get();
  if (!step || !path) return false;
  const groups = groupsOf(doc);
  const at = groups.findIndex((group) => group.layers.some((layer) => layer.path === path));
  const row = groups[at].layers.findIndex((layer) => layer.path === path);
  const to = headAt(groups, at, row + step[0], heads[0] + step[1], step[1] !== 0);
  if (to) store.set({ ...fitting(doc, { ...store.get(), path: to.path, heads: [to.head] }), hover: null });
  return true;
}

function headAt(groups, at, row, head, sideways) {
  const there = groups[at].layers[row];
  const beyond = head < 0 ? -1 : sideways && head >= (there?.heads ?? Infinity) ? 1 : 0;
  const group = groups[at + beyond];
  const layer = group?.layers[beyond ? Math.min(row, group.layers.length - 1) : row];
  if (!layer) return null;
  return { path: layer.path, head: beyond < 0 ? layer.heads - 1 : beyond > 0 ? 0 : Math.min(head, layer.heads - 1) };
}

// --- opening ---

async function boot() {
  const page = document.getElementById("page");
  applyTheme(keptTheme());
  try {
    const doc = await openDocument(JSON.parse(document.getElementById("document").textContent));
    furnishPage(page, doc);
  } catch (error) {
    clear(page).append(h("p", { class: "notice", role: "alert" }, `This page could not be opened: ${error.message}`));
    throw error;
  }
}

function furnishPage(page, doc) {
  const text = doc.readSide?.text ?? "";
  const silence = [];
  const store = createStore({
    doc, base: doc, ...firstLook(doc), hover: null, tab: "heads", rows: "auto", comparing: false, text, silence, prefix: [], beamSize: null, to: doc.json.languages?.[0] ?? null,
    baseQuestion: keyOf({ text, prefix: [], silence }), busy: false, error: null, theme: effectiveTheme(keptTheme()),
  });
  store.set(readAddress(doc, store.get(), TABS));
  const actions = makeActions(store);
  const shell = tabs(store, actions);
  clear(page).append(masthead(store), ...sentences(store, actions), shell.list, shell.panels);
  page.setAttribute("aria-busy", "false");
  store.on(["busy"], ({ busy }) => {
    page.classList.toggle("busy", busy);
    page.setAttribute("aria-busy", String(busy));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(store, keptTheme()));
  shell.start();
  store.flush();
  if (doc.json.live && !text) document.getElementById("sentence").focus();
  const address = location.hash;
  followAddress(store, TABS);
  askAgain(store, actions, address);
  listenToKeys(store);
  performance.mark("attent-ready");
}

/** A live page that is opened by its address, or loaded again, asks for the sentence in it. */
async function askAgain(store, actions, address) {
  const text = new URLSearchParams(address.slice(1)).get("text");
  if (!text || !store.get().doc.json.live || store.get().doc.layers.length) return;
  document.getElementById("sentence").value = text;
  await actions.ask({ text });
  store.set(readAddress(store.get().doc, store.get(), TABS, address));
}

boot();
