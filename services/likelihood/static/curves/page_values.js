// Values of a curve at a step, and two runs as their difference.
(() => {
  "use strict";
  const U = window.Unspiral;

  // Index of the newest point at a step or before it; -1 without one.
  const before = (steps, step) => {
    let [low, high] = [0, steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  // The value of a metric at a step as it was posted, not smoothed: {value, step}. Where the step has none, the newest before it.
  U.valueAt = (run, key, step) => {
    const values = run.series.series[key]?.mean;
    if (!values) return null;
    for (let i = before(run.series.step, step); i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return { value: values[i], step: run.series.step[i] };
    return null;
  };

  // Means of a curve in buckets of `stride` steps, which begin at multiples of it, as on the server.
  const bucketed = (run, key, stride) => {
    const sums = new Map();
    const { step, series } = run.series;
    series[key].mean.forEach((value, i) => {
      if (value === null || value === undefined) return;
      const at = Math.floor(step[i] / stride) * stride;
      const [sum, count] = sums.get(at) || [0, 0];
      sums.set(at, [sum + value, count + 1]);
    });
    return sums;
  };

  // A run as its difference to another, at the steps that both have. It has no thresholds, and no spread.
  U.difference = (run, base) => {
    const stride = Math.max(run.series.stride || 1, base.series.stride || 1);
    const series = {};
    const steps = new Set();
    const found = new Map();
    for (const key of Object.keys(run.series.series)) {
      if (!base.series.series[key]) continue;
      const [left, right] = [bucketed(run, key, stride), bucketed(base, key, stride)];
      const values = new Map();
      for (const [at, [sum, count]] of left) if (right.has(at)) values.set(at, sum / count - right.get(at)[0] / right.get(at)[1]);
      if (!values.size) continue;
      found.set(key, values);
      for (const at of values.keys()) steps.add(at);
    }
    const step = [...steps].sort((a, b) => a - b);
    for (const [key, values] of found) series[key] = { mean: step.map((at) => values.get(at) ?? null) };
    return { ...run, label: `${U.titleOf(run)} − ${U.titleOf(base)}`, alarms: [], bands: [], series: { ...run.series, step, stride, series } };
  };

  U.titleOf = (run) => run.label || run.title || run.run;

  // Long names of runs that are shown together, without what all of them begin and end with but for one word: a seed that tells them
  // apart often stands where a narrow place cuts a name.
  const SHORT = 28;
  const beginning = (names) => {
    let n = 0;
    while (names.every((name) => n < name.length && name[n] === names[0][n])) n++;
    return names[0].slice(0, n);
  };
  const reversed = (text) => [...text].reverse().join("");
  const left = (shared) => (/[-._ /][^-._ /]*[-._ /][^-._ /]*$/.exec(shared)?.index ?? -1) + 1;
  U.apart = (run, runs) => {
    const names = runs.map(U.titleOf);
    const name = U.titleOf(run);
    if (new Set(names).size < 2 || names.every((one) => one.length <= SHORT)) return name;
    const first = left(beginning(names));
    const rests = names.map((one) => one.slice(first));
    const last = reversed(beginning(rests.map(reversed))).search(/[-._ /]/);
    const shared = reversed(beginning(rests.map(reversed))).length;
    const cut = last < 0 || shared - last < 8 ? 0 : shared - last;
    return `${first ? "…" : ""}${name.slice(first, name.length - cut)}${cut ? "…" : ""}`;
  };

  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 5], [14, 4], [14, 3, 2, 3, 2, 3], [7, 2], [4, 8], [1, 2], [10, 3, 5, 3]];
  // Whether one line hides another: at more than half of the steps that both have they are less than a line's width apart, which is a
  // hundredth of the height.
  const hides = (left, right) => {
    const both = left.map((value, i) => [value, right[i]]).filter((pair) => pair.every((v) => v !== null && v !== undefined));
    const height = Math.max(...both.flat()) - Math.min(...both.flat());
    return both.length > 0 && 2 * both.filter(([a, b]) => Math.abs(a - b) <= height / 100).length > both.length;
  };

  // Of several runs each line of a chart has dashes of its own. Those of one run are told apart by their colours: one that hides
  // an earlier one is dashed, so that both are seen.
  U.dashOf = (curve, curves, runs) => {
    const meanOf = ({ run, line }) => run.series.series[line.key].mean;
    if (runs === 1 && !curves.slice(0, curves.indexOf(curve)).some((other) => hides(meanOf(other), meanOf(curve)))) return [];
    return DASHES[curve.l % DASHES.length];
  };

  // A threshold that the axis does not reach is said: without it nobody could tell that a curve is well.
  U.beyond = ([value, name], { min, max }) => (value > min && value < max ? "" : `${name} at ${String(value).replace("-", "−")}, ${value >= max ? "above" : "below"} this range`);
})();
