// Held-out scores in words: what has changed, of how many questions, and whether that is more than their noise.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;
  const Z = 1.959964; // of a 95 % interval

  // Wilson's interval of a share of n answers, as in services/common/shares.py (a test compares them).
  U.wilson = (share, n) => {
    const middle = share + (Z * Z) / (2 * n);
    const half = Z * Math.sqrt((share * (1 - share)) / n + (Z * Z) / (4 * n * n));
    const whole = 1 + (Z * Z) / n;
    return [Math.max(0, (middle - half) / whole), Math.min(1, (middle + half) / whole)];
  };

  // The interval of the change between two shares of the same n questions (Newcombe 1998, method 10).
  U.changeInterval = (first, last, n) => {
    const [[lowFirst, highFirst], [lowLast, highLast]] = [U.wilson(first, n), U.wilson(last, n)];
    const change = last - first;
    return [change - Math.hypot(last - lowLast, highFirst - first), change + Math.hypot(highLast - last, first - lowFirst)];
  };

  const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
  const counted = (n) => `${n.toLocaleString("en")} question${n === 1 ? "" : "s"}`;
  const made = (run, key, at) => (run.events || []).findLast((e) => e.kind === "evaluation" && e.step === at && e.data?.metrics && key in e.data.metrics);

  // A score from before the first step stands in the curves at the first step; its event has step 0.
  const beforeTraining = (run, key, { step }) => {
    const first = run.first_step ?? 1;
    return first > 0 && step <= first && Boolean(made(run, key, 0)) && !(step > 0 && made(run, key, step));
  };
  const when = (run, key, point) => (beforeTraining(run, key, point) ? "before training" : `at step ${point.step}`);
  const questions = (run, key, point) => made(run, key, beforeTraining(run, key, point) ? 0 : point.step)?.data.overall?.n ?? null;

  // The first and the last of a run's scores of one kind, and what may be said of their change.
  U.heldOut = (run, key, label, scores) => {
    const [first, last] = [scores[0], scores[scores.length - 1]];
    const out = { label, scores, first, last, change: last.value - first.value, from: when(run, key, first), to: when(run, key, last), clear: false };
    const counts = [questions(run, key, first), questions(run, key, last)].filter((n) => n > 0);
    const n = counts.length ? Math.min(...counts) : null;
    if (n === null) {
      out.noise = "of how many questions was not posted, so its noise is not known";
      if (scores.length > 1) out.word = "noise not known";
      return out;
    }
    if (scores.length === 1) {
      const [low, high] = U.wilson(last.value, n);
      out.noise = `${counted(n)}, 95 % interval ${low.toFixed(2)} to ${high.toFixed(2)}`;
      return out;
    }
    const [low, high] = U.changeInterval(first.value, last.value, n);
    out.clear = low > 0 || high < 0;
    out.word = "no clear change";
    out.noise = `${counted(n)}, ${signed(out.change, 3)}, 95 % interval ${signed(low, 2)} to ${signed(high, 2)}`;
    return out;
  };

  // What is said first where the reward says nothing yet. An arrow stands for a change that is more than noise, and for no other.
  U.heldOutFirst = ({ first, last, from, to, label, change, clear, word, noise }) => {
    const bare = (text) => text.replace("at ", "");
    const sign = clear ? (change > 0 ? "↑" : "↓") : "";
    const strong = clear ? `${number(first.value)} → ${number(last.value)}` : word;
    const said = clear ? ` ${label}, ${bare(from)} to ${bare(to)} (${noise})` : ` ${label}: ${number(first.value)} ${from}, ${number(last.value)} ${to} (${noise})`;
    return node("p", { class: "big" }, U.arrow(sign), node("strong", { class: "direction" }, strong), node("span", { class: "muted" }, said));
  };

  // The same in a line of its own, below the reward.
  U.heldOutLine = ({ scores, first, last, from, to, label, change, clear, word, noise }) => {
    let said = `${to}, the only score so far`;
    if (scores.length > 1) said = clear ? `${to}, ${change > 0 ? "up" : "down"} from ${number(first.value)} ${from}` : `${to}, ${number(first.value)} ${from}: ${word}`;
    return node("p", {}, node("strong", {}, number(last.value)), ` ${label}, ${said}`, node("span", { class: "muted" }, ` (${noise})`));
  };

  // Where the score and the reward went opposite ways, both are said. shift: of the reward's means, with their steps.
  U.opposite = (held, shift, direction) => {
    if (!held || !shift || held.scores.length < 2 || held.change * shift.change >= 0) return null;
    if (direction.flat) return null; // the reward went no way at all
    const noisy = held.clear ? "" : " (not a clear change)";
    return node("p", { class: "opposite" }, `Held-out score and reward went opposite ways: the score ${signed(held.change, 3)}${noisy}, the mean reward ${signed(shift.change, 3)} between ${shift.from} and ${shift.to}.`);
  };
})();
