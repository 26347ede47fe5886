// Light or dark: the system's by default. The attention view uses the same stored choice.

import { byId, h } from "./dom.js";

const NAME = "attent-theme";

function readTheme() {
  try {
    return localStorage.getItem(NAME) ?? "auto";
  } catch {
    return "auto";
  }
}

function applyTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

export function setUpTheme() {
  applyTheme(readTheme());
  byId("themes").append(...["auto", "light", "dark"].map((name) => {
    const input = h("input", { type: "radio", name: "theme", value: name, checked: name === readTheme() });
    input.addEventListener("change", () => {
      applyTheme(name);
      try {
        localStorage.setItem(NAME, name);
      } catch {
        // valid until the page is closed
      }
    });
    return h("label", {}, input, name);
  }));
}
