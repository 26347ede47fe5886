// Entry point: asks the server for its languages and sets up the parts of the page.

import { setUpAlignment } from "./alignment.js";
import { setUpAlternatives } from "./alternatives.js";
import { fetchInfo } from "./api.js";
import { byId, createStore, h } from "./dom.js";
import { setUpFiles } from "./files.js";
import { readGlossary, setUpGlossary } from "./glossary.js";
import { setUpHistory } from "./history.js";
import { askForKey } from "./key.js";
import { chooseLanguages, setUpLanguages } from "./languages.js";
import { startLiveTranslation } from "./live.js";
import { setUpSourcePane } from "./source_pane.js";
import { setUpTargetPane } from "./target_pane.js";
import { setUpTheme } from "./theme.js";

/** The languages and models of the server, as soon as it answers and accepts the key. */
async function loadInfo() {
  while (true) {
    try {
      const info = await fetchInfo();
      showNotice();
      return info;
    } catch (error) {
      if (error.status === 403) {
        await askForKey();
        continue;
      }
      showNotice(error.retryAfter ? error.retryMessage : error.message);
      if (!error.retryAfter) throw error;
      await new Promise((resolve) => { setTimeout(resolve, 1000 * error.retryAfter); });
    }
  }
}

function showNotice(...content) {
  byId("notice").replaceChildren(...content);
  byId("notice").hidden = !content.length;
}

function showModels({ models }) {
  const describe = ({ name, parameters }) => `${name} (${formatCount(parameters)} parameters)`;
  byId("models").textContent = models.filter(({ kind }) => kind === "translation").map(describe).join(" · ");
}

const formatCount = (number) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 }).format(number);

async function start() {
  setUpTheme();
  const info = await loadInfo();
  if (!info.directions.length) {
    const address = new URL("v1", location.href).href;
    const documentation = h("a", { href: "docs" }, "documentation");
    return showNotice(`This server has language models but no translator; their API is at ${address} (`, documentation, ").");
  }
  const store = createStore({
    info, ...chooseLanguages(info), text: "", glossary: readGlossary(), translation: null, busy: false, message: "", pointed: null,
  });
  setUpLanguages(store);
  setUpTargetPane(store);
  setUpAlignment(store);
  setUpAlternatives(store);
  setUpGlossary(store);
  setUpHistory(store);
  setUpFiles(store);
  showModels(info);
  byId("translator").hidden = false;
  setUpSourcePane(store, startLiveTranslation(store));
}

start();
