// Text files become part of the message: chosen with the button beside it, pasted, or dropped on the chat. They are read
// here, in the browser; nothing is uploaded.
(() => {
  const MOST = 1_000_000; // characters of a file: more than a context holds
  const KINDS = /\.([a-z0-9+#-]{1,12})$/i;
  const field = () => document.querySelector('#lm-message textarea');
  const texts = () => document.getElementById('lm-attach-texts')?.dataset ?? {};
  const line = document.createElement('p');
  line.id = 'lm-attached';
  line.setAttribute('role', 'status');
  const say = (sentences) => {
    if (!line.isConnected) document.getElementById('lm-composer')?.after(line);
    line.textContent = sentences.join(' ');
  };

  const refused = (why, name) => new Error(texts()[why].replace('{name}', name));

  const read = async (file) => {
    if (file.size > 4 * MOST) throw refused('large', file.name);
    let bytes;
    try {
      bytes = new Uint8Array(await file.arrayBuffer());
    } catch { // a folder, or gone meanwhile
      throw refused('unread', file.name);
    }
    const wide = { 'ff,fe': 'utf-16le', 'fe,ff': 'utf-16be' }[bytes.slice(0, 2).join().replace(/\d+/g, (n) => Number(n).toString(16))];
    let text;
    try {
      text = new TextDecoder(wide ?? 'utf-8', { fatal: true }).decode(bytes);
    } catch {
      throw refused('none', file.name);
    }
    if (text.includes('\0')) throw refused('none', file.name);
    if (text.length > MOST) throw refused('large', file.name);
    return text.replace(/\r\n?/g, '\n');
  };

  // Between marks that the text does not hold itself.
  const block = (name, text) => {
    const longest = (text.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const marks = '`'.repeat(longest + 1);
    return `${name}:\n${marks}${KINDS.exec(name)?.[1].toLowerCase() ?? ''}\n${text.replace(/\n*$/, '\n')}${marks}\n`;
  };

  const attach = async (files) => {
    const blocks = [], problems = [];
    for (const file of files) {
      try {
        blocks.push(block(file.name, await read(file)));
      } catch (error) {
        problems.push(error.message);
      }
    }
    say(problems);
    const box = field();
    if (!box || !blocks.length) return;
    const before = box.value && `${box.value.replace(/\n*$/, '')}\n\n`;
    const set = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set;
    set.call(box, `${before}${blocks.join('\n')}\n`);
    box.dispatchEvent(new Event('input', { bubbles: true }));
    box.focus();
    box.selectionStart = box.selectionEnd = box.value.length;
    box.scrollTop = box.scrollHeight;
  };

  document.addEventListener('input', (event) => {
    if (event.isTrusted && event.target === field()) say([]);
  });

  const input = document.createElement('input');
  input.type = 'file';
  input.multiple = true;
  input.hidden = true;
  input.id = 'lm-attach-input';
  input.addEventListener('change', () => {
    attach([...input.files]).finally(() => { input.value = ''; }); // the same file may be chosen again
  });
  const add = () => document.body.append(input);
  if (document.body) add();
  else document.addEventListener('DOMContentLoaded', add);

  document.addEventListener('click', (event) => {
    if (event.target.closest?.('#lm-attach')) input.click();
  });

  // Files that were copied elsewhere; what has a text as well, as cells of a table, is pasted as that.
  document.addEventListener('paste', (event) => {
    const { files, types } = event.clipboardData;
    if (event.target !== field() || !files.length || types.includes('text/plain')) return;
    event.preventDefault();
    attach([...files]);
  });

  const dropping = (event) => event.dataTransfer?.types.includes('Files');
  const mark = (on) => document.getElementById('lm-composer')?.classList.toggle('lm-drop', on);
  document.addEventListener('dragover', (event) => {
    if (!dropping(event)) return;
    event.preventDefault(); // else the browser would leave the page for the file
    const here = field()?.offsetParent !== null;
    event.dataTransfer.dropEffect = here ? 'copy' : 'none';
    mark(here);
  });
  document.addEventListener('dragleave', (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener('drop', (event) => {
    mark(false);
    if (!dropping(event)) return;
    event.preventDefault();
    if (field()?.offsetParent !== null) attach([...event.dataTransfer.files]);
  });
})();
