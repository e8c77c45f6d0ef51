// What "Copy message" takes along: the Chatbot would copy the HTML of folded thoughts, colours and the line of figures,
// and tags as they are made text for it.
(() => {
  // As it was written (app/tag_text.py).
  window.localmoeWritten = (text) => text
    .replace(/\\\(\\relax (.*?)\\\)/g, (whole, formula) => `$${formula}$`)
    .replaceAll('&#0060;', '<').replaceAll('&#0091;', '[').replaceAll('&#0038;', '&');

  const plain = (html) => {
    const box = document.createElement('textarea'); // decodes entities and makes nothing of tags
    box.innerHTML = html.replace(/<\/?mark>/g, '');
    return box.value;
  };
  const clean = (text) => window.localmoeWritten(text
    .replace(/<details class="lm-think">.*?<\/details>\s*/gs, '')
    .replace(/\s*<p class="lm-(?:line|error)">.*?<\/p>/gs, '')
    .replace(/<pre class="lm-tokens">(.*?)<\/pre>/gs, (whole, inner) => plain(inner)));

  const clipboard = navigator.clipboard; // there is none where the page is not trusted
  if (!clipboard) return;
  const write = clipboard.writeText.bind(clipboard);
  clipboard.writeText = (text) => write(clean(String(text)));
})();
