// Keys, the theme switch, the drawers of narrow screens, and the live panel of wide ones.
(() => {
  const store = { get: (key) => localStorage.getItem(key), set: (key, value) => localStorage.setItem(key, value) };
  // The chosen language, or the browser's. Gradio's own words follow the browser's, so it is told the choice.
  const chosen = store.get('localmoe-language') || 'auto';
  const language = chosen === 'auto' ? navigator.language : chosen;
  window.localmoeLanguage = () => language;
  // What the page itself has by this name: an answer may hold HTML, with names of its own choice.
  window.localmoePart = (id) => document.querySelector(`#${id}:not(.lm-turns *)`);
  if (chosen !== 'auto') {
    const code = chosen === 'zh' ? 'zh-CN' : 'en-US';
    Object.defineProperty(navigator, 'language', { get: () => code });
    Object.defineProperty(navigator, 'languages', { get: () => [code] });
  }
  const prefersDark = window.matchMedia('(prefers-color-scheme: dark)');
  const theme = () => store.get('localmoe-theme') || 'auto';

  const paint = () => {
    const dark = theme() === 'dark' || (theme() === 'auto' && prefersDark.matches);
    if (document.body.classList.contains('dark') !== dark) document.body.classList.toggle('dark', dark);
    document.documentElement.style.colorScheme = dark ? 'dark' : 'light';
  };

  const shell = () => window.localmoePart('lm-shell');
  const wide = window.matchMedia('(min-width: 1081px)'); // as page.css

  // What the scripts that fill the live panel ask before they ask the server.
  window.localmoeInSight = (element) => {
    if (!element || document.visibilityState !== 'visible') return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > 0 && box.left < innerWidth && getComputedStyle(element).visibility === 'visible';
  };

  const tellDrawers = () => {
    let changed = false;
    for (const button of document.querySelectorAll('[data-toggle]')) {
      const name = button.dataset.toggle, { classList } = shell();
      const open = String(wide.matches ? !classList.contains(`lm-no-${name}`) : classList.contains(`lm-show-${name}`));
      changed ||= button.getAttribute('aria-expanded') !== open;
      button.setAttribute('aria-expanded', open);
    }
    if (!changed) return;
    const tell = () => document.dispatchEvent(new Event('localmoe-drawers'));
    setTimeout(tell, wide.matches ? 0 : 200); // a drawer is in sight once it has moved (page.css)
  };
  // What is in a drawer that opens may be hidden for a moment yet.
  window.localmoeFocus = (element, tries = 10) => {
    element?.focus({ preventScroll: true });
    if (!element || document.activeElement === element || !tries) return;
    setTimeout(() => window.localmoeFocus(element, tries - 1), 50);
  };
  // A drawer that opens takes the focus; where it has it when it closes, its button gets it again.
  const focusDrawer = (name) => {
    const drawer = window.localmoePart(`lm-${name}`);
    drawer.tabIndex = -1;
    if (shell().classList.contains(`lm-show-${name}`)) window.localmoeFocus(drawer);
  };
  const closeDrawers = () => {
    const { activeElement } = document;
    const left = ['nav', 'live'].find((name) => shell()?.classList.contains(`lm-show-${name}`));
    shell()?.classList.remove('lm-show-nav', 'lm-show-live');
    if (left && !wide.matches && window.localmoePart(`lm-${left}`).contains(activeElement)) {
      document.querySelector(`[data-toggle=${left}]`)?.focus();
    }
  };
  const hideLive = (hidden) => {
    shell().classList.toggle('lm-no-live', hidden);
    store.set('localmoe-live', hidden ? 'hidden' : 'shown');
  };
  wide.addEventListener('change', tellDrawers);

  // The line with the two lists is drawn anew when the server knows the language.
  const choose = () => {
    for (const [name, value] of [['theme', theme()], ['language', chosen]]) {
      const list = window.localmoePart(`lm-${name}`);
      if (list && list.value !== value) list.value = value;
    }
    tellDrawers();
  };

  const start = () => {
    paint();
    // Gradio sets its own class after it mounts; ours has the last word.
    new MutationObserver(paint).observe(document.body, { attributes: true, attributeFilter: ['class'] });
    prefersDark.addEventListener('change', paint);
    const mounted = new MutationObserver(() => {
      const box = window.localmoePart('lm-scroll');
      const choice = window.localmoePart('lm-theme');
      if (!box || !choice) return;
      mounted.disconnect();
      document.documentElement.lang = language.startsWith('zh') ? 'zh' : 'en';
      new MutationObserver(choose).observe(window.localmoePart('lm-top-line'), { childList: true, subtree: true });
      new MutationObserver(tellDrawers).observe(shell(), { attributes: true, attributeFilter: ['class'] });
      if (store.get('localmoe-live') === 'hidden') hideLive(true);
      choose();
    });
    mounted.observe(document.body, { childList: true, subtree: true });
  };

  document.addEventListener('change', (event) => {
    if (event.target.id === 'lm-language') {
      store.set('localmoe-language', event.target.value);
      location.reload(); // what runs on the server goes on
    }
    if (event.target.id !== 'lm-theme') return;
    store.set('localmoe-theme', event.target.value);
    paint();
  });

  document.addEventListener('click', (event) => {
    const toggle = event.target.closest('[data-toggle]');
    if (toggle && toggle.dataset.toggle === 'live' && wide.matches) {
      hideLive(!shell().classList.contains('lm-no-live'));
    } else if (toggle) {
      const name = `lm-show-${toggle.dataset.toggle}`;
      const shown = shell().classList.contains(name);
      closeDrawers();
      shell().classList.toggle(name, !shown);
      focusDrawer(toggle.dataset.toggle);
    } else if (event.target.closest('#lm-main, #lm-new')) {
      closeDrawers();
    }
  });

  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || event.defaultPrevented) return;
    const stop = window.localmoePart('lm-stop');
    if (stop && stop.offsetParent !== null) stop.click();
    closeDrawers();
  });

  if (document.body) start();
  else document.addEventListener('DOMContentLoaded', start);
})();
