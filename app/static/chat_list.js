// Clicks in the list of chats become the events 'open_chat', 'rename_chat' and 'delete_chat'.
const row = (node) => node.closest('li[data-chat]');

const rename = (item) => {
  const open = item.querySelector('.lm-open');
  const input = document.createElement('input');
  input.className = 'lm-rename';
  input.value = open.title;
  input.maxLength = 80;
  input.setAttribute('aria-label', item.dataset.newTitle);
  let done = false;
  const end = (keep) => {
    if (done) return;
    done = true;
    input.replaceWith(open);
    const title = input.value.trim();
    if (keep && title && title !== open.title) trigger('rename_chat', { id: item.dataset.chat, title });
  };
  input.addEventListener('keydown', (event) => {
    event.stopPropagation();
    if (event.key === 'Enter') end(true);
    if (event.key === 'Escape') end(false);
  });
  input.addEventListener('blur', () => end(true));
  open.replaceWith(input);
  input.focus();
  input.select();
};

const remove = (item, button) => {
  if (item.classList.contains('lm-sure')) {
    trigger('delete_chat', { id: item.dataset.chat });
    return;
  }
  item.classList.add('lm-sure');
  button.textContent = item.dataset.sure;
  setTimeout(() => {
    item.classList.remove('lm-sure');
    button.textContent = '✕';
  }, 4000);
};

element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button) return;
  const item = row(button);
  if (button.dataset.act === 'open') {
    document.getElementById('lm-shell').classList.remove('lm-show-nav');
    trigger('open_chat', { id: item.dataset.chat });
  }
  if (button.dataset.act === 'rename') rename(item);
  if (button.dataset.act === 'delete') remove(item, button);
});
