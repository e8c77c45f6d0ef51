// Asks /now what has moved: fills the panel and the context meter, puts new text of the answer into the conversation
// (event 'grown', app/screen.py), and has the rest of the page drawn where it is out of date (event 'due'), or all of it
// where the server does not know the page any more (event 'open'). Nothing is asked while the page is out of sight.
const FIRST_MS = 100, LOST_MS = 2000, ANSWER_MS = 15000, PATIENCE_MS = 3000, BLIND_MS = 6000, TYPING_MS = 400, CHECK_MS = 250, WRONG = 3;
const shown = { panel: '', meter: '', turn: '' }; // keys of what was told last
const typed = { text: '', tokens: 0, about: false };
let grown = null; // the answer's text that is to be shown: {key, of, parts}
let last = null; // what was painted last: {of, text}
let newest = 0; // the stamp of the user's last action that the page has shown
let keyAt = -TYPING_MS; // when something was typed last
let wrong = 0; // how often in a row the conversation or its buttons were not what the mark says
let dueSince = 0; // when a refresh was asked for that has not come yet
let asking = false, again = false, next = null, rest = null;
let misses = 0; // questions in a row that nobody answered

const mark = () => element.querySelector('[data-epoch]')?.dataset;
const frame = (name) => document.querySelector(`[data-part="${name}"]`);
const box = () => window.localmoePart('lm-message')?.querySelector('textarea');

// The listener of 'grown'. `seen` says which turn the page shows: if it is another one by now, or the answer has ended
// there, it stays as it is.
const turnOf = (seen) => (seen ? JSON.parse(seen).turn : null);
const textOf = (turn) => JSON.stringify(turn?.at(-1)?.content?.map((part) => part.text));
window.localmoeGrown = (seen, turn) => {
  if (!grown || turnOf(seen) !== grown.of || !turn?.length) return [];
  const question = turn.filter((entry) => entry.role === 'user');
  const content = grown.parts.map((text) => ({ type: 'text', text }));
  const painted = [...question, { role: 'assistant', metadata: null, content, options: null }];
  shown.turn = grown.key;
  last = { of: grown.of, text: textOf(painted) };
  return [painted];
};

// The listener of 'check'. Between the look at `seen` and the painting an answer of the server may have come: then
// unfinished text stands in a turn that is another one, and all is drawn anew.
window.localmoeCheck = (seen, turn) => {
  if (last && turnOf(seen) !== last.of && textOf(turn) === last.text) {
    wrong = WRONG;
    trigger('due');
  }
  return [];
};

// What a refresh takes for shown: nothing, if the conversation or a button is not what it should be.
window.localmoeSeen = (seen) => (wrong >= WRONG ? '' : seen);

// Gradio loses a change of a button that it is just putting in.
const hasWrongButton = (at) => {
  const [send, stop] = ['lm-send', 'lm-stop'].map((id) => window.localmoePart(id) !== null);
  return (send || stop) && (stop !== (at.running === '1') || send === stop);
};

const isWrong = (at) => {
  if (hasWrongButton(at)) return true;
  const turn = window.localmoePart('lm-turn');
  if (!turn || turn.querySelector('textarea')) return false; // a question is being edited
  return turn.querySelectorAll('[data-testid=user]').length !== Number(at.asked);
};

const fill = (name, part) => {
  const place = frame(name);
  if (!part || !place) return;
  place.innerHTML = part.html;
  shown[name] = part.key;
};

const show = (told, chat) => {
  fill('panel', told.panel);
  const at = mark();
  if (chat === (at?.chat ?? '')) {
    fill('meter', told.meter);
    if (told.turn) {
      grown = told.turn;
      trigger('grown');
    }
  }
  const now = performance.now();
  wrong = at && isWrong(at) ? wrong + 1 : 0;
  const unknown = at ? Number(at.stamp) === 0 : now > BLIND_MS;
  const stale = at && (at.epoch !== told.epoch || Number(at.stamp) < newest || wrong >= WRONG);
  if ((unknown || stale) && (!dueSince || now - dueSince > PATIENCE_MS)) {
    dueSince = now;
    trigger(unknown ? 'open' : 'due');
  }
};

// How many tokens are being written, once the keys rest. The text is looked at with every question, as Gradio empties
// the box unseen.
const count = async () => {
  const text = box()?.value ?? '';
  if (text === typed.text || performance.now() - keyAt < TYPING_MS) return;
  Object.assign(typed, { text, tokens: 0, about: false });
  if (!text.trim()) return;
  const answer = await fetch('/typed', { method: 'POST', body: text });
  if (answer.ok) Object.assign(typed, await answer.json());
};

// What /now tells; null where the server is gone or restarting: what is shown stays, and the next round asks again.
const ask = async (chat) => {
  try {
    await count();
    const panel = window.localmoeInSight(window.localmoePart('lm-live')) ? shown.panel : 'hidden';
    const asked = new URLSearchParams({ ...shown, panel, chat, language: window.localmoeLanguage(), typed: typed.tokens });
    if (typed.about) asked.set('about', '1');
    const answer = await fetch(`/now?${asked}`, { signal: AbortSignal.timeout(ANSWER_MS) });
    return answer.ok ? await answer.json() : null;
  } catch (error) {
    console.debug('localmoe: /now', error.message);
    return null;
  }
};

// Twice in vain: what is shown is not what is, so it is said.
const sayLost = (lost) => {
  const said = document.getElementById('lm-lost');
  if (!lost) said?.remove();
  if (!lost || said) return;
  const line = Object.assign(document.createElement('p'), { id: 'lm-lost', className: 'lm-alert' });
  line.setAttribute('role', 'alert');
  window.localmoePart('lm-tabs').before(line);
  line.textContent = window.localmoePart('lm-lost-text').textContent;
};

const poll = async () => {
  clearTimeout(next);
  if (asking) { again = true; return; }
  if (document.visibilityState !== 'visible') return; // becoming visible asks again
  asking = true;
  const chat = mark()?.chat ?? '';
  const told = await ask(chat);
  asking = false;
  misses = told ? 0 : misses + 1;
  sayLost(misses > 1);
  next = setTimeout(poll, again ? 0 : told ? 1000 * told.wait : LOST_MS);
  again = false;
  if (told) show(told, chat);
};

const soon = (ms) => { clearTimeout(next); next = setTimeout(poll, ms); };
new MutationObserver(() => { // the server has answered
  dueSince = 0;
  if (last) setTimeout(() => trigger('check'), CHECK_MS);
  newest = Math.max(newest, Number(mark()?.stamp ?? 0));
  soon(0);
}).observe(element, { childList: true, subtree: true, attributes: true });
document.addEventListener('visibilitychange', () => soon(0));
document.addEventListener('localmoe-drawers', () => soon(0));
document.addEventListener('input', (event) => {
  if (event.target !== box()) return;
  keyAt = performance.now();
  clearTimeout(rest);
  rest = setTimeout(poll, TYPING_MS + 20); // beside the next question, which keys do not put off
});
soon(FIRST_MS);
