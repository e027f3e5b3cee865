// The tab "About": what each run says of itself, and on which keys of the configuration the chosen runs differ.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const find = node("input", { type: "search", placeholder: "key of the configuration", "aria-label": "Search the configuration" });
  const different = node("input", { type: "checkbox" });

  const flat = (value, prefix = "") =>
    Object.entries(value || {}).flatMap(([key, inner]) => (inner && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length ? flat(inner, `${prefix}${key}.`) : [[`${prefix}${key}`, inner]]));
  const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const time = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC") : null);

  const of = (text, said, whose) => (text && said ? `${text} (of ${whose})` : text);

  function facts(run) {
    const about = run.about || {};
    // The store knows the run since its first attempt, and the newest attempt tells when it started itself. Of the first one no step
    // can have ended before; where it was posted from a machine whose clock is ahead, this keeps it from being called an earlier one.
    const again = run.created < about.started && (run.attempt > 0 || !(run.last_step_time >= about.started));
    const rows = [
      ["name", run.run],
      ["title", run.title],
      ["tags", run.tags?.join(", ")],
      ["commit", about.commit],
      ...Object.entries(about.versions || {}).map(([name, number]) => [`version of ${name}`, number]),
      ...Object.entries(about.machine || {}),
      ["started", of(time(about.started), again, "this attempt")],
      ["first post", of(time(run.created), again, "an earlier attempt")],
      ["last step", time(run.last_step_time)],
      ["ended", time(about.ended)],
      ["exit status", about.ended ? about.exit : null],
      ["attempt", run.attempt ? `${run.attempt} (the first is 0)` : run.attempt],
      ["steps", about.steps ? `${run.steps} of ${about.steps}` : run.steps],
      ["trajectories", run.trajectories],
    ];
    return new Map(rows.filter(([, value]) => value !== null && value !== undefined && value !== ""));
  }

  const heading = (run) => node("th", { scope: "col" }, node("span", { class: "swatch", style: `background:${run.colour}` }), " ", U.titleOf(run));
  function table(title, runs, columns, name) {
    const keys = [...new Set(columns.flatMap((c) => [...c.keys()]))];
    if (!keys.length) return null;
    const body = keys.map((key) => {
      const cells = columns.map((c) => text(c.get(key)));
      const differs = cells.some((c) => c !== cells[0]);
      return node("tr", { "data-key": key.toLowerCase(), class: differs ? "differs" : null }, node("th", { scope: "row" }, key, differs ? node("span", { class: "quiet" }, " (differs)") : null), ...cells.map((c) => node("td", {}, c)));
    });
    return node("section", { class: `panel ${name}` }, node("h2", {}, title), U.wide(title, node("table", { class: "facts" }, node("thead", {}, node("tr", {}, node("th", { scope: "col" }, "Key"), ...runs.map(heading))), node("tbody", {}, ...body))));
  }

  function filter(panel) {
    for (const row of panel.querySelectorAll(".configuration tbody tr")) row.hidden = !row.dataset.key.includes(find.value.toLowerCase()) || (different.isConnected && different.checked && !row.classList.contains("differs"));
  }

  U.tabs.add({
    id: "about",
    title: "About",
    draw(panel, runs) {
      const shape = JSON.stringify(runs.map((r) => [r.run, r.colour, r.title, r.tags, r.about, r.config, r.steps]));
      if (panel.shape === shape) return;
      panel.shape = shape;
      const configs = runs.map((run) => new Map(flat(run.about?.config || run.config)));
      find.oninput = different.onchange = () => filter(panel);
      const silent = runs.filter((_, i) => !configs[i].size).map(U.titleOf);
      const bar = () => node("div", { class: "filters" }, node("label", { class: "search" }, "Search ", find), runs.length > 1 ? node("label", {}, different, " only what differs") : null);
      const config = table("Configuration", runs, configs, "configuration");
      U.redraw(panel, () => {
        config?.firstElementChild.after(bar());
        return [table("Run", runs, runs.map(facts), "run-facts"), config, silent.length ? node("p", { class: "hint" }, `${silent.join(", ")} posted no configuration (POST /v1/runs/NAME/about).`) : null];
      });
      filter(panel);
    },
  });
})();
