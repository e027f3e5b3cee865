// Text from outside, made visible: nothing in it is markup, and marks that would reorder or hide text are spelt out.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const SHOWN = 3000;
  // Controls other than tab and line feed, marks of direction, zero-width characters, line and paragraph separators.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

  U.counted = (n, one) => `${U.integer(n)} ${one}${n === 1 ? "" : "s"}`;
  U.integer = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, ",");
  U.percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);
  U.signed = (nats) => {
    if (nats === null || nats === undefined) return "–";
    const digits = Math.abs(nats) < 0.0995 ? 3 : 2;
    const text = nats.toFixed(digits);
    return Number(text) === 0 ? "0" : text.replace(/^-/, "−").replace(/^(?=\d)/, "+");
  };

  // Nodes that show a text as it is.
  U.visible = (text) => {
    const out = [];
    let from = 0;
    for (const found of text.matchAll(HIDDEN)) {
      if (found.index > from) out.push(text.slice(from, found.index));
      const code = found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
      out.push(node("span", { class: "mark", title: "a character that is not shown otherwise" }, `U+${code}`));
      from = found.index + found[0].length;
    }
    if (from < text.length) out.push(text.slice(from));
    return out;
  };

  // A text that may be long: its beginning, and a button for the rest.
  U.long = (text, limit = SHOWN) => {
    const box = node("span", { class: "outside", dir: "auto" });
    const all = () => box.replaceChildren(...U.visible(text));
    if (text.length <= limit) {
      all();
      return box;
    }
    const more = node("button", { type: "button", class: "more", onclick: all }, `show all ${U.integer(text.length)} characters`);
    box.append(...U.visible(text.slice(0, limit)), node("span", { class: "muted" }, " … "), more);
    return box;
  };

  // The beginning of a text, on one line.
  U.short = (text, limit = 80) => {
    const line = text.slice(0, limit + 1).replace(/\s+/g, " ").trim();
    return node("span", { class: "outside", dir: "auto" }, ...U.visible(line.slice(0, limit)), text.length > limit ? "…" : null);
  };
})();
