// One press is one: of a double click its first click, which may have put another button in this place, and of Enter that is
// held down its first stroke. Lists with buttons that ask first count clicks themselves (actions.js, chat_list.js).
(() => {
  const ignore = (event) => {
    event.preventDefault();
    event.stopImmediatePropagation();
  };

  document.addEventListener('click', (event) => {
    if (event.detail > 1 && event.target.closest?.('#lm-main button[id^=lm-]')) ignore(event);
  }, true);

  const breaksLine = ({ target, ctrlKey, metaKey, shiftKey }) =>
    target.matches?.('textarea') && !ctrlKey && !metaKey && (shiftKey || target.rows > 1);

  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && event.repeat && !breaksLine(event)) ignore(event);
  }, true);
})();
