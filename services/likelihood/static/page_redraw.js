// Drawing anew without taking the keyboard's place away, or a press that is not over yet.
(() => {
  "use strict";
  const U = window.Unspiral;
  const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";
  const SCROLLED = ".wide, .events, .pin-values";

  // What an element is called; `data-keep` names one whose words or kind change.
  const nameOf = (e) => e.dataset.keep || [e.tagName, e.id || e.getAttribute("aria-label") || (e.tagName === "SUMMARY" && e.parentElement.id) || e.name || e.textContent].join(" ");
  const called = (root, name) => [...root.querySelectorAll(FOCUSABLE)].filter((e) => nameOf(e) === name);
  const isTyped = (e) => e.selectionStart !== null && e.selectionStart !== undefined;

  // Give an element other children, or those that a function makes: a field that is kept within new ones leaves its old place while
  // they are made. Children that it has already stay where they are. What had the focus within it has it afterwards; if it was
  // replaced, what is called like it; if nothing is, the element itself, so that no key goes to another button.
  U.redraw = (root, ...children) => {
    const held = root !== document.activeElement && root.contains(document.activeElement) ? document.activeElement : null;
    const name = held && nameOf(held);
    const number = held && called(root, name).indexOf(held);
    const typed = held && isTyped(held) ? [held.selectionStart, held.selectionEnd] : null;
    const scrolled = [...root.querySelectorAll(SCROLLED)].map((e) => [e.scrollLeft, e.scrollTop]);

    const made = typeof children[0] === "function" ? children[0]() : children;
    const wanted = made.filter((c) => c !== null && c !== undefined);
    for (const child of [...root.childNodes]) if (!wanted.includes(child)) child.remove();
    wanted.forEach((child, i) => {
      if (root.childNodes[i] !== child) root.insertBefore(child instanceof Node ? child : document.createTextNode(child), root.childNodes[i] || null);
    });

    root.querySelectorAll(SCROLLED).forEach((e, i) => scrolled[i] && e.scrollTo(...scrolled[i]));
    if (!held || document.activeElement === held) return;
    const next = root.contains(held) ? held : called(root, name)[number];
    if (!next) root.tabIndex = -1;
    (next || root).focus({ preventScroll: true });
    if (next === held && typed) held.setSelectionRange(...typed);
  };

  // A press is a pointer or the space bar between down and up. A browser makes no click of it where what was pressed has been taken
  // away meanwhile: what the page draws by itself waits for its end. `most`: milliseconds after which nothing waits for it any more.
  const down = new Map(); // by pointer or key: since when
  const waiting = new Set();
  const CLICK = 50; // milliseconds after its end within which its click has come, that of a finger too
  const SPACE = " ";
  const spaceIsTyped = "input:not([type=checkbox], [type=radio]), select, textarea";
  U.press = {
    most: 10_000,
    get on() {
      return [...down.values()].some((since) => performance.now() - since < this.most);
    },
    // Ends at once where nothing is pressed.
    over() {
      if (!this.on) return Promise.resolve();
      return new Promise((done) => {
        const goOn = () => {
          clearTimeout(limit);
          waiting.delete(goOn);
          done();
        };
        const limit = setTimeout(goOn, this.most);
        waiting.add(goOn);
      });
    },
  };
  // One whose release was never told is dropped at the next.
  const begin = (name) => {
    for (const [other, since] of down) if (performance.now() - since >= U.press.most) down.delete(other);
    down.set(name, performance.now());
  };
  function end(name) {
    if (name === undefined) down.clear();
    else down.delete(name);
    if (!U.press.on) for (const goOn of waiting) setTimeout(goOn, CLICK);
  }

  const hear = (kind, does) => document.addEventListener(kind, does, { capture: true, passive: true });
  hear("pointerdown", (e) => e.button !== 2 && begin(e.pointerId));
  for (const kind of ["pointerup", "pointercancel"]) hear(kind, (e) => end(e.pointerId));
  hear("keydown", (e) => e.key === SPACE && !e.repeat && !e.target.matches?.(spaceIsTyped) && begin(SPACE));
  hear("keyup", (e) => e.key === SPACE && end(SPACE));
  // A release outside of the window, or over a menu, is not always told.
  hear("pointermove", (e) => !e.buttons && down.has(e.pointerId) && end(e.pointerId));
  hear("visibilitychange", () => end());
  window.addEventListener("blur", () => end());
})();
