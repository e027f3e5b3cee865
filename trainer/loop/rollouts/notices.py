"""What a run says of itself in words, seldom enough to be read: why nothing is learnt, and what the reward
calls right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.loop.rollouts.sampling import BatchSampler, RolloutBatch

IDLE_STEPS = 10
"""Idle steps from one line about them to the next."""
RIGHT_BY_STEP = 10
"""A reward function of the user's that has called no answer right by this step is asked about."""
FEW_VALID = 0.5
"""Below this share of turns with a search or an answer a model does not write the tags."""


def why_nothing_is_learnt(batch: RolloutBatch) -> str:
    """The cause that can be seen in a batch in which nothing can act, and what helps."""
    known = batch.rewards[np.isfinite(batch.rewards)]
    if not batch.trajectories:
        return "every trajectory was too old for the learner (rollout.max_staleness)"
    if not len(known):
        return (
            "no trajectory has a reward: look whether what the reward function calls is up, and what it "
            "answers"
        )
    if batch.right.all():
        return "every answer is right: these questions have nothing more to teach; take harder ones"
    equal = f"all answers to a question earned the same (mean reward {known.mean():.3f})"
    kinds = [action.kind for trajectory in batch.trajectories for action in trajectory.actions]
    valid = sum(kind != "invalid" for kind in kinds) / len(kinds)
    if valid < FEW_VALID:
        return (
            f"{equal}, and {valid:.0%} of the turns hold a search or an answer: teach the model the tags "
            "first (unspiral warm-start)"
        )
    return (
        f"{equal}: take easier questions, a larger rollout.group_size, a reward with more levels "
        "(reward.kind=f1), or a warm-started model (unspiral warm-start)"
    )


class Notices:
    """Decides when a line is due. `say` gets it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.idle = 0
        self.asked = False

    def idle_step(self, step: int, batch: RolloutBatch) -> str | None:
        """After a step without any update: the cause, where it was said."""
        self.idle += 1
        if (self.idle - 1) % IDLE_STEPS:
            return None
        why = why_nothing_is_learnt(batch)
        again = f" ({self.idle} such steps so far)" if self.idle > 1 else ""
        self.say(f"step {step}: nothing to learn, the update is skipped{again}: {why}")
        return why

    def rewards(self, step: int, sampler: BatchSampler) -> None:
        """Once in a run: the reward function does not give what counts as right."""
        if self.asked or sampler.right_said:
            return
        found = (
            f"the reward function's highest reward is {sampler.highest:g}, and right is a reward of "
            f"{sampler.right_at:g}"
        )
        how = "set reward.right_at, or give the function an attribute right_at"
        if sampler.highest > sampler.right_at:
            self.say(f"step {step}: {found} or more: if that is not its best, {how}")
        elif step >= RIGHT_BY_STEP and -np.inf < sampler.highest < sampler.right_at:
            self.say(
                f"step {step}: {found}: no answer is right, and the probes have nothing to follow; {how}"
            )
        else:
            return
        self.asked = True
