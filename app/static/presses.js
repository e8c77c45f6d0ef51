// One press is one: of a double click its first click, which may have put another button in this place, and of Enter that is
// held down its first stroke. Lists with buttons that ask first count clicks themselves (actions.js, chat_list.js).
(() => {
  const ignore = (event) => {
    event.preventDefault();
    event.stopImmediatePropagation();
  };

  document.addEventListener('click', (event) => {
    if (event.detail > 1 && event.target.closest?.('#lm-main button[id^=lm-]')) ignore(event);
  }, true);

  const breaksLine = ({ target, ctrlKey, metaKey, shiftKey }) =>
    target.matches?.('textarea') && !ctrlKey && !metaKey && (shiftKey || target.rows > 1);

  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && event.repeat && !breaksLine(event)) ignore(event);
  }, true);
})();

// A press counts for the button on which it began, although that has moved from under the pointer meanwhile, as lines above
// it follow what was typed just before, or was drawn anew with its list: browsers tell of no click then, or of one on the
// button that Gradio has made of it.
(() => {
  const STILL_PX = 8;
  const TYPED_INTO = 'textarea, select, input:not([type=radio], [type=checkbox])';
  let press = null; // {button, name, x, y, counted}

  const nameOf = (button) => {
    const { act, key, node } = button.dataset;
    return act || node ? [act, key, node, button.closest('[data-chat]')?.dataset.chat].join(' ') : '';
  };
  const inPage = ({ button, name, part }) => {
    if (button.isConnected && nameOf(button) === name) return button;
    const drawnAnew = name && part ? part.querySelectorAll('button') : [];
    return [...drawnAnew].find((one) => nameOf(one) === name);
  };

  document.addEventListener('pointerdown', ({ target, button: which, isPrimary, clientX: x, clientY: y }) => {
    const button = target.closest?.('button, label, summary');
    press = null;
    if (!button || which !== 0 || !isPrimary || target.closest(TYPED_INTO)) return;
    press = { button, name: nameOf(button), part: button.closest('[id^=lm-]'), x, y, counted: false };
  }, true);
  document.addEventListener('mousedown', ({ detail }) => { if (detail > 1) press = null; }, true); // a double click is one
  document.addEventListener('pointercancel', () => { press = null; }, true);
  document.addEventListener('pointerup', ({ clientX: x, clientY: y }) => {
    if (!press || Math.hypot(x - press.x, y - press.y) > STILL_PX) return;
    const told = press.button.contains(document.elementFromPoint(x, y)); // the browser tells of a click
    const button = inPage(press);
    if (told && button === press.button) return;
    const shown = button?.checkVisibility();
    if (shown) button.click();
    press.counted = shown || told;
  }, true);
  document.addEventListener('click', (event) => { // of what lies there now
    if (!press?.counted || !event.isTrusted || event.detail === 0) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);
})();
