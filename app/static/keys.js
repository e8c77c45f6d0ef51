// Ctrl+K looks for a chat, Ctrl+Shift+O begins one, Ctrl+Enter sends from anywhere on the page (Cmd on a Mac). Stopping
// with Esc is in page.js.
(() => {
  const click = (id) => {
    const button = window.localmoePart(id);
    if (button && button.offsetParent !== null) button.click();
    return Boolean(button);
  };
  const field = (id) => window.localmoePart(id)?.querySelector('textarea, input');

  const keys = {
    'k': () => {
      const shell = window.localmoePart('lm-shell');
      shell.classList.remove('lm-show-live');
      shell.classList.add('lm-show-nav'); // the drawer of a narrow screen
      window.localmoeFocus(field('lm-find'));
      field('lm-find')?.select();
    },
    'shift+o': () => {
      click('lm-tab-chat-button');
      window.localmoePart('lm-new')?.click();
      setTimeout(() => field('lm-message')?.focus());
    },
    'enter': () => click('lm-send'),
  };

  document.addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.altKey || !(event.ctrlKey || event.metaKey)) return;
    const act = keys[`${event.shiftKey ? 'shift+' : ''}${event.key.toLowerCase()}`];
    if (!act) return;
    event.preventDefault();
    act();
  });

  // Enter that ends the composing of a Chinese or Japanese word sends nothing, and Esc that gives it up stops no answer.
  // 229: of a key that Safari tells of when the composing has ended.
  document.addEventListener('keydown', (event) => {
    const composes = event.isComposing || event.keyCode === 229;
    if (composes && (event.key === 'Enter' || event.key === 'Escape')) event.stopImmediatePropagation();
  }, true);

  // Gradio opens a list at any key but Esc. Tab leaves it: it would stay open over what lies below.
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Tab' && event.target.closest?.('[role=combobox]')) event.stopImmediatePropagation();
  }, true);

  // Esc in the search box empties it, and stops no answer.
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || !event.target.closest?.('#lm-find')) return;
    event.stopImmediatePropagation();
    event.target.value = '';
    event.target.dispatchEvent(new Event('input', { bubbles: true }));
    window.localmoePart('lm-shell').classList.remove('lm-show-nav');
    field('lm-message')?.focus();
  }, true);
})();
