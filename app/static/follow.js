// Where the conversation is read: at its end, which is followed while an answer grows, or where the reader has scrolled to.
(() => {
  const NEAR_PX = 80, HOLD_MS = 3000;
  const mark = () => window.localmoePart('lm-mark')?.querySelector('[data-chat]')?.dataset ?? {};

  const follow = (box) => {
    let atEnd = true;
    let held = null; // {fromEnd, until}: what is read while messages are put before it
    let shown = { ...mark() };
    const stick = () => {
      const welcome = window.localmoePart('lm-welcome');
      if (held && performance.now() > held.until) held = null;
      if (held) box.scrollTop = box.scrollHeight - held.fromEnd;
      else if (atEnd && !welcome?.offsetHeight) box.scrollTop = box.scrollHeight; // a greeting is read from its top
    };
    box.addEventListener('scroll', () => {
      atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
    });
    // Another chat is shown from its end, and so is an answer that was asked for here.
    const look = () => {
      const now = { ...mark() }, begins = now.running === '1' && shown.running !== '1' && now.stamp !== shown.stamp;
      if (now.chat !== shown.chat || begins) {
        atEnd = true;
        held = null;
      }
      shown = now;
      stick();
    };
    box.addEventListener('click', (event) => {
      if (event.target.closest('#lm-earlier')) held = { fromEnd: box.scrollHeight - box.scrollTop, until: performance.now() + HOLD_MS };
    });
    for (const name of ['wheel', 'touchmove', 'pointerdown', 'keydown']) {
      box.addEventListener(name, () => { held = null; }, { capture: true, passive: true });
    }
    new ResizeObserver(stick).observe(box);
    new MutationObserver(stick).observe(box, { childList: true, subtree: true, characterData: true });
    new MutationObserver(look).observe(window.localmoePart('lm-mark'), { childList: true, subtree: true, attributes: true });
    stick();
  };

  const mounted = new MutationObserver(() => {
    const box = window.localmoePart('lm-scroll');
    if (!box || !window.localmoePart('lm-mark')) return;
    mounted.disconnect();
    follow(box);
  });
  mounted.observe(document.documentElement, { childList: true, subtree: true });
})();
