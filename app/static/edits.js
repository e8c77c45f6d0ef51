// Notes which messages a list shows when one of them is opened to be edited: until it is sent, the list may be drawn anew
// with other messages in its places, and its box stays open over them.
const begun = {}; // list -> what it showed
window.localmoePart('lm-scroll').addEventListener('click', (event) => {
  const row = event.target.closest('.message-buttons')?.previousElementSibling;
  const list = row?.closest('.lm-turns')?.id.replace('lm-', '');
  if (!list || row.querySelector('textarea')) return; // no button, or the end of an edit
  begun[list] = element.querySelector(`[data-${list}]`)?.dataset[list] ?? '';
}, true);
window.localmoeEdited = (list) => begun[list] ?? '';
