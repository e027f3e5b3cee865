// The paper's figures in place of the usual curves: `unspiral report --paper`.
(() => {
  "use strict";
  const U = window.Unspiral;
  const figures = JSON.parse(document.getElementById("frozen").textContent).paper;
  U.PAPER = true;
  U.GROUPS = figures.map((figure) => ({
    title: figure.title,
    note: figure.note,
    charts: figure.charts.map(({ title, unit, lines }) => ({
      title,
      unit,
      lines: (names) => lines.filter(([key]) => names.has(key)).map(([key, label]) => ({ key, label })),
    })),
  }));
})();
