// A message that is being written stays, with its pictures, when the page is loaded again: by the reader, for another
// language, or by Gradio, once a server that was gone is there again. Kept by the browser, for this tab and until then.
(() => {
  const KEY = 'localmoe-unsent-message', LOOK_MS = 50, PATIENCE_MS = 30_000;
  const box = () => window.localmoePart('lm-message')?.querySelector('textarea');
  const kept = sessionStorage.getItem(KEY);
  const forget = () => sessionStorage.removeItem(KEY);
  forget();
  addEventListener('pageshow', forget); // the same page again, with all that is in it
  addEventListener('pagehide', () => {
    const text = box()?.value ?? '', pictures = window.localmoeHeld.all();
    if (text.trim() || pictures.length) sessionStorage.setItem(KEY, JSON.stringify({ text, pictures }));
  });
  if (!kept) return;
  const { text, pictures } = JSON.parse(kept);

  const began = performance.now();
  const put = () => {
    const told = Number(window.localmoePart('lm-mark')?.querySelector('[data-stamp]')?.dataset.stamp ?? 0);
    if (!told || !box()) { // what the server first tells would take its place
      if (performance.now() - began < PATIENCE_MS) setTimeout(put, LOOK_MS);
      return;
    }
    if (pictures.length) window.localmoeHeld.hold(pictures);
    if (box().value || !text) return; // who was faster goes on
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set.call(box(), text);
    box().dispatchEvent(new Event('input', { bubbles: true }));
  };
  put();
})();

// What is typed while a message is on its way stays, when it has been sent.
(() => {
  let sent = '';
  window.localmoeSends = (text) => { sent = text; return text; };
  window.localmoeUnsent = (text) => {
    window.localmoeHeld.wasSent();
    return text.startsWith(sent) ? text.slice(sent.length).trimStart() : text;
  };
})();
