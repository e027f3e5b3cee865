// The tab "Evaluations": what `unspiral eval --suite` measured on the chosen runs, above the rows that papers print.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const AVERAGES = ["general", "multi_hop", "macro", "micro"];

  // Three digits without the 0 in front, as the papers print them.
  const short = (value) => value.toFixed(3).replace(/^0\./, ".");
  const strong = (key, content) => (AVERAGES.includes(key) ? node("strong", {}, content) : content);
  const absent = () => node("td", { class: "n" }, "–");

  function measured(columns, row) {
    const cells = columns.map(({ key }) => {
      const found = row.em[key];
      return found ? node("td", { class: "n" }, strong(key, short(found.mean)), node("small", { class: "muted" }, `${short(found.low)}–${short(found.high)}`)) : absent();
    });
    const swatch = node("span", { class: "swatch", style: `background:${row.run.colour}` });
    return node("tr", {}, node("th", { scope: "row" }, swatch, " ", node("a", { href: row.href }, `${U.titleOf(row.run)}, ${row.name}`), node("small", { class: "muted" }, `${row.model}, ${row.method}, ${row.n} questions`)), ...cells);
  }

  function printed(columns, row) {
    const cells = columns.map(({ key }) => (key in row.em ? node("td", { class: "n" }, strong(key, short(row.em[key]))) : absent()));
    return node("tr", {}, node("th", { scope: "row" }, row.model, node("small", { class: "muted" }, row.method)), ...cells);
  }

  const part = (columns, text) => node("tr", { class: "part" }, node("th", { scope: "rowgroup", colspan: columns.length + 1 }, node("span", {}, text)));
  function table({ columns, printed: papers }, rows) {
    const names = [...new Set(papers.map((row) => row.paper))];
    const heads = columns.map(({ head }) => node("th", { scope: "col", class: "n" }, head));
    const body = [part(columns, "Measured, greedy, with bootstrap interval"), ...rows.map((row) => measured(columns, row))];
    for (const name of names) body.push(part(columns, `As printed in ${name}, not measured here`), ...papers.filter((row) => row.paper === name).map((row) => printed(columns, row)));
    return U.wide("Exact match", node("table", { class: "evaluations" }, node("thead", {}, node("tr", {}, node("th", { scope: "col" }, "Exact match"), ...heads)), node("tbody", {}, ...body)));
  }

  // What the runs asked of their own held-out questions, the newest first.
  function own(runs) {
    const rows = runs.flatMap((run) => (run.events || []).filter((e) => e.kind === "evaluation" && e.data?.overall).map((event) => ({ run, event }))).reverse();
    if (!rows.length) return null;
    const score = (value) => node("td", { class: "n" }, typeof value === "number" ? short(value) : "–");
    const cells = ({ run, event: { step, data } }) => [
      node("th", { scope: "row" }, node("span", { class: "swatch", style: `background:${run.colour}` }), ` ${U.titleOf(run)}, step ${step}`, node("small", { class: "muted" }, String(data.tag ?? ""))),
      node("td", {}, String(data.mode ?? "–")),
      score(data.overall.em),
      score(data.overall.f1),
      node("td", { class: "n" }, String(data.overall.n ?? "–")),
    ];
    const heads = ["Evaluation", "Mode", "Exact match", "F1", "Questions"].map((head, i) => node("th", { scope: "col", class: i > 1 ? "n" : null }, head));
    const body = rows.map((row) => node("tr", {}, ...cells(row)));
    return node("section", { class: "panel" }, node("h2", {}, "Held-out questions of the run"), U.wide("Held-out questions", node("table", { class: "evaluations own" }, node("thead", {}, node("tr", {}, ...heads)), node("tbody", {}, ...body))));
  }

  const asked = (runs) => runs.flatMap((run) => (run.evaluations || []).map((name) => ({ run, name, at: `/runs/${encodeURIComponent(run.run)}/evaluations/${encodeURIComponent(name)}` })));
  async function draw(panel, runs) {
    const wanted = asked(runs);
    const made = runs.map((run) => [run.run, run.colour, run.title, (run.events || []).filter((e) => e.kind === "evaluation").map((e) => [e.step, e.text])]);
    const shape = JSON.stringify([made, wanted.map(({ at }) => at)]);
    if (panel.shape === shape) return;
    panel.shape = shape;
    const answers = await Promise.all(wanted.map(({ at }) => U.source.get(`/v1${at}`).catch(() => null)));
    if (panel.shape !== shape) return; // other runs were chosen meanwhile
    const rows = wanted.flatMap(({ run, name, at }, i) => (answers[i]?.measured || []).map((row) => ({ ...row, run, name, href: at })));
    const lacking = wanted.filter((_, i) => !answers[i]).map(({ run, name }) => `${U.titleOf(run)}, ${name}`);
    const first = answers.find((answer) => answer);
    const ours = own(runs);
    panel.replaceChildren(
      ...(ours ? [ours] : []),
      node(
        "section",
        { class: "panel" },
        node("h2", {}, "Seven question sets"),
        first ? table(first, rows) : null,
        first ? node("p", { class: "hint" }, "The papers' protocols differ from these and from each other: compare within a part of the table first.") : null,
        lacking.length ? node("p", { class: "hint" }, `Without a table to show: ${lacking.join("; ")}. The same unspiral eval command writes it.`) : null,
        wanted.length ? null : node("p", { class: "hint" }, "No evaluation on these sets lies in the folders of these runs. unspiral eval --suite search7 makes one."),
      ),
    );
  }

  // A report holds no evaluations.
  if (U.source.live) U.tabs.add({ id: "evaluations", title: "Evaluations", draw });
})();
