// Clicks on buttons with data-act become the event 'act'. The lists are drawn anew while a pointer is down (presses.js) or a
// button has the focus, which is put back on the one with the same act and key.
const same = (button) => button && `${button.dataset.act} ${button.dataset.key}`;
const find = (id) => [...element.querySelectorAll('button[data-act]')].find((button) => same(button) === id);
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

element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button && event.detail < 2) act(button); // a double click neither answers the question that it asks nor resumes what it pauses
});
element.addEventListener('focusin', (event) => { focused = same(event.target.closest('button[data-act]')); });
element.addEventListener('focusout', (event) => { if (event.target.isConnected && event.relatedTarget) focused = null; });
new MutationObserver(() => {
  mark();
  if (focused && document.activeElement === document.body) find(focused)?.focus({ preventScroll: true });
}).observe(element, { childList: true, subtree: true });
