// The state shared by all views, with listeners per key. Changes are batched until the next animation frame.

/** {get(), set(partial), on(keys, f) -> off, flush()}; f is called with the state and the set of changed keys. */
export function createStore(initial) {
  let state = { ...initial };
  let changed = new Set();
  let frame = null;
  const listeners = new Set();

  function set(partial) {
    for (const [key, value] of Object.entries(partial)) {
      if (Object.is(state[key], value)) continue;
      state = { ...state, [key]: value };
      changed.add(key);
    }
    if (changed.size && frame === null) frame = requestAnimationFrame(flush);
  }

  /** Call the listeners now instead of on the next frame. */
  function flush() {
    if (frame !== null) cancelAnimationFrame(frame);
    frame = null;
    const news = changed;
    changed = new Set();
    for (const { keys, listener } of [...listeners]) {
      if (keys.some((key) => news.has(key))) listener(state, news);
    }
  }

  function on(keys, listener) {
    const entry = { keys: [keys].flat(), listener };
    listeners.add(entry);
    return () => listeners.delete(entry);
  }

  return { get: () => state, set, on, flush };
}
