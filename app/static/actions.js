// Clicks on buttons with data-act become the event 'act'. The lists are drawn anew while a pointer is down or a
// button has the focus, so a press counts for the button with the same act and key, and the focus is put back.
const same = (button) => button && `${button.dataset.act} ${button.dataset.key}`;
const find = (id) => [...element.querySelectorAll('button[data-act]')].find((button) => same(button) === id);
let pressed = null;
let twice = false; // a double click is one press: it neither answers the question that it asks nor resumes what it pauses
let focused = null;
let sure = null;

const ask = (id) => {
  sure = id;
  mark();
  window.localmoeSayAsked(id ? find(id) : null);
};

const act = (button) => {
  const id = same(button);
  if (button.dataset.sure && sure !== id) {
    ask(id);
    setTimeout(() => { if (sure === id) ask(null); }, 4000);
    return;
  }
  if (sure) ask(null);
  trigger('act', { act: button.dataset.act, key: button.dataset.key });
};

// A button that asks first shows its question until it is pressed again, or for four seconds.
const mark = () => {
  for (const button of element.querySelectorAll('button[data-sure]')) {
    const asks = same(button) === sure;
    window.localmoeAsks(button, asks, button.dataset.sure);
    if (button.classList.contains('sure') !== asks) button.classList.toggle('sure', asks);
  }
};

element.addEventListener('pointerdown', (event) => {
  pressed = event.button === 0 ? same(event.target.closest('button[data-act]')) : null;
  twice = false;
});
element.addEventListener('mousedown', (event) => { twice = event.detail > 1; });
element.addEventListener('pointerup', (event) => {
  const button = event.target.closest('button[data-act]');
  if (pressed && !twice && same(button) === pressed) act(button);
  pressed = null;
});
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button && event.detail === 0) act(button); // by key or by a screen reader: a pointer's is counted above
});
element.addEventListener('focusin', (event) => { focused = same(event.target.closest('button[data-act]')); });
element.addEventListener('focusout', (event) => { if (event.target.isConnected && event.relatedTarget) focused = null; });
new MutationObserver(() => {
  mark();
  if (focused && document.activeElement === document.body) find(focused)?.focus({ preventScroll: true });
}).observe(element, { childList: true, subtree: true });
