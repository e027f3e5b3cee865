// A run's control plane on its page: what it is doing, and pause, resume, scale and drain for those who hold the token.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const EVERY = 5000; // milliseconds between two looks
  const panels = new Map(); // by run: what was seen of it last, and the parts of its panel

  const place = () => document.getElementById("control");
  const has = (run) => Boolean(U.source.live && run.about?.control && !run.about.ended);
  const at = (run) => `/v1/runs/${encodeURIComponent(run)}/control`;
  const of = (run) => panels.get(run) || panels.set(run, made(run)).get(run);
  const set = (element, text) => element.textContent === text || (element.textContent = text);

  async function look(run) {
    const seen = of(run);
    const turn = (seen.turn = (seen.turn || 0) + 1);
    seen.looking = true;
    const view = await U.source.get(at(run)).catch(() => null);
    if (seen.turn !== turn) return; // a later look, as that after a press, knows better
    seen.looking = false;
    seen.view = view || { passes_on: false, status: null, problem: "the service did not answer" };
    draw();
  }

  async function act(run, path, body) {
    const seen = of(run);
    if (seen.busy) return;
    seen.busy = true;
    draw();
    const done = await U.send("POST", `${at(run)}${path}`, body || {});
    seen.busy = false;
    seen.said.className = done.ok ? "said" : "said flag";
    set(seen.said, done.token ? "The service no longer accepts this token." : done.text);
    await look(run);
  }

  const button = (text, onclick, more = {}) => node("button", { type: "button", onclick, ...more }, text);
  // Not `disabled`, which would take the focus from a button that was just pressed: `act` does nothing meanwhile.
  const off = (element, busy) => element.setAttribute("aria-disabled", String(busy));

  // Forms are made once and stay on the page: whoever types in them keeps what was typed, and the place.
  function made(run) {
    const seen = { view: null, looking: false, busy: false, wanted: null, asking: false };
    seen.said = node("p", { role: "status", class: "said" });
    seen.box = node("section", { class: "panel control", "data-run": run });
    seen.token = tokenForm(seen);
    seen.ask = button("Control this run", () => {
      seen.asking = true;
      draw();
      seen.token.querySelector("input").focus();
    });
    seen.invitation = node("p", {}, seen.ask, node("span", { class: "muted" }, " asks for the API token; the page forgets it when it is left"));
    seen.count = node("input", { type: "number", min: "1", max: "10000", "aria-label": `Workers wanted of ${run}`, oninput: () => (seen.wanted = seen.count.value) });
    seen.pause = button("Pause", () => act(run, paused(seen) ? "/resume" : "/pause"), { "data-keep": "pause" });
    const scale = (n) => {
      if (!seen.busy) seen.wanted = null;
      act(run, "/workers/scale", { n });
    };
    seen.buttons = [seen.pause, node("button", { type: "submit" }, "Scale"), button("All", () => scale("all"), { title: "as many as the cluster has room for" })];
    const forget = button("Forget the token", () => {
      U.token.forget();
      draw();
    });
    const [pause, submit, all] = seen.buttons;
    seen.form = node("form", { class: "row", onsubmit: (e) => (e.preventDefault(), scale(Number(seen.count.value))) }, pause, node("label", {}, "Workers ", seen.count), submit, all, forget);
    return seen;
  }

  function tokenForm(seen) {
    const secret = node("input", { type: "password", autocomplete: "off", "aria-label": "API token for control" });
    const refused = node("span", { role: "alert", class: "flag" });
    const close = () => {
      seen.asking = false;
      secret.value = "";
      set(refused, "");
    };
    const enter = async (e) => {
      e.preventDefault();
      const problem = await U.token.enter(secret.value.trim());
      if (problem) return set(refused, problem);
      close();
      draw();
    };
    const cancel = () => {
      close();
      draw();
      seen.ask.focus();
    };
    return node("form", { class: "row", onsubmit: enter }, node("label", {}, "API token ", secret), node("button", { type: "submit" }, "Use it"), button("Cancel", cancel), refused);
  }

  const paused = (seen) => ["paused", "pausing"].includes(seen.view?.status?.state);

  function buttons(seen) {
    const { status } = seen.view;
    if (!paused(seen) && status.state !== "running") return node("p", { class: "muted" }, `It can be asked for nothing while it is ${status.state}.`);
    set(seen.pause, paused(seen) ? "Resume" : "Pause");
    if (seen.wanted === null && document.activeElement !== seen.count) seen.count.value = String(status.target);
    for (const one of seen.buttons) off(one, seen.busy);
    return seen.form;
  }

  function workers(run, seen, may) {
    const rows = seen.view.status.workers.map((w) => {
      const drain = may && w.state !== "draining" ? button("Drain", () => act(run, `/workers/${encodeURIComponent(w.id)}/drain`), { "aria-label": `Drain ${w.id}`, title: "it finishes what it runs, then ends" }) : null;
      if (drain) off(drain, seen.busy);
      return node("li", {}, node("code", {}, w.id), ` ${w.state}, version ${w.version}, ${w.trajectories} trajectories `, drain);
    });
    return node("ul", { class: "workers" }, ...rows);
  }

  function panel(run, many) {
    const seen = of(run.run);
    const title = node("h2", {}, many ? `Control of ${U.titleOf(run)}` : "Control");
    const { view } = seen;
    const lines = [title];
    if (!view) lines.push(node("p", { class: "muted" }, "asking the run"));
    else {
      const may = view.passes_on && U.token.known;
      if (view.status) {
        const { state, target, follows_cluster: all, problem, stage } = view.status;
        lines.push(node("p", {}, node("strong", { class: "control-state" }, state), stage ? ` (${stage})` : "", `, ${target} worker${target === 1 ? "" : "s"} wanted${all ? " (all that the cluster has room for)" : ""}`, problem ? `. ${problem}` : ""));
        lines.push(workers(run.run, seen, may));
        if (may) lines.push(buttons(seen));
      } else lines.push(node("p", { class: "muted" }, view.problem));
      if (seen.asking && !may) lines.push(seen.token);
      else if (view.status && view.passes_on && !may) lines.push(seen.invitation);
      if (view.status && !view.passes_on) lines.push(node("p", { class: "muted" }, "There are no buttons, since this service has no token. Set UNSPIRAL_API_TOKEN before the run starts, or use ", node("code", {}, "unspiral pause"), ", ", node("code", {}, "resume"), " and ", node("code", {}, "workers"), "."));
    }
    U.redraw(seen.box, ...lines, seen.said);
    return seen.box;
  }

  function draw() {
    const runs = (U.app?.loaded || []).filter(has);
    U.redraw(place(), ...runs.map((run) => panel(run, runs.length > 1)));
  }

  // The state and the stage of a run, as its control plane said last; null where it has none, or did not answer.
  U.controlOf = (run) => (has(run) ? panels.get(run.run)?.view?.status ?? null : null);

  U.drawControl = () => {
    draw();
    for (const run of (U.app?.loaded || []).filter(has)) if (!of(run.run).view && !of(run.run).looking) look(run.run);
  };

  // A step has ended: what the run does now is another thing.
  U.lookAtControl = (run) => has(run) && !of(run.run).looking && look(run.run);

  setInterval(() => {
    if (document.hidden) return;
    for (const run of (U.app?.loaded || []).filter(has)) look(run.run);
  }, EVERY);
})();
