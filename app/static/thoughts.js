// Thoughts that the reader has opened stay open while the answer grows: each update draws them anew, folded.
(() => {
  const start = () => {
    const turn = window.localmoePart('lm-turn');
    if (!turn) return false;
    let opened = false; // the thoughts of the last turn: there is one block of them
    turn.addEventListener('click', (event) => {
      const block = event.target.closest('summary')?.closest('details.lm-think');
      if (block) opened = !block.open; // the click is about to change it
    });
    new MutationObserver(() => {
      const block = turn.querySelector('details.lm-think');
      if (!block) opened = false; // another chat or turn
      else if (opened && !block.open) block.open = true;
    }).observe(turn, { childList: true, subtree: true });
    return true;
  };
  const mounted = new MutationObserver(() => { if (start()) mounted.disconnect(); });
  mounted.observe(document.documentElement, { childList: true, subtree: true });
})();
