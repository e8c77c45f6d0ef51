// Clicks in the list of chats become the events 'open_chat', 'rename_chat' and 'delete_chat'. The list may be drawn anew at
// any time: a title that is being typed, a question that is being asked and the focus stay. Gradio draws into the elements
// that are there, often no more than other texts and attributes.
const rowOf = (id) => [...element.querySelectorAll('li[data-chat]')].find((item) => item.dataset.chat === id);
const deleteOf = (item) => item.querySelector('button[data-act=delete]');
const idOf = (button) => button.closest('li')?.dataset.chat;
const putFocusBack = window.localmoeKeepFocus(element, (button) => `${button.dataset.act} ${idOf(button)}`, (button) => {
  const id = idOf(button);
  return () => rowOf(id)?.querySelector('.lm-open');
});
let renaming = null; // {id, input, open}: the input stands in the place of the button `open`
let sure = null; // the chat whose Delete asks
let ends = 0; // the timer of its question

const end = (keep, byKey = false) => {
  const { id, input, open } = renaming;
  renaming = null;
  input.replaceWith(open);
  if (byKey) open.focus({ preventScroll: true }); // else nothing has it
  const title = input.value.trim();
  if (keep && title && title !== open.title) trigger('rename_chat', { id, title });
};

const rename = (item) => {
  if (renaming) end(true);
  const open = item.querySelector('.lm-open');
  const input = document.createElement('input');
  input.className = 'lm-rename';
  input.value = open.title;
  input.maxLength = 80;
  input.setAttribute('aria-label', item.dataset.newTitle);
  input.addEventListener('keydown', (event) => {
    event.stopPropagation();
    if (event.key === 'Enter') end(true, true);
    if (event.key === 'Escape') end(false, true);
  });
  input.addEventListener('blur', () => setTimeout(() => { // a list that is drawn anew has the input back by then
    if (renaming?.input === input && document.activeElement !== input) end(true);
  }));
  renaming = { id: item.dataset.chat, input, open };
  open.replaceWith(input);
  input.focus();
  input.select();
};

const putBack = () => {
  if (!renaming || renaming.input.isConnected) return;
  const open = rowOf(renaming.id)?.querySelector('.lm-open');
  if (!open) { renaming = null; return; } // the chat is gone
  const { input } = renaming;
  const selected = [input.selectionStart, input.selectionEnd, input.selectionDirection];
  renaming.open = open;
  open.replaceWith(input);
  if (document.activeElement !== document.body) return;
  input.focus({ preventScroll: true });
  input.setSelectionRange(...selected);
};

const mark = (item, asks) => {
  item.classList.toggle('lm-sure', asks);
  window.localmoeAsks(deleteOf(item), asks, item.dataset.sure);
};

const markSure = () => {
  for (const item of element.querySelectorAll('.lm-sure')) if (item.dataset.chat !== sure) mark(item, false);
  const item = sure && rowOf(sure);
  if (item && !item.classList.contains('lm-sure')) mark(item, true);
  return item;
};

const ask = (id) => {
  clearTimeout(ends);
  sure = id;
  const item = markSure();
  window.localmoeSayAsked(item ? deleteOf(item) : null);
  if (id) ends = setTimeout(ask, 4000, null);
};

const remove = (id) => {
  const answered = sure === id;
  ask(answered ? null : id);
  if (answered) trigger('delete_chat', { id });
};

element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button) return;
  const item = button.closest('li[data-chat]');
  if (button.dataset.act === 'open') {
    window.localmoePart('lm-shell').classList.remove('lm-show-nav');
    trigger('open_chat', { id: item.dataset.chat });
  }
  if (button.dataset.act === 'rename') rename(item);
  if (button.dataset.act === 'delete' && event.detail < 2) remove(item.dataset.chat); // a double click is one press
});
new MutationObserver(() => { putBack(); markSure(); putFocusBack(); })
  .observe(element, { childList: true, subtree: true, characterData: true, attributeFilter: ['data-chat'] });
