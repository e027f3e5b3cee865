// The page itself: runs, phases, alarms, and the charts that follow them.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number, source } = U;
  const $ = (id) => document.getElementById(id);
  const MOST_RUNS = 8;

  const app = {
    list: [],
    selected: [],
    window: null,
    smooth: 5,
    charts: [],

    async start() {
      U.theme.start(() => {
        this.paint();
        this.draw();
      });
      $("smooth").onchange = (e) => this.setSmooth(Number(e.target.value));
      $("unzoom").onclick = () => this.zoom(null);
      for (const group of U.GROUPS) {
        const charts = group.charts.map((definition) => new U.Chart(definition, this));
        const section = node("section", { class: "group" }, node("h2", {}, group.title), group.note ? node("p", { class: "note" }, group.note) : null, node("div", { class: "grid" }, ...charts.map((c) => c.figure)));
        this.charts.push({ section, charts, note: group.note });
        $("charts").append(section);
      }
      this.others = { section: node("section", { class: "group" }, node("h2", {}, "Other metrics"), node("div", { class: "grid" })), charts: new Map() };
      $("charts").append(this.others.section);
      U.startSamples();
      await this.readRuns();
      await this.select(source.preselected(this.list));
      const longest = Math.max(0, ...this.selected.map((r) => r.series.step.length));
      if (longest && longest < 40) {
        $("smooth").value = "1";
        this.setSmooth(1);
      }
      status();
      source.listen((kind, data) => this.heard(kind, data));
    },

    async readRuns() {
      this.list = await source.runs();
      this.drawRuns();
    },

    async select(names) {
      const wanted = names.slice(0, MOST_RUNS);
      const loaded = await Promise.all(wanted.map((name) => source.load(name, this.window)));
      this.selected = loaded.filter(Boolean);
      this.paint();
      source.remember(wanted);
      this.draw();
    },

    paint() {
      const order = this.list.map((r) => r.run);
      for (const run of this.selected) run.colour = U.runColour(order.indexOf(run.run));
    },

    toggle(name) {
      const names = this.selected.map((r) => r.run);
      return this.select(names.includes(name) ? names.filter((n) => n !== name) : [...names, name]);
    },

    range() {
      if (this.window) return this.window;
      const steps = this.selected.flatMap((r) => (r.series.step.length ? [r.series.step[0], r.last_step ?? r.series.step[r.series.step.length - 1]] : []));
      const [low, high] = [Math.min(...steps), Math.max(...steps)];
      return steps.length ? [low, Math.max(high, low + 1)] : [0, 1];
    },

    async zoom(range) {
      const before = this.window;
      this.window = null;
      const [low, high] = this.whole || (this.whole = this.range());
      this.window = range && range[1] - range[0] < high - low ? [Math.max(low, range[0]), Math.min(high, range[1])] : null;
      if (this.window && this.window[1] - this.window[0] < 2) this.window = before;
      if (!this.window) this.whole = null;
      $("unzoom").hidden = !this.window;
      if (source.live) await this.select(this.selected.map((r) => r.run));
      else this.draw();
    },

    setSmooth(span) {
      this.smooth = span;
      this.draw();
    },

    draw() {
      this.drawRuns();
      drawPhases(this.selected, this.range());
      drawAlarms(this.selected);
      U.drawLanes(this.selected, this.range());
      drawEvents(this.selected);
      drawDifferences(this.selected);
      const known = new Set();
      for (const { section, charts, note } of this.charts) {
        const any = charts.map((chart) => {
          const drawn = chart.update(this.selected);
          for (const line of chart.lines) known.add(line.key);
          for (const key of chart.definition.spread || []) known.add(key);
          return drawn;
        });
        section.hidden = !any.some(Boolean) && !note;
      }
      if (!U.PAPER) this.drawOthers(known);
      else this.others.section.hidden = true;
    },

    drawOthers(known) {
      const names = [...new Set(this.selected.flatMap((r) => Object.keys(r.series.series)))].filter((n) => !known.has(n) && !U.NOT_CURVES.includes(n)).sort();
      for (const name of names) {
        if (this.others.charts.has(name)) continue;
        const chart = new U.Chart({ title: name, unit: "", lines: (all) => (all.has(name) ? [{ key: name, label: name }] : []) }, this);
        this.others.charts.set(name, chart);
        this.others.section.lastElementChild.append(chart.figure);
      }
      for (const chart of this.others.charts.values()) chart.update(this.selected);
      this.others.section.hidden = !names.length;
    },

    // The figure that draws a metric.
    figureOf(metric) {
      const drawn = this.charts.flatMap(({ charts }) => charts).find((chart) => chart.lines.some((line) => line.key === metric));
      return (drawn || this.others.charts.get(metric))?.figure;
    },

    drawRuns() {
      if (!this.list.length) {
        $("runs").replaceChildren(node("p", { class: "empty" }, "No run yet. The first post to /v1/runs/NAME/steps makes one."));
        return;
      }
      const head = ["Run", "Phase", "Step", "Reward", "Right answers", "Lag probe", "Share falling", "Alarms"];
      const rows = this.list.map((info) => {
        const run = this.selected.find((r) => r.run === info.run);
        const latest = (name) => run?.metrics[name] ?? run?.series.series[name]?.mean.findLast((v) => v !== null);
        const standing = (run?.alarms || []).filter((a) => a.cleared === null);
        const box = node("input", { type: "checkbox", onchange: () => this.toggle(info.run) });
        box.checked = Boolean(run);
        const swatch = node("span", { class: "swatch", style: `background:${run ? run.colour : "transparent"};border:1px solid var(--line)` });
        return node(
          "tr",
          {},
          node("th", { scope: "row" }, node("label", {}, box, swatch, info.run)),
          node("td", {}, run ? chip(run.phase, ` since ${run.since}`) : node("span", { class: "muted" }, "not shown")),
          node("td", { class: "n" }, (run && U.tokensLink(run, run.last_step, "", number(run.last_step))) || number((run || info).last_step)),
          ...[latest("reward/mean"), latest("logp/right"), latest("probe/lag"), latest("displacement/share_negative")].map((v) => node("td", { class: "n" }, number(v))),
          node("td", { class: "n" }, run ? (standing.length ? String(standing.length) : "none") : "–"),
        );
      });
      const columns = head.map((h, i) => node("th", { scope: "col", class: i > 1 ? "n" : null }, h));
      const table = node("table", {}, node("thead", {}, node("tr", {}, ...columns)), node("tbody", {}, ...rows));
      const focused = document.activeElement?.closest?.("#runs") ? [...$("runs").querySelectorAll("input")].indexOf(document.activeElement) : -1;
      $("runs").replaceChildren(table);
      if (focused >= 0) $("runs").querySelectorAll("input")[focused]?.focus();
    },

    // ---- live

    heard(kind, data) {
      if (kind === "open" || kind === "lost") {
        status(kind === "lost");
        if (kind === "open") this.again();
        return;
      }
      const run = this.selected.find((r) => r.run === data.run);
      if (kind === "reset" || (kind === "step" && !this.list.some((r) => r.run === data.run))) return this.again();
      if (!run) return;
      if (kind === "step" && !this.window && U.append(run, data)) this.soon();
      else if (kind === "alarm") run.alarms.push(data), this.soon();
      else if (kind === "event") run.events.push(data), this.soon();
      else this.again();
    },

    soon() {
      if (this.due) return;
      this.due = setTimeout(() => {
        this.due = null;
        this.draw();
      }, 400);
    },

    again() {
      if (this.rereading) return;
      this.rereading = setTimeout(async () => {
        this.rereading = null;
        try {
          await this.readRuns();
          const names = this.selected.map((r) => r.run);
          await this.select(names.length ? names : source.preselected(this.list));
        } catch {
          status(true);
        }
      }, 1500);
    },
  };

  function chip(phase, more = "") {
    return node("span", {}, node("span", { class: "chip", style: `color:var(--${phase})` }, phase), more ? node("span", { class: "muted" }, more) : null);
  }

  function status(lost = false) {
    const element = $("status");
    const steps = app.selected.map((r) => r.last_step ?? 0);
    element.className = `status ${source.live ? (lost ? "lost" : "live") : ""}`;
    if (source.live) element.textContent = lost ? "connection lost; trying again" : "live";
    else element.textContent = `report of ${app.list.length} run${app.list.length === 1 ? "" : "s"}, up to step ${Math.max(0, ...steps)}`;
  }

  function drawPhases(runs, [low, high]) {
    $("phases").hidden = !runs.some((r) => r.bands.length);
    const share = (step) => `${((Math.min(Math.max(step, low), high + 1) - low) / (high + 1 - low)) * 100}%`;
    const lanes = runs.map((run) => {
      const bar = node("div", { class: "bar", role: "img", "aria-label": run.bands.map((b) => `${b.phase} from step ${b.first} to ${b.last}`).join(", ") });
      for (const b of run.bands) {
        if (b.last < low || b.first > high) continue;
        bar.append(node("i", { style: `left:${share(b.first)};right:calc(100% - ${share(b.last + 1)});background:var(--${b.phase});opacity:${b.phase === "healthy" || b.phase === "unknown" ? 0.35 : 0.9}`, title: `${b.phase}, steps ${b.first} to ${b.last}` }));
      }
      for (const a of run.alarms) if (a.step >= low && a.step <= high) bar.append(alarmMark(run, a, share(a.step)));
      return node("div", { class: "lane" }, node("span", { title: run.run }, run.run), bar);
    });
    const axis = node("div", { class: "lane axis-lane" }, node("span"), node("div", { class: "axis" }, node("span", {}, `step ${Math.round(low)}`), node("span", {}, `step ${Math.round(high)}`)));
    $("timeline").replaceChildren(...lanes, axis);
    const keys = Object.entries(U.PHASES).map(([phase, what]) => node("li", {}, node("span", { class: "swatch", style: `background:var(--${phase})` }), node("span", {}, node("strong", {}, phase), `: ${what}`)));
    $("phase-key").replaceChildren(...keys, node("li", {}, node("span", { style: "border-left:2px solid var(--ink);height:.9rem" }), "alarm raised"));
  }

  // Where an alarm was raised; a link where trajectories are kept.
  function alarmMark(run, alarm, left) {
    const title = `alarm at step ${alarm.step}: ${alarm.seen}`;
    const link = U.tokensLink(run, alarm.step, alarm.rule, "");
    if (!link) return node("b", { style: `left:${left}`, title });
    link.className = "alarm-mark";
    link.setAttribute("style", `left:${left}`);
    link.title = `${title}; see its tokens`;
    link.setAttribute("aria-label", link.title);
    return link;
  }

  function drawAlarms(runs) {
    const all = runs.flatMap((run) => run.alarms.map((alarm) => ({ run, alarm })));
    $("alarm-panel").hidden = !all.length;
    all.sort((a, b) => (a.alarm.cleared !== null) - (b.alarm.cleared !== null) || b.alarm.step - a.alarm.step);
    const open = new Set([...$("alarms").querySelectorAll("details[open]")].map((d) => d.id));
    const card = ({ run, alarm }, i) => {
      const stands = alarm.cleared === null;
      const id = `alarm-${run.run}-${alarm.rule}-${alarm.step}`;
      const first = !app.alarmsSeen && i === 0 && stands;
      return node(
        "details",
        { id, class: `alarm ${stands ? "" : "cleared"}`, style: stands ? `border-color:var(--${U.TROUBLE.includes(alarm.phase) ? alarm.phase : "decay"})` : null, open: first || open.has(id) },
        node("summary", {}, node("span", { class: "when" }, `step ${alarm.step}`), chip(alarm.phase), node("strong", {}, alarm.rule), node("span", { class: "head" }, runs.length > 1 ? `${run.run}: ${alarm.seen}` : alarm.seen)),
        node("p", {}, `${alarm.metric}, seen since step ${alarm.since}; confidence ${alarm.confidence}; ${stands ? "stands" : `ended at step ${alarm.cleared}`}.`),
        node("p", { class: "advice" }, alarm.advice),
        node("p", {}, U.tokensLink(run, alarm.step, alarm.rule)),
      );
    };
    const cards = all.map(card);
    app.alarmsSeen = true;
    const rest = cards.splice(6);
    const more = rest.length ? node("details", { id: "alarms-more", open: open.has("alarms-more") }, node("summary", {}, `${rest.length} more`), ...rest) : null;
    $("alarms").replaceChildren(...cards, ...(more ? [more] : []));
  }

  function drawEvents(runs) {
    const all = runs.flatMap((run) => (run.events || []).map((event) => ({ run, event })));
    $("event-panel").hidden = !all.length;
    const items = all.slice(-200).map(({ run, event }) => node("li", {}, `${runs.length > 1 ? `${run.run}, ` : ""}step ${event.step ?? "–"}: `, node("strong", {}, event.kind), ` ${event.text}`));
    $("events").replaceChildren(node("ul", { class: "events" }, ...items.reverse()));
  }

  function drawDifferences(runs) {
    const rows = source.differences;
    $("difference-panel").hidden = !rows.length;
    if (!rows.length) return;
    const names = app.list.map((r) => r.run);
    const head = node("tr", {}, node("th", { scope: "col" }, "Key"), ...names.map((n) => node("th", { scope: "col" }, n)));
    const body = rows.map((r) => node("tr", {}, node("th", { scope: "row" }, r.key), ...r.values.map((v) => node("td", {}, v === null ? "–" : JSON.stringify(v).replace(/^"|"$/g, "")))));
    $("differences").replaceChildren(node("table", {}, node("thead", {}, head), node("tbody", {}, ...body)));
  }

  U.app = app;
  app.start().catch((error) => {
    $("status").className = "status lost";
    $("status").textContent = `the service did not answer (${error.message})`;
  });
})();
