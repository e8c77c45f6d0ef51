// The names of presets. Gradio tells of a choice whenever such a field is left, and at Enter takes the first preset whose name
// holds what was typed: either would put a preset's text in the place of one that is being written below.
(() => {
  const fieldOf = (target) => target.closest?.('.lm-presets')?.querySelector('input') ?? null;
  const used = new WeakMap(); // field -> what has become of it since it took the focus

  document.addEventListener('focusin', ({ target }) => {
    if (fieldOf(target) === target) used.set(target, { text: target.value, chose: false, moved: false });
  });
  document.addEventListener('input', ({ target }) => {
    if (used.has(target)) used.get(target).moved = false;
  });
  document.addEventListener('mousedown', ({ target }) => { // before Gradio hears of it
    const use = used.get(fieldOf(target));
    if (use && target.closest('[role=option]')) use.chose = true;
  }, true);
  document.addEventListener('keydown', (event) => {
    const { key, target } = event, use = used.get(target);
    if (!use || event.isComposing) return;
    if (['ArrowDown', 'ArrowUp'].includes(key)) use.moved = true; // to a preset of the list
    if (key !== 'Enter') return;
    use.chose = true;
    if (use.moved || !target.value) return;
    target.addEventListener('keydown', (same) => same.stopPropagation(), { once: true }); // Gradio does not hear of it
    target.blur(); // takes the name as it is
  }, true);

  // The listener's: the preset that was chosen, or none.
  window.localmoeChosen = (kind, name) => {
    const field = window.localmoePart(`lm-preset-${kind}`)?.querySelector('input'), use = used.get(field);
    return !use || use.chose || field.value !== use.text ? name : null;
  };
})();
