// Notes which messages a list shows when one of them is opened to be edited: until it is sent, the list may be drawn anew
// with other messages in its places, and its box stays open over them. Names that box, and gives it keys.
const begun = {}; // list -> what it showed
const scroll = window.localmoePart('lm-scroll');
const buttonsOf = (box) => box.closest('.message-row')?.nextElementSibling; // Submit and Cancel, then Copy and Edit again

const listed = (list) => element.querySelector(`[data-${list}]`)?.dataset[list] ?? '';
const placeOf = (row) => [...row.closest('.lm-turns').querySelectorAll('.user-row')].indexOf(row);
let sent = null; // {list, shown, place, text, pictures}: the last edit, for as long as the list shows what it was of
let told = null; // {list, images}: ids of its pictures, for the server

scroll.addEventListener('click', (event) => {
  const buttons = event.target.closest('.message-buttons'), row = buttons?.previousElementSibling;
  const list = row?.closest('.lm-turns')?.id.replace('lm-', '');
  if (!list) return;
  const box = row.querySelector('textarea');
  if (!box) {
    begun[list] = listed(list);
    return;
  }
  const button = event.target.closest('button'), tray = window.localmoeHeld.of(box);
  if (button !== buttons.querySelector('button')) return;
  if (window.localmoeHeld.defer(tray, event, () => { if (box.isConnected) button.click(); })) return;
  const pictures = tray?.all();
  sent = { list, shown: begun[list], place: placeOf(row), text: box.value, pictures };
  told = pictures && { list, images: pictures.map(({ id }) => id) };
}, true);
new MutationObserver(() => { if (sent && listed(sent.list) !== sent.shown) sent = null; })
  .observe(element, { childList: true, subtree: true, attributes: true });
window.localmoeEdited = (list) => {
  const noted = begun[list] ?? '';
  return noted && told?.list === list ? JSON.stringify({ ...JSON.parse(noted), images: told.images }) : noted;
};

// The box holds the text as the list shows it (app/tag_text.py); after an edit that was refused, as when an answer is being
// written, what had been written.
scroll.addEventListener('focusin', ({ target }) => {
  if (!target.matches('.lm-turns textarea')) return;
  target.setAttribute('aria-label', element.querySelector('[data-name]')?.dataset.name ?? '');
  const row = target.closest('.message-row'), list = row.closest('.lm-turns').id.replace('lm-', '');
  const refused = sent?.list === list && sent.shown === begun[list] && sent.place === placeOf(row);
  const text = refused ? sent.text : window.localmoeWritten(target.value);
  if (refused) {
    if (sent.pictures) window.localmoeHeld.edit(target, sent.pictures);
    sent = null;
  }
  if (target.value === text) return;
  Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set.call(target, text);
  target.dispatchEvent(new Event('input', { bubbles: true }));
});

// Ctrl+Enter sends this message, not the new one below; Esc leaves it as it was, and stops no answer.
scroll.addEventListener('keydown', (event) => {
  const sends = event.key === 'Enter' && (event.ctrlKey || event.metaKey), ends = event.key === 'Escape';
  const box = event.target.closest('.lm-turns .user-row')?.querySelector('textarea'); // or a button of its pictures
  if (!(sends || ends) || !box) return;
  event.preventDefault();
  event.stopPropagation();
  const buttons = buttonsOf(box);
  buttons?.querySelectorAll('button')[sends ? 0 : 1]?.click();
  if (ends) setTimeout(() => [...buttons.querySelectorAll('button')].at(-1)?.focus());
});
