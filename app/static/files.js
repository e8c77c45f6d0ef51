// The import button: the chosen file is sent to the server, and its answer becomes the event 'imported'.
const t = (name) => element.querySelector('.lm-files')?.dataset[name] ?? '';

const send = async (file) => {
  if (file.size > Number(t('max'))) {
    trigger('imported', { error: t('large') });
    return;
  }
  try {
    const answer = await fetch('/chats', { method: 'POST', body: file });
    const { id = '', error = '' } = await answer.json();
    trigger('imported', { id, error });
  } catch (failure) {
    trigger('imported', { error: t('failed') });
  }
};

element.addEventListener('click', (event) => {
  if (event.target.closest('button[data-act=import]')) element.querySelector('input[type=file]').click();
});
element.addEventListener('change', (event) => {
  const [file] = event.target.files ?? [];
  if (file) send(file);
  event.target.value = ''; // the same file can be chosen again
});
