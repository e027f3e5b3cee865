// A table that can be wider than the window scrolls in a box of its own, and the box says so.
(() => {
  "use strict";
  const U = window.Unspiral;

  function mark(box) {
    const beyond = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", beyond > 1 && box.scrollLeft > 1);
    box.classList.toggle("more-right", beyond > 1 && box.scrollLeft < beyond - 1);
  }
  const sizes = new ResizeObserver((seen) => {
    for (const box of new Set(seen.map(({ target }) => target.closest(".wide")))) if (box) mark(box);
  });

  // `label`: what the table holds, for whoever comes to it by the keyboard; null where it holds fields of its own to come to.
  U.wide = (label, table, kind = "") => {
    const reached = label === null ? {} : { tabindex: "0", role: "region", "aria-label": label };
    const box = U.node("div", { class: `wide ${kind}`.trim(), ...reached, onscroll: () => mark(box) }, table);
    sizes.observe(box);
    sizes.observe(table);
    return box;
  };
})();
