// The page itself: runs, phases, alarms, and the charts that follow them.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number, source } = U;
  const $ = (id) => document.getElementById(id);
  const MOST_RUNS = 8;
  const SHORT = 40; // steps of runs whose curves are not smoothed unless one asks for it
  const OPEN_ON_A_PHONE = 2; // groups of curves; one below the other, all would be twenty windows long

  const app = {
    list: [],
    wanted: [], // the names of the chosen runs
    missing: [], // those that the address names and that are not here
    loaded: [], // these runs, as they are
    selected: [], // as they are drawn: differences, where a run is taken from the others
    window: null,
    view: U.readAddress(),
    smooth: 5,
    charts: [],
    places: new Map(), // of the drawn runs among the colours

    async start() {
      U.theme.start(() => {
        this.paint();
        this.draw();
      });
      this.window = source.live ? this.view.window : null;
      $("unzoom").hidden = !this.window;
      $("smooth").onchange = (e) => this.setSmooth(Number(e.target.value));
      $("unzoom").onclick = () => this.zoom(null);
      $("minus").onchange = (e) => this.subtract(e.target.value || null);
      const narrow = matchMedia("(max-width: 700px)").matches;
      U.GROUPS.forEach((group, i) => {
        const charts = group.charts.map((definition) => new U.Chart(definition, this));
        const fold = node("details", { open: !narrow || i < OPEN_ON_A_PHONE }, node("summary", {}, node("h2", {}, group.title)), group.note ? node("p", { class: "note" }, group.note) : null, group.drawing ? U.drawn(group.drawing) : null, node("div", { class: "grid" }, ...charts.map((c) => c.figure)));
        const section = node("section", { class: "group" }, fold);
        this.charts.push({ section, charts, note: group.note, lead: group.lead });
        $(group.lead ? "lead" : "charts").append(section);
      });
      if (!$("lead").hasChildNodes()) document.querySelector(".skip").setAttribute("href", "#charts");
      U.startOthers(this);
      U.startSamples();
      await U.patiently(async () => {
        await this.readRuns();
        await this.select(source.preselected(this.list, this.view.runs), this.absent(this.view.runs));
      }, lost);
      if (!source.live && this.view.window) await this.zoom(this.view.window);
      status();
      source.listen((kind, data) => this.heard(kind, data));
    },

    async readRuns() {
      this.list = await source.runs();
      U.drawRuns(this.list, this.loaded);
    },

    absent(names) {
      return names.filter((name) => !this.list.some((r) => r.run === name));
    },

    // missing: names that were asked for beside these. Whoever chooses in the list has seen that they are not here.
    async select(names, missing = []) {
      this.missing = missing;
      if (names !== this.wanted) this.undrawn = names.slice(MOST_RUNS); // otherwise the same are read again
      const wanted = (this.wanted = names.slice(0, MOST_RUNS));
      const turn = (this.turn = (this.turn || 0) + 1);
      let loaded;
      do {
        // Asked for again after a press: steps that came meanwhile are in it.
        await U.press.over();
        this.behind = false;
        loaded = await Promise.all(wanted.map((name) => source.load(name, this.window)));
      } while (U.press.on);
      if (turn !== this.turn) return; // they were chosen anew meanwhile
      this.loaded = loaded.filter(Boolean);
      if (this.behind) this.again();
      this.paint();
      this.remember();
      this.entitle();
      this.draw();
    },

    remember() {
      U.writeAddress([...this.loaded.map((r) => r.run), ...this.missing], this.view, this.window);
    },

    // Windows and bookmarks are told apart by the title.
    entitle() {
      const names = this.loaded.map(U.titleOf);
      document.title = names.length ? `${names.slice(0, 3).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}: Unspiral` : "Unspiral: likelihood";
      const said = this.missing.length ? [`No run ${this.missing.join(", ")} ${source.live ? "in this store" : "in this report"}.${names.length ? "" : " Choose one below."}`] : [];
      const left = this.undrawn || [];
      if (left.length) said.push(`${MOST_RUNS} runs are drawn at once, no more: ${left.length > 3 ? `${left.length} others are` : `${left.join(", ")} ${left.length > 1 ? "are" : "is"}`} not.`);
      $("no-such-run").hidden = !said.length;
      $("no-such-run").textContent = said.join(" ");
    },

    // Draw the other runs as their difference to one; null draws all as they are.
    subtract(name) {
      this.view.minus = name;
      this.remember();
      this.draw();
    },

    // What is drawn of the chosen runs.
    derive() {
      this.deriveSmooth();
      const base = this.loaded.find((r) => r.run === this.view.minus);
      const others = this.loaded.filter((r) => r !== base);
      if (!(base && others.length)) this.view.minus = null;
      this.selected = this.view.minus ? others.map((run) => U.difference(run, base)) : this.loaded;
      $("minus-choice").hidden = this.loaded.length < 2;
      const choices = [["", "as they are"], ...this.loaded.map((r) => [r.run, `minus ${U.apart(r, this.loaded)}`])];
      if (JSON.stringify(choices) !== this.minusShape) $("minus").replaceChildren(...choices.map(([value, text]) => node("option", { value }, text)));
      this.minusShape = JSON.stringify(choices); // an open list stays open
      $("minus").value = this.view.minus || "";
    },

    everyChart() {
      return [...this.charts.flatMap(({ charts }) => charts), ...this.others.charts.values()];
    },

    forget(name) {
      this.wanted = this.wanted.filter((n) => n !== name);
      this.loaded = this.loaded.filter((r) => r.run !== name);
    },

    paint() {
      // A run keeps its colour for as long as it is drawn, whichever of them was written to last. One that comes gets a free one.
      this.places = new Map([...this.places].filter(([name]) => this.loaded.some((r) => r.run === name)));
      for (const run of this.loaded) {
        const taken = [...this.places.values()];
        if (!this.places.has(run.run)) this.places.set(run.run, Array.from({ length: MOST_RUNS }, (_, i) => i).find((i) => !taken.includes(i)) ?? 0);
        run.colour = U.runColour(this.places.get(run.run));
      }
    },

    // Whether one more run can be drawn.
    full() {
      return this.wanted.length >= MOST_RUNS;
    },

    toggle(name) {
      return this.select(this.wanted.includes(name) ? this.wanted.filter((n) => n !== name) : [...this.wanted, name]);
    },

    // The steps of what is drawn: those of a difference are the ones that both runs have.
    range(runs = this.selected) {
      if (this.window) return this.window;
      const last = (r) => (runs === this.loaded ? r.last_step : null) ?? r.series.step[r.series.step.length - 1];
      const steps = runs.flatMap((r) => (r.series.step.length ? [r.series.step[0], last(r)] : []));
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
      if (source.live) return this.select(this.wanted);
      this.remember();
      this.draw();
    },

    setSmooth(span) {
      this.view.smooth = span;
      this.remember();
      this.draw();
    },

    // Until one is chosen it follows the length of the whole runs, whatever part of them is drawn: a reload draws the same.
    deriveSmooth() {
      const longest = Math.max(0, ...this.loaded.map((run) => run.steps ?? run.series.step.length));
      this.smooth = this.view.smooth ?? (longest < SHORT ? 1 : 5);
      $("smooth").value = String(this.smooth);
    },

    // The status again, whose ages grow; not before the first reading is done, nor over what is wrong.
    tellStatus() {
      if ($("status").classList.contains("live")) status();
    },

    draw() {
      this.derive();
      this.drawn = Boolean(this.turn);
      this.drawKey();
      U.drawRuns(this.list, this.loaded);
      U.drawFirst(this.loaded);
      this.tellStatus();
      for (const group of this.charts) if (group.lead) this.drawGroup(group);
      U.drawControl();
      U.tabs.draw(this.loaded);
      $("curve-hint").hidden = this.everyChart().every(({ figure }) => figure.hidden);
      U.drawPin(this.loaded);
    },

    // Whose the colours are, beside everything that has them. What is drawn alone is named, too, where there are others: its row
    // stands below the curves, whose lines then have colours of their own.
    drawKey() {
      const runs = this.list.length > 1 ? this.selected : [];
      const swatch = (run) => (runs.length > 1 ? node("span", { class: "swatch", style: `background:${run.colour}` }) : null);
      $("run-key").hidden = !runs.length;
      U.redraw($("run-key"), ...runs.map((run) => node("li", { title: U.titleOf(run) }, swatch(run), node("span", {}, U.apart(run, runs)))));
    },

    drawCurves() {
      drawPhases(this.loaded, this.range(this.loaded));
      drawAlarms(this.loaded);
      U.drawLanes(this.loaded, this.range(this.loaded));
      drawEvents(this.loaded);
      drawDifferences(this.loaded);
      const known = new Set();
      let drawn = false;
      for (const group of this.charts) {
        if (!group.lead) this.drawGroup(group);
        for (const chart of group.charts) for (const key of [...chart.lines.map((line) => line.key), ...(chart.definition.spread || [])]) known.add(key);
        drawn ||= !group.section.hidden;
      }
      if (!U.PAPER) U.drawOthers(this, known, !drawn);
      else this.others.section.hidden = true;
      U.drawFull();
    },

    drawGroup({ section, charts, note }) {
      const any = charts.map((chart) => chart.update(this.selected));
      section.hidden = !any.some(Boolean) && !note;
    },

    // The figure that draws a metric.
    figureOf(metric) {
      const drawn = this.charts.flatMap(({ charts }) => charts).find((chart) => chart.lines?.some((line) => line.key === metric));
      return (drawn || U.otherChart(this, metric))?.figure;
    },

    // ---- live

    heard(kind, data) {
      if (kind === "open" || kind === "lost") {
        status(kind === "lost");
        if (kind === "open") this.again();
        return;
      }
      const run = this.loaded.find((r) => r.run === data.run);
      if (run) run.updated = Math.max(run.updated ?? 0, source.now()); // whatever came, it is alive
      if (kind === "step" && run) U.lookAtControl(run);
      if (kind === "reset" || kind === "about" || (kind === "step" && !this.list.some((r) => r.run === data.run))) return this.again();
      if (this.wanted.includes(data.run)) this.behind = true; // what is being read meanwhile may lack this
      if (!run) return U.heardBrief(kind, data);
      if (kind === "event" && data.kind === "evaluation") run.events.push(data), this.again(); // its scores are in the curves
      else if (kind === "step" && repeats(run, data)) this.again();
      else if (kind === "step" && !this.window && U.append(run, data)) this.soon();
      else if (kind === "samples") keptMore(run, data.step), this.soon();
      else if (kind === "alarm") run.alarms.push(data), this.soon();
      else if (kind === "event") run.events.push(data), this.soon();
      else this.again();
    },

    soon() {
      if (this.due) return;
      this.due = setTimeout(async () => {
        await U.press.over();
        this.due = null;
        this.draw();
      }, 400);
    },

    again(wait = 1500) {
      if (this.rereading) return;
      this.rereading = setTimeout(async () => {
        this.rereading = null;
        try {
          await this.readRuns();
          // A missing run may have been made meanwhile, and a drawn one be gone: deleted, or the service was started on another store.
          const asked = [...this.wanted, ...this.missing];
          const names = asked.filter((n) => this.list.some((r) => r.run === n));
          const missing = this.absent(asked);
          await this.select(names.length || missing.length ? names : source.preselected(this.list, []), missing);
        } catch {
          status(true);
        }
      }, wait);
    },
  };

  const { chip } = U;

  // The line of the step after an evaluation repeats its scores; the service shows them once.
  const repeats = (run, { step }) => (run.events || []).some((event) => event.kind === "evaluation" && event.step === step - 1);

  // Trajectories of a step are kept from now on.
  function keptMore(run, step) {
    if (!run.sampled.some((s) => s.step === step)) run.sampled = [...run.sampled, { step }].sort((a, b) => a.step - b.step);
  }

  function status(lost = false) {
    const element = $("status");
    const steps = app.loaded.filter(U.begun).map((r) => r.last_step);
    const over = source.live && !lost ? U.quietSince(app.loaded) : null;
    element.className = `status ${source.live ? (lost ? "lost" : "live") : ""}${over ? " over" : ""}`;
    const said = (text) => element.textContent === text || (element.textContent = text); // else readers aloud say it again
    if (source.live) said(lost ? "connection lost; trying again" : over || "live");
    else element.textContent = `report of ${app.list.length} run${app.list.length === 1 ? "" : "s"}, ${steps.length ? `up to step ${Math.max(...steps)}` : "no step has ended"}`;
  }

  function lost(line) {
    $("status").className = "status lost";
    $("status").textContent = line;
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
      return node("div", { class: "lane" }, node("span", { title: run.run }, U.titleOf(run)), bar);
    });
    const axis = node("div", { class: "lane axis-lane" }, node("span"), node("div", { class: "axis" }, node("span", {}, `step ${Math.round(low)}`), node("span", {}, `step ${Math.round(high)}`)));
    U.redraw($("timeline"), ...lanes, axis);
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
        node("summary", {}, node("span", { class: "when" }, `step ${alarm.step}`), chip(alarm.phase), node("strong", {}, alarm.rule), node("span", { class: "head" }, runs.length > 1 ? `${U.titleOf(run)}: ${alarm.seen}` : alarm.seen)),
        node("p", {}, `${alarm.metric}, seen since step ${alarm.since}; confidence ${alarm.confidence}; ${stands ? "stands" : `ended at step ${alarm.cleared}`}.`),
        node("p", { class: "advice" }, alarm.advice),
        node("p", {}, U.tokensLink(run, alarm.step, alarm.rule)),
      );
    };
    const cards = all.map(card);
    app.alarmsSeen = true;
    const rest = cards.splice(6);
    const more = rest.length ? node("details", { id: "alarms-more", open: open.has("alarms-more") }, node("summary", {}, `${rest.length} more`), ...rest) : null;
    U.redraw($("alarms"), ...cards, more);
  }

  function drawEvents(runs) {
    const all = runs.flatMap((run) => (run.events || []).map((event) => ({ run, event })));
    $("event-panel").hidden = !all.length;
    const items = all.slice(-200).map(({ run, event }) => node("li", {}, `${runs.length > 1 ? `${run.run}, ` : ""}step ${event.step ?? "–"}: `, node("strong", {}, event.kind), ` ${event.kind === "evaluation" ? event.text.replace(/\bRIGHT\b/, "right") : event.text}`)); // as earlier versions wrote it
    U.redraw($("events"), node("ul", { class: "events" }, ...items.reverse()));
  }

  function drawDifferences(runs) {
    const rows = source.differences;
    $("difference-panel").hidden = !rows.length;
    if (!rows.length) return;
    const names = app.list.map((r) => r.run);
    const head = node("tr", {}, node("th", { scope: "col" }, "Key"), ...names.map((n) => node("th", { scope: "col" }, n)));
    const body = rows.map((r) => node("tr", {}, node("th", { scope: "row" }, r.key), ...r.values.map((v) => node("td", {}, v === null ? "–" : JSON.stringify(v).replace(/^"|"$/g, "")))));
    const table = node("table", { class: "facts" }, node("thead", {}, head), node("tbody", {}, ...body));
    $("differences").replaceChildren(U.wide("What differs", table));
  }

  U.app = app;
  U.tabs.add({ id: "curves", title: "Curves", panel: $("tab-curves"), draw: () => app.drawCurves() });
  U.tabs.list.unshift(U.tabs.list.pop());
  $("tabs").prepend($("tab-of-curves"));
  app.start().catch((error) => lost(U.refused(error)));
})();
