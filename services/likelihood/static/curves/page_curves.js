// Which curves there are, in groups. Metrics that no chart names get one of their own under "Other metrics".
(() => {
  "use strict";
  const U = window.Unspiral;

  const named = (...pairs) => (names) => pairs.filter(([key]) => names.has(key)).map(([key, label, colour, sparse]) => ({ key, label, colour, sparse }));
  const numbered = (prefix, label) => (names) =>
    [...names]
      .filter((n) => n.startsWith(prefix) && /^\d+$/.test(n.slice(prefix.length)))
      .sort((a, b) => a.slice(prefix.length) - b.slice(prefix.length))
      .map((key) => ({ key, label: `${label} ${Number(key.slice(prefix.length)) + (prefix.includes("action") ? 1 : 0)}` }));

  // Held-out scores of each data source: eval/SOURCE/em_MODE.
  const bySource = (mode) => (names) =>
    [...names].map((key) => [key, key.split("/")]).filter(([, parts]) => parts.length === 3 && parts[0] === "eval" && parts[2] === mode)
      .sort().map(([key, parts]) => ({ key, label: parts[1], sparse: true }));

  // A sparse line (a few evaluations) is drawn with points, and not smoothed.
  // The group with `lead` stands directly below the answers, whichever tab is shown.
  // title, unit, note (what it tells), lines, and: limit (a threshold), zero (range holds 0), log (log scale when it spreads widely)
  U.GROUPS = [
    {
      title: "Reward and held-out score",
      lead: true,
      charts: [
        { title: "Reward", unit: "mean of the batch", lines: named(["reward/mean", "reward", "a"], ["reward/em", "exact match", "b"]), zero: true },
        { title: "Held-out score", unit: "exact match", note: "Questions that are not trained on.", lines: named(["eval/em_greedy", "greedy", "c", true], ["eval/em_sampled", "sampled", "d", true]), zero: true },
      ],
    },
    {
      title: "Likelihood",
      charts: [
        { title: "Lag probe", unit: "nats per token", note: "Right answers of a few steps ago, scored again now. The earliest sign.", lines: named(["probe/lag", "lag probe", "a"]), limit: [-0.08, "alarm"], zero: true },
        { title: "Fixed probe", unit: "nats per token", note: "Right answers frozen at the start, scored again.", lines: named(["probe/fixed", "fixed probe", "a"]) },
        { title: "Log-prob by class", unit: "nats per token", note: "This batch's right, untrained and wrong answers, each over its own tokens. Survivors: right can look well while the probes fall.", lines: named(["logp/right", "right", "right"], ["logp/untrained", "untrained", "soft"], ["logp/wrong", "wrong", "wrong"]) },
        { title: "Right answers by action", unit: "nats per token", note: "First search, second, .. answer.", lines: numbered("logp/right_action_", "action") },
        { title: "Wrong answers by action", unit: "nats per token", lines: numbered("logp/wrong_action_", "action") },
        { title: "Surprise by number of tool rounds", unit: "nats per token", note: "Mean negative log-prob of trajectories with so many searches.", lines: numbered("nll/rounds_", "rounds") },
      ],
    },
    {
      title: "Scores by source, and what groups teach",
      charts: [
        { title: "Held-out EM by source, greedy", unit: "mean of the source", lines: bySource("em_greedy"), zero: true },
        { title: "Groups that teach nothing", unit: "share", note: "Every sample of the group has the same reward.", lines: named(["groups/zero_variance", "zero variance", "a"]), limit: [0.9, "alarm"], zero: true },
        { title: "Wrong answers with a right one's documents", unit: "share of wrong", note: "First retrieval gave the same documents as a right answer of the group.", lines: named(["retrieval/wrong_same_documents", "same documents", "a"]), zero: true },
      ],
    },
    {
      title: "Displacement: what each update did to answers with advantage ≥ 0",
      charts: [
        { title: "Change per token", unit: "nats", note: "Mean, and the middle 80 % of responses as a band. Wrong answers are meant to fall.", lines: named(["displacement/mean", "mean", "a"], ["displacement/p50", "median", "b"], ["displacement/wrong", "wrong answers", "wrong"], ["displacement/positive", "advantage > 0", "right"]), spread: ["displacement/p10", "displacement/p90"], zero: true },
        { title: "Share that lost likelihood", unit: "share", note: "Above one half with LLDS off is a sign of acceleration.", lines: named(["displacement/share_negative", "responses", "a"], ["displacement/share_negative_actions", "actions", "b"], ["displacement/share_negative_positive", "advantage > 0", "right"]), limit: [0.5, "half"], zero: true },
        { title: "Change by action", unit: "nats per token", lines: numbered("displacement/mean_action_", "action"), zero: true },
        { title: "Share that lost likelihood, by action", unit: "share", lines: numbered("displacement/share_negative_action_", "action"), zero: true },
      ],
    },
    {
      title: "Update",
      charts: [
        { title: "Entropy", unit: "nats per token", lines: named(["entropy", "entropy", "a"]), zero: true },
        { title: "Gradient norm", unit: "before clipping", lines: named(["grad_norm", "mean", "a"], ["grad_norm/max", "largest", "b"]), log: true, zero: true },
        { title: "Largest ratio", unit: "π / π old", lines: named(["ratio/max", "largest", "a"], ["ratio/p99", "99 %", "b"], ["ratio/p1", "1 %", "c"]), log: true },
        { title: "Clipped tokens", unit: "share", lines: named(["policy/clip_fraction", "clipped", "a"]), zero: true },
        { title: "Policy loss", unit: "per token", lines: named(["policy/loss", "loss", "a"]) },
        { title: "Optimiser steps skipped", unit: "of a batch", note: "Gradient norm not finite.", lines: named(["learner/skipped", "skipped", "wrong"]), zero: true },
        { title: "Leak", unit: "nats per token", note: "|surprise of sampled tokens − entropy|. Not near 0: sampler and learner have different supports.", lines: named(["leak/logp_entropy", "leak", "a"]), limit: [0.1, "alarm"], zero: true },
        { title: "Sampler against learner", unit: "nats per token", lines: named(["mismatch/abs_logp", "|difference|", "a"], ["kl/sampler", "KL", "b"]), zero: true },
        { title: "KL to the reference", unit: "nats per token", lines: named(["kl/ref", "reference", "a"]), zero: true },
        { title: "KL to the policy before the update", unit: "nats per token", lines: named(["kl/old", "old policy", "b"]), zero: true },
      ],
    },
    {
      title: "LLDS",
      charts: [
        { title: "LLDS loss", unit: "nats per token", lines: named(["llds/loss", "loss", "a"]), zero: true },
        { title: "Where LLDS acts", unit: "share of preserved tokens", lines: named(["llds/active_share", "active", "a"], ["llds/active_action_share", "active, of actions", "b"], ["llds/preserved_unrewarded", "of groups without a right answer", "wrong"], ["llds/beta", "beta", "c"]), zero: true },
        { title: "What LLDS acts on", unit: "count of a step", lines: named(["llds/active_tokens", "tokens", "a"], ["llds/active_actions", "actions", "b"]), zero: true },
        { title: "Active tokens by optimiser step", unit: "count", note: "0 at the first: the weights are still those that LLDS compares with.", lines: numbered("llds/active_tokens_step_", "step"), zero: true },
        { title: "Weight of LLDS", unit: "lambda", lines: named(["llds/lambda", "lambda", "a"]), zero: true },
      ],
    },
    {
      title: "Rollouts",
      charts: [
        { title: "Response length", unit: "model tokens", lines: named(["rollout/length", "length", "a"]), zero: true },
        { title: "Searches", unit: "per trajectory", lines: named(["rollout/searches", "searches", "a"]), zero: true },
        { title: "Well-formed", unit: "share", lines: named(["rollout/valid", "valid actions", "a"], ["rollout/finished", "finished", "b"]), zero: true },
        { title: "How trajectories end without an answer", unit: "share", lines: named(["rollout/truncated", "limit of tokens", "a"], ["rollout/at_turn_limit", "limit of turns", "b"]), zero: true },
        { title: "Searches that bring nothing new", unit: "share of searches", lines: named(["retrieval/empty", "no document", "a"], ["retrieval/repeated", "the same documents", "b"], ["retrieval/errors", "a failed try", "c"]), zero: true },
        { title: "Documents without a text", unit: "share of documents", note: "Nothing, or a title alone.", lines: named(["retrieval/blank", "without a text", "a"]), zero: true },
        { title: "Repetition", unit: "share of runs of four tokens", lines: named(["text/repetition", "seen before", "a"]), zero: true },
        { title: "Words that nobody gave", unit: "share of words", note: "In neither the questions nor the documents of the step.", lines: named(["text/non_words", "other words", "a"]), zero: true },
        { title: "Tags", unit: "log-prob per token", note: "Of right answers frozen at the start, and of this batch.", lines: named(["probe/control", "frozen answers", "a"], ["logp/control", "this batch", "b"]) },
        { title: "Sampling speed", unit: "tokens per second", lines: named(["rollout/tokens_per_s", "tokens/s", "a"]), zero: true },
        { title: "Time of a step", unit: "seconds", lines: named(["time/step", "step", "a"], ["time/rollout", "rollout", "b"], ["time/logprob", "log-probs", "c"], ["time/update", "update", "d"], ["time/sync", "sync", "e"], ["time/reward", "rewards, part of rollout", "f"]), zero: true },
      ],
    },
    {
      title: "Machine",
      charts: [
        { title: "Processor and memory", unit: "share", note: "Of the driver's machine, sampled once per step.", lines: named(["system/cpu", "processor", "a"], ["system/memory", "memory", "b"]), zero: true },
        { title: "GPUs", unit: "share of time", note: "Of the driver's machine; mean since the step before.", lines: numbered("system/gpu_", "GPU"), zero: true },
        { title: "Memory of the GPUs", unit: "share", note: "The most since the step before, by all processes.", lines: numbered("system/gpu_memory_", "GPU"), zero: true },
        { title: "Memory of the driver", unit: "GiB", lines: named(["system/driver_gib", "driver", "a"]), zero: true },
        { title: "Rollout workers", unit: "that serve", lines: named(["rollout/workers", "workers", "a"]), zero: true },
      ],
    },
  ];
})();
