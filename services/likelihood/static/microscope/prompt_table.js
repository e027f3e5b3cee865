// What is drawn of a prompt through time: its trajectories, the tokens of one at every step, and two steps side by side.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;
  const ROWS = 300;
  const stepPage = (run, step, group) => `/runs/${encodeURIComponent(run)}/steps/${step}${group === null ? "" : `#group=${encodeURIComponent(group)}`}`;

  U.placed = (p) => `${p.step}/${p.t.uid}`;

  // All kept trajectories of the prompt, with the choice of two.
  U.drawPlaced = (view) => {
    const columns = ["A", "B", "Step", "", "Answer", "Reward", "Log-prob per token", "Change by its update", "Tokens", "Tokens shared with A"];
    const rows = view.placed.map((p) => {
      const { t } = p;
      const [sign, word] = U.verdict(t.verdict);
      const radio = (side) => {
        const input = node("input", { type: "radio", name: `side-${side}`, "aria-label": `step ${p.step}, ${t.uid} as ${side.toUpperCase()}`, onchange: () => view.choose(side, U.placed(p)) });
        input.checked = view[side] === p;
        input.disabled = view[side === "a" ? "b" : "a"] === p;
        return node("td", {}, input);
      };
      const cell = (...inside) => node("td", { class: "n" }, ...inside);
      const change = t.probe ? null : U.meanChange(t);
      const answer = t.probe && !t.scoring?.answer ? node("span", { class: "muted" }, "scored again") : U.answerOf(t);
      return node(
        "tr",
        { "data-place": U.placed(p) },
        radio("a"),
        radio("b"),
        cell(node("a", { href: stepPage(view.run, p.step, t.probe ? null : t.group) }, p.step)),
        node("td", { class: `verdict ${word.replace(" ", "-")}` }, `${sign} ${word}`, t.probe ? node("span", { class: "muted" }, " probe") : null),
        node("td", { class: "answer", title: t.uid }, answer),
        cell(number(t.reward)),
        cell(U.signed(U.meanOf(t))),
        cell(change === null ? "–" : node("span", { class: "t", style: `background:${U.tint(change, view.scale)}` }, U.signed(change))),
        cell(U.tokensOf(t).length),
        cell(p === view.a ? "–" : U.shared(view.a.t, t).tokens),
      );
    });
    const head = node("tr", {}, ...columns.map((c, i) => node("th", { scope: "col", class: i === 2 || i > 4 ? "n" : null }, c)));
    return U.wide("Kept trajectories of the prompt", node("table", { class: "trajectories" }, node("thead", {}, head), node("tbody", {}, ...rows)), "tall placed");
  };

  // The token of A that lost most from its first to its last known step; null where none is known twice.
  U.lowestAlong = (along) => {
    const [lowest] = (along[0]?.values || [])
      .map((_, i) => ({ i, known: along.map((c) => c.values[i]).filter((v) => v !== null) }))
      .filter(({ known }) => known.length > 1)
      .sort((x, y) => x.known[x.known.length - 1] - x.known[0] - (y.known[y.known.length - 1] - y.known[0]));
    return lowest?.i ?? null;
  };

  U.meanChange = (t) => {
    const changes = t.segments.filter((s) => s.by === "model").flatMap((s) => s.tokens.map((_, k) => U.change(s, k)));
    return !changes.length || changes.includes(null) ? null : changes.reduce((x, y) => x + y, 0) / changes.length;
  };

  // Tokens down, steps across: the colour is the change since the first step at which the token is known.
  U.drawAlong = (view) => {
    const tokens = U.tokensOf(view.a.t);
    const columns = view.along;
    const start = tokens.map((_, i) => columns.map((c) => c.values[i]).find((v) => v !== null) ?? null);
    const mean = (values) => (values.includes(null) || !values.length ? null : values.reduce((x, y) => x + y, 0) / values.length);
    const means = columns.map((c) => mean(c.values));
    const meanStart = means.find((v) => v !== null) ?? null;
    const cell = (value, from, step, what) => {
      if (value === null) return node("td", { class: "cell unknown", title: `${what}: not known at step ${step}` });
      const out = node("td", { class: "cell", title: `${what}, step ${step}: log-prob ${U.signed(value)}, change ${U.signed(value - from)} nats` });
      const tint = U.tint(value - from, view.scale);
      out.style.backgroundImage = `linear-gradient(${tint}, ${tint})`;
      return out;
    };
    const head = node("tr", {}, node("th", { scope: "col" }, `A's tokens (${tokens.length})`), ...columns.map((c) => node("th", { scope: "col", class: `at-step${c.before ? " before" : ""}` }, c.step)), node("th", { scope: "col", class: "n" }, "Change"));
    const total = (values) => {
      const known = values.filter((v) => v !== null);
      return known.length > 1 ? known[known.length - 1] - known[0] : null;
    };
    const row = ({ s, k, text, action }, i) => {
      const name = text.trim() ? U.short(text, 24) : U.short(JSON.stringify(text), 24);
      const values = columns.map((c) => c.values[i]);
      const label = node("th", { scope: "row" }, node("button", { type: "button", class: "token-row", "data-at": `${s}.${k}`, "aria-pressed": "false", "aria-label": `token ${i + 1}, action ${action}: ${text.slice(0, 60)}`, onclick: () => view.point(i) }, name));
      return node("tr", {}, label, ...values.map((v, c) => cell(v, start[i], columns[c].step, `token ${i + 1} of action ${action}`)), node("td", { class: "n" }, U.signed(total(values))));
    };
    const average = node("tr", { class: "average" }, node("th", { scope: "row" }, "mean per token"), ...means.map((v, c) => cell(v, meanStart, columns[c].step, "mean")), node("td", { class: "n" }, U.signed(total(means))));
    const body = node("tbody", {}, average, ...tokens.slice(0, ROWS).map(row));
    const out = [U.wide("Log-prob of A's tokens, step by step", node("table", {}, node("thead", {}, head), body), "tall along")];
    if (tokens.length > ROWS) {
      const more = node("button", { type: "button", class: "more", onclick: () => (body.append(...tokens.slice(ROWS).map((t, i) => row(t, i + ROWS))), more.remove()) }, `show all ${U.integer(tokens.length)} tokens`);
      out.push(more);
    }
    return out;
  };

  const svg = (tag, attributes, ...children) => {
    const out = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) out.setAttribute(key, value);
    out.append(...children);
    return out;
  };

  // One token's log-prob over the steps.
  U.drawLine = (view, i) => {
    const token = U.tokensOf(view.a.t)[i];
    const points = view.along.map((c) => ({ step: c.step, value: c.values[i] })).filter((p) => p.value !== null);
    const wide = document.documentElement.clientWidth < 700 ? 330 : 640; // text keeps its size
    const [high, left, low] = [170, 58, 28];
    const values = points.map((p) => p.value);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const room = Math.max(most - least, 0.02) * 0.1;
    const [first, last] = [points[0].step, points[points.length - 1].step];
    const x = (step) => left + ((step - first) / Math.max(1, last - first)) * (wide - left - 14);
    const y = (value) => 10 + ((most + room - value) / (most - least + 2 * room)) * (high - low - 10);
    const text = (at, words, anchor = "end") => svg("text", { x: at[0], y: at[1], "text-anchor": anchor }, words);
    const drawn = svg(
      "svg",
      { viewBox: `0 0 ${wide} ${high}`, class: "line", role: "img", "aria-label": `Log-prob of token ${i + 1} from step ${first} to ${last}: ${points.map((p) => `${p.step}: ${U.signed(p.value)}`).join(", ")}` },
      svg("line", { x1: left, x2: wide - 14, y1: y(most), y2: y(most), class: "rule" }),
      svg("line", { x1: left, x2: wide - 14, y1: y(least), y2: y(least), class: "rule" }),
      svg("polyline", { points: points.map((p) => `${x(p.step)},${y(p.value)}`).join(" ") }),
      ...points.map((p) => svg("circle", { cx: x(p.step), cy: y(p.value), r: 3 }, svg("title", {}, `step ${p.step}: ${U.signed(p.value)}`))),
      text([left - 6, y(most) + 4], U.signed(most)),
      ...(most - least > 0.001 ? [text([left - 6, y(least) + 4], U.signed(least))] : []),
      text([left, high - 6], `step ${first}`, "start"),
      ...(last > first ? [text([wide - 14, high - 6], `step ${last}`)] : []),
    );
    return node("figure", { class: "one-token" }, node("figcaption", {}, node("strong", {}, ...U.visible(JSON.stringify(token.text.slice(0, 60)))), node("span", { class: "unit" }, `token ${i + 1} of ${U.tokensOf(view.a.t).length}, action ${token.action}: log-prob in nats`)), drawn);
  };
})();
// Two trajectories of a prompt, of two steps, side by side after the beginning that they share.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;

  // A's shared beginning with the log-probs of its step as `before` and those of B's step as `after`.
  function between(a, b) {
    const segments = a.t.segments.map((segment, s) => {
      const other = b.t.segments[s];
      if (segment.by !== "model" || other?.by !== "model") return segment;
      const most = Math.min(segment.tokens.length, other.tokens.length);
      const read = (of) => Array.from({ length: most }, (_, k) => U.logpAt(of, k));
      return { ...segment, tokens: segment.tokens.slice(0, most), logp_before: read(segment), logp_after: read(other), logp_sampler: null, held: null };
    });
    return { ...a.t, segments };
  }

  // The change between the two that gets the strongest colour.
  U.scaleBetween = ({ a, b }) => {
    const { segment, token } = U.shared(a.t, b.t);
    return U.scaleOf([cut(between(a, b), { segment, token })]);
  };

  U.twoSteps = (view) => {
    const { a, b } = view;
    if (!b) return [node("p", { class: "hint" }, "Only one trajectory of this prompt is kept.")];
    const parted = U.shared(a.t, b.t);
    const made = between(a, b);
    const ends = { segment: parted.segment, token: parted.token };
    const shared = parted.tokens
      ? node(
          "section",
          { class: "common", "data-uid": a.t.uid, "aria-label": "Beginning that A and B share" },
          node("h3", {}, `Shared by A (step ${a.step}) and B (step ${b.step}): ${U.counted(parted.tokens, "token")}`),
          node("p", { class: "note" }, a.step === b.step ? "Both are of one step: the same tokens have the same log-prob." : `The same tokens under the weights of step ${a.step} and of step ${b.step}.`),
          node("div", { class: "legend-row" }, U.rampOf(`Change of a token's log-prob from step ${a.step} to step ${b.step}, in nats`, view.scale)),
          ...U.partsOf(made, { segment: 0, token: 0 }, ends, view.scale),
        )
      : node("p", { class: "parting" }, "A and B differ from their first token on.");
    const rest = (p) => p.t.segments.length > parted.segment;
    const sides = rest(a) || rest(b) ? [node("div", { class: "pair" }, side(view, a, "A", parted), side(view, b, "B", parted))] : [];
    const held = [a, b].some((p) => p.t.segments.some((s) => s.held));
    return [node("section", { class: "panel", "aria-label": "Two steps" }, node("h2", {}, `Step ${a.step} beside step ${b.step}`), shared, sides.length ? U.legendOf(view.scale, held) : null, ...sides)];
  };

  function side(view, p, name, parted) {
    const column = U.columnOf(p.t, name, parted, view.scale);
    column.querySelector("h3").append(node("span", { class: "muted" }, ` step ${p.step}`));
    return column;
  }

  function cut(t, to) {
    const segments = t.segments.slice(0, to.segment + 1).map((segment, s) => {
      if (segment.by !== "model" || s < to.segment) return segment;
      return { ...segment, tokens: segment.tokens.slice(0, to.token) };
    });
    return { segments };
  }
})();
