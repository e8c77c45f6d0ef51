// Puts the pictures of messages above their texts, again whenever the messages are drawn anew.
const box = window.localmoePart('lm-scroll');
const MESSAGE = '.user-row :is([data-testid=user], textarea)'; // the latter while it is edited
const hostOf = ({ list, user }) => box.querySelectorAll(`#lm-${list} :is(${MESSAGE})`)[user]?.closest('.flex-wrap > *') ?? null;

const place = () => {
  const wanted = new Map();
  for (const pictures of element.querySelectorAll('.lm-pictures')) {
    const host = hostOf(pictures.dataset), copy = pictures.cloneNode(true);
    if (!host) continue;
    if (wanted.has(host)) wanted.get(host).append(...copy.children); // messages in a row are drawn as one
    else wanted.set(host, copy);
  }
  for (const placed of box.querySelectorAll('.lm-pictures.placed')) {
    const host = placed.nextElementSibling, pictures = wanted.get(host);
    const same = pictures && placed.innerHTML === pictures.innerHTML && placed.dataset.alone === pictures.dataset.alone;
    if (same) wanted.delete(host);
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
