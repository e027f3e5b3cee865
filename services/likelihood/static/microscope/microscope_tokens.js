// Tokens, coloured by what the update did to them: orange lost likelihood, blue gained it.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const LEAST = 0.02;
  const STRONGEST = 78;
  const LONG = 200; // a token of more characters is a block: an outline around thousands of lines takes seconds

  // The change of a token's log-prob, in nats; null where it was not scored again.
  U.change = (segment, k) => (segment.logp_after ? segment.logp_after[k] - segment.logp_before[k] : null);

  // The change that gets the strongest colour: 98 of 100 tokens change by less.
  U.scaleOf = (trajectories) => {
    const sizes = [];
    for (const trajectory of trajectories) {
      for (const segment of trajectory.segments) {
        if (segment.by !== "model" || !segment.logp_after) continue;
        for (let k = 0; k < segment.tokens.length; k++) sizes.push(Math.abs(U.change(segment, k)));
      }
    }
    sizes.sort((a, b) => a - b);
    const found = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : LEAST;
    const power = 10 ** Math.floor(Math.log10(Math.max(found, LEAST)));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= Math.max(found, LEAST) * 0.999);
  };

  // By the root, so that small changes are seen beside large ones.
  U.tint = (nats, scale) => {
    const share = Math.sqrt(Math.min(1, Math.abs(nats) / scale)) * STRONGEST;
    return `color-mix(in srgb, var(--${nats < 0 ? "fell" : "rose"}) ${share.toFixed(1)}%, transparent)`;
  };

  U.rampOf = (what, scale) => {
    const ticks = [-scale, -scale / 4, 0, scale / 4, scale];
    const stops = [];
    for (let i = -10; i <= 10; i++) stops.push(U.tint((i * Math.abs(i) * scale) / 100, scale));
    const bar = node("span", { class: "ramp", style: `background:linear-gradient(to right, ${stops.join(", ")})` });
    const marks = node("span", { class: "ticks" }, ...ticks.map((t) => node("span", {}, U.signed(t))));
    return node("span", { class: "scale" }, node("span", { class: "what" }, `${what}: `), node("span", { class: "ends" }, node("span", {}, "lost"), node("span", { class: "ramp-box" }, bar, marks), node("span", {}, "gained")));
  };

  // untouched: why LLDS pulls no token of the step up, where that is known.
  U.legendOf = (scale, held, untouched) =>
    node(
      "div",
      { class: "legend-row" },
      U.rampOf("Change of a token's log-prob by the update, in nats", scale),
      held ? node("span", {}, node("span", { class: "t held" }, "underlined"), ": LLDS pulls it up") : node("span", { class: "muted" }, `LLDS pulls no token up here: ${untouched || "it is off, or nothing was updated at this step"}`),
      node("span", {}, node("span", { class: "t unscored" }, "dotted"), ": not scored again"),
    );

  // Tokens [from, to) of a segment as spans.
  U.strip = (segment, index, from, to, scale) => {
    const held = new Set(segment.held || []);
    const strip = node("p", { class: "strip" });
    for (let k = from; k < to; k++) {
      const change = U.change(segment, k);
      const text = segment.tokens[k];
      const long = text.length > LONG;
      const kind = `t${held.has(k) ? " held" : ""}${change === null ? " unscored" : ""}${long ? " long" : ""}`;
      const token = node("span", { class: kind, "data-at": `${index}.${k}` });
      if (change !== null) token.style.background = U.tint(change, scale);
      if (long) token.append(U.long(text));
      else if (text === "") token.append(node("span", { class: "mark", title: "a part of the next token's character" }, "·"));
      else token.append(...newlines(text));
      strip.append(token);
    }
    return strip;
  };

  function newlines(text) {
    const out = [];
    text.split("\n").forEach((line, i) => {
      if (i) out.push(node("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n");
      out.push(...U.visible(line));
    });
    return out;
  }

  // What is known of a token, in one line.
  U.readout = (trajectory, at) => {
    const [index, k] = at.split(".").map(Number);
    const segment = trajectory.segments[index];
    const change = U.change(segment, k);
    const actions = trajectory.segments.slice(0, index + 1).filter((s) => s.by === "model").length;
    const parts = [
      node("span", { class: "token-name" }, ...U.visible(JSON.stringify(segment.tokens[k].slice(0, 60)))),
      node("span", {}, `token ${k + 1} of action ${actions}`),
      node("span", {}, "before ", node("b", {}, U.signed(segment.logp_before[k]))),
    ];
    if (change === null) parts.push(node("span", { class: "muted" }, "not scored again after the update"));
    else parts.push(node("span", {}, "after ", node("b", {}, U.signed(segment.logp_after[k]))), node("span", { class: change < 0 ? "lost" : "gained" }, "change ", node("b", {}, U.signed(change)), " nats"));
    if (segment.logp_sampler) parts.push(node("span", {}, "sampler ", node("b", {}, U.signed(segment.logp_sampler[k]))));
    if (segment.held) parts.push(node("span", {}, segment.held.includes(k) ? "LLDS pulls it up" : "LLDS leaves it"));
    return parts;
  };
})();
