// One lane per detector on the axis of steps: quiet, watch (the sign is seen), alarm. A click shows the reason and the curve.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const $ = (id) => document.getElementById(id);

  // What each rule reads, as in monitor/detectors/table.py (a test compares them).
  U.RULES = {
    likelihood: ["probe/lag", "probe/fixed", "displacement/share_negative"],
    acceleration: ["probe/lag", "probe/fixed", "displacement/share_negative", "grad_norm", "entropy"],
    collapse: ["reward/mean"],
    leak: ["leak/logp_entropy"],
    nonfinite: ["grad_norm"],
    dead_batch: ["groups/zero_variance", "reward/mean", "policy/clip_fraction"],
    no_reward: ["reward/mean", "reward/missing"],
    gradient: ["grad_norm", "grad_norm/max", "reward/mean"],
    entropy_low: ["entropy"],
    entropy_high: ["entropy"],
    interaction: ["rollout/searches", "rollout/at_turn_limit"],
    validity: ["rollout/valid", "rollout/finished"],
    mismatch: ["mismatch/abs_logp", "kl/sampler"],
    degenerate_groups: ["groups/zero_variance", "reward/right", "reward/mean"],
    truncation: ["rollout/truncated"],
    length: ["rollout/length"],
    retrieval: ["retrieval/empty", "retrieval/repeated", "retrieval/errors", "retrieval/blank"],
    garbage: ["text/repetition", "text/non_words", "reward/mean"],
    control_tokens: ["logp/control", "probe/control"],
    reward_gap: ["eval/em_greedy", "eval/em_sampled", "reward/mean", "reward/right", "reward/em"],
    silent_llds: ["llds/active_tokens", "llds/lambda", "llds/min_drop", "llds/largest_drop", "learner/optimiser_steps", "groups/zero_variance"],
  };

  // What each rule is a sign of, as in docs/monitor.md (a test compares them).
  U.SIGNS = {
    likelihood: "earlier right answers lose likelihood: decay",
    acceleration: "the fall is large, or further signs agree",
    collapse: "the reward is lost",
    leak: "tokens that are learnt but cannot be sampled",
    nonfinite: "the loss has broken (NaN, infinity)",
    dead_batch: "a model that never writes the tags, or a dead reward",
    no_reward: "a judge that is down",
    gradient: "the loss is about to break",
    entropy_low: "the policy has become deterministic",
    entropy_high: "the policy turns into noise",
    interaction: "the agent stops searching, or never answers",
    validity: "the form goes",
    mismatch: "the samples are not the policy's own",
    degenerate_groups: "groups that teach nothing, many of them wrong",
    truncation: "trajectories that are cut off",
    length: "loops, a reward for length, or guesses",
    retrieval: "searches that bring nothing new",
    garbage: "text between the tags decays while the reward holds",
    control_tokens: "the tags become unlikely",
    reward_gap: "the reward is paid for something else",
    silent_llds: "LLDS is on, and does nothing",
  };

  // From the first sign to the alarm it is watched; from the alarm to its end (or the run's last step) it stands.
  function spans(run, rule) {
    const last = run.last_step ?? run.series.step[run.series.step.length - 1] ?? 0;
    return run.alarms
      .filter((alarm) => alarm.rule === rule)
      .flatMap((alarm) => [
        { state: "watch", first: alarm.since, last: alarm.step - 1, alarm },
        { state: "alarm", first: alarm.step, last: alarm.cleared === null ? last : alarm.cleared - 1, alarm },
      ])
      .filter((span) => span.last >= span.first);
  }

  function show(run, alarm) {
    if (U.tabs.current.id !== "curves") U.tabs.show("curves");
    const card = $(`alarm-${run.run}-${alarm.rule}-${alarm.step}`);
    for (let box = card; box; box = box.parentElement?.closest("details")) box.open = true;
    card?.scrollIntoView({ block: "center" });
    point(alarm.metric);
  }

  U.showAlarm = show;

  U.MARKED = 4000; // milliseconds from the last click for which a curve is marked
  // One curve is marked at a time; each redraw sets the mark again.
  let pointed = null;
  let unmark;
  function point(metric) {
    clearTimeout(unmark);
    pointed = metric;
    mark();
    const fold = document.querySelector("figure.pointed")?.closest("details");
    if (fold) fold.open = true;
    if (metric !== null) unmark = setTimeout(() => point(null), U.MARKED);
  }

  function mark() {
    const figure = pointed === null ? null : U.app.figureOf(pointed);
    for (const other of document.querySelectorAll("figure.pointed")) if (other !== figure) other.classList.remove("pointed");
    figure?.classList.add("pointed");
  }

  // A name of several words may go on in the next line.
  const breakable = (name, rule = name) => node("span", { title: `${name}: ${U.SIGNS[rule]}` }, ...name.split("_").flatMap((word, i) => (i ? ["_", node("wbr"), word] : [word])));

  function lane(run, rule, [low, high], many) {
    const title = many ? `${rule}, ${U.titleOf(run)}` : rule;
    const at = (step) => ((Math.min(Math.max(step, low), high + 1) - low) / (high + 1 - low)) * 100;
    const found = spans(run, rule);
    const said = found.filter((s) => s.state === "alarm").map((s) => `alarm from step ${s.first} to ${s.last}`);
    const bar = node("div", { class: "bar", role: "group", "aria-label": `${title}: ${said.join(", ") || "quiet"}` });
    for (const span of found) {
      if (span.last < low || span.first > high) continue;
      const colour = span.state === "alarm" ? "acceleration" : "stagnation";
      const label = `${span.state}, steps ${span.first} to ${span.last}: ${span.alarm.seen}`;
      const style = `left:${at(span.first)}%;width:${Math.max(0, at(span.last + 1) - at(span.first))}%;background:var(--${colour})`;
      bar.append(node("button", { type: "button", style, title: label, "aria-label": label, "data-keep": `${title} ${span.state} ${span.first}`, onclick: () => show(run, span.alarm) }));
    }
    const swatch = many ? [node("span", { class: "swatch", style: `background:${run.colour}` }), " "] : [];
    return node("div", { class: "lane rule" }, node("span", { title: `${title}: ${U.SIGNS[rule]}` }, ...swatch, breakable(rule)), bar);
  }

  U.drawLanes = (runs, range) => {
    mark();
    $("lane-panel").hidden = !runs.length;
    if (!runs.some(U.begun)) {
      U.redraw($("lanes"), node("p", { class: "muted" }, "No step has ended: the detectors judge from the first one on."));
      $("lane-help").hidden = true;
      return $("lane-key").replaceChildren();
    }
    const lanes = [];
    const quiet = [];
    const unread = [];
    const waiting = new Map(); // reason -> rules that cannot judge yet, or in a run that is over did not have what they need
    let over = true;
    for (const [rule, metrics] of Object.entries(U.RULES)) {
      let read = false;
      for (const run of runs) {
        const why = run.undecided?.[rule];
        if (why && !spans(run, rule).length) {
          read = true;
          over &&= U.over(run);
          const title = runs.length > 1 ? `${rule}, ${U.titleOf(run)}` : rule;
          waiting.set(why, [...(waiting.get(why) || []), [title, rule]]);
          continue;
        }
        const has = metrics.some((name) => run.series.series[name]) || run.alarms.some((a) => a.rule === rule);
        if (!has) continue;
        read = true;
        const one = lane(run, rule, range, runs.length > 1);
        (spans(run, rule).length ? lanes : quiet).push(one);
      }
      if (!read) unread.push(rule);
    }
    $("lane-panel").hidden = !lanes.length && !quiet.length && !waiting.size;
    // Those without a sign are folded: the curves below are what is looked at next.
    // A lane is of one detector and one run.
    const each = runs.length > 1 ? ` (each detector of each of ${runs.length} runs)` : "";
    const fold = node("details", { id: "quiet-lanes", open: $("quiet-lanes")?.open ?? false }, node("summary", {}, `${quiet.length}${lanes.length ? " more" : ""} saw no sign${each}`), ...quiet);
    // They are not quiet: of such a rule no sign could have been seen.
    const count = [...waiting.values()].flat().length;
    const reasons = [...waiting].map(([why, rules]) => node("li", {}, node("strong", {}, why), ": ", ...rules.flatMap((one, i) => (i ? [", ", breakable(...one)] : [breakable(...one)]))));
    const undecided = node("details", { id: "undecided-lanes", open: $("undecided-lanes")?.open ?? false }, node("summary", {}, `${count} ${over ? "did not have what they need" : "cannot judge yet"}${each}`), node("ul", { class: "reasons" }, ...reasons));
    U.redraw($("lanes"), ...lanes, quiet.length ? fold : null, count ? undecided : null);
    const missing = unread.length ? [node("li", { class: "unread" }, `not recorded: ${unread.join(", ")}`)] : [];
    const whose = runs.length > 1 ? runs.map((run) => node("li", {}, node("span", { class: "swatch", style: `background:${run.colour}` }), U.titleOf(run))) : [];
    const key = (colour, text) => node("li", {}, node("span", { class: "swatch", style: `background:var(--${colour})` }), text);
    $("lane-key").replaceChildren(...whose, ...missing);
    $("lane-states").replaceChildren(key("grid", "quiet"), key("stagnation", "watch: the sign is seen"), key("acceleration", "alarm"), ...Object.entries(U.SIGNS).map(([rule, sign]) => node("li", {}, node("span", {}, node("strong", {}, breakable(rule)), `: ${sign}`))));
    $("lane-help").hidden = false;
  };
})();
