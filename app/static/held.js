// Pictures of a message that is being written or edited: made smaller here where they are large, uploaded at once, and shown
// above its box until the message is sent or they are removed.
(() => {
  const MOST = 8, PIXELS = 1 << 22, LONGEST = 8192; // pictures of a message; of a picture, and of its longer side
  const LARGE = 4 << 20, SMALL = 1 << 18; // bytes; pixels of one that takes little room as PNG too
  const texts = () => window.localmoePart('lm-attach-texts')?.dataset ?? {};
  const told = (why, name) => texts()[why].replace('{name}', () => name);
  const begins = (bytes, text, at = 0) => [...text].every((char, i) => bytes[at + i] === char.charCodeAt(0));
  const isPicture = (bytes) => begins(bytes, '\x89PNG') || begins(bytes, '\xff\xd8\xff')
    || (/^GIF8[79]a$/.test(String.fromCharCode(...bytes.slice(0, 6))) && bytes.slice(0, 16).includes(0))
    || (begins(bytes, 'RIFF') && begins(bytes, 'WEBP', 8)) || (begins(bytes, 'BM') && begins(bytes, '\0\0\0\0', 6));

  const smaller = async (image, name) => {
    const canvas = document.createElement('canvas'), longer = Math.max(image.width, image.height);
    const share = Math.min(1, Math.sqrt(PIXELS / (image.width * image.height)), LONGEST / longer);
    const width = canvas.width = Math.max(1, Math.round(share * image.width));
    const height = canvas.height = Math.max(1, Math.round(share * image.height));
    const pen = canvas.getContext('2d');
    pen.imageSmoothingQuality = 'high';
    pen.drawImage(image, 0, 0, width, height);
    const seen = pen.getImageData(0, 0, width, height).data;
    let clear = false; // somewhere
    for (let i = 3; i < seen.length && !clear; i += 4) clear = seen[i] < 255;
    const kind = clear || width * height <= SMALL ? 'image/png' : 'image/jpeg';
    const made = await new Promise((done) => { canvas.toBlob(done, kind, 0.9); });
    if (!made) throw new Error(told('kind', name));
    return made;
  };
  const toUpload = async (file) => {
    let image;
    try {
      image = await createImageBitmap(file);
    } catch {
      throw new Error(told('kind', file.name));
    }
    try {
      const many = image.width * image.height > PIXELS || Math.max(image.width, image.height) > LONGEST;
      return many || file.size > LARGE ? await smaller(image, file.name) : file;
    } finally {
      image.close();
    }
  };

  const made = (tag, attributes, text = '') => {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    found.textContent = text;
    return found;
  };

  // Those of one message, in a list of the page. back: gets the focus when the last one is removed.
  const makeTray = (back) => {
    const list = made('ul', { class: 'lm-held', 'aria-live': 'polite' });
    const coming = new Set(); // of attachments with a picture: promises of how many of their files were refused
    let held = []; // {id, name}

    // What becomes of a file; an Error says why it is refused.
    const upload = async (file, others) => {
      if (held.length + others >= MOST) throw new Error(told('many', file.name));
      const body = await toUpload(file);
      let answer, found;
      try {
        answer = await fetch(`/images?language=${window.localmoeLanguage()}`, { method: 'POST', body });
        found = await answer.json();
      } catch {
        throw new Error(told('unsent', file.name));
      }
      if (!answer.ok) throw new Error(answer.status === 409 ? found.error : `${file.name}: ${found.error}`);
      return { id: found.id, name: file.name };
    };

    const remove = (id) => {
      const place = held.findIndex((one) => one.id === id);
      set(held.filter((one) => one.id !== id));
      const left = list.querySelectorAll('[data-id] button');
      (left[Math.min(place, left.length - 1)] ?? back())?.focus();
    };
    const item = ({ id, name }) => {
      const row = made('li', { 'data-id': id }), title = told('remove', name);
      const button = made('button', { type: 'button', title, 'aria-label': title }, '×');
      button.addEventListener('click', ({ detail }) => { if (detail < 2) remove(id); }); // a double click is one press
      row.append(made('img', { src: `/images/${id}`, alt: name }), button);
      return row;
    };
    const draw = () => {
      list.setAttribute('aria-label', texts().pictures ?? '');
      const rows = new Map([...list.querySelectorAll('[data-id]')].map((row) => [row.dataset.id, row]));
      for (const one of held) if (!rows.delete(one.id)) list.insertBefore(item(one), list.querySelector('.lm-last'));
      for (const row of rows.values()) row.remove();
    };
    const set = (pictures) => {
      held = pictures.filter(({ id }, place) => pictures.findIndex((one) => one.id === id) === place);
      draw();
    };
    // Names of those that have no room any more, as others came meanwhile.
    const hold = (more) => {
      const added = more.filter(({ id }) => held.every((one) => one.id !== id)), room = Math.max(0, MOST - held.length);
      set([...held, ...added.slice(0, room)]);
      return added.slice(room).map(({ name }) => name);
    };
    const wait = (refused) => {
      coming.add(refused);
      refused.finally(() => coming.delete(refused));
    };
    return { list, coming, upload, set, hold, wait, all: () => held, pressed: false };
  };

  const field = () => window.localmoePart('lm-message')?.querySelector('textarea');
  const composer = makeTray(field);
  composer.list.id = 'lm-held';
  const hold = (pictures) => {
    if (!composer.list.isConnected) window.localmoePart('lm-composer')?.before(composer.list);
    return composer.hold(pictures);
  };

  // JSON of the ids, for the message that is sent.
  let sent = [];
  const toSend = () => {
    sent = composer.all().map(({ id }) => id);
    return JSON.stringify(sent);
  };
  const wasSent = () => {
    composer.set(composer.all().filter(({ id }) => !sent.includes(id)));
    sent = [];
  };

  // Of messages that are edited, by their boxes; with a button that attaches files to that message.
  const trays = new WeakMap();
  const edit = (box, pictures) => {
    const tray = trays.get(box) ?? makeTray(() => box);
    if (!trays.has(box)) {
      const title = window.localmoePart('lm-attach')?.textContent.trim() ?? '';
      const add = made('button', { type: 'button', title, 'aria-label': title }, '+'), last = made('li', { class: 'lm-last' });
      add.addEventListener('click', () => window.localmoeChoose(box));
      last.append(add);
      tray.list.append(last);
    }
    trays.set(box, tray);
    tray.set(pictures);
    return tray;
  };
  const of = (box) => (box === field() ? { ...composer, hold } : trays.get(box));

  // A message that is sent meanwhile waits for what is being attached, and is not sent without what is refused.
  const defer = (tray, event, again) => {
    if (!tray?.coming.size) return false;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (tray.pressed) return true;
    tray.pressed = true;
    Promise.all(tray.coming).then((refused) => {
      tray.pressed = false;
      if (!refused.some(Boolean)) setTimeout(again);
    });
    return true;
  };
  const send = () => window.localmoePart('lm-send')?.click();
  document.addEventListener('click', (event) => {
    if (event.target.closest?.('#lm-send')) defer(composer, event, send);
  }, true);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && event.target.closest?.('#lm-message')) defer(composer, event, send);
  }, true);
  window.localmoeHeld = { isPicture, of, edit, defer, hold, toSend, wasSent, all: composer.all };
})();
