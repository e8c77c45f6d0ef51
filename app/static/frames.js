// Runs before anything else on the page (app/first_script.py). Whoever asks for the next frame in every frame, for
// longer than an animation lasts, is a clock: Gradio keeps one that nobody sees, at a tenth of a core. It gets four
// frames a second.
(() => {
  const ANIMATION = 120; // frames in a row, two seconds
  const PAUSE_MS = 250;
  const ask = window.requestAnimationFrame.bind(window);
  const cancel = window.cancelAnimationFrame.bind(window);
  const late = new Map(); // our handle of a frame that waits -> what takes it back; the browser's are positive
  let handles = 0;
  let row = 0; // frames in a row, up to the callback that runs

  window.requestAnimationFrame = (callback) => {
    const place = row + 1;
    const call = (time) => {
      const outer = row;
      row = place;
      try {
        callback(time);
      } finally {
        row = outer;
      }
    };
    if (place <= ANIMATION) return ask(call);
    handles -= 1;
    const handle = handles;
    const timer = setTimeout(() => {
      const frame = ask((time) => {
        late.delete(handle);
        call(time);
      });
      late.set(handle, () => cancel(frame));
    }, PAUSE_MS);
    late.set(handle, () => clearTimeout(timer));
    return handle;
  };

  window.cancelAnimationFrame = (handle) => {
    if (handle >= 0) return cancel(handle);
    late.get(handle)?.();
    late.delete(handle);
  };
})();
