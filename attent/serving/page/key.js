// The dialog that asks for the API key.

import { readKey, storeKey } from "./api.js";
import { byId } from "./dom.js";

/** Ask until a key is entered, and store it for this tab. */
export function askForKey() {
  const dialog = byId("key-dialog");
  if (readKey()) byId("key-text").textContent = "The server does not accept this API key. Enter another one.";
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  return new Promise((resolve) => {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      storeKey(byId("key").value.trim());
      byId("key").value = "";
      dialog.close();
      resolve();
    }, { once: true });
    dialog.showModal();
  });
}
