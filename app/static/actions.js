// Clicks on buttons with data-act become the event 'act'. The lists are drawn anew while a pointer is down (presses.js) or a
// button has the focus. That goes back to the one with the same act and key, or without one to its row's first that asks nothing.
// Gradio draws into the elements that are there, often no more than other texts and attributes.
const same = (button) => button && `${button.dataset.act} ${button.dataset.key}`;
const putFocusBack = window.localmoeKeepFocus(element, same, (button) => {
  const row = button.closest('[data-model]');
  const first = row && `[data-model="${CSS.escape(row.dataset.model)}"] button[data-act]:not([data-sure])`;
  return () => first && element.querySelector(first);
});
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
new MutationObserver(() => { mark(); putFocusBack(); }).observe(element, {
  childList: true, subtree: true, characterData: true, attributeFilter: ['data-act', 'data-key', 'data-sure'],
});
