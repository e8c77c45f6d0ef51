// Buttons that ask before they act. While one asks, its text and its name are the question; a screen reader does not read
// a button again that has the focus already, so it is told the question besides.
(() => {
  const region = document.createElement('p');
  region.id = 'lm-asking';
  region.className = 'lm-hidden';
  region.style.top = 0; // below the page it would make it scroll
  region.setAttribute('aria-live', 'assertive');
  const add = () => document.body.append(region); // before it says anything: else it is not heard
  if (document.body) add();
  else document.addEventListener('DOMContentLoaded', add);

  const nameOf = ({ text, label }, verb, question) =>
    label.startsWith(verb || text) ? question + label.slice((verb || text).length) : `${question} ${label}`;

  window.localmoeAsks = (button, asks, question) => {
    const { dataset } = button;
    dataset.text ??= button.textContent;
    dataset.label ??= button.getAttribute('aria-label') ?? '';
    const text = asks ? question : dataset.text;
    if (button.textContent !== text) button.textContent = text;
    if (dataset.label) button.setAttribute('aria-label', asks ? nameOf(dataset, button.title, question) : dataset.label);
  };

  // Of the button that asks now; null: none does any more.
  window.localmoeSayAsked = (button) => {
    region.textContent = button ? button.getAttribute('aria-label') || button.textContent : '';
  };
})();
