// The masking view of the live page: switch heads, sub-layers and layers off and compare the output with the baseline.

import { h, clear, isTouch, renderDiff } from "./dom.js";
import { groupLayers } from "./data.js";

const DEBOUNCE = 250; // milliseconds: several quick clicks make one request

const COST_NOTE = "Red: the BLEU lost by masking the part.";
const INTRO = "a head to mask it: its output becomes zero, and the sentence is";

export function maskingView(store, actions) {
  const parts = h("div", { class: "mask-parts" });
  const now = h("aside", { class: "mask-now", "aria-live": "polite" });
  const again = store.get().doc.translates ? "translated" : "processed";
  const intro = h("p", { class: "quiet-text" }, `${isTouch() ? "Tap" : "Click"} ${INTRO} ${again} again.`);
  const element = h("div", {}, intro, h("br", {}), h("div", { class: "mask" }, parts, now));
  let [timer, selected, isShown] = [null, null, false];

  function toggle(part) {
    const current = selected ?? store.get().maskedParts;
    selected = current.includes(part) ? current.filter((other) => other !== part) : [...current, part];
    send();
  }

  function send() {
    updateSwitches(parts, selected);
    clearTimeout(timer);
    timer = setTimeout(() => {
      const maskedParts = selected;
      selected = null;
      actions.ask({ maskedParts });
    }, DEBOUNCE);
  }

  function build() {
    if (!isShown) return;
    const { doc } = store.get();
    const key = doc.layers.map(({ path, heads }) => `${path}:${heads}`).join();
    if (parts.dataset.key !== key) {
      parts.dataset.key = key;
      clear(parts).append(...buildTables(doc));
    }
    draw();
  }

  function draw() {
    if (!isShown) return;
    updateSwitches(parts, selected ?? store.get().maskedParts);
    drawOutput(now, store.get(), toggle, actions);
  }

  parts.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-part]");
    if (button) toggle(button.dataset.part);
  });
  store.on(["doc"], build);
  store.on(["maskedParts", "busy", "base"], draw);
  return { element, show: () => { isShown = true; build(); }, hide: () => { isShown = false; } };
}

const blockPath = (path) => path.replace(/\.[^.]+$/, "");

function buildTables(doc) {
  const costs = computeCosts(doc.json.ablation);
  const stacks = new Map();
  for (const layer of doc.layers) stacks.set(blockPath(layer.path), layer);
  return [...groupLayers(doc).map((group) => headTable(group, costs)), ...blockTables([...stacks.entries()], costs)];
}

/** BLEU lost by masking each part, relative to the largest loss of its kind. */
function computeCosts(ablation) {
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

/** Feed-forward sub-layers and whole layers, one table per stack. */
function blockTables(blocks, costs) {
  const stacks = [...new Set(blocks.map(([, layer]) => layer.stack))];
  return stacks.map((stack) => {
    const stackBlocks = blocks.filter(([, layer]) => layer.stack === stack);
    const rows = stackBlocks.map(([block, layer]) => blockRow(block, layer, costs));
    return h("table", {}, h("caption", {}, `${stack}: sub-layers and layers`), h("tbody", {}, rows));
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
  const effect = cost ? `: BLEU ${(cost.bleu + cost.lost).toFixed(1)} to ${cost.bleu.toFixed(1)} without it` : "";
  return h("button", {
    type: "button", class: typeof label === "string" ? "switch wide" : "switch", dataset: { part },
    "aria-pressed": "false", "aria-label": `mask ${name}${effect}`, title: `${part}${effect}`,
    style: { "--cost": cost?.share ?? 0 },
  }, label);
}

function updateSwitches(parts, maskedParts) {
  for (const button of parts.querySelectorAll("button[data-part]")) {
    button.setAttribute("aria-pressed", String(maskedParts.includes(button.dataset.part)));
  }
}

function drawOutput(now, state, toggle, actions) {
  const { maskedParts, doc, base, busy } = state;
  const [before, after] = [base.targetText, doc.targetText];
  clear(now).append(h("h2", {}, maskedParts.length ? "Masked parts" : "Nothing is masked"));
  if (!maskedParts.length) {
    now.append(outputLabel(doc), h("p", { class: "text" }, h("bdi", { dir: "auto" }, before)));
    if (doc.json.ablation) now.append(h("p", { class: "quiet-text small" }, COST_NOTE));
    return;
  }
  const chip = (part) => h("button", {
    type: "button", class: "chip off", title: "unmask", on: { click: () => toggle(part) },
  }, part);
  const forced = state.prefix.length ? "Tokens are forced too, which explains part of the difference. " : "";
  const same = forced + (doc.hasOutput && before === after ? "The output is unchanged." : "");
  const all = h("button", { type: "button", class: "button" }, "Unmask all");
  all.addEventListener("click", () => actions.ask({ maskedParts: [] }));
  now.append(
    h("div", { class: "mask-list" }, maskedParts.map(chip)),
    outputLabel(doc),
    h("p", { class: "text" }, busy ? "…" : renderDiff(before, after, { old: true })),
    h("p", { class: "quiet-text small" }, busy ? "Running …" : same),
    h("div", {}, all),
  );
}

/** A label for outputs that are not translations. */
function outputLabel(doc) {
  return doc.json.output ? h("p", { class: "quiet-text small" }, doc.json.output.label) : "";
}
