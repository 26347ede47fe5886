// Switch parts of the model off and see what becomes of the translation: heads, whole sub-layers, whole layers. Only
// on the live page, as the model has to run again; that is asked of the server through the actions.

import { h, clear, shownDifference } from "./dom.js";
import { groupsOf } from "./data.js";

const PAUSE = 250; // milliseconds: a person who presses three switches asks one question

const REDDER = "The redder a part, the more BLEU it cost to silence it.";
const INTRO = "Press a head to switch it off: it adds nothing to the words then, and the sentence is";

export function silenceView(store, actions) {
  const parts = h("div", { class: "silence-parts" });
  const now = h("aside", { class: "silence-now", "aria-live": "polite" });
  const again = store.get().doc.translates ? "translated" : "read";
  const intro = h("p", { class: "quiet-text" }, `${INTRO} ${again} again.`);
  const element = h("div", {}, intro, h("br", {}), h("div", { class: "silence" }, parts, now));
  let [timer, wanted, isShown] = [null, null, false];

  function toggle(part) {
    const silence = wanted ?? store.get().silence;
    wanted = silence.includes(part) ? silence.filter((other) => other !== part) : [...silence, part];
    send();
  }

  function send() {
    markSwitches(parts, wanted);
    clearTimeout(timer);
    timer = setTimeout(() => {
      const silence = wanted;
      wanted = null;
      actions.ask({ silence });
    }, PAUSE);
  }

  function build() {
    if (!isShown) return;
    const { doc } = store.get();
    const key = doc.layers.map(({ path, heads }) => `${path}:${heads}`).join();
    if (parts.dataset.key !== key) {
      parts.dataset.key = key;
      clear(parts).append(...tablesOf(doc));
    }
    draw();
  }

  function draw() {
    if (!isShown) return;
    markSwitches(parts, wanted ?? store.get().silence);
    drawOutcome(now, store.get(), toggle, actions);
  }

  parts.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-part]");
    if (button) toggle(button.dataset.part);
  });
  store.on(["doc"], build);
  store.on(["silence", "busy", "base"], draw);
  return { element, show: () => { isShown = true; build(); }, hide: () => { isShown = false; } };
}

const blockOf = (path) => path.replace(/\.[^.]+$/, "");

function tablesOf(doc) {
  const costs = costsOf(doc.json.ablation);
  const stacks = new Map();
  for (const layer of doc.layers) stacks.set(blockOf(layer.path), layer);
  return [...groupsOf(doc).map((group) => headTable(group, costs)), ...blockTables([...stacks.entries()], costs)];
}

/** What each part costs in BLEU as a share of the dearest of its kind: the redder, the more it matters. */
function costsOf(ablation) {
  const priced = (entry) => [entry.part, { ...entry, lost: ablation.bleu - entry.bleu }];
  const lost = new Map((ablation?.parts ?? []).map(priced));
  const most = {};
  for (const { kind, lost: cost } of lost.values()) most[kind] = Math.max(most[kind] ?? 1e-6, cost);
  for (const entry of lost.values()) entry.share = Math.max(0, entry.lost / most[entry.kind]);
  return lost;
}

function headTable(group, costs) {
  const columns = Math.max(...group.layers.map((layer) => layer.heads));
  const heads = Array.from({ length: columns }, (_, head) => h("th", { scope: "col" }, head));
  const rows = group.layers.map((layer) => headRow(layer, `${group.name}, layer ${layer.layer}`, costs));
  const top = h("thead", {}, h("tr", {}, h("td", {}), heads, h("td", {})));
  return h("table", {}, h("caption", {}, group.name), top, h("tbody", {}, rows));
}

function headRow(layer, name, costs) {
  const cell = (head) => h("td", {}, partSwitch(`${layer.path}:${head}`, `${name}, head ${head}`, costs, head));
  const all = h("td", {}, partSwitch(layer.path, `${name}, all heads`, costs, "all"));
  const cells = Array.from({ length: layer.heads }, (_, head) => cell(head));
  return h("tr", {}, h("th", { scope: "row" }, layer.layer), cells, all);
}

/** Feed-forward and whole layers, the stacks side by side. */
function blockTables(blocks, costs) {
  const stacks = [...new Set(blocks.map(([, layer]) => layer.stack))];
  return stacks.map((stack) => {
    const own = blocks.filter(([, layer]) => layer.stack === stack);
    const rows = own.map(([block, layer]) => blockRow(block, layer, costs));
    return h("table", {}, h("caption", {}, `${stack}, more at once`), h("tbody", {}, rows));
  });
}

function blockRow(block, { stack, layer }, costs) {
  const name = `${stack} layer ${layer}`;
  return h("tr", {},
    h("th", { scope: "row" }, layer),
    h("td", {}, partSwitch(`${block}.feedforward`, `${name}, feed-forward`, costs, "feed-forward")),
    h("td", {}, partSwitch(block, `${name}, the whole layer`, costs, "whole layer")),
  );
}

function partSwitch(part, name, costs, label) {
  const cost = costs.get(part);
  const told = (bleu) => bleu.toFixed(1);
  const tells = cost ? `: without it BLEU goes from ${told(cost.bleu + cost.lost)} to ${told(cost.bleu)}` : "";
  return h("button", {
    type: "button", class: typeof label === "string" ? "switch wide" : "switch", dataset: { part },
    "aria-pressed": "false", "aria-label": `silence ${name}${tells}`, title: `${part}${tells}`,
    style: { "--cost": cost?.share ?? 0 },
  }, label);
}

function markSwitches(parts, silence) {
  for (const button of parts.querySelectorAll("button[data-part]")) {
    button.setAttribute("aria-pressed", String(silence.includes(button.dataset.part)));
  }
}

function drawOutcome(now, state, toggle, actions) {
  const { silence, doc, base, busy } = state;
  const [before, after] = [base.targetText, doc.targetText];
  clear(now).append(h("h2", {}, silence.length ? "Without these parts" : "Nothing is silenced"));
  if (!silence.length) {
    now.append(outcomeLabel(doc), h("p", { class: "text" }, h("bdi", { dir: "auto" }, before)));
    if (doc.json.ablation) now.append(h("p", { class: "quiet-text small" }, REDDER));
    return;
  }
  const chip = (part) => h("button", {
    type: "button", class: "chip off", title: "switch it on again", on: { click: () => toggle(part) },
  }, part);
  const forced = state.prefix.length ? "Words are forced, too: part of the difference comes from that. " : "";
  const what = doc.translates ? "The translation stays the same, word for word." : "What it says stays the same.";
  const same = forced + (before === after ? what : "");
  const all = h("button", { type: "button", class: "button" }, "Switch everything on again");
  all.addEventListener("click", () => actions.ask({ silence: [] }));
  now.append(
    h("div", { class: "silence-list" }, silence.map(chip)),
    outcomeLabel(doc),
    h("p", { class: "text" }, busy ? "…" : shownDifference(before, after, { old: true })),
    h("p", { class: "quiet-text small" }, busy ? `${doc.translates ? "Translating" : "Reading"} again …` : same),
    h("div", {}, all),
  );
}

/** What the text below is, where it is no translation. */
function outcomeLabel(doc) {
  return doc.json.outcome ? h("p", { class: "quiet-text small" }, doc.json.outcome.label) : "";
}
