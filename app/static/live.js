// Fills the live cards (app/live_html.py) from /live, about once a second and only while they are in sight.
(() => {
  const BUSY_MS = 1000, IDLE_MS = 3000, HIDDEN_MS = 500;
  const find = (selector) => window.localmoePart('lm-live-cards')?.querySelector(selector);
  let shown = null; // the last answer: cells as bytes, layers, experts
  let at = null; // the cell that is read: {layer, expert}

  const colour = (element, name) => {
    const text = getComputedStyle(element).getPropertyValue(name).trim();
    return [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
  };

  // One pixel an expert; the style sheet scales it without smoothing. Opacity is the heat's root, so that what is
  // asked for seldom can be told from what is never asked for.
  const draw = (canvas) => {
    const { cells, layers, experts } = shown;
    if (!layers) { // what is seen is no model's any more
      canvas.getContext('2d').clearRect(0, 0, canvas.width, canvas.height);
      return;
    }
    if (canvas.width !== experts || canvas.height !== layers) {
      canvas.width = experts; canvas.height = layers;
      canvas.style.height = `${Math.max(layers * 3, Math.min(180, layers * 11))}px`;
    }
    const here = colour(canvas, '--lm-hit'), away = colour(canvas, '--lm-late');
    const image = new ImageData(experts, layers);
    for (let i = 0; i < cells.length; i += 1) {
      const resident = cells[i] & 0x80, heat = Math.sqrt((cells[i] & 0x7f) / 0x7f);
      image.data.set(resident ? here : away, 4 * i);
      image.data[4 * i + 3] = 255 * (resident ? 0.22 + 0.78 * heat : heat);
    }
    canvas.getContext('2d').putImageData(image, 0, 0);
  };

  const readCell = (canvas) => {
    const line = find('[data-map-cell]');
    if (!line) return;
    if (!at || !shown || at.layer >= shown.layers || at.expert >= shown.experts) { line.textContent = ''; canvas.title = ''; return; }
    const cell = shown.cells[at.layer * shown.experts + at.expert];
    const text = canvas.dataset.cell.replace('{layer}', at.layer).replace('{expert}', at.expert)
      .replace('{place}', cell & 0x80 ? canvas.dataset.here : canvas.dataset.away)
      .replace('{share}', `${Math.round((100 * (cell & 0x7f)) / 0x7f)} %`);
    if (line.textContent !== text) line.textContent = text;
    canvas.title = text;
  };

  const show = (told) => {
    const canvas = find('[data-map]');
    if (!canvas) return;
    shown = { layers: told.layers, experts: told.experts, cells: Uint8Array.from(atob(told.cells), (c) => c.charCodeAt(0)) };
    draw(canvas);
    for (const name of ['here', 'away']) { // which a model whose experts lie on the disk has elsewhere
      if (told[name] === undefined || canvas.dataset[name] === told[name]) continue;
      canvas.dataset[name] = told[name];
      find(`.lm-map-key [data-${name}]`).textContent = told[name];
    }
    if (canvas.getAttribute('aria-label') !== told.words) canvas.setAttribute('aria-label', told.words);
    if (document.activeElement !== canvas) readCell(canvas); // a focused cell is read when the reader moves
    const link = find('[data-key="link_now"]');
    link.textContent = told.link ?? '—';
    find('[data-link-bar]').style.width = `${100 * (told.linkShare ?? 0)}%`;
    const step = find('[data-step]');
    if (told.step !== undefined && !step.matches(':hover')) { // held still under the pointer
      step.innerHTML = told.step;
      find('[data-step-words]').textContent = told.stepWords;
    }
  };

  let turn = 0; // of the question that decides when the next one comes: there is one row of them
  const poll = async () => {
    turn += 1;
    const mine = turn;
    let wait = HIDDEN_MS;
    if (window.localmoeInSight(find('[data-map]'))) {
      const open = find('[data-timeline]').open ? '&timeline=true' : '';
      wait = IDLE_MS;
      try {
        const answer = await fetch(`/live?language=${encodeURIComponent(window.localmoeLanguage())}${open}`);
        if (answer.ok) {
          const told = await answer.json();
          show(told);
          if (told.answering || open) wait = BUSY_MS;
        }
      } catch (error) { // the server is gone or restarting: what is shown stays, and the next round asks again
        console.debug('localmoe: /live', error.message);
      }
      wait = Math.min(wait, window.localmoePart('lm-stop')?.offsetParent ? BUSY_MS : wait);
    }
    if (mine === turn) next = setTimeout(poll, wait);
  };
  let next = setTimeout(poll, HIDDEN_MS);
  const soon = () => { turn += 1; clearTimeout(next); next = setTimeout(poll, 50); };

  document.addEventListener('pointermove', (event) => {
    const canvas = event.target.closest?.('[data-map]');
    if (!canvas || !shown || !shown.layers) return;
    const box = canvas.getBoundingClientRect();
    const place = (value, size, count) => Math.min(count - 1, Math.max(0, Math.floor((value / size) * count)));
    at = {
      layer: place(event.clientY - box.top, box.height, shown.layers),
      expert: place(event.clientX - box.left, box.width, shown.experts),
    };
    readCell(canvas);
  });
  document.addEventListener('keydown', (event) => {
    const canvas = event.target.closest?.('[data-map]');
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!canvas || !move || !shown || !shown.layers) return;
    event.preventDefault();
    at = at === null ? { layer: 0, expert: 0 } : {
      layer: Math.min(shown.layers - 1, Math.max(0, at.layer + move[0])),
      expert: Math.min(shown.experts - 1, Math.max(0, at.expert + move[1])),
    };
    readCell(canvas);
  });
  document.addEventListener('toggle', (event) => { if (event.target.matches?.('[data-timeline]')) soon(); }, true);
  document.addEventListener('visibilitychange', soon);
  document.addEventListener('localmoe-drawers', soon);
})();
