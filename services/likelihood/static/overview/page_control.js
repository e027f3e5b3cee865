// A run's control plane on its page: what it is doing, and pause, resume, scale and drain for those who hold the token.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const EVERY = 5000; // milliseconds between two looks
  const panels = new Map(); // by run: what was seen of it last, and what was said to a request
  let asking = false; // whether the form for the token is open
  let refused = "";

  const place = () => document.getElementById("control");
  const has = (run) => Boolean(U.source.live && run.about?.control && !run.about.ended);
  const at = (run) => `/v1/runs/${encodeURIComponent(run)}/control`;
  const of = (run) => panels.get(run) || panels.set(run, { view: null, said: "", bad: false, busy: false }).get(run);

  async function look(run) {
    const seen = of(run);
    const view = await U.source.get(at(run)).catch(() => null);
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
    seen.bad = !done.ok;
    seen.said = done.token ? "The service takes this token no more." : done.text;
    await look(run);
  }

  function buttons(run, seen) {
    const { status } = seen.view;
    const off = seen.busy ? "" : null;
    const paused = status.state === "paused" || status.state === "pausing";
    const ready = paused || status.state === "running";
    if (!ready) return node("p", { class: "muted" }, `It can be asked for nothing while it is ${status.state}.`);
    const count = node("input", { type: "number", min: "1", max: "10000", value: String(seen.wanted ?? status.target), "aria-label": `Workers wanted of ${run}`, oninput: () => (seen.wanted = count.value) });
    const scale = (n) => {
      seen.wanted = undefined;
      act(run, "/workers/scale", { n });
    };
    const form = node(
      "form",
      { class: "row", onsubmit: (e) => (e.preventDefault(), scale(Number(count.value))) },
      node("button", { type: "button", disabled: off, onclick: () => act(run, paused ? "/resume" : "/pause") }, paused ? "Resume" : "Pause"),
      node("label", {}, "Workers ", count),
      node("button", { type: "submit", disabled: off }, "Scale"),
      node("button", { type: "button", disabled: off, title: "as many as the cluster has room for", onclick: () => scale("all") }, "All"),
      node("button", { type: "button", onclick: () => (U.token.forget(), draw()) }, "Forget the token"),
    );
    return form;
  }

  function workers(run, seen, may) {
    const rows = seen.view.status.workers.map((w) =>
      node("li", {}, node("code", {}, w.id), ` ${w.state}, version ${w.version}, ${w.trajectories} trajectories `, may && w.state !== "draining" ? node("button", { type: "button", disabled: seen.busy ? "" : null, "aria-label": `Drain ${w.id}`, title: "it finishes what it runs, then ends", onclick: () => act(run, `/workers/${encodeURIComponent(w.id)}/drain`) }, "Drain") : null),
    );
    return node("ul", { class: "workers" }, ...rows);
  }

  function tokenForm() {
    const secret = node("input", { type: "password", autocomplete: "off", "aria-label": "API token for control" });
    const enter = async (e) => {
      e.preventDefault();
      refused = (await U.token.enter(secret.value.trim())) || "";
      asking = Boolean(refused);
      draw(true);
    };
    return node("form", { class: "row", onsubmit: enter }, node("label", {}, "API token ", secret), node("button", { type: "submit" }, "Use it"), node("button", { type: "button", onclick: () => ((asking = false), draw(true)) }, "Cancel"), node("span", { role: "alert", class: "flag" }, refused));
  }

  function panel(run, many) {
    const seen = of(run.run);
    const title = node("h2", {}, many ? `Control of ${U.titleOf(run)}` : "Control");
    const { view } = seen;
    if (!view) return node("section", { class: "panel control" }, title, node("p", { class: "muted" }, "asking the run"));
    const lines = [];
    const may = view.passes_on && U.token.known;
    if (view.status) {
      const { state, target, follows_cluster: all, problem, stage } = view.status;
      lines.push(node("p", {}, node("strong", { class: "control-state" }, state), stage ? ` (${stage})` : "", `, ${target} worker${target === 1 ? "" : "s"} wanted${all ? " (all that the cluster has room for)" : ""}`, problem ? `. ${problem}` : ""));
      lines.push(workers(run.run, seen, may));
      if (may) lines.push(buttons(run.run, seen));
    } else lines.push(node("p", { class: "muted" }, view.problem));
    if (!view.passes_on) lines.push(node("p", { class: "muted" }, "There are no buttons, since this service has no token. Set UNSPIRAL_API_TOKEN before the run starts, or use ", node("code", {}, "unspiral pause"), ", ", node("code", {}, "resume"), " and ", node("code", {}, "workers"), "."));
    else if (!may && view.status) lines.push(asking ? tokenForm() : node("p", {}, node("button", { type: "button", onclick: () => ((asking = true), (refused = ""), draw(true), document.querySelector("#control input[type=password]")?.focus()) }, "Control this run"), node("span", { class: "muted" }, " asks for the API token; the page forgets it when it is left")));
    lines.push(node("p", { role: "status", class: seen.bad ? "said flag" : "said" }, seen.said));
    return node("section", { class: "panel control", "data-run": run.run }, title, ...lines);
  }

  // Not while somebody types: the fields would lose what stands in them.
  function draw(now = false) {
    if (!now && place().contains(document.activeElement) && document.activeElement.matches("input")) return;
    const runs = (U.app?.loaded || []).filter(has);
    place().replaceChildren(...runs.map((run) => panel(run, runs.length > 1)));
  }

  U.drawControl = () => {
    draw();
    for (const run of (U.app?.loaded || []).filter(has)) if (!panels.has(run.run)) look(run.run);
  };

  setInterval(() => {
    if (document.hidden) return;
    for (const run of (U.app?.loaded || []).filter(has)) look(run.run);
  }, EVERY);
})();
