// The list of runs: which are shown, by name, title or tag; hidden ones on request.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;
  const $ = (id) => document.getElementById(id);
  const MANY = 6;
  const HEAD = ["Run", "Phase", "Step", "Reward", "Held-out", "Right answers, nats/token", "Lag probe, nats/token", "Share falling", "Alarms"];
  let wanted = "";
  let withHidden = false;

  U.chip = (phase, more = "") => node("span", {}, node("span", { class: "chip", style: `--of:var(--${phase})` }, phase), more ? node("span", { class: "muted" }, more) : null);

  const find = node("input", { type: "search", placeholder: "name, title or tag", "aria-label": "Search the runs", oninput: () => ((wanted = find.value), U.drawRuns(U.app.list, U.app.loaded)) });
  const fits = (info) => [info.run, info.title || "", ...(info.tags || [])].some((t) => t.toLowerCase().includes(wanted.toLowerCase()));

  // A way to the tokens of a run's last step. They come a moment after the step: until then its number keeps the focus for them.
  function lastStep(run) {
    const place = U.tokensLink(run, run.last_step, "", number(run.last_step)) || node("span", { tabindex: "-1" }, number(run.last_step));
    place.dataset.keep = `last step of ${run.run}`;
    return place;
  }

  function row(info, drawn) {
    const run = drawn || briefs.get(info.run)?.found;
    const latest = (name) => run?.metrics[name] ?? run?.series.series[name]?.mean.findLast((v) => v !== null);
    const standing = (run?.alarms || []).filter((a) => a.cleared === null);
    const box = node("input", { type: "checkbox", "aria-label": info.title ? `${info.title} (${info.run})` : info.run, "data-keep": `show ${info.run}`, onchange: () => U.app.toggle(info.run) });
    if (!drawn && U.app.full()) Object.assign(box, { disabled: true, title: "No more runs can be drawn at once: untick another one first" });
    const swatch = node("span", { class: "swatch", style: `background:${drawn ? drawn.colour : "transparent"};border:1px solid var(--line)` });
    const names = node("span", { class: "names" }, U.titleOf(info), info.title ? node("span", { class: "muted" }, ` ${info.run}`) : null, info.hidden ? node("span", { class: "muted" }, " (hidden)") : null);
    const tags = (info.tags || []).map((tag) => node("span", { class: "tag" }, tag));
    const change = U.source.live ? node("button", { type: "button", class: "edit", "aria-label": `Change ${info.run}`, title: "title, tags, hide, delete", onclick: () => U.manage(info) }, "⋯") : null;
    const score = latest("eval/em_greedy") ?? latest("eval/em_sampled");
    const value = (i, what) => node("td", { class: "n", "data-label": HEAD[i] }, what);
    const values = [latest("reward/mean"), score, latest("logp/right"), latest("probe/lag"), latest("displacement/share_negative")];
    return node(
      "tr",
      { class: drawn ? null : "off" },
      node("th", { scope: "row" }, node("label", {}, box, swatch, names), ...tags, change),
      node("td", {}, run ? U.chip(run.phase, U.begun(run) ? ` since ${run.since}` : `, ${U.noStep(run)}`) : node("span", { class: "muted" }, "–")),
      value(2, run ? lastStep(run) : number(info.last_step)),
      ...values.map((v, i) => value(3 + i, number(v))),
      value(8, run ? (standing.length ? String(standing.length) : "none") : "–"),
    );
  }

  // What is known of the runs that are not drawn, by run: read a few at a time, while their rows are shown.
  const briefs = new Map();
  const AT_ONCE = 4;
  let reading = 0;
  let due = null;
  function readBriefs(infos) {
    if (U.source.live && !U.app.drawn) return; // a browser has few connections: the chosen curves come first
    for (const info of infos) {
      if (reading >= AT_ONCE) return;
      const updated = info.updated ?? 0; // nothing comes to a report
      const seen = briefs.get(info.run);
      if (seen?.busy || seen?.updated >= updated) continue;
      const kept = { found: seen?.found, updated, busy: true };
      briefs.set(info.run, kept);
      reading++;
      const read = U.source.brief(info.run).then((found) => (kept.found = found), () => null); // deleted meanwhile: the list follows
      read.then(() => {
        reading--;
        kept.busy = false;
        U.drawRuns(U.app.list, U.app.loaded);
      });
    }
  }

  // A step, or an alarm, of a run that is not drawn.
  U.heardBrief = (kind, data) => {
    const kept = briefs.get(data.run);
    const tells = kind === "step" || kind === "alarm" || kind === "cleared" || (kind === "event" && data.kind === "evaluation");
    if (!kept || !tells) return;
    if (kept.busy || kind !== "step" || !kept.found || !U.append(kept.found, data)) kept.updated = -1; // read anew
    due ||= setTimeout(async () => {
      await U.press.over();
      due = null;
      U.drawRuns(U.app.list, U.app.loaded);
    }, 400);
  };

  // A row that is there already stays in its place with all that has not changed: a key or a button that is pressed while a step
  // comes belongs to the same element when it is let go.
  let rows = new Map();
  const body = node("tbody");
  const columns = HEAD.map((h, i) => node("th", { scope: "col", class: i > 1 ? "n" : null }, h));
  const wide = U.wide(null, node("table", {}, node("thead", {}, node("tr", {}, ...columns)), body));
  const bar = node("div", { class: "run-bar filters" });
  const search = node("label", { class: "search" }, "Search ", find);
  const more = node("button", { type: "button", onclick: () => ((withHidden = !withHidden), U.drawRuns(U.app.list, U.app.loaded)) });

  function placed(info, run) {
    const made = row(info, run);
    const there = rows.get(info.run) || made;
    if (there !== made) {
      there.className = made.className;
      const [head, ...values] = made.children;
      U.redraw(there, there.firstChild.isEqualNode(head) ? there.firstChild : head, ...values);
    }
    there.querySelector("input").checked = Boolean(run);
    return there;
  }

  U.drawRuns = (list, loaded) => {
    if (!list.length) {
      $("runs").replaceChildren(node("p", { class: "empty" }, "No run yet. One that is starting comes when its parts are up; of another trainer, the first post to /v1/runs/NAME/steps makes one."));
      return;
    }
    const chosen = new Map(loaded.map((r) => [r.run, r]));
    const hidden = list.filter((info) => info.hidden && !chosen.has(info.run));
    const shown = list.filter((info) => chosen.has(info.run) || ((withHidden || !info.hidden) && fits(info)));
    if (U.app.turn) readBriefs(shown.filter((info) => !chosen.has(info.run) && !U.app.wanted.includes(info.run)));
    rows = new Map(shown.map((info) => [info.run, placed(info, chosen.get(info.run))]));
    U.redraw(body, ...rows.values());
    more.textContent = withHidden ? "Leave hidden runs out" : `Show ${hidden.length} hidden`;
    U.redraw(bar, list.length > MANY || wanted ? search : null, hidden.length || withHidden ? more : null);
    U.redraw($("runs"), bar, wide);
  };
})();
