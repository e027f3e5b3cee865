// What each curve can do beside being looked at: a logarithmic axis, the whole screen, its values as CSV.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;

  U.chartTools = (chart) => {
    const { title } = chart.definition;
    const button = (text, label, onclick) => node("button", { type: "button", title: label, "aria-label": `${label}: ${title}`, onclick }, text);
    const log = button("log", "Logarithmic axis", () => {
      const { log: chosen } = chart.app.view;
      if (!chosen.delete(title)) chosen.add(title);
      chart.app.remember();
      chart.draw();
      mark();
    });
    const full = button("full", "Full screen", () => U.fullScreen(chart.figure.classList.contains("full") ? null : title));
    const mark = () => {
      log.setAttribute("aria-pressed", String(chart.app.view.log.has(title)));
      full.setAttribute("aria-pressed", String(chart.app.view.full === title));
      full.textContent = chart.app.view.full === title ? "close" : "full";
    };
    chart.markTools = mark;
    return node("span", { class: "chart-tools" }, log, button("csv", "Values as CSV", () => save(chart)), full);
  };

  // One curve over the whole window, and back.
  U.fullScreen = (title) => {
    const { app } = U;
    app.view.full = title;
    app.remember();
    U.drawFull();
  };
  U.drawFull = () => {
    const { full } = U.app.view;
    let found = false;
    for (const chart of U.app.everyChart()) {
      const chosen = chart.definition.title === full && !chart.figure.hidden;
      found ||= chosen;
      chart.figure.classList.toggle("full", chosen);
      if (chosen) chart.figure.closest("details").open = true;
      chart.markTools();
      chart.resize();
    }
    document.documentElement.classList.toggle("has-full", found);
  };
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape" && U.app.view.full) U.fullScreen(null);
  });

  // A cell of CSV. A spreadsheet would take a text that begins with one of these signs for a formula.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };

  // Rows by step; one column per curve, as posted: not smoothed, and with the live service not thinned either (up to 20,000 steps).
  U.csvOf = (curves, tables) => {
    const steps = [...new Set(tables.flatMap((t) => t.step))].sort((a, b) => a - b);
    const columns = curves.map(({ line }, i) => {
      const at = new Map(tables[i].step.map((step, k) => [step, k]));
      const values = tables[i].series[line.key]?.mean || [];
      return steps.map((step) => values[at.get(step)]);
    });
    const stride = Math.max(1, ...tables.map((t) => t.stride || 1));
    const head = ["step", ...curves.map(({ run, line }) => `${U.titleOf(run)} ${line.key}${stride > 1 ? ` (mean of ${stride} steps)` : ""}`)];
    return [head, ...steps.map((step, i) => [step, ...columns.map((c) => c[i])])].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };

  async function save(chart) {
    const tables = await Promise.all(chart.curves.map(({ run, line }) => (run.label ? run.series : U.source.curve(run, line.key, chart.app.window))));
    const text = U.csvOf(chart.curves, tables);
    const link = node("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${chart.definition.title.replace(/[^A-Za-z0-9]+/g, "_").toLowerCase()}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
})();
