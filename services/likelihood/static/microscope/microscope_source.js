// Where the trajectories come from: the running service, or those that a report carries.
(() => {
  "use strict";
  const U = window.Unspiral;

  class LiveSamples {
    constructor() {
      this.live = true;
    }
    heads(run, step, filters) {
      const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value));
      return U.source.get(`${at(run, step)}?${query}`);
    }
    // The steps of which trajectories are kept, and the run's last step.
    async kept(run) {
      const of = `/v1/runs/${encodeURIComponent(run)}`;
      const [sampled, summary] = await Promise.all([U.source.get(`${of}/samples`), U.source.get(`${of}/summary`)]);
      return { steps: sampled.map((s) => s.step), last: summary.last_step };
    }
    group(run, step, group) {
      return U.source.get(`${at(run, step)}/full?group=${encodeURIComponent(group)}`);
    }
    // The page of a trajectory's prompt. As the service names prompts, by code points.
    through(run, t) {
      return `/runs/${encodeURIComponent(run)}/prompts?prompt=${encodeURIComponent([...(t.question || t.group)].slice(0, 200).join(""))}`;
    }
  }
  const at = (run, step) => `/v1/runs/${encodeURIComponent(run)}/steps/${step}/samples`;

  class FrozenSamples {
    constructor(runs) {
      this.live = false;
      this.runs = new Map(runs.map((run) => [run.run, run.samples || []]));
    }
    found(run, step) {
      return this.runs.get(run).find((s) => s.step === step);
    }
    async heads(run, step, filters) {
      const kept = this.found(run, step);
      const steps = this.runs.get(run).map((s) => s.step);
      if (!kept) return { run, step, trajectories: 0, matching: 0, groups: [], more_groups: 0, sources: [], heaviest: null, previous: null, next: null };
      const text = (filters.text || "").toLowerCase();
      const texts = new Map(kept.trajectories.map((t) => [t.uid, text ? textOf(t) : ""]));
      const fits = (h) => (!filters.source || h.data_source === filters.source) && (!filters.which || SUCH[filters.which](h)) && texts.get(h.uid).includes(text);
      const groups = kept.heads.groups.map((g) => ({ ...g, trajectories: g.trajectories.filter(fits) })).filter((g) => g.trajectories.length);
      const order = ORDERS[filters.order];
      if (order) groups.sort((x, y) => order(y) - order(x));
      const left = groups.flatMap((g) => g.trajectories);
      const heaviest = kept.heaviest[filters.rule] ?? kept.heads.heaviest;
      return {
        ...kept.heads,
        groups,
        matching: left.length,
        heaviest: left.some((h) => h.uid === heaviest?.uid) ? heaviest : null,
        previous: steps.filter((s) => s < step).pop() ?? null,
        next: steps.find((s) => s > step) ?? null,
      };
    }
    async kept(run) {
      return { steps: this.runs.get(run).map((s) => s.step), last: U.source.data.runs.find((r) => r.run === run).last_step };
    }
    through() {
      return null;
    }
    async group(run, step, group) {
      return this.found(run, step).trajectories.filter((t) => t.group === group);
    }
  }
  const SUCH = {
    right: (h) => h.right === true,
    wrong: (h) => h.right === false,
    invalid: (h) => h.valid === false,
    truncated: (h) => h.finish === "length",
  };
  const ORDERS = {
    falls: (g) => Math.max(...g.trajectories.map((h) => (h.advantage >= 0 ? -(h.change ?? 0) : -(h.change ?? 0) / 1000))),
    longest: (g) => Math.max(...g.trajectories.map((h) => h.tokens)),
  };
  const textOf = (t) => {
    const found = (t.segments || []).flatMap((s) => (s.by === "model" ? [s.tokens.join(""), ...(s.documents || []).map((d) => `${d.id} ${d.title || ""} ${d.text || ""}`)] : [s.text]));
    return [t.question || "", ...found].join("\n").toLowerCase();
  };

  U.samples = U.source.live ? new LiveSamples() : new FrozenSamples(U.source.data.runs);

  // The step of which trajectories are kept that is nearest to a step: at it or before, otherwise after.
  U.keptStep = (run, step) => {
    const steps = (run.sampled || []).map((s) => s.step);
    return steps.filter((s) => s <= step).pop() ?? steps[0] ?? null;
  };

  // Call `hear` when trajectories of more steps of a run are kept. A browser has few connections for all windows of a service: a
  // hidden one gives its own back.
  U.followSamples = (run, hear) => {
    let stream = null;
    let due = null;
    const soon = () => (due ||= setTimeout(() => ((due = null), hear()), 1000));
    const heard = (kind, data) => (["open", "reset"].includes(kind) || (kind === "samples" && data.run === run)) && soon();
    const listen = () => {
      if (!document.hidden) stream ||= U.source.listen(heard);
      else if (stream) stream = stream.close() ?? null;
    };
    document.addEventListener("visibilitychange", listen);
    listen();
  };

  // A link to the prompts of a run through time; null where no trajectories are kept, or in a report.
  U.promptsLink = (run, named) => {
    if (!U.source.live || U.keptStep(run, 0) === null) return null;
    return U.node("a", { class: "tokens-link", href: `/runs/${encodeURIComponent(run.run)}/prompts` }, `${named ? `${U.titleOf(run)}: ` : ""}prompts through time`);
  };

  // A link to the trajectories of a run's step; null where none are kept.
  U.tokensLink = (run, step, rule, text) => {
    const kept = U.keptStep(run, step);
    if (kept === null) return null;
    const words = text ?? `See the tokens of step ${kept}`;
    if (!U.source.live) return U.node("a", { class: "tokens-link", href: "#sample-panel", onclick: (e) => (e.preventDefault(), U.showSamples(run.run, kept, rule)) }, words);
    const query = rule ? `?rule=${encodeURIComponent(rule)}` : "";
    return U.node("a", { class: "tokens-link", href: `/runs/${encodeURIComponent(run.run)}/steps/${kept}${query}` }, words);
  };
})();
