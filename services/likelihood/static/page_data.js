// Where the page's data come from: a frozen report, or the running service.
(() => {
  "use strict";
  const U = (window.Unspiral = {});
  const POINTS = 1200;
  const FINEST = 20000;
  const HEADLINE = "reward/mean,eval/em_greedy,eval/em_sampled,time/step";
  const BRIEF = "reward/mean,eval/em_greedy,eval/em_sampled,logp/right,probe/lag,displacement/share_negative";

  class FrozenSource {
    constructor(data) {
      this.live = false;
      this.data = data;
      this.differences = data.differences || [];
    }
    async runs() {
      return this.data.runs;
    }
    async load(name) {
      return this.data.runs.find((r) => r.run === name);
    }
    brief(name) {
      return this.load(name);
    }
    // The runs in the address, else all.
    preselected(runs, wanted) {
      const names = wanted.filter((n) => runs.some((r) => r.run === n));
      return names.length ? names : runs.map((r) => r.run);
    }
    now() {
      return Date.now() / 1000;
    }
    async curve(run) {
      return run.series;
    }
    async stepOf(run, step) {
      const at = run.series.step.indexOf(step);
      if (at < 0) return null;
      const found = Object.entries(run.series.series).map(([name, { mean }]) => [name, mean[at]]);
      return Object.fromEntries(found.filter(([, value]) => value !== null && value !== undefined));
    }
    listen() {}
  }

  class LiveSource {
    constructor() {
      this.live = true;
      this.differences = [];
      this.ahead = 0;
      this.steps = new Map();
    }
    // Unix seconds by the service's clock: steps are dated by it.
    now() {
      return Date.now() / 1000 + this.ahead;
    }
    // What was asked for is drawn when it comes: it comes after a press that goes on.
    async get(path) {
      const found = await this.ask(path);
      await U.press.over();
      return found;
    }
    ask(path) {
      return this.answer(path).catch((error) => { throw Object.assign(error, { asked: true }); });
    }
    async answer(path) {
      const answer = await fetch(path, { credentials: "same-origin" });
      const date = Date.parse(answer.headers.get("date"));
      if (date) this.ahead = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
      if (answer.status === 401) {
        location.href = "/login";
      }
      if (!answer.ok) {
        const { detail } = await answer.json().catch(() => ({}));
        throw Object.assign(new Error(`${path}: ${answer.status}`), { status: answer.status, detail });
      }
      return answer.json();
    }
    runs() {
      return this.get("/v1/runs");
    }
    async load(name, range) {
      const at = `/v1/runs/${encodeURIComponent(name)}`;
      const part = range ? `&first=${Math.max(0, Math.floor(range[0]))}&last=${Math.max(0, Math.ceil(range[1]))}` : "";
      const [summary, series, phase, alarms, events, sampled, about, evaluations, headline, scores] = await Promise.all([
        this.ask(`${at}/summary`),
        this.ask(`${at}/series?points=${POINTS}${part}`),
        this.ask(`${at}/phase`),
        this.ask(`${at}/alarms`),
        this.ask(`${at}/events?limit=200`),
        this.ask(`${at}/samples`),
        this.ask(`${at}/about`),
        this.ask(`${at}/evaluations`).catch(() => []), // a service that is made without a folder has no such route
        range ? this.ask(`${at}/series?points=${POINTS}&names=${HEADLINE}`) : null, // the first screen tells of the whole run
        this.ask(`${at}/events?kind=evaluation`), // all of them, however many other events have followed
      ]);
      events.unshift(...scores.filter(({ time }) => time < events[0]?.time));
      return { ...summary, series, about, evaluations, headline, bands: phase.bands, undecided: phase.undecided, phase: phase.phase, since: phase.since, alarms, events, sampled };
    }
    // The runs in the address, hidden ones too; where it names none, the one that was updated last.
    preselected(runs, wanted) {
      const names = wanted.filter((n) => runs.some((r) => r.run === n));
      return wanted.length ? names : runs.filter((r) => !r.hidden).slice(0, 1).map((r) => r.run);
    }
    // What the table of runs says of one whose curves are not drawn.
    async brief(name) {
      const at = `/v1/runs/${encodeURIComponent(name)}`;
      const [summary, series, about, sampled] = await Promise.all([this.get(`${at}/summary`), this.get(`${at}/series?points=${POINTS}&names=${BRIEF}`), this.get(`${at}/about`), this.get(`${at}/samples`)]);
      return { ...summary, series, about, sampled, bands: [{ phase: summary.phase, first: summary.since, last: summary.last_step }] };
    }
    // A curve as finely as the service gives it.
    curve(run, name, range) {
      const part = range ? `&first=${Math.max(0, Math.floor(range[0]))}&last=${Math.max(0, Math.ceil(range[1]))}` : "";
      return this.get(`/v1/runs/${encodeURIComponent(run.run)}/series?points=${FINEST}&names=${encodeURIComponent(name)}${part}`);
    }
    // The metrics of one step, exactly; null where the run has no such step.
    async stepOf(run, step) {
      const key = `${run.run} ${run.attempt} ${step}`;
      if (!this.steps.has(key)) {
        const [found] = await this.get(`/v1/runs/${encodeURIComponent(run.run)}/steps?first=${step}&limit=1`);
        if (found?.step !== step) return null;
        this.steps.set(key, found.metrics);
      }
      return this.steps.get(key);
    }
    // A browser opens a stream again that broke off. One that was refused (a service that starts, a proxy without it) it gives up.
    listen(on) {
      let stream = null;
      let due = null;
      const open = () => {
        stream = new EventSource("/v1/stream");
        stream.onopen = () => on("open", {});
        stream.onerror = () => {
          on("lost", {});
          if (stream.readyState === EventSource.CLOSED) due = setTimeout(() => (this.ask("/v1/runs").catch(() => {}), open()), U.AGAIN); // a token that is asked for by now leads to its form
        };
        for (const kind of ["step", "samples", "alarm", "cleared", "event", "about", "reset"]) {
          stream.addEventListener(kind, (e) => on(kind, JSON.parse(e.data)));
        }
      };
      open();
      return {
        close() {
          clearTimeout(due);
          stream.close();
        },
      };
    }
  }

  const frozen = document.getElementById("frozen");
  U.source = frozen ? new FrozenSource(JSON.parse(frozen.textContent)) : new LiveSource();

  // Add one step to curves that are not thinned. False: read them anew instead.
  U.append = (run, event) => {
    const { step, stride, series } = run.series;
    if (stride !== 1 || step.length > 2 * POINTS || (step.length && event.step <= step[step.length - 1])) {
      return false;
    }
    step.push(event.step);
    for (const [name, value] of Object.entries(event.metrics)) {
      series[name] = series[name] || { mean: new Array(step.length - 1).fill(null) };
      series[name].mean.push(value);
    }
    for (const curve of Object.values(series)) {
      while (curve.mean.length < step.length) curve.mean.push(null);
    }
    const band = run.bands[run.bands.length - 1];
    if (band && band.phase === event.phase) {
      band.last = event.step;
    } else {
      run.bands.push({ phase: event.phase, first: event.step, last: event.step });
      run.since = event.step;
    }
    Object.assign(run, { phase: event.phase, undecided: event.undecided ?? run.undecided, first_step: run.first_step ?? event.step, last_step: event.step, steps: run.steps + 1, metrics: event.metrics, last_step_time: event.time });
    return true;
  };

  // What went wrong: what the service said, that it said nothing, or that it was no request.
  U.refused = (error) => {
    if (error.status) return typeof error.detail === "string" ? error.detail : `the service refused (${error.message})`;
    return `${error.asked ? "the service did not answer" : "this page failed"} (${error.message})`;
  };

  // Milliseconds between two tries to reach a service.
  U.AGAIN = 2000;

  // Do what a page begins with, until the service has answered. One that starts or is away is asked again; `told` gets the line.
  U.patiently = async (work, told) => {
    for (;;) {
      try {
        return await work();
      } catch (error) {
        const passes = U.source.live && error.asked && (!error.status || error.status === 429 || error.status >= 500);
        told(`${U.refused(error)}${passes ? "; trying again" : ""}`);
        if (!error.asked) throw error; // of the page itself: trying again changes nothing
        if (!passes) return;
        await new Promise((go) => setTimeout(go, U.AGAIN));
      }
    }
  };

  // Three significant digits; whole numbers, and what is above a thousand, to the unit.
  U.number = (v) => {
    if (v === null || v === undefined || Number.isNaN(v)) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 0.001 || a >= 100000)) return v.toExponential(1).replace(/-/g, "−");
    const text = Number.isInteger(v) ? String(v) : a < 999.5 ? v.toPrecision(3) : v.toFixed(0);
    return text.replace(/^-/, "−");
  };
  U.node = (tag, attributes = {}, ...children) => {
    const out = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) out.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) out.setAttribute(key, value);
    }
    out.append(...children.filter((c) => c !== null && c !== undefined));
    return out;
  };
  U.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  U.NOT_CURVES = ["step", "attempt", "policy_version", "phase"];
  U.TROUBLE = ["decay", "acceleration", "collapsed"];
  U.PHASES = {
    unknown: "not enough has been seen to judge by",
    healthy: "no sign of a fall in likelihood or reward; a curve may slip within the limits",
    stagnation: "likelihood slips while reward still holds or rises",
    decay: "earlier right answers lose likelihood",
    acceleration: "earlier right answers have lost much likelihood, or further signs agree",
    collapsed: "reward under half of its best, or no finite gradient",
    recovering: "the fall has stopped",
  };
  const RUNS_LIGHT = ["#2a5db0", "#d1632a", "#2e8b57", "#8e44ad", "#b8860b", "#c2185b", "#00838f", "#5d4037"];
  const RUNS_DARK = ["#6aa8ff", "#f5985a", "#5fd39b", "#c792ea", "#e5c453", "#ff7eb0", "#4dd0e1", "#bca08f"];
  U.dark = () => document.documentElement.dataset.theme === "dark";
  U.runColour = (index) => (U.dark() ? RUNS_DARK : RUNS_LIGHT)[index % 8];
})();
