// Metrics that no chart names: folded, searched by name, and drawn only while they are looked at.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;

  U.startOthers = (app) => {
    const grid = node("div", { class: "grid" });
    const count = node("span", { class: "muted" });
    const find = node("input", { type: "search", placeholder: "part of a name", "aria-label": "Search the other metrics", value: app.view.find, oninput: () => search() });
    const fold = node("details", { ontoggle: () => toggled() }, node("summary", {}, node("h2", {}, "Other metrics "), count), node("div", { class: "filters" }, node("label", { class: "search" }, "Search ", find)), grid);
    const search = () => {
      app.view.find = find.value;
      app.remember();
      draw(app);
    };
    const toggled = () => {
      if (fold.open === app.view.others) return;
      app.view.others = fold.open;
      app.remember();
      draw(app);
    };
    app.others = { section: node("section", { class: "group others" }, fold), fold, grid, count, charts: new Map(), names: [] };
    document.getElementById("charts").append(app.others.section);
  };

  // `known`: metrics that have a chart. `alone`: there is no other curve, so they are not folded.
  U.drawOthers = (app, known, alone) => {
    const { others } = app;
    others.names = [...new Set(app.selected.flatMap((r) => Object.keys(r.series.series)))].filter((n) => !known.has(n) && !U.NOT_CURVES.includes(n)).sort();
    others.section.hidden = !others.names.length;
    others.count.textContent = `${others.names.length}`;
    if (alone && !others.unfolded) app.view.others = true;
    others.unfolded ||= alone;
    draw(app);
  };

  function draw(app) {
    const { others } = app;
    others.fold.open = app.view.others;
    const wanted = app.view.find.toLowerCase();
    const shown = new Set(app.view.others ? others.names.filter((n) => n.toLowerCase().includes(wanted)) : []);
    for (const name of shown) chartOf(app, name);
    for (const [name, chart] of others.charts) {
      if (shown.has(name)) chart.update(app.selected);
      else chart.figure.hidden = true;
    }
  }

  function chartOf(app, name) {
    const { charts, grid } = app.others;
    if (!charts.has(name)) {
      const chart = new U.Chart({ title: name, unit: "", lines: (all) => (all.has(name) ? [{ key: name, label: name }] : []) }, app);
      charts.set(name, chart);
      const after = [...charts.keys()].filter((n) => n > name && n !== name).sort()[0];
      grid.insertBefore(chart.figure, after ? charts.get(after).figure : null);
    }
    return charts.get(name);
  }

  // The chart of such a metric, unfolded; undefined where no run has it.
  U.otherChart = (app, name) => {
    if (!app.others?.names.includes(name)) return undefined;
    app.view.others = true;
    draw(app);
    return app.others.charts.get(name);
  };
})();
