// Puts the pictures of messages above their texts, again whenever the messages are drawn anew. Those of a message that is
// edited can be removed, and others added (held.js).
const box = window.localmoePart('lm-scroll');
const MESSAGE = '.user-row :is([data-testid=user], textarea)'; // the latter while it is edited
const hostOf = ({ list, user }) => box.querySelectorAll(`#lm-${list} :is(${MESSAGE})`)[user]?.closest('.flex-wrap > *') ?? null;

const nameOf = (row) => row.querySelector('img')?.alt ?? row.textContent;
const picturesOf = (list) => [...(list?.children ?? [])].map((row) => ({ id: row.dataset.id, name: nameOf(row) }));
const place = () => {
  const wanted = new Map();
  for (const pictures of element.querySelectorAll('.lm-pictures')) {
    const host = hostOf(pictures.dataset), copy = pictures.cloneNode(true);
    if (!host) continue;
    copy.classList.add('placed');
    if (wanted.has(host)) wanted.get(host).append(...copy.children); // messages in a row are drawn as one
    else wanted.set(host, copy);
  }
  for (const area of box.querySelectorAll('.user-row textarea')) {
    const host = area.closest('.flex-wrap > *');
    if (host.querySelectorAll('textarea').length > 1) continue;
    const tray = window.localmoeHeld.of(area) ?? window.localmoeHeld.edit(area, picturesOf(wanted.get(host)));
    wanted.set(host, tray.list);
  }
  for (const placed of box.querySelectorAll(':is(.lm-pictures, .lm-held).placed')) {
    const host = placed.nextElementSibling, pictures = wanted.get(host);
    const alike = pictures && placed.innerHTML === pictures.innerHTML && placed.className === pictures.className;
    if (pictures === placed || (alike && placed.dataset.alone === pictures.dataset.alone)) wanted.delete(host);
    else placed.remove();
  }
  for (const [host, pictures] of wanted) {
    pictures.classList.add('placed');
    host.before(pictures);
  }
};

new MutationObserver(place).observe(box, { childList: true, subtree: true });
new MutationObserver(place).observe(element, { childList: true, subtree: true });
place();
