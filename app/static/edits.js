// Notes which messages a list shows when one of them is opened to be edited: until it is sent, the list may be drawn anew
// with other messages in its places, and its box stays open over them. Names that box, and gives it keys.
const begun = {}; // list -> what it showed
const scroll = window.localmoePart('lm-scroll');
const buttonsOf = (box) => box.closest('.message-row')?.nextElementSibling; // Submit and Cancel, then Copy and Edit again

scroll.addEventListener('click', (event) => {
  const row = event.target.closest('.message-buttons')?.previousElementSibling;
  const list = row?.closest('.lm-turns')?.id.replace('lm-', '');
  if (!list || row.querySelector('textarea')) return; // no button, or the end of an edit
  begun[list] = element.querySelector(`[data-${list}]`)?.dataset[list] ?? '';
}, true);
window.localmoeEdited = (list) => begun[list] ?? '';

// The box holds the text as the list shows it (app/tag_text.py).
scroll.addEventListener('focusin', ({ target }) => {
  if (!target.matches('.lm-turns textarea')) return;
  target.setAttribute('aria-label', element.querySelector('[data-name]')?.dataset.name ?? '');
  if (!target.value.includes('&#0060;')) return;
  const { set } = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value');
  set.call(target, target.value.replaceAll('&#0060;', '<'));
  target.dispatchEvent(new Event('input', { bubbles: true }));
});

// Ctrl+Enter sends this message, not the new one below; Esc leaves it as it was, and stops no answer.
scroll.addEventListener('keydown', (event) => {
  const sends = event.key === 'Enter' && (event.ctrlKey || event.metaKey), ends = event.key === 'Escape';
  if (!(sends || ends) || !event.target.matches('.lm-turns textarea')) return;
  event.preventDefault();
  event.stopPropagation();
  const buttons = buttonsOf(event.target);
  buttons?.querySelectorAll('button')[sends ? 0 : 1]?.click();
  if (ends) setTimeout(() => [...buttons.querySelectorAll('button')].at(-1)?.focus());
});
