// A table or a block of code that is wider than its box says so: it fades at the side where there is more, and above a table stands a line.
// Names of keys, metrics and files may wrap after their dots, slashes and underscores, so that a column of them is not as wide as the longest.
(() => {
  "use strict";
  const MANY = 9; // columns

  for (const code of document.querySelectorAll("[role=main] .wide td code")) {
    if (code.textContent.length < 12 || code.children.length) continue;
    const parts = code.textContent.split(/(?<=[._/,=:-])(?=[^\s._/,=:-])/);
    code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }

  const told = new Map();
  const look = (box) => {
    const more = box.scrollWidth > box.clientWidth + 1;
    box.classList.toggle("more-before", more && box.scrollLeft > 1);
    box.classList.toggle("more-after", more && box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    if (told.has(box)) told.get(box).hidden = !more;
  };
  const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => look(target.closest(".wide, pre > code"))));

  for (const box of document.querySelectorAll("[role=main] .wide, [role=main] pre > code")) {
    if (box.matches(".wide")) {
      const columns = box.querySelectorAll("thead th").length;
      if (columns >= MANY) box.firstElementChild.classList.add("many");
      const line = document.createElement("p");
      line.className = "sideways";
      line.textContent = `${columns} columns: scroll sideways for the rest →`;
      line.hidden = true;
      box.before(line);
      told.set(box, line);
      watch.observe(box.firstElementChild);
    }
    box.addEventListener("scroll", () => look(box), { passive: true });
    watch.observe(box);
    look(box);
  }
})();
