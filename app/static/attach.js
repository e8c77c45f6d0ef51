// Text files become part of the message: chosen with the button beside it, pasted, or dropped on the chat. They are read
// here, in the browser; nothing is uploaded. One that is dropped on a message that is being edited becomes part of that.
// Pictures, known by how they begin, go with the same message (held.js).
(() => {
  const MOST = 1_000_000; // characters of a message
  const KINDS = /\.([a-z0-9+#-]{1,12})$/i;
  const field = () => window.localmoePart('lm-message')?.querySelector('textarea');
  const inSight = (box) => Boolean(box?.offsetParent);
  const texts = () => window.localmoePart('lm-attach-texts')?.dataset ?? {};
  const chat = () => window.localmoePart('lm-mark')?.querySelector('[data-chat]')?.dataset.chat ?? '';
  const told = (why, name) => texts()[why].replace('{name}', () => name);
  const line = document.createElement('p');
  line.id = 'lm-attached';
  line.setAttribute('role', 'status');
  const say = (sentences) => {
    if (!line.isConnected) window.localmoePart('lm-composer')?.after(line);
    line.textContent = sentences.join(' ');
  };

  const decoded = (bytes) => {
    const wide = bytes[0] === 0xff && bytes[1] === 0xfe ? 'utf-16le' : bytes[0] === 0xfe && bytes[1] === 0xff ? 'utf-16be' : 'utf-8';
    // of Chinese files not all are Unicode
    for (const encoding of window.localmoeLanguage().startsWith('zh') ? [wide, 'gb18030'] : [wide]) {
      try {
        const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
        if (!text.includes('\0')) return text.replace(/\r\n?/g, '\n');
      } catch { /* the next one may be it */ }
    }
    return null;
  };

  const bytesOf = async (blob, name) => {
    try {
      return new Uint8Array(await blob.arrayBuffer());
    } catch { // a folder, or gone meanwhile
      throw new Error(told('unread', name));
    }
  };
  const read = async (file) => {
    if (file.size > 4 * MOST) throw new Error(told('large', file.name));
    const text = decoded(await bytesOf(file, file.name));
    if (text === null) throw new Error(told(file.type.startsWith('image/') ? 'kind' : 'none', file.name));
    return text;
  };
  const isPicture = async (file) => window.localmoeHeld.isPicture(await bytesOf(file.slice(0, 32), file.name));

  // Marks of one character that the text does not hold itself.
  const marks = (text, least) => {
    const runs = text.match(/`+/g) ?? [];
    return '`'.repeat(runs.reduce((most, run) => Math.max(most, run.length), least - 1) + 1);
  };
  const named = (name) => (name.includes('`') ? `${marks(name, 1)} ${name} ${marks(name, 1)}` : `\`${name}\``);
  const block = (name, text) => {
    const fence = marks(text, 3), kind = KINDS.exec(name)?.[1].toLowerCase() ?? '';
    return `${named(name)}:\n${fence}${kind}\n${text.replace(/\n*$/, '\n')}${fence}\n`;
  };

  // Behind what is there. Who types goes on where the caret is; nobody who types elsewhere is brought here.
  const append = (box, blocks) => {
    const { selectionStart, selectionEnd, scrollTop } = box, typing = document.activeElement;
    const busy = typing === box && box.value, free = !typing || typing.matches('body, #lm-attach, .lm-last *');
    const before = box.value && `${box.value.replace(/\n*$/, '')}\n\n`;
    const set = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set;
    set.call(box, `${before}${blocks.join('\n')}\n`);
    box.dispatchEvent(new Event('input', { bubbles: true }));
    if (busy) {
      box.setSelectionRange(selectionStart, selectionEnd);
      box.scrollTop = scrollTop;
    } else if (free || typing === box) {
      box.focus();
      box.selectionStart = box.selectionEnd = box.value.length;
      box.scrollTop = box.scrollHeight;
    }
  };

  // How many were refused. onPicture: called once there is a picture among them.
  const attachAll = async (files, box, onPicture) => {
    const of = chat(), tray = window.localmoeHeld.of(box), blocks = [], pictures = [], problems = [];
    say(files.length ? [told('reading', files.length > 1 ? `${files[0].name} …` : files[0].name)] : []);
    let length = box.value.length;
    for (const file of files) {
      try {
        if (await isPicture(file)) {
          if (!tray) throw new Error(told('left', file.name));
          onPicture(tray);
          pictures.push(await tray.upload(file, pictures.length));
          continue;
        }
        const made = block(file.name, await read(file));
        length += made.length;
        if (length > MOST) throw new Error(told('large', file.name));
        blocks.push(made);
      } catch (error) {
        problems.push(error.message);
      }
    }
    if (chat() !== of || !box.isConnected) { // what was meant for one is not put into another
      say([told('left', files[0].name)]);
      return files.length;
    }
    if (pictures.length) problems.push(...tray.hold(pictures).map((name) => told('many', name)));
    say([...new Set(problems)]);
    if (blocks.length) append(box, blocks);
    return problems.length;
  };
  const attach = (files, box) => {
    const refused = attachAll(files, box, (tray) => tray.wait(refused));
    return refused;
  };

  document.addEventListener('input', (event) => {
    if (event.isTrusted && event.target === field()) say([]);
  });

  const input = document.createElement('input');
  input.type = 'file';
  input.multiple = true;
  input.hidden = true;
  input.id = 'lm-attach-input';
  let chosenFor = null; // a message that is edited, or the new one
  window.localmoeChoose = (box) => {
    chosenFor = box;
    input.click();
  };
  input.addEventListener('change', () => {
    const box = chosenFor ?? field();
    if (input.files.length) attach([...input.files], box).finally(() => { input.value = ''; }); // the same one again
  });
  const add = () => document.body.append(input);
  if (document.body) add();
  else document.addEventListener('DOMContentLoaded', add);

  document.addEventListener('click', (event) => {
    if (event.target.closest?.('#lm-attach')) window.localmoeChoose(null);
  });

  // Files that were copied elsewhere; what has a text as well, as cells of a table, is pasted as that.
  document.addEventListener('paste', (event) => {
    const { files, types } = event.clipboardData, box = event.target;
    const takes = box === field() || box.matches?.('.lm-turns textarea');
    if (!takes || !files.length || types.includes('text/plain')) return;
    event.preventDefault();
    attach([...files], box);
  });

  // Where a file would go that is dropped here: a message that is being edited, the new one, or nowhere.
  const place = (target) => {
    const edited = target.closest?.('.user-row')?.querySelector('textarea');
    const box = edited ?? (target.closest?.('#lm-tab-chat') ? field() : null);
    return inSight(box) ? box : null;
  };
  const dropping = (event) => event.dataTransfer?.types.includes('Files');
  const mark = (on) => window.localmoePart('lm-composer')?.classList.toggle('lm-drop', on);
  document.addEventListener('dragover', (event) => {
    if (!dropping(event)) return;
    event.preventDefault(); // else the browser would leave the page for the file
    const box = place(event.target);
    event.dataTransfer.dropEffect = box ? 'copy' : 'none';
    mark(box === field() && Boolean(box));
  });
  document.addEventListener('dragleave', (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener('drop', (event) => {
    mark(false);
    if (!dropping(event)) return;
    event.preventDefault();
    const box = place(event.target), files = [...event.dataTransfer.files];
    if (box && files.length) attach(files, box);
  });
})();
