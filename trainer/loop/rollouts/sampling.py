"""From prompts to a batch of scored trajectories."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from services.contracts import Question, Trajectory, TrajectoryRequest
from services.likelihood.metrics.verdicts import is_right
from services.rollout.pool.pool import RolloutPool
from trainer.algorithms import overlong_penalty, zero_variance
from trainer.config.schema import Config
from trainer.data import PromptCursor
from trainer.loop.rollouts.scoring import calls_of, sampled_and_scored
from trainer.rewards import Reward, make_reward, right_at


def seed_of(run_seed: int, uid: str) -> int:
    """A trajectory's own seed: the same in every run of the same seed, whatever worker samples it."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}:{uid}".encode(), digest_size=4).digest(), "big") >> 1


@dataclass
class RolloutBatch:
    """One step's trajectories with their rewards. `cursor` is the prompt cursor's state after them."""

    step: int
    trajectories: list[Trajectory]
    rewards: np.ndarray  # float64 [B], NaN where the reward function gave nothing
    em: np.ndarray  # float64 [B]
    right: np.ndarray  # bool [B], what the reward function calls right
    cursor: dict[str, Any]
    seconds: float
    counts: dict[str, float] = field(default_factory=dict)
    """Metrics of the sampling itself: groups resampled, trajectories without a finite reward, those dropped
    as too stale, seconds that it waited for rewards."""

    @property
    def mean_searches(self) -> float:
        """Searches per trajectory that were carried out; 0 for an empty batch."""
        return float(np.mean([t.searches for t in self.trajectories] or [0]))

    def drop_older_than(self, version: int) -> RolloutBatch:
        """Without the trajectories that an older policy version took part in, nor the last one of a group
        that lost all others by it: alone it has nothing to be compared with. How many is counted."""
        groups = [t.group for t in self.trajectories]
        fresh = [i for i, t in enumerate(self.trajectories) if t.policy_version >= version]
        born = Counter(groups)
        left = Counter(groups[i] for i in fresh)
        rows = [i for i in fresh if left[groups[i]] > 1 or born[groups[i]] == 1]
        kept = [self.trajectories[i] for i in rows]
        rewards = self.rewards[rows]
        counts = self.counts | {
            "rollout/stale_dropped": float(len(self.trajectories) - len(rows)),
            "reward/missing": float((~np.isfinite(rewards)).sum()),
        }
        return replace(
            self,
            trajectories=kept,
            rewards=rewards,
            em=self.em[rows],
            right=self.right[rows],
            counts=counts,
        )


class BatchSampler:
    """Takes prompts, gives each occurrence a fresh group uid, asks the pool for G trajectories of each,
    scores them."""

    def __init__(self, config: Config, pool: RolloutPool, cursor: PromptCursor, reward: Reward) -> None:
        self.config = config
        self.pool = pool
        self.cursor = cursor
        self.reward = reward
        self.exact = make_reward("em")
        self.calls = calls_of(reward, config.reward)
        self.right_at = right_at(reward, config.reward.right_at)
        self.right_said = (
            ":" not in config.reward.kind or config.reward.right_at is not None or hasattr(reward, "right_at")
        )
        """Whether `right_at` is known, and not only what rewards usually are."""
        self.highest = -math.inf
        """Highest reward that the reward function has given so far."""

    def requests(self, step: int, questions: list[Question], first: int = 0) -> list[TrajectoryRequest]:
        """G requests for each question. Uids are `step-prompt-sample`: unique in a run, the same in a resumed
        one."""
        out = []
        for p, question in enumerate(questions, first):
            group = f"{step:06d}-{p:04d}"
            for g in range(self.config.rollout.group_size):
                uid = f"{group}-{g:02d}"
                out.append(
                    TrajectoryRequest(
                        uid, group, question, seed_of(self.config.seed, uid), self.config.rollout.temperature
                    )
                )
        return out

    async def sample(self, step: int, on_done: Callable[[Trajectory], None] | None = None) -> RolloutBatch:
        """One step's batch. With dynamic sampling (DAPO), groups without variance are replaced, a bounded
        number of times."""
        began = time.monotonic()
        waited = self.calls.waited
        wanted = self.config.rollout.prompts_per_step
        size = self.config.rollout.group_size
        rounds = self.config.algorithm.dynamic_sampling
        kept: list[Trajectory] = []
        rewards: list[float] = []
        right: list[bool] = []
        asked = resampled = 0
        while True:
            # Whole groups alone are kept, so that this division is exact.
            missing = wanted - len(kept) // size
            questions = self.cursor.take(missing)
            # Of this batch, whatever is taken ahead for the next one before this one is trained on.
            cursor = self.cursor.state_dict()
            # Numbers go on from round to round: no uid is given twice.
            requests = self.requests(step, questions, first=asked)
            # The reward function alone says what is right.
            fresh, earned = await sampled_and_scored(self.pool, requests, self.calls, on_done)
            self.highest = max([self.highest, *filter(math.isfinite, earned)])
            asked += missing
            good = is_right(earned, self.right_at).tolist()
            # A penalty makes variance too: a group of equal answers of different lengths teaches something.
            values = [e - self.length_penalty(t) for e, t in zip(earned, fresh, strict=True)]
            # In the last round (and without dynamic sampling) all groups are taken, so that the batch has its
            # size.
            flat = (
                zero_variance(torch.tensor(values, dtype=torch.float64), torch.arange(len(fresh)) // size)
                if rounds
                else None
            )
            for g in range(0, len(fresh), size):
                # `flat` says the same of each row of a group: the first one speaks for it.
                if flat is not None and flat[g]:
                    resampled += 1
                    continue
                kept += fresh[g : g + size]
                rewards += values[g : g + size]
                right += good[g : g + size]
            if len(kept) // size >= wanted:
                break
            rounds -= 1
        scores = np.asarray(rewards, np.float64)
        return RolloutBatch(
            step,
            kept,
            scores,
            np.asarray([self.exact(t) for t in kept]),
            np.asarray(right, bool),
            cursor,
            time.monotonic() - began,
            {
                "groups/resampled": float(resampled),
                "reward/missing": float((~np.isfinite(scores)).sum()),
                "time/reward": self.calls.waited - waited,
            },
        )

    def length_penalty(self, trajectory: Trajectory) -> float:
        """What DAPO takes off the reward for length, at least 0; 0 where that is off."""
        overlong = self.config.algorithm.overlong
        if not overlong.tokens:
            return 0.0
        written = torch.tensor(sum(len(a.token_ids) for a in trajectory.actions))
        limit = self.config.rollout.max_response_tokens * (self.config.rollout.max_turns + 1)
        return -overlong_penalty(
            written, max_tokens=limit, zone_tokens=overlong.tokens, penalty=overlong.penalty
        ).item()
