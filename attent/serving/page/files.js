// Files: chosen or dropped on the page, sent to the server, and downloaded when they are translated.

import { fetchFile, keyHeaders, RequestError, toError } from "./api.js";
import { byId, h, toSentence } from "./dom.js";

export function setUpFiles(store) {
  const { file_suffixes: suffixes } = store.get().info;
  const input = byId("file");
  const pane = byId("source-pane");
  let pending = new AbortController();

  async function start(file) {
    pending.abort();
    pending = new AbortController();
    const { signal } = pending;
    const problem = describeProblem(file, store.get().info);
    if (problem) return showStatus(file.name, problem);
    const bar = h("progress", { max: 1, "aria-label": `Progress of ${file.name}` });
    const cancel = h("button", { type: "button", class: "plain", on: { click: () => { pending.abort(); hideStatus(); } } }, "Cancel");
    try {
      showStatus(file.name, "is being uploaded.", bar, cancel);
      const { source, target } = store.get();
      const path = await translateFile(file, { source, target }, signal, {
        onUpload: (share) => { bar.value = share; },
        onTranslation: (share) => {
          if (share) bar.value = share;
          else {
            bar.removeAttribute("value");
            showStatus(file.name, "is being translated.", bar, cancel);
          }
        },
      });
      const link = await makeDownload(path, addLanguage(file.name, target), signal);
      showStatus(file.name, "is translated.", link, closeButton());
      link.click();
      link.focus();
    } catch (error) {
      if (!signal.aborted) showStatus(file.name, `was not translated. ${error.message}`, closeButton());
    }
  }

  byId("choose-file").title = `Formats: ${suffixes.join(" ")}`;
  input.accept = suffixes.join(",");
  byId("choose-file").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    if (input.files[0]) start(input.files[0]);
    input.value = ""; // the same file can be chosen again
  });
  const hasFile = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    pane.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) pane.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    pane.classList.remove("dropping");
    if (!hasFile(event)) return;
    event.preventDefault();
    start(event.dataTransfer.files[0]);
  });
}

function describeProblem(file, { file_suffixes: suffixes, limits }) {
  if (!suffixes.some((suffix) => file.name.toLowerCase().endsWith(suffix))) return `has another format than ${suffixes.join(", ")}.`;
  const limit = limits.file_bytes;
  return file.size > limit ? `is larger than ${(limit / 2 ** 20).toLocaleString("en")} MiB.` : null;
}

/** "letter.txt" -> "letter.de.txt". */
const addLanguage = (name, language) => name.replace(/(?=\.[^.]*$)/, `.${language}`);

/** Translate with the progress of the upload, which fetch does not report; returns the path of the translated file. */
function translateFile(file, fields, signal, { onUpload, onTranslation }) {
  const form = new FormData();
  for (const [name, value] of Object.entries({ ...fields, file })) form.append(name, value);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "translate_file");
    for (const [name, value] of Object.entries({ ...keyHeaders(), Accept: "text/event-stream" })) request.setRequestHeader(name, value);
    const readLastEvent = () => JSON.parse(request.responseText.split("\n\n").at(-2)?.slice("data: ".length) ?? "{}");
    request.upload.addEventListener("progress", ({ loaded, total }) => onUpload(loaded / total));
    request.upload.addEventListener("load", () => onTranslation(0));
    request.addEventListener("progress", () => {
      if (request.status === 200) onTranslation(readLastEvent().progress);
    });
    request.addEventListener("load", () => {
      if (request.status !== 200) return reject(toError(request.status, request.getResponseHeader("retry-after"), request.responseText));
      const { error, translatedFileUrl } = readLastEvent();
      if (!translatedFileUrl) return reject(new RequestError(toSentence(error ?? "the server stopped"), 0));
      resolve(`download_file/${translatedFileUrl.split("/").pop()}`); // behind a proxy, the server may not know its own address
    });
    request.addEventListener("error", () => reject(new RequestError("The server does not respond.", 0)));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

async function makeDownload(path, name, signal) {
  const address = URL.createObjectURL(await fetchFile(path, signal));
  return h("a", { class: "button", href: address, download: name }, "Download");
}

const closeButton = () => h("button", { type: "button", class: "plain", on: { click: hideStatus } }, "Close");

function showStatus(name, text, ...controls) {
  byId("file-status").replaceChildren(h("span", {}, h("b", { dir: "auto" }, name), ` ${text}`), ...controls);
  byId("file-status").hidden = false;
}

function hideStatus() {
  byId("file-status").hidden = true;
}
