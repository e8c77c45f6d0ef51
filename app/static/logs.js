// Fills the Logs tab (app/tabs/logs.py) from /log while it is in sight: filter, follow, copy.
(() => {
  const PERIOD_MS = 1000, MAX_LINES = 2000;
  const find = (selector) => window.localmoePart('lm-logs')?.querySelector(selector);
  let last = 0; // number of the newest line that is shown

  const append = (box, lines) => {
    const part = document.createDocumentFragment();
    for (const line of lines) {
      const row = document.createElement('div');
      row.className = `lm-log ${line.level.toLowerCase()}`;
      row.textContent = `${line.time} ${line.level} ${line.source}: ${line.text}`;
      part.append(row);
    }
    box.append(part);
    while (box.childElementCount > MAX_LINES) box.firstElementChild.remove();
    if (find('[data-log-follow]').checked) box.scrollTop = box.scrollHeight;
  };

  const poll = async () => {
    const box = find('[data-log-lines]');
    if (box && box.offsetParent !== null && document.visibilityState === 'visible') {
      try {
        if (!box.childElementCount) last = 0; // drawn anew
        const answer = await fetch(`/log?after=${last}`);
        const { lines } = await answer.json();
        const fresh = lines.filter((line) => line.number > last);
        if (fresh.length) { append(box, fresh); last = fresh.at(-1).number; }
      } catch (error) { // the server is gone or restarting: the next round asks again
        console.debug('localmoe: /log', error.message);
      }
    }
    setTimeout(poll, PERIOD_MS);
  };
  setTimeout(poll, PERIOD_MS);

  document.addEventListener('change', (event) => {
    if (event.target.matches?.('[data-log-level]')) find('[data-log-lines]').dataset.level = event.target.value;
    if (event.target.matches?.('[data-log-follow]') && event.target.checked) {
      const box = find('[data-log-lines]');
      box.scrollTop = box.scrollHeight;
    }
  });
  // Who scrolls up wants to read: following ends, and begins again at the end of the list.
  document.addEventListener('wheel', (event) => {
    const box = event.target.closest?.('[data-log-lines]');
    if (!box) return;
    requestAnimationFrame(() => {
      find('[data-log-follow]').checked = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    });
  }, { passive: true });
  document.addEventListener('click', async (event) => {
    const button = event.target.closest?.('[data-log-copy]');
    if (!button) return;
    const rows = [...find('[data-log-lines]').children].filter((row) => row.offsetParent !== null);
    await navigator.clipboard.writeText(rows.map((row) => row.textContent).join('\n'));
    const text = button.textContent;
    button.textContent = button.dataset.done;
    setTimeout(() => { button.textContent = text; }, 1500);
  });
})();
