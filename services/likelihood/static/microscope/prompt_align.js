// One trajectory's tokens at many steps. A token has a log-prob at a step where a trajectory of that step begins with the
// same tokens and observations up to it: what was asked of the weights is then the same.
(() => {
  "use strict";
  const U = window.Unspiral;

  // The log-prob of a token that a step ended with; before its update where it was not scored again.
  U.logpAt = (segment, k) => (segment.logp_after ? segment.logp_after[k] : segment.logp_before[k]);

  // Its tokens in order: segment, index, text, and the number of the action.
  U.tokensOf = (trajectory) => {
    const out = [];
    let action = 0;
    trajectory.segments.forEach((segment, s) => {
      if (segment.by !== "model") return;
      action += 1;
      segment.tokens.forEach((text, k) => out.push({ s, k, text, action }));
    });
    return out;
  };

  // Whether all of it was scored after the update, and the mean log-prob per token.
  U.meanOf = (trajectory) => {
    const written = trajectory.segments.filter((s) => s.by === "model");
    const all = written.flatMap((s) => s.tokens.map((_, k) => U.logpAt(s, k)));
    return all.length ? all.reduce((x, y) => x + y, 0) / all.length : null;
  };
  U.scored = (trajectory) => trajectory.segments.every((s) => s.by !== "model" || s.logp_after);

  // For each step: the log-prob of each token of `one`, null where no trajectory of the step goes so far along with it.
  // `before`: whether a value is from before that step's update.
  U.along = (one, steps) => {
    const tokens = U.tokensOf(one);
    return steps.map(({ step, trajectories }) => {
      const sources = trajectories.map((t) => ({ t, shared: U.shared(one, t).tokens, scored: U.scored(t) }));
      sources.sort((x, y) => y.scored - x.scored || y.shared - x.shared);
      const values = tokens.map(({ s, k }, i) => {
        const from = sources.find((source) => source.shared > i);
        return from ? U.logpAt(from.t.segments[s], k) : null;
      });
      const before = tokens.length > 0 && sources.some((source) => source.shared > 0) && !sources.some((source) => source.scored && source.shared > 0);
      return { step, values, before };
    });
  };
})();
