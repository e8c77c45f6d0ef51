// Clicks on buttons with data-act become the event 'act'. The lists are drawn anew while a pointer is down (presses.js) or a
// button has the focus. That goes back to the one with the same act and key, or without one to its row's first that asks nothing:
// Gradio draws into the elements that are there, often no more than other texts and attributes, and may make another button of
// the one that has the focus, of Unload Delete.
const same = (button) => button && `${button.dataset.act} ${button.dataset.key}`;
const find = (id) => [...element.querySelectorAll('button[data-act]')].find((button) => same(button) === id);
const harmless = 'button[data-act]:not([data-sure])';
const firstOfRow = (model) => model && element.querySelector(`[data-model="${CSS.escape(model)}"] ${harmless}`);
let holder = null; // of the focus
let focused = null; // its act and key
let row = null; // and its row
// What a button asks: with other words it is another question, as once more has arrived of what would be deleted.
const question = (button) => `${same(button)} ${button.dataset.sure}`;
let sure = null; // the question that is asked
let ends = 0; // its timer

const ask = (button) => {
  clearTimeout(ends);
  sure = button && question(button);
  mark();
  window.localmoeSayAsked(button);
  if (button) ends = setTimeout(ask, 4000, null);
};

const act = (button) => {
  if (button.dataset.sure && sure !== question(button)) {
    ask(button);
    return;
  }
  if (sure) ask(null);
  trigger('act', { act: button.dataset.act, key: button.dataset.key });
};

// A button that asks first shows its question until it is pressed again, or for four seconds.
const mark = () => {
  for (const button of element.querySelectorAll('button[data-sure]')) {
    const asks = question(button) === sure;
    window.localmoeAsks(button, asks, button.dataset.sure);
    if (button.classList.contains('sure') !== asks) button.classList.toggle('sure', asks);
  }
};

element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (button && event.detail < 2) act(button); // a double click neither answers the question that it asks nor resumes what it pauses
});
element.addEventListener('focusin', ({ target }) => {
  holder = target.closest('button[data-act]');
  focused = same(holder);
  row = target.closest('[data-model]')?.dataset.model;
});
element.addEventListener('focusout', (event) => { if (event.target.isConnected && event.relatedTarget) focused = null; });
new MutationObserver(() => {
  mark();
  const { activeElement } = document;
  const another = element.contains(activeElement) && same(activeElement.closest('button[data-act]')) !== focused;
  const lost = activeElement === document.body && !holder?.isConnected; // else it was left for nothing, by a click beside it
  if (focused && (another || lost)) {
    (find(focused) ?? firstOfRow(row))?.focus({ preventScroll: true });
  }
}).observe(element, {
  childList: true, subtree: true, characterData: true, attributeFilter: ['data-act', 'data-key', 'data-sure'],
});
