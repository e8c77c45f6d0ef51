// A button that goes away once it is pressed by key, as Send, Stop, Continue and Retry do, Show earlier messages, and Chat in a
// list of models, leaves the focus to nobody. The message box has it then. Who presses by pointer sees no keyboard come up on a
// touch screen.
(() => {
  const PATIENCE_MS = 3000, LOOK_MS = 50, SELDOM_MS = 200, LOAD_MS = 15000;
  const BUTTONS = '#lm-send, #lm-stop, #lm-continue, #lm-turn .message-buttons button, #lm-earlier, [data-act^=chat]';
  const edits = () => document.querySelector('.lm-turns textarea') !== null;

  const watch = (button, until) => {
    const { activeElement } = document;
    if (performance.now() > until || (activeElement !== button && activeElement !== document.body)) return;
    const gone = activeElement === document.body && !button.checkVisibility();
    if (gone && !edits()) window.localmoePart('lm-message')?.querySelector('textarea')?.focus({ preventScroll: true });
    else setTimeout(watch, LOOK_MS, button, until);
  };

  // A load may take minutes: who presses nothing meanwhile has the box as soon as the chat is opened. Nothing is waited for once
  // the load has failed, or if none has begun.
  const awaitChat = () => {
    const shows = (state) => document.querySelector(`#lm-header .lm-chip.${state}`) !== null;
    let begun = !shows('bad'), until = performance.now() + LOAD_MS; // one that failed before may still be shown
    const inVain = () => {
      if (shows('busy')) [begun, until] = [true, performance.now() + LOAD_MS];
      return (begun && shows('bad')) || performance.now() > until;
    };
    const timer = setInterval(() => {
      if (inVain()) { end(); return; }
      const box = window.localmoePart('lm-message')?.querySelector('textarea');
      if (document.activeElement !== document.body || !box?.checkVisibility()) return;
      end();
      if (!edits()) box.focus({ preventScroll: true });
    }, SELDOM_MS);
    const end = () => {
      clearInterval(timer);
      for (const name of ['keydown', 'pointerdown']) document.removeEventListener(name, end, true);
    };
    for (const name of ['keydown', 'pointerdown']) document.addEventListener(name, end, true);
  };

  document.addEventListener('click', (event) => {
    const button = event.target.closest?.(BUTTONS);
    if (!button || !event.isTrusted || event.detail !== 0 || document.activeElement !== button) return;
    if (button.dataset.act?.startsWith('chat')) awaitChat();
    else watch(button, performance.now() + PATIENCE_MS);
  });
})();

// In a list that is drawn anew the focus goes back to the button that had it. Gradio draws into the elements that are there, and
// may make another button of the one that has the focus: of one chat's another's, of Unload Delete. Returns what is called once
// the list has been drawn. neighbour: given a button that takes the focus, it returns a way to find another one of its row, which
// has the focus if that one is gone, and before it if a row shows that one only while the focus is in it.
window.localmoeKeepFocus = (list, nameOf, neighbour) => {
  let holder = null, name = null, findOther = null;
  const find = () => [...list.querySelectorAll('button[data-act]')].find((button) => nameOf(button) === name);
  const focus = (button) => button?.focus({ preventScroll: true });

  list.addEventListener('focusin', ({ target }) => {
    holder = target.closest('button[data-act]');
    if (holder) [name, findOther] = [nameOf(holder), neighbour(holder)];
  });
  list.addEventListener('focusout', ({ target, relatedTarget }) => { if (target.isConnected && relatedTarget) holder = null; });
  return () => {
    const { activeElement } = document;
    const another = list.contains(activeElement) && nameOf(activeElement) !== name;
    const lost = activeElement === document.body && !holder?.isConnected; // else it was left for nothing, by a click beside it
    if (!holder || !(another || lost)) return;
    const button = find();
    if (!button?.checkVisibility()) focus(findOther());
    focus(button);
  };
};
