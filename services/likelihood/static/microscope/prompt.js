// The page of a prompt through time: what the address says is shown, and what is shown stands in the address.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const $ = (id) => document.getElementById(id);
  const run = decodeURIComponent(location.pathname.split("/")[2]);
  const at = `/v1/runs/${encodeURIComponent(run)}/prompts`;
  const view = { run, prompt: null, first: null, last: null, pointed: null };

  function remember() {
    const query = new URLSearchParams(["prompt", "first", "last"].filter((n) => view[n] !== null).map((n) => [n, view[n]]));
    const place = new URLSearchParams();
    if (view.a) place.set("a", U.placed(view.a));
    if (view.b) place.set("b", U.placed(view.b));
    if (view.pointed !== null) place.set("token", view.pointed);
    history.replaceState(null, "", `${location.pathname}?${query}#${place}`);
  }

  const lost = (line) => {
    $("status").className = "status lost";
    $("status").textContent = line;
  };
  const failed = (error) => lost(U.refused(error));

  const select = node("select", { id: "prompt", onchange: () => show(select.value, null, null, {}) });
  const field = (name) => node("input", { type: "number", min: "0", name, placeholder: name, "aria-label": `${name} step`, onchange: () => show(view.prompt, fields.first.value || null, fields.last.value || null, {}) });
  const fields = { first: field("first"), last: field("last") };
  $("choice").replaceChildren(node("label", { class: "search" }, "Prompt ", select), node("span", { class: "range" }, "Steps ", fields.first, " to ", fields.last));

  // The prompts by name, with the number of their steps. An open list stays open where nothing has changed.
  function drawPrompts(prompts) {
    const named = prompts.some((p) => p.prompt === view.prompt) || view.prompt === null ? prompts : [{ prompt: view.prompt, steps: null }, ...prompts];
    const about = (p) => (p.steps === null ? "" : ` (${p.probe ? "probe, " : ""}${p.steps} step${p.steps === 1 ? "" : "s"})`);
    const texts = named.map((p) => `${p.prompt.length > 90 ? `${p.prompt.slice(0, 90)}…` : p.prompt}${about(p)}`);
    if ([...select.options].map((o) => o.text).join("\n") !== texts.join("\n")) select.replaceChildren(...named.map((p, i) => node("option", { value: p.prompt, dir: "auto" }, texts[i])));
    select.value = view.prompt;
  }

  // An empty field says between which steps the prompt is kept.
  function drawRange(from, to) {
    fields.first.placeholder = from ?? "first";
    fields.last.placeholder = to ?? "last";
    for (const input of Object.values(fields)) Object.assign(input, { min: from ?? 0, max: to ?? "" });
  }

  // More steps were kept while the page is read. What is shown stays: it is read anew on request.
  async function hear() {
    const prompts = await U.source.get(at).catch(() => null);
    if (!prompts) return;
    if (view.prompt === null) return begin(prompts);
    drawPrompts(prompts);
    const now = prompts.find((p) => p.prompt === view.prompt);
    if (!now || !view.kept || (now.steps === view.kept.length && now.last === view.kept[view.kept.length - 1])) return;
    drawRange(now.first, now.last);
    const again = node("button", { type: "button", onclick: () => show(view.prompt, view.first, view.last, chosenNow()) }, "Read again");
    U.redraw($("news"), node("span", {}, `Kept at ${now.steps} step${now.steps === 1 ? "" : "s"} by now, up to step ${now.last}. `), again);
  }
  const chosenNow = () => ({ a: view.a && U.placed(view.a), b: view.b && U.placed(view.b), token: view.pointed === null ? null : String(view.pointed) });

  async function show(prompt, first, last, chosen) {
    Object.assign(view, { prompt, first, last, pointed: null });
    fields.first.value = first ?? "";
    fields.last.value = last ?? "";
    const query = new URLSearchParams({ prompt });
    for (const [name, value] of [["first", first], ["last", last]]) if (value !== null) query.set(name, value);
    const asked = (view.asked = (view.asked || 0) + 1);
    try {
      const found = await U.source.get(`${at}/samples?${query}`);
      if (asked === view.asked) take(found, chosen);
    } catch (error) {
      failed(error);
    }
  }

  function take(found, chosen) {
    view.steps = found.steps.filter((s) => s.trajectories.length);
    view.placed = view.steps.flatMap(({ step, trajectories }) => trajectories.map((t) => ({ step, t })));
    for (const { t } of view.placed) t.verdict = t.right ?? (t.reward === null || t.reward === undefined ? null : t.reward >= 1);
    const [one, two] = pair(view.placed, chosen);
    Object.assign(view, { a: one, b: two });
    view.kept = found.kept;
    const all = found.kept.length;
    drawRange(found.kept[0], found.kept[all - 1]);
    U.redraw($("news"));
    const left = found.cut ? " The answer was too large: later steps are left out; choose a smaller range." : "";
    $("note").textContent = all ? `Kept at ${all} step${all === 1 ? "" : "s"}${all > view.steps.length ? `, ${view.steps.length} of them shown` : ""}.${left}` : "No trajectory of this prompt is kept token by token.";
    $("status").className = "status live";
    $("status").replaceChildren(node("span", {}, run));
    document.title = `${run}: a prompt through time`;
    // A token that was pressed while the steps were read stays pressed.
    draw(view.pointed === null ? chosen.token : String(view.pointed));
    view.ready = true;
    remember();
  }

  // The two that are compared: those in the address, otherwise the first right one and what shares most with it at the last step.
  function pair(placed, chosen) {
    const named = (name) => placed.find((p) => U.placed(p) === chosen[name]);
    const one = named("a") || placed.find((p) => p.t.probe) || placed.find((p) => p.t.verdict === true) || placed[0] || null;
    if (!one) return [null, null];
    const others = placed.filter((p) => p !== one);
    const given = named("b");
    if (given && given !== one) return [one, given];
    const last = others.filter((p) => p.step === others[others.length - 1].step);
    const most = last.map((p) => ({ p, n: U.shared(one.t, p.t).tokens })).sort((x, y) => y.n - x.n)[0];
    return [one, most?.p || null];
  }

  view.choose = (side, place) => {
    view[side] = view.placed.find((p) => U.placed(p) === place);
    draw();
    $("time").querySelector(`input[name="side-${side}"]:checked`)?.focus();
    remember();
  };

  // The change that gets the strongest colour: 98 of 100 changes since the first known value are smaller.
  const timeScale = (along) => U.scaleOf([{ segments: [{ by: "model", ...pairs(along) }] }]);
  function pairs(along) {
    const first = (along[0]?.values || []).map((_, i) => along.map((c) => c.values[i]).find((v) => v !== null) ?? null);
    const known = along.flatMap((c) => c.values.map((v, i) => [first[i], v]).filter(([, v]) => v !== null));
    return { tokens: known.map(() => ""), logp_before: known.map(([v]) => v), logp_after: known.map(([, v]) => v) };
  }

  // `token`: the number of the token whose curve is shown; otherwise the one that lost most.
  function draw(token) {
    if (!view.a) {
      $("time").replaceChildren();
      return;
    }
    view.along = U.along(view.a.t, view.steps);
    // One scale for all of the page: the same colour is the same change.
    const updates = U.scaleOf(view.placed.filter((p) => !p.t.probe).map((p) => p.t));
    view.scale = Math.max(updates, timeScale(view.along), view.b ? U.scaleBetween(view) : 0);
    // Of a trajectory that was scored again the accepted answers may not have been posted.
    const asked = [view.a, ...view.placed].find((p) => p.t.scoring?.golden?.length)?.t || view.a.t;
    const before = view.along.some((c) => c.before);
    const [sign, word] = U.verdict(view.a.t.verdict);
    $("time").replaceChildren(
      node("section", { class: "panel" }, U.headingOf(asked), U.drawPlaced(view)),
      node(
        "section",
        { class: "panel", "aria-label": "A's tokens through time" },
        node("h2", {}, `A's tokens at every step `, node("span", { class: "muted" }, `A: ${sign} ${word}, of step ${view.a.step}`)),
        node("p", { class: "note" }, "A token is known at a step where a trajectory of it begins with the same tokens and documents. Its colour is the change since the first such step; press a token for its curve.", before ? " Steps in italics: before the update, as nothing was scored after it." : ""),
        node("div", { class: "legend-row" }, U.rampOf("Change of the log-prob since the first known step, in nats", view.scale)),
        node("div", { class: "along-side" }, node("div", { id: "line" }), node("div", {}, ...U.drawAlong(view))),
      ),
      ...U.twoSteps(view),
    );
    const known = (i) => view.along.some((c) => (c.values[i] ?? null) !== null);
    const wanted = /^\d+$/.test(token ?? "") && known(Number(token)) ? Number(token) : U.lowestAlong(view.along);
    view.pointed = null;
    if (wanted !== null) view.point(wanted);
  }

  view.point = (i) => {
    view.pointed = i;
    const { s, k } = U.tokensOf(view.a.t)[i];
    for (const button of document.querySelectorAll(".token-row")) button.setAttribute("aria-pressed", String(button.dataset.at === `${s}.${k}`));
    $("line").replaceChildren(U.drawLine(view, i));
    if (view.ready) remember();
  };

  U.theme.start(() => view.a && draw(String(view.pointed)));
  for (const id of ["back", "way-back"]) $(id).href = `/#runs=${encodeURIComponent(encodeURIComponent(run))}`;
  $("way-back").textContent = `← run ${run}`;
  const query = new URLSearchParams(location.search);
  const place = new URLSearchParams(location.hash.slice(1));
  async function begin(prompts) {
    view.prompt = query.get("prompt") || prompts[0]?.prompt || null;
    drawPrompts(prompts);
    $("choice").hidden = false;
    if (view.prompt !== null) return show(view.prompt, query.get("first"), query.get("last"), Object.fromEntries(place));
    $("status").className = "status live";
    $("status").replaceChildren(node("span", {}, run));
    document.title = `${run}: a prompt through time`;
    $("choice").hidden = true;
    const { last_step: last } = await U.source.get(`/v1/runs/${encodeURIComponent(run)}/summary`);
    $("note").textContent = `No trajectory of this run is kept token by token: ${last === null ? "no step of it has ended" : "trainers other than unspiral train post them as samples, and store.trajectory_groups=0 keeps none"}.`;
  }
  U.patiently(async () => begin(await U.source.get(at)), lost);

  U.followSamples(run, hear);
})();
