// The import button: the chosen file is sent to the server, and its answer becomes the event 'imported'. So does the reason
// why a chat is not exported, as one with too many pictures is not: of a link the browser would say that it failed, alone.
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

const take = async (link) => {
  try {
    const answer = await fetch(link.href);
    if (!answer.ok) throw new Error(await answer.text());
    const named = /filename\*=UTF-8''([^;]*)/.exec(answer.headers.get('Content-Disposition'));
    const file = document.createElement('a');
    file.download = decodeURIComponent(named[1]);
    file.href = URL.createObjectURL(await answer.blob());
    file.click();
    setTimeout(() => URL.revokeObjectURL(file.href), 60_000); // it is being saved
  } catch (failure) {
    trigger('imported', { error: failure instanceof TypeError ? t('failed') : failure.message });
  }
};

element.addEventListener('click', (event) => {
  const link = event.target.closest('a[download]');
  if (link) {
    event.preventDefault();
    take(link);
  }
  if (event.target.closest('button[data-act=import]')) element.querySelector('input[type=file]').click();
});
element.addEventListener('change', (event) => {
  const [file] = event.target.files ?? [];
  if (file) send(file);
  event.target.value = ''; // the same file can be chosen again
});
