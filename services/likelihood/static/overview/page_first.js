// The first screen: is it learning, is it sick, what is it doing now. Nothing that was not measured is shown as good.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;
  const SPAN = 10; // points of a mean
  const SCORES = [["eval/em_greedy", "held-out EM, greedy"], ["eval/em_sampled", "held-out EM, sampled"]];
  const SILENT = 60; // seconds without a word that say nothing yet
  const UNSURE = 600; // the same, while too few steps tell what is usual
  const ENOUGH = 10; // steps whose times tell it: the first ones compile, load and fill caches

  // By exit status: at its end, or by SIGINT or SIGTERM with a checkpoint.
  const ENDS = { 0: { word: "ended", look: "done" }, 4: { word: "stopped by the monitor", look: "failed" }, 129: { word: "stopped", look: "done" }, 130: { word: "stopped", look: "done" }, 143: { word: "stopped", look: "done" } };
  const SIGNALS = { 129: "SIGHUP", 130: "SIGINT, Ctrl-C", 143: "SIGTERM" };
  const PAUSES = ["pausing", "paused"]; // as the control plane says
  const FAILED = { word: "ended with an error", look: "failed" };

  const known = (series, key) => (series.series[key]?.mean || []).map((value, i) => ({ value, step: series.step[i] })).filter((p) => p.value !== null && p.value !== undefined);
  const mean = (points) => points.reduce((sum, p) => sum + p.value, 0) / points.length;
  const variance = (points, centre) => points.reduce((sum, p) => sum + (p.value - centre) ** 2, 0) / (points.length - 1);

  const stepsOf = (points) => (points.length === 1 ? `step ${points[0].step}` : `steps ${points[0].step} to ${points[points.length - 1].step}`);

  // The last 10 points and the 10 that they are compared with: those that end 30 before, or the first ones of a short run. Of fewer
  // than 20 points, its two halves.
  const compared = (points) => {
    const size = Math.min(SPAN, Math.floor(points.length / 2));
    const start = Math.max(0, points.length - 5 * SPAN);
    return [points.slice(start, start + size), points.slice(points.length - size)];
  };

  // Of few points both ends are said. Their halves are not compared: of so few values of a curve that moves, a standard error says little.
  const tooFew = (points) => {
    const [first, last] = [points[0], points[points.length - 1]];
    if (points.length === 1) return "one step shows no direction";
    return `${number(first.value)} at step ${first.step}, ${number(last.value)} at step ${last.step}; so few steps show no direction by themselves`;
  };

  // How a curve moves. A change counts from twice its standard error on. It is said against the steps that were looked at, since
  // nothing is known here of the step at which it began.
  U.direction = (points) => {
    if (points.length < 2 * SPAN) return { word: tooFew(points), sign: "", unknown: true };
    const [earlier, last] = compared(points);
    const [now, then] = [mean(last), mean(earlier)];
    const error = Math.sqrt((variance(last, now) + variance(earlier, then)) / SPAN);
    if (Math.abs(now - then) <= 2 * error || now === then) return { word: `no clear change from ${stepsOf(earlier)}`, sign: "", flat: true };
    return now > then ? { word: `higher than at ${stepsOf(earlier)}`, sign: "↑" } : { word: `lower than at ${stepsOf(earlier)}`, sign: "↓" };
  };

  // An arrow of a line that says a direction; of none nothing stands there.
  U.arrow = (sign) => (sign ? node("span", { class: "sign", "aria-hidden": "true" }, sign, " ") : null);

  // The same as a difference of two means.
  const shiftOf = (points) => {
    if (points.length < 2) return null;
    const [earlier, last] = compared(points);
    return { change: mean(last) - mean(earlier), from: stepsOf(earlier), to: stepsOf(last) };
  };

  // The best 10 points before the last ones, where these lie below them by more than five standard errors; otherwise null. One of
  // many is best by chance, too: of runs of 200 steps of noise alone, three errors would call 10 % fallen, five 0.1 %.
  U.fallFromBest = (points) => {
    const last = points.slice(-SPAN);
    let top = null;
    for (let i = SPAN; i <= points.length - SPAN; i++) {
      const these = points.slice(i - SPAN, i);
      if (!top || mean(these) > mean(top)) top = these;
    }
    if (!top) return null;
    const [peak, now] = [mean(top), mean(last)];
    const error = Math.sqrt((variance(top, peak) + variance(last, now)) / SPAN);
    return peak - now > 5 * error ? { value: peak, first: top[0].step, last: top[SPAN - 1].step } : null;
  };

  // What is said of a curve first: a fall from its best comes before its direction, which is then said aside.
  U.headline = (points) => {
    const direction = U.direction(points);
    const fall = U.fallFromBest(points);
    if (!fall) return direction;
    const now = mean(points.slice(-SPAN));
    const word = `fell from its best ${number(fall.value)} at steps ${fall.first} to ${fall.last} to ${number(now)} at ${stepsOf(points.slice(-SPAN))}`;
    return { word, sign: "↓", aside: direction.unknown || direction.flat ? direction.word : `the mean is ${direction.word}` };
  };

  // Before the first step has ended nothing of a run can be judged; what is missing then is not called unrecorded.
  U.begun = (run) => run.last_step !== null && run.last_step !== undefined;
  // A report is of a run that is over, unless it says that the run still went on.
  U.over = (run) => (U.source.live ? Boolean(run.about?.ended) : run.ending?.state !== "running");
  const ended = (run) => (U.source.live ? (ENDS[run.about?.exit || 0] ?? FAILED).word : run.ending?.state || "ended");
  U.noStep = (run, of = "") => (U.over(run) && (U.source.live || run.ending) ? `${ended(run)} before its first step${of}` : `no step${of} has ended${U.over(run) ? "" : " yet"}`);

  function learning(run) {
    const all = run.headline || run.series;
    const rewards = known(all, "reward/mean");
    const headline = rewards.length ? U.headline(rewards) : null;
    const scored = SCORES.map(([key, label]) => [key, label, known(all, key)]).filter(([, , scores]) => scores.length).map((one) => U.heldOut(run, ...one));
    const [held] = scored;
    const apart = headline && U.opposite(held, shiftOf(rewards), headline);
    // Where nothing is known of the reward's direction, the held-out score says first what has changed.
    const first = (!headline || headline.unknown) && scored[0]?.scores.length > 1 ? scored.shift() : null;
    // A reward that clearly goes one way, and a held-out score that clearly goes the other: neither may be read alone.
    const against = apart && held.clear && !headline.unknown;
    const lines = [];
    if (against) lines.push(apart);
    if (first) lines.push(U.heldOutFirst(first));
    if (headline) {
      const { word, sign, aside } = headline;
      const few = rewards.slice(-SPAN);
      lines.push(node("p", { class: first ? null : "big" }, U.arrow(sign), `${number(mean(few))} `, node("span", { class: "muted" }, `reward, mean of ${few.length === 1 ? "1 point" : `the last ${few.length} points`}: `), node(first ? "span" : "strong", { class: "direction" }, word)));
      if (!headline.unknown) lines.push(node("p", { class: "muted" }, `${number(rewards[rewards.length - 1].value)} at the last step${aside ? `; ${aside}` : bestBefore(rewards)}.`));
    } else if (!U.begun(run)) lines.push(node("p", { class: "big" }, U.noStep(run)));
    else lines.push(node("p", { class: first ? "muted" : "big" }, "unknown", node("span", { class: "muted" }, ": no reward/mean was posted")));
    for (const one of scored) lines.push(U.heldOutLine(one));
    if (apart && !against) lines.push(apart);
    const evaluated = run.evaluations?.length || scored.length;
    if (U.source.live && evaluated) lines.push(node("p", {}, node("a", { href: `/runs/${encodeURIComponent(run.run)}/evaluations` }, "evaluations and their answers")));
    if (U.begun(run) && !SCORES.some(([key]) => all.series[key])) lines.push(node("p", { class: "muted" }, "No held-out score was posted."));
    return lines;
  }
  // The best mean of ten points, where it is another number than that of the last ones, which stands above.
  const bestBefore = (points) => {
    let best = -Infinity;
    for (let i = SPAN; i <= points.length; i++) best = Math.max(best, mean(points.slice(i - SPAN, i)));
    return number(best) === number(mean(points.slice(-SPAN))) ? "; no earlier mean was higher" : `, best mean ${number(best)}`;
  };

  const WORST = ["collapsed", "acceleration", "decay", "stagnation", "recovering", "healthy", "unknown"];
  const SURE = ["high", "medium", "low"];
  // How many of the rules no alarm could come from.
  const undecided = (run) => {
    const count = Object.keys(run.undecided || {}).length;
    return count ? ` ${count} of ${Object.keys(U.RULES).length} detectors ${U.over(run) ? `did not have what they need: ${lacked(run)}` : "cannot judge it yet"}.` : "";
  };
  // What most of them lacked; below Detectors stands what each did.
  const lacked = (run) => {
    const reasons = Object.values(run.undecided);
    const count = (why) => reasons.filter((one) => one === why).length;
    const most = [...new Set(reasons)].sort((a, b) => count(b) - count(a))[0];
    return `${count(most) < reasons.length ? `${count(most)} of them had ` : ""}${count(most) > 1 ? most.replace("its usual", "their usual") : most}`;
  };
  function sick(run) {
    if (!U.begun(run)) return [node("p", { class: "big" }, U.chip("unknown"), node("span", { class: "muted" }, `: ${U.noStep(run)}`)), node("p", { class: "muted" }, "The detectors judge from the first step on.")];
    const standing = run.alarms.filter((a) => a.cleared === null);
    standing.sort((a, b) => WORST.indexOf(a.phase) - WORST.indexOf(b.phase) || SURE.indexOf(a.confidence) - SURE.indexOf(b.confidence) || b.step - a.step);
    const lines = [node("p", { class: "big" }, U.chip(run.phase), node("span", { class: "muted" }, ` since step ${run.since ?? "–"}: ${U.PHASES[run.phase] || ""}`))];
    if (!standing.length) {
      const past = run.alarms.length ? `; ${run.alarms.length} ended` : "";
      lines.push(node("p", { class: "muted" }, run.phase === "unknown" ? `No alarm stands${past}. That is no sign of health: likelihood and reward have not been seen long enough.` : `No alarm stands${past}.`, undecided(run)), node("p", {}, U.promptsLink(run)));
      return lines;
    }
    const [worst] = standing;
    lines.push(node("p", {}, node("strong", {}, `${standing.length} alarm${standing.length === 1 ? "" : "s"}`), `, worst: ${worst.rule} since step ${worst.step}. ${worst.seen}`));
    lines.push(node("p", { class: "ways" }, U.tokensLink(run, worst.step, worst.rule), U.promptsLink(run), node("button", { type: "button", onclick: () => U.showAlarm(run, worst) }, "Reason and advice")));
    return lines;
  }

  U.duration = (seconds) => {
    const s = Math.max(0, seconds);
    if (s < 10) return `${s.toFixed(1)} s`;
    if (s < 120) return `${Math.round(s)} s`;
    if (s < 7200) return `${Math.round(s / 60)} min`;
    return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
  };
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];


  // Whether a run goes on, by what it said and by how long it has been silent. A run that posts anything, or whose control plane
  // answers, is not silent, however long its step takes.
  U.state = (run, now) => {
    const all = run.headline || run.series;
    const times = known(all, "time/step");
    const usual = median(times.slice(-20).map((p) => p.value)) ?? null;
    const age = run.last_step_time ? now - run.last_step_time : null;
    const about = run.about || {};
    const planned = about.steps ?? null;
    // Some trainers count from 0.
    const left = planned === null || !U.begun(run) ? null : Math.max(0, planned - run.last_step - (run.first_step === 0 ? 1 : 0));
    const word = now - Math.max(run.last_step_time ?? 0, run.updated ?? 0);
    const out = { usual, age, planned, left, heard: word };
    if (about.ended) return { ...out, ...(ENDS[about.exit || 0] ?? FAILED), ended: about.ended, exit: about.exit ?? null };
    if (age === null) return { ...out, word: "no step yet", look: "done" };
    const patience = Math.max(times.length < ENOUGH ? UNSURE : SILENT, 5 * (usual ?? 0));
    if (Math.min(age, word) > patience && !U.controlOf(run)) return { ...out, quiet: true, ...(left === 0 ? { word: "all steps posted", look: "done" } : { word: "silent", look: "silent" }) };
    const said = U.controlOf(run)?.state;
    return { ...out, word: PAUSES.includes(said) ? said : "running", look: "running" };
  };

  // Where nothing comes to any of the runs: how they ended, or that they are silent, and since when. Otherwise null.
  U.quietSince = (runs) => {
    const now = U.source.now();
    const states = runs.map((run) => U.state(run, now));
    if (!states.length || states.some((state) => !state.ended && !state.quiet)) return null;
    const since = Math.min(...states.map((state) => (state.ended ? now - state.ended : state.age)));
    if (states.length > 1) return `${states.some((state) => !state.ended) ? "none goes on" : "all ended"}, the last word ${U.duration(since)} ago`;
    return states[0].ended ? `${states[0].word} ${U.duration(since)} ago` : `no step for ${U.duration(since)}`;
  };

  // In a report: where the run stood when it was written, and how it ended.
  function recorded(run) {
    const planned = run.config?.trainer?.steps;
    const look = run.ending?.state.startsWith("failed") ? "failed" : "done";
    const of = planned ? ` of ${planned}` : "";
    const begun = U.begun(run);
    const step = begun ? `step ${run.last_step}${of} ` : U.noStep(run, of);
    const said = run.ending?.text || "A record of metrics alone: how the run ended is not in it.";
    return [node("p", { class: "big" }, step, begun && run.ending ? node("strong", { class: `state ${look}` }, run.ending.state) : null), node("p", { class: run.ending ? null : "muted" }, said)];
  }

  // Before the first step: what its control plane says that it does, and since when it is there.
  function beginning(run, state, of) {
    const now = U.controlOf(run);
    const word = now && !state.ended ? now.state : state.ended ? state.word : "";
    const since = run.about?.started && !state.ended ? `it began ${U.duration(U.source.now() - run.about.started)} ago` : "";
    const stage = now?.stage && !state.ended ? `now, ${now.stage}` : "";
    const said = [stage, since].filter(Boolean).join("; ");
    return [node("p", { class: "big" }, `${U.noStep(run, of)} `, word && !state.ended ? node("strong", { class: "state running" }, word) : null), said ? node("p", {}, `${said[0].toUpperCase()}${said.slice(1)}.`) : null].filter(Boolean);
  }

  // It goes on, as something other than a step has told.
  const slower = ({ age, usual, heard }) => age > SILENT && usual && age > 5 * usual && heard < age - 1;

  function doing(run) {
    const now = U.source.now();
    const state = U.state(run, now);
    const of = state.planned ? ` of ${state.planned}` : "";
    if (!U.source.live) return recorded(run);
    const step = node("p", { class: "big" }, `step ${run.last_step}${of} `, node("strong", { class: `state ${state.look}` }, state.word));
    const lines = U.begun(run) ? [step] : beginning(run, state, of);
    if (state.ended) lines.push(node("p", {}, `It ended ${U.duration(now - state.ended)} ago, exit status ${state.exit ?? "unknown"}${SIGNALS[state.exit] ? ` (${SIGNALS[state.exit]})` : ""}.`));
    else if (state.quiet) lines.push(node("p", {}, state.left === 0 ? `Its last planned step ended ${U.duration(state.age)} ago; no word of its end came.` : `No step for ${U.duration(state.age)}${state.usual ? `, ${Math.round(state.age / state.usual)} times its usual step` : ""}, nothing else from it for ${U.duration(state.heard)}, and no word of its end: this step is slow, or the run was stopped, hangs, or cannot reach this service.`));
    else if (state.age !== null) lines.push(node("p", {}, `Step ${run.last_step} ended ${U.duration(state.age)} ago${state.usual ? `, one takes ${U.duration(state.usual)}` : ""}.${slower(state) ? ` The step since then is slow; the run's last word came ${U.duration(state.heard)} ago.` : ""}`));
    if (!U.begun(run)) return lines;
    const facts = [];
    const latest = (name) => run.metrics[name] ?? null;
    if (latest("rollout/tokens_per_s") !== null) facts.push(`${number(latest("rollout/tokens_per_s"))} tokens/s`);
    if (latest("rollout/workers") !== null) facts.push(`${latest("rollout/workers")} worker${latest("rollout/workers") === 1 ? "" : "s"}`);
    if (state.word === "running" && state.planned && state.usual && state.left) facts.push(`about ${U.duration(state.left * state.usual)} left`);
    const unknown = [["rollout/tokens_per_s", "throughput"], ["rollout/workers", "workers"]].filter(([key]) => latest(key) === null).map(([, word]) => word);
    if (!state.ended && !(state.planned && state.usual)) unknown.push("time left");
    if (facts.length) lines.push(node("p", {}, `${facts.join(" · ")}${state.word === "running" ? "" : " at its last step"}`));
    if (unknown.length && !state.ended) lines.push(node("p", { class: "muted" }, `Not posted: ${unknown.join(", ")}.`));
    return lines;
  }

  const card = (title, lines, name) => node("section", { class: `panel answer ${name}` }, node("h2", {}, title), ...lines);
  U.drawFirst = (runs) => {
    const rows = runs.map((run) => {
      const name = runs.length > 1 ? node("h2", { class: "of-run" }, node("span", { class: "swatch", style: `background:${run.colour}` }), U.titleOf(run)) : null;
      return node("div", { class: "answers", "data-run": run.run }, name, card("Is it learning?", learning(run), "learning"), card("Is it sick?", sick(run), "sick"), card(U.source.live ? "What is it doing now?" : "How did it end?", doing(run), "doing"));
    });
    U.redraw(document.getElementById("first"), ...rows);
    // Of one run the answers are short, and stand above its curves. Those of several would fill the first window, where the curves
    // are what compares them.
    const [first, lead, hint] = ["first", "lead", "curve-hint"].map((id) => document.getElementById(id));
    const [before, after] = runs.length > 1 ? [lead, first] : [first, lead];
    if (before.compareDocumentPosition(after) & Node.DOCUMENT_POSITION_PRECEDING) after.before(before);
    if (lead.nextElementSibling !== hint) lead.after(hint);
  };

  // The age of the last step grows between two posts.
  setInterval(() => {
    if (document.hidden || U.press.on || !U.source.live || !U.app?.selected.length) return;
    for (const row of document.querySelectorAll(".answers")) {
      const run = U.app.selected.find((r) => r.run === row.dataset.run);
      if (run) row.querySelector(".doing").replaceChildren(node("h2", {}, "What is it doing now?"), ...doing(run));
    }
    U.app.tellStatus();
  }, 2000);
})();
