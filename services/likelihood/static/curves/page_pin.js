// One step pinned: a line through all curves, its values in all metrics, a way to its page. It stands at the foot of the window.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const exact = (v) => (v === null || v === undefined ? "–" : String(Number(v.toPrecision(6))).replace(/-/g, "−"));
  const $ = (id) => document.getElementById(id);
  let wanted = "";
  let asked = 0;

  U.pin = (step) => {
    const { app } = U;
    app.view.pin = step === app.view.pin ? null : step;
    app.remember();
    for (const chart of app.everyChart()) chart.u?.redraw(false);
    U.drawPin(app.selected);
  };

  const find = node("input", { type: "search", placeholder: "metric", "aria-label": "Search the values of the step", oninput: () => ((wanted = find.value), filter()) });
  const filter = () => {
    for (const row of $("pinned").querySelectorAll("tbody tr")) row.hidden = !row.dataset.name.toLowerCase().includes(wanted.toLowerCase());
  };

  U.drawPin = async (runs) => {
    const { pin } = U.app.view;
    const turn = ++asked;
    $("pinned").hidden = pin === null || !runs.length;
    if (pin === null || !runs.length) return;
    const open = $("pinned").querySelector("details")?.open ?? false;
    const found = await Promise.all(runs.map((run) => U.source.stepOf(run, pin)));
    if (turn !== asked) return;
    const links = runs.map((run) => U.tokensLink(run, pin, null, `${runs.length > 1 ? `${U.titleOf(run)}: ` : ""}tokens of step ${U.keptStep(run, pin)}`)).filter(Boolean);
    links.push(...runs.map((run) => U.promptsLink(run, runs.length > 1)).filter(Boolean));
    const names = [...new Set(found.flatMap((metrics) => Object.keys(metrics || {})))].filter((n) => !U.NOT_CURVES.includes(n)).sort();
    const head = node("tr", {}, node("th", { scope: "col" }, "metric"), ...runs.map((run) => node("th", { scope: "col", class: "n" }, U.titleOf(run))));
    const rows = names.map((name) => node("tr", { "data-name": name }, node("th", { scope: "row" }, name), ...found.map((metrics) => node("td", { class: "n" }, exact(metrics?.[name])))));
    const values = () => node("details", { open }, node("summary", { "data-keep": "values" }, `${names.length} values`), node("div", { class: "pin-values" }, find, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows))));
    const missing = runs.filter((_, i) => !found[i]).map((run) => `${U.titleOf(run)} has no step ${pin}`);
    U.redraw($("pinned"), () => [
      node("div", { class: "pin-head" }, node("strong", {}, `Step ${pin}`), ...links, missing.length ? node("span", { class: "muted" }, missing.join("; ")) : null, node("button", { type: "button", onclick: () => U.pin(pin) }, "Unpin")),
      values(),
    ]);
    filter();
  };
})();
