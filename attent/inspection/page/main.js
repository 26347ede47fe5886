// Entry point: opens the document, creates the shared state and the tabs, and handles the keyboard.

import { h, clear } from "./dom.js";
import { createStore } from "./store.js";
import { openDocument, groupLayers } from "./data.js";
import { defaultSelection, clampSelection, syncUrl, readUrl } from "./url_state.js";
import { requestKey, makeActions } from "./requests.js";
import { applyTheme, effectiveTheme, storedTheme, pageHeader, sentences, setTheme } from "./header.js";
import { headsView } from "./heads.js";
import { equationView } from "./equation.js";
import { decodingView } from "./decoding.js";
import { predictionsView } from "./predictions.js";
import { headStatsView } from "./head_stats.js";
import { positionsView } from "./positions.js";
import { maskingView } from "./masking.js";

const TABS = [
  { id: "heads", label: "Heads", view: headsView, has: () => true },
  { id: "equation", label: "Equation", view: equationView, has: (json) => (json.layers ?? []).length > 0 },
  { id: "decoding", label: "Decoding", view: decodingView, has: (json) => json.decoding },
  { id: "predictions", label: "Predictions", view: predictionsView, has: (json) => json.predictions },
  { id: "head_stats", label: "Head statistics", view: headStatsView, has: (json) => json.head_stats || json.ablation },
  { id: "positions", label: "Positions", view: positionsView, has: (json) => (json.positions ?? []).length > 0 },
  { id: "masking", label: "Masking", view: maskingView, has: (json) => json.live && json.layers?.length },
];

// --- the tabs ---

function tabs(store, actions) {
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
  const panels = h("main", {});
  const made = TABS.map((tab) => makeTab(store, actions, tab));
  list.append(...made.map(({ button }) => button));
  panels.append(...made.map(({ panel }) => panel));
  list.addEventListener("keydown", (event) => moveTab(event, store, made));
  store.on(["tab", "doc"], () => showTab(store, made));
  return { list, panels, start: () => showTab(store, made) };
}

function makeTab(store, actions, { id, label, view, has }) {
  const button = h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}` }, label);
  button.addEventListener("click", () => store.set({ tab: id }));
  const panel = h("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true });
  return { id, button, panel, has, view: null, isShown: false, make: () => view(store, actions) };
}

/** Views are created when first shown. */
function showTab(store, made) {
  const { doc, tab } = store.get();
  for (const entry of made) {
    const available = Boolean(entry.has(doc.json));
    const selected = available && entry.id === tab;
    entry.button.hidden = !available;
    entry.button.setAttribute("aria-selected", String(selected));
    entry.button.tabIndex = selected ? 0 : -1;
    setShown(entry, selected);
  }
  if (!made.some((entry) => entry.isShown)) store.set({ tab: "heads" });
}

function setShown(entry, selected) {
  if (selected === entry.isShown) return;
  entry.isShown = selected;
  entry.panel.hidden = !selected;
  if (selected && !entry.view) {
    entry.view = entry.make();
    entry.panel.append(entry.view.element);
  }
  entry.view?.[selected ? "show" : "hide"]?.();
}

function moveTab(event, store, made) {
  const visible = made.filter((entry) => !entry.button.hidden);
  const at = visible.findIndex((entry) => entry.id === store.get().tab);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: visible.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  const next = visible[(to + visible.length) % visible.length];
  store.set({ tab: next.id });
  next.button.focus();
}

// --- keys ---

/** Arrow keys move through layers and heads unless the focused element uses them. */
function bindKeys(store) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input, textarea, select, [role=listbox], dialog, [data-own-keys]")) return;
    if (event.key === "Escape") store.set({ query: null, pinnedKey: null, hover: null });
    else if (event.key === "?") document.getElementById("key-help").showModal();
    else if (["heads", "equation"].includes(store.get().tab) && moveHead(store, event.key)) event.preventDefault();
  });
}

/** Up and down: layers of the same group. Left and right: heads, and beyond the last head the next group. */
function moveHead(store, key) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  const { doc, path, heads } = store.get();
  if (!step || !path) return false;
  const groups = groupLayers(doc);
  const at = groups.findIndex((group) => group.layers.some((layer) => layer.path === path));
  const row = groups[at].layers.findIndex((layer) => layer.path === path);
  const to = findHead(groups, at, row + step[0], heads[0] + step[1], step[1] !== 0);
  if (to) store.set({ ...clampSelection(doc, { ...store.get(), path: to.path, heads: [to.head] }), hover: null });
  return true;
}

function findHead(groups, at, row, head, sideways) {
  const current = groups[at].layers[row];
  const beyond = head < 0 ? -1 : sideways && head >= (current?.heads ?? Infinity) ? 1 : 0;
  const group = groups[at + beyond];
  const layer = group?.layers[beyond ? Math.min(row, group.layers.length - 1) : row];
  if (!layer) return null;
  return { path: layer.path, head: beyond < 0 ? layer.heads - 1 : beyond > 0 ? 0 : Math.min(head, layer.heads - 1) };
}

// --- opening ---

async function boot() {
  const page = document.getElementById("page");
  applyTheme(storedTheme());
  try {
    const doc = await openDocument(JSON.parse(document.getElementById("document").textContent));
    buildPage(page, doc);
  } catch (error) {
    clear(page).append(h("p", { class: "notice", role: "alert" }, `This page could not be opened: ${error.message}`));
    throw error;
  }
}

function buildPage(page, doc) {
  const text = doc.inputSide?.text ?? "";
    const store = createStore({
    doc, base: doc, ...defaultSelection(doc), hover: null, tab: "heads", rows: "auto", comparing: false, text, maskedParts: [], prefix: [], beamSize: null, to: doc.json.languages?.[0] ?? null,
    baseKey: requestKey({ text, prefix: [], masked_parts: [] }), busy: false, error: null, theme: effectiveTheme(storedTheme()),
  });
  store.set(readUrl(doc, store.get(), TABS));
  const actions = makeActions(store);
  const shell = tabs(store, actions);
  clear(page).append(pageHeader(store), ...sentences(store, actions), shell.list, shell.panels);
  page.setAttribute("aria-busy", "false");
  store.on(["busy"], ({ busy }) => {
    page.classList.toggle("busy", busy);
    page.setAttribute("aria-busy", String(busy));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(store, storedTheme()));
  shell.start();
  store.flush();
  if (doc.json.live && !text) document.getElementById("sentence").focus();
  const address = location.hash;
  syncUrl(store, TABS);
  restoreFromUrl(store, actions, address);
  bindKeys(store);
  performance.mark("attent-ready");
}

/** A live page that is reloaded, or opened by a link of the translation page, requests the sentence in its URL. */
async function restoreFromUrl(store, actions, address) {
  const parameters = new URLSearchParams(address.slice(1));
  const [text, to] = [parameters.get("text"), parameters.get("to")];
  const { live, languages = [] } = store.get().doc.json;
  if (!text || !live || store.get().doc.layers.length) return;
  document.getElementById("sentence").value = text;
  await actions.ask({ text, ...(languages.includes(to) ? { to } : {}) });
  store.set(readUrl(store.get().doc, store.get(), TABS, address));
}

boot();
