// Helpers for elements, the shared state and stored settings. Text enters only through text nodes and setAttribute.

export const byId = (id) => document.getElementById(id);

/** An element: h("button", {class: "plain", on: {click: f}}, "Go"). Null, undefined and false are left out. */
export function h(tag, { on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** {get(), set(changes), on(keys, listener)}: a listener is called with the state if one of its keys has changed. */
export function createStore(initial) {
  let state = initial;
  const listeners = [];
  return {
    get: () => state,
    set(changes) {
      const changed = Object.keys(changes).filter((key) => !Object.is(state[key], changes[key]));
      if (!changed.length) return;
      state = { ...state, ...changes };
      for (const { keys, listener } of listeners) if (keys.some((key) => changed.includes(key))) listener(state);
    },
    on: (keys, listener) => listeners.push({ keys, listener }),
  };
}

/** A stored JSON value; browsers may refuse storage. */
export function readStored(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function writeStored(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // valid until the page is closed
  }
}

export const toSentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
