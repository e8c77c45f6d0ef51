// A button that goes away once it is pressed by key, as Send, Stop, Continue and Retry do, Show earlier messages, and Chat in a
// list of models, leaves the focus to nobody. The message box has it then. Who presses by pointer sees no keyboard come up on a
// touch screen.
(() => {
  const PATIENCE_MS = 3000, LOOK_MS = 50;
  const BUTTONS = '#lm-send, #lm-stop, #lm-continue, #lm-turn .message-buttons button, #lm-earlier, [data-act=chat]';
  const edits = () => document.querySelector('.lm-turns textarea') !== null;

  const watch = (button, until) => {
    const { activeElement } = document;
    if (performance.now() > until || (activeElement !== button && activeElement !== document.body)) return;
    const gone = activeElement === document.body && !button.checkVisibility();
    if (gone && !edits()) window.localmoePart('lm-message')?.querySelector('textarea')?.focus({ preventScroll: true });
    else setTimeout(watch, LOOK_MS, button, until);
  };

  document.addEventListener('click', (event) => {
    const button = event.target.closest?.(BUTTONS);
    if (button && event.isTrusted && event.detail === 0 && document.activeElement === button) {
      watch(button, performance.now() + PATIENCE_MS);
    }
  });
})();
