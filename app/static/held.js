// Pictures of the message that is being written: made smaller here where they are large, uploaded at once, and shown above
// the box until the message is sent or they are removed.
(() => {
  const MOST = 8, LONGEST = 2048; // pictures of a message; pixels
  const LARGE = 4 << 20, SMALL = 1 << 18; // bytes; pixels of one that takes little room as PNG too
  const texts = () => window.localmoePart('lm-attach-texts')?.dataset ?? {};
  const told = (why, name) => texts()[why].replace('{name}', () => name);
  const list = document.createElement('ul');
  list.id = 'lm-held';
  list.setAttribute('aria-live', 'polite');
  let held = []; // {id, name}
  let sent = [];
  const coming = new Set(); // of attachments with a picture: promises of how many of their files were refused
  let pressed = false; // Send, which waits for them

  const begins = (bytes, text, at = 0) => [...text].every((char, i) => bytes[at + i] === char.charCodeAt(0));
  const isPicture = (bytes) => begins(bytes, '\x89PNG') || begins(bytes, '\xff\xd8\xff')
    || (/^GIF8[79]a$/.test(String.fromCharCode(...bytes.slice(0, 6))) && bytes.slice(0, 16).includes(0))
    || (begins(bytes, 'RIFF') && begins(bytes, 'WEBP', 8)) || (begins(bytes, 'BM') && begins(bytes, '\0\0\0\0', 6));

  const smaller = async (image, name) => {
    const share = Math.min(1, LONGEST / Math.max(image.width, image.height)), canvas = document.createElement('canvas');
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
      const large = Math.max(image.width, image.height) > LONGEST || file.size > LARGE;
      return large ? await smaller(image, file.name) : file;
    } finally {
      image.close();
    }
  };

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
    held = held.filter((one) => one.id !== id);
    draw();
    const left = list.querySelectorAll('button');
    (left[Math.min(place, left.length - 1)] ?? window.localmoePart('lm-message')?.querySelector('textarea'))?.focus();
  };
  const item = ({ id, name }) => {
    const row = document.createElement('li'), image = new Image(), button = document.createElement('button');
    image.src = `/images/${id}`;
    image.alt = name;
    button.type = 'button';
    button.textContent = '×';
    button.title = told('remove', name);
    button.setAttribute('aria-label', button.title);
    button.addEventListener('click', ({ detail }) => { if (detail < 2) remove(id); }); // a double click is one press
    row.dataset.id = id;
    row.append(image, button);
    return row;
  };
  function draw() {
    if (!list.isConnected) window.localmoePart('lm-composer')?.before(list);
    list.setAttribute('aria-label', texts().pictures ?? '');
    for (const row of [...list.children]) if (held.every(({ id }) => id !== row.dataset.id)) row.remove();
    list.append(...held.slice(list.children.length).map(item));
  }
  const hold = (more) => {
    for (const one of more) if (held.every(({ id }) => id !== one.id)) held.push(one);
    draw();
  };

  // JSON of the ids, for the message that is sent.
  const toSend = () => {
    sent = held.map(({ id }) => id);
    return JSON.stringify(sent);
  };
  const wasSent = () => {
    held = held.filter(({ id }) => !sent.includes(id));
    sent = [];
    draw();
  };
  const wait = (refused) => {
    coming.add(refused);
    refused.finally(() => coming.delete(refused));
  };

  // A message that is sent meanwhile waits for what is being attached, and is not sent without what is refused.
  const defer = async (event) => {
    if (!coming.size) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (pressed) return;
    pressed = true;
    const refused = await Promise.all(coming);
    pressed = false;
    if (!refused.some(Boolean)) setTimeout(() => window.localmoePart('lm-send')?.click());
  };
  document.addEventListener('click', (event) => {
    if (event.target.closest?.('#lm-send')) defer(event);
  }, true);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && event.target.closest?.('#lm-message')) defer(event);
  }, true);
  window.localmoeHeld = { isPicture, upload, hold, toSend, wasSent, wait, all: () => held };
})();
