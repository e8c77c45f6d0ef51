// Runs before anything else on the page (app/first_script.py). Before each change of the page Gradio takes a snapshot
// of what its widgets hold, and Svelte asks for a structured clone of every string, number and function in it: a
// quarter of the page's processor time. What is no object is its own clone, and of a function there is none.
(() => {
  const clone = window.structuredClone.bind(window);
  const refused = new DOMException("A function could not be cloned.", "DataCloneError"); // making one each time is slow

  window.structuredClone = function (value) {
    if (arguments.length === 1) {
      const kind = typeof value;
      if (kind === "function") throw refused;
      if ((kind !== "object" && kind !== "symbol") || value === null) return value;
    }
    return clone(...arguments);
  };
})();
