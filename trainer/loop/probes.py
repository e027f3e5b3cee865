"""What is scored again after an update: the batch itself (displacement), and trajectories of the past (the probes).

The lag probe takes right trajectories of k steps ago from the likelihood store: the batch's own right samples are survivors, whose
log-prob stays high while the likelihood of earlier right answers decays. The fixed probe is a frozen set of right trajectories.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.contracts import TokenBatch
from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.step_metrics import fixed_probe, lag_probe
from services.likelihood.metrics.verdicts import probe_rows
from services.likelihood.tokens import pack_tokens, unpack_tokens
from services.settings import ProbeSettings

FREEZE_BY_STEP = 5
"""The fixed probe is closed at this step, however few right trajectories there were."""


@dataclass
class Rescored:
    """Log-probs under the new weights. `rows` of the batch were scored; `logp_new` [sum T] is NaN elsewhere."""

    rows: list[int]
    logp_new: np.ndarray
    metrics: dict[str, float]


class Probes:
    """Chooses what is to be scored again at a step. The fixed set lies in `fixed_probe.npz` of the run's folder."""

    def __init__(self, settings: ProbeSettings, store: LikelihoodClient, run: str, folder: Path) -> None:
        self.settings, self.store, self.run, self._file = settings, store, run, folder / "fixed_probe.npz"
        self.fixed: TokenBatch | None = None

    def restore(self, step: int) -> None:
        """Take the fixed set up as it was after `step`."""
        if self._file.exists():
            saved = unpack_tokens(self._file.read_bytes())
            rows = np.flatnonzero(saved.extra["step"] <= step).tolist()
            self.fixed = saved.take(rows) if rows else None

    def parts(self, step: int, batch: TokenBatch, *, moved: bool = True) -> dict[str, TokenBatch]:
        """The trajectories to score, by purpose: a spread of the batch, the lag probe, the fixed probe. Empty
        at steps without a probe.

        moved: whether the update changed the weights; otherwise there is no displacement to measure.
        """
        self._freeze(step, batch)
        if step % self.settings.every:
            return {}
        found = {
            "displacement": batch.take(self._sample(len(batch))) if moved else None,
            "lag": self._lag(step),
            "fixed": self._fixed(step),
        }
        return {name: part for name, part in found.items() if part is not None and len(part)}

    def read(self, batch: TokenBatch, parts: dict[str, TokenBatch], logp: np.ndarray) -> Rescored:
        """Take apart the log-probs of `join(parts)`."""
        ends = np.cumsum([len(p.token_ids) for p in parts.values()])
        scored = dict(zip(parts, np.split(logp, ends[:-1]) if parts else [], strict=True))
        logp_new, rows = np.full(len(batch.token_ids), np.nan, np.float32), []
        if "displacement" in parts:
            rows = self._sample(len(batch))
            for i, row in enumerate(rows):
                logp_new[batch.row(row)] = scored["displacement"][parts["displacement"].row(i)]
        metrics = {}
        if "lag" in parts:
            metrics["probe/lag"] = lag_probe(parts["lag"], scored["lag"])
        if "fixed" in parts:
            metrics["probe/fixed"] = fixed_probe(parts["fixed"], scored["fixed"])
        return Rescored(rows, logp_new, metrics)

    def _sample(self, n: int) -> list[int]:
        size = min(self.settings.displacement_size or n, n)
        return np.unique(np.linspace(0, n - 1, size).astype(int)).tolist() if n else []

    def _freeze(self, step: int, batch: TokenBatch) -> None:
        have = len(self.fixed) if self.fixed else 0
        rows = _right_rows(batch)[: self.settings.fixed_size - have]
        if step > FREEZE_BY_STEP or not rows:
            return
        part = batch.take(rows)
        part = TokenBatch(part.uid, part.offsets, part.token_ids, part.action_ids, logp_old=part.logp_old)
        part.extra["step"] = np.full(len(rows), step, np.int64)
        self.fixed = join([self.fixed, part]) if self.fixed else part
        aside = self._file.with_suffix(".tmp")
        aside.write_bytes(pack_tokens(self.fixed))
        os.replace(aside, self._file)

    def _fixed(self, step: int) -> TokenBatch | None:
        """The fixed set once it is closed: before, its mean would move with its members."""
        full = self.fixed is not None and len(self.fixed) >= self.settings.fixed_size
        return self.fixed if full or step > FREEZE_BY_STEP else None

    def _lag(self, step: int) -> TokenBatch | None:
        past = step - self.settings.lag_steps
        batch = self.store.get_tokens(self.run, past) if past >= 1 else None
        return batch.take(_right_rows(batch)[: self.settings.lag_size]) if batch else None


def _right_rows(batch: TokenBatch) -> list[int]:
    right = batch.extra["right"]
    return probe_rows(right, batch.extra.get("advantages", np.zeros(len(right)))).tolist()


def join(batches: list[TokenBatch]) -> TokenBatch:
    """Rows of several batches one after another; sampler log-probs are left out, extra columns kept where all have them."""
    shared = set.intersection(*(set(b.extra) for b in batches))
    return TokenBatch(
        [u for b in batches for u in b.uid],
        np.cumsum([0, *(n for b in batches for n in np.diff(b.offsets))]),
        np.concatenate([b.token_ids for b in batches]),
        np.concatenate([b.action_ids for b in batches]),
        logp_old=np.concatenate([b.logp_old for b in batches]),
        extra={k: np.concatenate([b.extra[k] for b in batches]) for k in sorted(shared)},
    )
