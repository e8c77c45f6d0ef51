// Puts the arrows to other versions under their messages, again whenever the messages are drawn anew. A press on
// one becomes the event 'show_version'.
const box = window.localmoePart('lm-scroll');
const name = (arrows) => `${arrows.dataset.list} ${arrows.dataset.user} ${arrows.dataset.role}`;
let focused = null; // the arrows and the direction that had the focus

const hostOf = ({ list, user, role }) => {
  const bubble = box.querySelectorAll(`#lm-${list} [data-testid=user]`)[user];
  let row = bubble?.closest('.message-row');
  if (role === 'assistant') {
    // The first answer of a list may have no question in it: then it is the first row.
    row = row ? row.nextElementSibling : box.querySelector(`#lm-${list} .message-row`);
    while (row && !row.matches('.message-row')) row = row.nextElementSibling;
    if (!row?.matches('.bot-row')) return null;
  }
  return row?.querySelector('.flex-wrap') ?? null;
};

const place = () => {
  const wanted = new Map();
  for (const arrows of element.querySelectorAll('.lm-branch')) {
    const host = hostOf(arrows.dataset);
    if (host) wanted.set(name(arrows), [host, arrows]);
  }
  for (const placed of box.querySelectorAll('.lm-branch.placed')) {
    const [host, arrows] = wanted.get(name(placed)) ?? [];
    if (host === placed.parentElement && placed.innerHTML === arrows.innerHTML) wanted.delete(name(placed));
    else placed.remove();
  }
  for (const [host, arrows] of wanted.values()) {
    const copy = arrows.cloneNode(true);
    copy.classList.add('placed');
    host.append(copy);
    if (focused && focused.name === name(copy) && document.activeElement === document.body) {
      const buttons = [...copy.querySelectorAll('button')];
      (buttons[focused.index].disabled ? buttons[1 - focused.index] : buttons[focused.index]).focus({ preventScroll: true });
    }
  }
};

box.addEventListener('click', (event) => {
  const button = event.target.closest('.lm-branch.placed button');
  if (!button || button.disabled || !('node' in button.dataset)) return;
  const arrows = button.parentElement;
  focused = { name: name(arrows), index: [...arrows.querySelectorAll('button')].indexOf(button) };
  trigger('show_version', { node: Number(button.dataset.node) });
});
new MutationObserver(place).observe(box, { childList: true, subtree: true });
new MutationObserver(place).observe(element, { childList: true, subtree: true });
place();
