// The paper's figures in place of the usual curves: `unspiral report --paper`.
(() => {
  "use strict";
  const U = window.Unspiral;
  const figures = JSON.parse(document.getElementById("frozen").textContent).paper;
  U.PAPER = true;
  U.drawn = (svg) => {
    const place = U.node("div", { class: "drawing" });
    place.innerHTML = svg; // made by unspiral report, which escapes names
    return place;
  };
  U.GROUPS = figures.map((figure) => ({
    title: figure.title,
    note: figure.note,
    drawing: figure.drawing,
    charts: figure.charts.map(({ title, unit, lines }) => ({
      title,
      unit,
      lines: (names) => lines.filter(([key]) => names.has(key)).map(([key, label]) => ({ key, label })),
    })),
  }));
})();
