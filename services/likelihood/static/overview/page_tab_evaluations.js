// The tab "Evaluations": what `unspiral eval` measured on the chosen runs, their held-out scores, and the papers' sets above the rows that papers print.
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

  const pageOf = (run, name) => `/runs/${encodeURIComponent(run.run)}/evaluations/${encodeURIComponent(name)}`;
  const swatch = (run) => node("span", { class: "swatch", style: `background:${run.colour}` });
  // Beside the papers' sets three digits, as on the other pages.
  const score = (label, value, low, high) => node("td", { class: "n", "data-label": label }, typeof value === "number" ? value.toFixed(3) : "–", typeof low === "number" ? node("small", { class: "muted" }, `${low.toFixed(3)}–${high.toFixed(3)}`) : null);
  const day = (seconds) => node("td", { "data-label": "Made, UTC" }, new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 16));
  function scored(title, heads, rows, hint) {
    const head = heads.map((text, i) => node("th", { scope: "col", class: i > 1 && i < heads.length - 1 ? "n" : null }, text));
    const filled = node("table", { class: "evaluations own" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...rows));
    return node("section", { class: "panel" }, node("h2", {}, title), U.wide(title, filled), node("p", { class: "hint" }, ...hint));
  }

  // What `unspiral eval` asked beside the papers' sets, the newest first.
  function own(found) {
    if (!found.length) return null;
    const rows = found.sort((a, b) => b.made - a.made).map(({ run, name, at, made, model, protocol, scores }) =>
      node(
        "tr",
        {},
        node("th", { scope: "row" }, swatch(run), " ", node("a", { href: at }, `${U.titleOf(run)}, ${name}`), node("small", { class: "muted" }, model?.name ?? "how it was asked was not kept")),
        node("td", { "data-label": "Template" }, String(protocol?.template ?? "–")),
        score("Exact match", scores.em.mean, scores.em.low, scores.em.high),
        score("F1", scores.f1),
        node("td", { class: "n", "data-label": "Questions" }, String(scores.n)),
        day(made),
      ),
    );
    return scored("Own questions, by unspiral eval", ["Evaluation", "Template", "Exact match", "F1", "Questions", "Made, UTC"], rows, ["Greedy answers, with the 95 % interval of the exact match. A name leads to every answer with its searches."]);
  }

  // A posted evaluation with its overall scores: as a run of ours posts them, otherwise of each mode that its metrics name.
  function byMode(event) {
    if (event.kind !== "evaluation") return [];
    if (event.data?.overall) return [event];
    const modes = new Map();
    for (const [name, value] of Object.entries(event.data?.metrics ?? {})) {
      const [, score, mode] = name.match(/^eval\/(em|f1)_(\w+)$/) ?? [];
      if (mode) modes.set(mode, { ...modes.get(mode), [score]: value });
    }
    return [...modes].map(([mode, overall]) => ({ ...event, data: { ...event.data, mode, overall } }));
  }

  // The held-out questions that were asked while the runs trained, the newest first. kept: of each run the names of those whose answers
  // lie in its folder: they have a page.
  function heldOut(runs, kept) {
    const found = runs.flatMap((run) => (run.events || []).flatMap(byMode).map((event) => ({ run, event }))).reverse();
    if (!found.length) return null;
    const rows = found.map(({ run, event: { step, time, data } }) => {
      const { em, f1, n } = data.overall;
      const [low, high] = n > 0 && em >= 0 && em <= 1 ? U.wilson(em, n) : [];
      const cells = [node("td", { "data-label": "Mode" }, String(data.mode ?? "–")), score("Exact match", em, low, high), score("F1", f1), node("td", { class: "n", "data-label": "Questions" }, String(n ?? "–")), day(time)];
      const name = `eval_${data.tag}_${data.mode}`;
      const title = `${U.titleOf(run)}, ${step ? `step ${step}` : "before training"}`;
      const shown = kept.get(run.run)?.includes(name) ? node("a", { href: pageOf(run, name) }, title) : title;
      return node("tr", {}, node("th", { scope: "row" }, swatch(run), " ", shown, node("small", { class: "muted" }, String(data.tag ?? ""))), ...cells);
    });
    // Of each mode, the first and the newest answers that were kept, question by question.
    const turned = runs.flatMap((run) => {
      const of = {};
      for (const event of run.events || []) {
        const name = `eval_${event.data?.tag}_${event.data?.mode}`;
        if (event.kind === "evaluation" && kept.get(run.run)?.includes(name)) (of[event.data.mode] ??= new Map()).set(name, event.step);
      }
      const weights = (step) => (step ? `step ${step}` : "before training");
      return Object.entries(of).flatMap(([mode, names]) => {
        const [[first, from], [last, to]] = [[...names][0], [...names].at(-1)];
        return first === last ? [] : [" ", node("a", { href: `${pageOf(run, last)}/beside?before=${encodeURIComponent(first)}` }, `${U.titleOf(run)}, ${weights(from)} → ${weights(to)}, ${mode}`), ";"];
      });
    });
    if (turned.length) turned.splice(-1, 1, ".");
    const ways = runs.flatMap((run, i) => [i ? ", " : "", node("a", { href: `/runs/${encodeURIComponent(run.run)}/evaluations` }, U.titleOf(run))]);
    return scored("Held-out questions of training", ["Weights of", "Mode", "Exact match", "F1", "Questions", "Made, UTC"], rows, ["The answers, to be read: evaluations of ", ...ways, ".", ...(turned.length ? [" Which turned right, which wrong:", ...turned] : [])]);
  }

  const asked = (runs) => runs.flatMap((run) => (run.evaluations || []).map((name) => ({ run, name, at: pageOf(run, name) })));
  const keptOf = async (run) => [run.run, await U.source.get(`/v1/runs/${encodeURIComponent(run.run)}/evaluations?of=training`).catch(() => [])];
  async function draw(panel, runs) {
    const wanted = asked(runs);
    const made = runs.map((run) => [run.run, run.colour, run.title, (run.events || []).filter((e) => e.kind === "evaluation").map((e) => [e.step, e.text])]);
    const shape = JSON.stringify([made, wanted.map(({ at }) => at)]);
    if (panel.shape === shape) return;
    panel.shape = shape;
    const answers = await Promise.all(wanted.map(({ at }) => U.source.get(`/v1${at}`).catch(() => null)));
    const kept = new Map(await Promise.all(runs.map(keptOf)));
    if (panel.shape !== shape) return; // other runs were chosen meanwhile
    const placed = wanted.map((one, i) => ({ ...one, answer: answers[i] }));
    const suites = placed.filter(({ answer }) => answer?.measured);
    const rows = suites.flatMap(({ run, name, at, answer }) => answer.measured.map((row) => ({ ...row, run, name, href: at })));
    const lacking = placed.filter(({ answer }) => !answer).map(({ run, name }) => `${U.titleOf(run)}, ${name}`);
    const asking = own(placed.filter(({ answer }) => answer?.scores).map(({ run, name, at, answer }) => ({ ...answer, run, name, at })));
    const training = heldOut(runs, kept);
    const none = !asking && !training && !wanted.length;
    const more = [
      suites.length ? table(suites[0].answer, rows) : null,
      suites.length ? node("p", { class: "hint" }, "The papers' protocols differ from these and from each other: compare within a part of the table first.") : null,
      lacking.length ? node("p", { class: "hint" }, `Without a table to show: ${lacking.join("; ")}. The same unspiral eval command writes it.`) : null,
      none ? node("p", { class: "hint" }, "No held-out score was posted, and no answers of unspiral eval lie in the folders of these runs.") : null,
      suites.length || lacking.length ? null : node("p", { class: "hint" }, "unspiral eval --suite search7 makes one on the seven sets of the papers."),
    ].filter(Boolean);
    panel.replaceChildren(...[asking, training, node("section", { class: "panel" }, node("h2", {}, "Seven question sets"), ...more)].filter(Boolean));
  }

  // A report holds no evaluations.
  if (U.source.live) U.tabs.add({ id: "evaluations", title: "Evaluations", draw });
})();
