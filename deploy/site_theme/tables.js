// On a phone a table with sentences in it is shown row by row, each cell under the name of its column: beside each other the columns
// would be a word wide, or lie outside of the window. Of many rows the first two cells are shown (of two columns the first one), and the rest on request.
// Tables of numbers stay tables, and scroll in their frame.
(() => {
  "use strict";
  const SENTENCE = 60; // characters
  const MANY = 8; // rows
  const MANY_OF_TWO = 16; // rows of two columns

  const button = (text, onclick) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "more";
    made.textContent = text;
    made.onclick = onclick;
    return made;
  };

  for (const table of document.querySelectorAll("[role=main] table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const rows = [...table.querySelectorAll("tbody tr")];
    const cells = rows.flatMap((row) => [...row.cells]);
    if (names.length < 2 || !cells.some((cell) => cell.textContent.length > SENTENCE)) continue;
    table.classList.add("told");
    for (const cell of cells) cell.dataset.column = names[cell.cellIndex] || "";
    const shown = names.length > 2 ? 2 : 1;
    const leads = rows.filter((row) => row.cells[1].querySelector("a")).length > rows.length / 2; // a list of links is there to be seen
    if (rows.length <= (shown === 2 ? MANY : MANY_OF_TWO) || (shown === 1 && leads)) continue;
    table.classList.add(`shows-${shown}`);

    const open = (row, whether) => {
      row.classList.toggle("folded", !whether);
      row.fold.textContent = whether ? "less" : "more";
      row.fold.setAttribute("aria-expanded", String(whether));
    };
    for (const row of rows) {
      row.fold = button("more", () => open(row, row.classList.contains("folded")));
      row.fold.setAttribute("aria-label", `More about ${row.cells[0].textContent.trim()}`);
      row.cells[shown - 1].append(row.fold);
      open(row, false);
    }
    table.before(button("open all rows", () => rows.forEach((row) => open(row, true))));
  }
})();
