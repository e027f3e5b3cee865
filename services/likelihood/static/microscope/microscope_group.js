// One group: its trajectories in a table, two of them side by side after the beginning that they share.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;

  U.VERDICTS = { true: ["✓", "right"], false: ["✗", "wrong"], null: ["?", "no reward"] };
  U.verdict = (right) => U.VERDICTS[right === true || right === false ? String(right) : "null"];

  // The last answer among the tokens, by the tags of the papers: `state` is none, open (never closed) or closed.
  U.writtenAnswer = (t) => {
    const last = t.segments.filter((s) => s.by === "model").map((s) => s.tokens.join("")).findLast((text) => text.includes("<answer>"));
    if (last === undefined) return { state: "none" };
    const inside = last.slice(last.lastIndexOf("<answer>") + "<answer>".length);
    const end = inside.indexOf("</answer>");
    return end < 0 ? { state: "open" } : { state: "closed", text: inside.slice(0, end).trim() };
  };
  const NO_ANSWER = { none: "no answer", open: "not closed: <answer> without </answer>", closed: "none that the reward reads" };

  // The answer in a table: the one that was scored; where the trainer posted no scoring, the one that was written.
  U.answerOf = (t) => {
    if (t.scoring?.answer) return U.short(t.scoring.answer, 40);
    const { state, text } = U.writtenAnswer(t);
    const muted = (words) => node("span", { class: "muted" }, words);
    if (state === "open") return muted("not closed");
    if (state === "none") return muted("none");
    return t.scoring ? muted(NO_ANSWER.closed) : U.short(text, 40);
  };

  // How many tokens two trajectories share, and where they part: the first segment and token that differ.
  U.shared = (a, b) => {
    let tokens = 0;
    for (let s = 0; s < Math.min(a.segments.length, b.segments.length); s++) {
      const [left, right] = [a.segments[s], b.segments[s]];
      if (left.by !== right.by) return { tokens, segment: s, token: 0 };
      if (left.by === "environment") {
        if (left.text !== right.text) return { tokens, segment: s, token: 0 };
        continue;
      }
      const most = Math.min(left.tokens.length, right.tokens.length);
      let k = 0;
      while (k < most && left.tokens[k] === right.tokens[k]) k++;
      tokens += k;
      if (k < left.tokens.length || k < right.tokens.length) return { tokens, segment: s, token: k };
    }
    return { tokens, segment: Math.min(a.segments.length, b.segments.length), token: 0 };
  };

  // What stands beside a trajectory at first: of those with another verdict the one that shares most with it.
  U.partner = (all, one) => {
    const others = all.filter((t) => t.uid !== one.uid);
    const most = (of) => of.map((t) => ({ t, n: U.shared(one, t).tokens })).sort((x, y) => y.n - x.n)[0]?.t;
    return most(others.filter((t) => t.verdict !== one.verdict)) || most(others) || null;
  };

  U.drawGroup = (view) => {
    const { trajectories, heads, a, b, scale } = view;
    const parted = b ? U.shared(a, b) : null;
    const held = trajectories.some((t) => t.segments.some((s) => s.held));
    const children = [heading(a, view.through), table(view, heads, trajectories), U.legendOf(scale, held, view.untouched)];
    if (parted) children.push(sharedPart(a, b, parted, scale));
    const columns = node("div", { class: `pair${b ? "" : " alone"}` }, column(a, "A", parted, scale));
    if (b) columns.append(column(b, "B", parted, scale));
    children.push(columns);
    return children;
  };

  // `through`: the address of the prompt's page through time, where there is one.
  function heading(t, through) {
    const golden = t.scoring?.golden || [];
    return node(
      "div",
      { class: "group-head" },
      node("h2", {}, t.question ? U.long(t.question, 600) : `Group ${t.group}`),
      node("p", {}, golden.length ? "Accepted: " : "No accepted answers were posted. ", ...golden.slice(0, 8).flatMap((g, i) => [i ? "; " : null, node("strong", {}, U.long(g.text, 200))]), golden.length > 8 ? ` and ${golden.length - 8} more` : null, node("span", { class: "muted" }, ` · group ${t.group}${t.data_source ? ` · ${t.data_source}` : ""}`), through ? node("a", { class: "through", href: through }, "This prompt through time") : null),
      t.prompt ? node("details", { class: "folded" }, node("summary", {}, `Prompt, ${U.integer(t.prompt.length)} characters`), node("div", { class: "body" }, U.long(t.prompt))) : null,
    );
  }

  U.headingOf = heading;

  function table(view, heads, trajectories) {
    const columns = ["A", "B", "", "Answer", "Reward", "Advantage", "Change per token", "Tokens that fell", "LLDS pulls up", "Searches", "Tokens", "Tokens shared with A", "End"];
    const rows = trajectories.map((t) => {
      const head = heads.find((h) => h.uid === t.uid);
      const [sign, word] = U.verdict(t.verdict);
      const radio = (side) => {
        const input = node("input", { type: "radio", name: `side-${side}`, "aria-label": `${t.uid} as ${side.toUpperCase()}`, onchange: () => view.choose(side, t.uid) });
        input.checked = view[side]?.uid === t.uid;
        input.disabled = view[side === "a" ? "b" : "a"]?.uid === t.uid;
        return node("td", {}, input);
      };
      const cell = (...inside) => node("td", { class: "n" }, ...inside);
      return node(
        "tr",
        { "data-uid": t.uid },
        radio("a"),
        radio("b"),
        node("td", { class: `verdict ${word.replace(" ", "-")}` }, sign, node("span", { class: "word" }, ` ${word}`)),
        node("td", { class: "answer", title: t.uid }, U.answerOf(t)),
        cell(number(t.reward)),
        cell(U.signed(t.advantage)),
        cell(head.change === null || head.change === undefined ? "–" : node("span", { class: "t", style: `background:${U.tint(head.change, view.scale)}` }, U.signed(head.change))),
        cell(U.percent(head.falling)),
        cell(head.held === null || head.held === undefined ? "–" : `${head.held} of ${head.tokens}`),
        cell(head.searches),
        cell(head.tokens),
        cell(t.uid === view.a.uid ? "–" : U.shared(view.a, t).tokens),
        node("td", {}, END[t.finish] || "–", t.valid === false ? node("span", { class: "flag" }, " invalid action") : null),
      );
    });
    const head = node("tr", {}, ...columns.map((c, i) => node("th", { scope: "col", class: i > 3 && i < 12 ? "n" : null }, c)));
    return U.wide("Trajectories of the group", node("table", { class: "trajectories" }, node("thead", {}, head), node("tbody", {}, ...rows)));
  }
  const END = { answer: "answer", turns: "limit of turns", length: "cut off" };

  function sharedPart(a, b, parted, scale) {
    if (!parted.tokens) return node("p", { class: "parting" }, "A and B differ from their first token on.");
    const [, left] = U.verdict(a.verdict);
    const [, right] = U.verdict(b.verdict);
    const body = parts(a, { segment: 0, token: 0 }, parted, scale);
    const scored = a.segments.some((s) => s.logp_after);
    return node(
      "section",
      { class: "common", "data-uid": a.uid, "aria-label": "Beginning that A and B share" },
      node("h3", {}, `Shared by A (${left}) and B (${right}): ${U.counted(parted.tokens, "token")}`),
      node("p", { class: "note" }, scored && left !== right ? "The same tokens stand in a right and in a wrong answer: what pushes the wrong one down pushes them down, too." : "The same tokens, with the same change, stand in both."),
      ...body,
    );
  }

  function column(t, side, parted, scale) {
    const [sign, word] = U.verdict(t.verdict);
    const from = parted || { segment: 0, token: 0 };
    const body = parts(t, from, { segment: t.segments.length, token: 0 }, scale);
    const about = t.probe ? ["probe, scored again"] : [`reward ${number(t.reward)}`, `advantage ${U.signed(t.advantage)}`];
    if (t.policy_version !== null && t.policy_version !== undefined) about.push(`policy version ${t.policy_version}`);
    if (t.seconds !== null && t.seconds !== undefined) about.push(`${t.seconds.toFixed(2)} s`);
    if (t.preserved !== null && t.preserved !== undefined) about.push(preservedOf(t));
    return node(
      "section",
      { class: "side", "data-uid": t.uid, "aria-label": `Trajectory ${side}` },
      node("h3", {}, `${side} `, node("span", { class: `verdict ${word.replace(" ", "-")}` }, `${sign} ${word}`), node("span", { class: "muted uid" }, ` ${t.uid}`)),
      node("p", { class: "note" }, about.join(" · ")),
      ...(body.length ? body : [node("p", { class: "note" }, "Nothing but the shared beginning.")]),
      t.probe ? null : reward(t),
    );
  }
  U.columnOf = column;

  // Whether LLDS may act on a trajectory is one thing, on how many of its tokens it acts another.
  function preservedOf(t) {
    if (!t.preserved) return "not preserved by LLDS";
    const written = t.segments.filter((s) => s.by === "model");
    if (!written.length || !written.every((s) => s.held)) return "preserved by LLDS";
    const [pulled, all] = [written.flatMap((s) => s.held).length, written.flatMap((s) => s.tokens).length];
    return `preserved by LLDS: it pulls up ${pulled} of its ${all} tokens`;
  }

  // Segments of a trajectory from one place up to another.
  function parts(t, from, to, scale) {
    const out = [];
    let action = 0;
    for (let s = 0; s < t.segments.length; s++) {
      const segment = t.segments[s];
      action += segment.by === "model" ? 1 : 0;
      if (s < from.segment || s > to.segment || (s === to.segment && !to.token)) continue;
      if (segment.by === "environment") {
        out.push(observed(segment));
        continue;
      }
      const first = s === from.segment ? from.token : 0;
      const last = s === to.segment ? to.token : segment.tokens.length;
      if (first >= last && segment.tokens.length) continue;
      out.push(node("p", { class: "caption" }, caption(segment, action, first)), U.strip(segment, s, first, last, scale));
      if (last === segment.tokens.length) out.push(...documents(segment));
    }
    return out;
  }
  U.partsOf = parts;

  function caption(segment, action, first) {
    const words = [`${first ? "… " : ""}action ${action}${segment.kind ? `: ${segment.kind}` : ""}`];
    if (first) return words[0];
    if (segment.seconds !== null && segment.seconds !== undefined) words.push(`written in ${segment.seconds.toFixed(2)} s`);
    if (segment.search_seconds !== null && segment.search_seconds !== undefined) words.push(`searched in ${segment.search_seconds.toFixed(2)} s`);
    if (segment.policy_version !== null && segment.policy_version !== undefined) words.push(`version ${segment.policy_version}`);
    return words.join(" · ");
  }

  function observed(segment) {
    const size = segment.tokens === null || segment.tokens === undefined ? `${U.integer(segment.text.length)} characters` : `${U.integer(segment.tokens)} tokens`;
    return node("details", { class: "folded" }, node("summary", {}, `Observation, ${size}: `, U.short(segment.text, 60)), node("div", { class: "body" }, U.long(segment.text)));
  }

  function documents(segment) {
    if (!segment.documents) return [];
    if (!segment.documents.length) return [node("p", { class: "note" }, "The search found nothing.")];
    return segment.documents.map((d, i) => {
      const title = node("summary", {}, `Document ${i + 1}: `, d.title ? U.short(d.title) : node("span", { class: "muted" }, d.id));
      const body = d.text ? U.long(d.text) : node("span", { class: "muted" }, "its text was not posted");
      return node("details", { class: "folded document" }, title, node("div", { class: "body" }, node("p", { class: "note" }, `id ${d.id}`), body));
    });
  }

  // Why it earned what it earned: the answer as it is compared, beside the accepted ones. The comparison is the whole reason for exact
  // match alone; of a function at an import path no part is known.
  const BY_MATCH = ["em", "em_strict", "em_search_r1"];
  function reason(t, name) {
    if (!name || BY_MATCH.includes(name)) return [`Why reward ${number(t.reward)}`, null];
    const unknown = `${name} gave ${number(t.reward)}. A reward function returns one number, so its parts are unknown.`;
    const known = `${name} gave ${number(t.reward)}; it weighs more than equality.`;
    return [`Reward ${number(t.reward)}`, `${name.includes(":") ? unknown : known} The table shows exact match of the answer, whatever the reward is.`];
  }
  function reward(t) {
    const said = t.scoring;
    if (!said) return node("p", { class: "note" }, `Reward ${number(t.reward)}; the trainer posted no explanation.`);
    const rows = (said.golden || []).map((g) => node("tr", {}, node("td", {}, U.long(g.text, 300)), node("td", {}, U.long(g.normalized ?? "", 300)), node("td", { class: g.equal ? "verdict right" : "verdict wrong" }, g.equal ? "= equal" : "≠ differs")));
    const answer = node("tr", {}, node("th", { scope: "row" }, said.answer === null || said.answer === undefined ? NO_ANSWER[U.writtenAnswer(t).state] : U.long(said.answer, 300)), node("td", {}, U.long(said.normalized ?? "", 300)), node("td", {}, "its answer"));
    const head = node("tr", {}, ...["As written", "As compared", ""].map((h) => node("th", { scope: "col" }, h)));
    const [title, note] = reason(t, said.function);
    return node("div", { class: "reward" }, node("h4", {}, title, said.function ? node("span", { class: "muted" }, ` by ${said.function}`) : null), note ? node("p", { class: "note" }, note) : null, U.wide("Its answer and the accepted ones", node("table", {}, node("thead", {}, head), node("tbody", {}, answer, ...rows))));
  }
})();
