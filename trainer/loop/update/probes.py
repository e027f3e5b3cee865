"""The rows that are scored again after an update: the batch itself (displacement), and trajectories of the
past (the probes).

The lag probe takes right trajectories of k steps ago from the likelihood store: the batch's own right samples
are survivors, whose log-prob stays high while the likelihood of earlier right answers decays. The fixed probe
is a frozen set of right trajectories.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.files import write_atomically
from services.contracts import TokenBatch
from services.likelihood.client import LikelihoodClient
from services.likelihood.metrics.step_metrics import fixed_probe, lag_probe
from services.likelihood.metrics.text_metrics import control_logp, control_mask
from services.likelihood.metrics.verdicts import probe_rows
from services.likelihood.wire.tokens import pack_tokens, unpack_tokens
from services.settings import ProbeSettings

ASK_SECONDS = 5.0
"""Longest wait for the store's answer, from the beginning of the step. A store that was late once is not
waited for again until it answers."""
FREEZE_BY_STEP = 5
"""The fixed probe is closed at this step, however few right trajectories there were."""


@dataclass(frozen=True)
class FixedScores:
    """The fixed set under the new weights."""

    tokens: TokenBatch
    logp: np.ndarray
    """float32 [sum T] in nats."""


@dataclass(frozen=True)
class Rescored:
    """Log-probs under the new weights."""

    rows: list[int]
    """Rows of the batch that were scored."""
    logp_new: np.ndarray
    """float32 [sum T] in nats, NaN on the other rows."""
    metrics: dict[str, float | None]
    """Of the probes, by name."""
    fixed: FixedScores | None = None
    """None at steps that do not score the fixed set."""


class Probes:
    """Chooses what is to be scored again at a step. The fixed set lies in `fixed_probe.npz` of the run's
    folder."""

    def __init__(
        self,
        settings: ProbeSettings,
        store: LikelihoodClient,
        run: str,
        folder: Path,
        decode: Callable[[list[int]], str] | None = None,
        group_size: int = 1,
    ) -> None:
        """decode: the text of some tokens, by which the tags of the fixed set are found; None: they are not
        looked at."""
        self.settings = settings
        self.decode = decode
        self.store = store
        self.run = run
        self.group_size = group_size
        """Rows that follow each other and are scored together, or not at all: a group can be compared."""
        self._file = folder / "fixed_probe.npz"
        self.fixed: TokenBatch | None = None
        self._tags: np.ndarray | None = None
        """The tag tokens of the fixed set, once they have been looked for."""
        self.missing: str | None = None
        """Why the last step had no lag probe, where it should have had one."""
        self.missed = 0
        """Steps without one for such a reason."""
        self._asked = 0
        self._asked_at = 0.0
        self._answer: Future[TokenBatch | None] = Future()
        self._late = False

    def restore(self, step: int) -> None:
        """Take the fixed set up as it was after `step`."""
        if self._file.exists():
            saved = unpack_tokens(self._file.read_bytes())
            assert saved.step is not None, "written by _freeze"
            # What later steps froze is of a course that the run has left; it freezes its own when it gets
            # there.
            rows = np.flatnonzero(saved.step <= step).tolist()
            self.fixed = saved.take(rows) if rows else None
            self._tags = None

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
        """Take apart the log-probs of `TokenBatch.joined` of the parts."""
        ends = np.cumsum([len(p.token_ids) for p in parts.values()])
        scored = dict(zip(parts, np.split(logp, ends[:-1]) if parts else [], strict=True))
        logp_new = np.full(len(batch.token_ids), np.nan, np.float32)
        rows = []
        if "displacement" in parts:
            rows = self._sample(len(batch))
            for i, row in enumerate(rows):
                logp_new[batch.row(row)] = scored["displacement"][parts["displacement"].row(i)]
        metrics: dict[str, float | None] = {}
        if "lag" in parts:
            metrics["probe/lag"] = lag_probe(parts["lag"], scored["lag"])
        if self.missed:
            metrics["probe/lag_missed"] = float(self.missed)
        if "fixed" in parts:
            metrics["probe/fixed"] = fixed_probe(parts["fixed"], scored["fixed"])
            if self.decode:
                if self._tags is None:
                    self._tags = control_mask(parts["fixed"], self.decode)
                if (value := control_logp(parts["fixed"], scored["fixed"], self._tags)) is not None:
                    metrics["probe/control"] = value
        fixed = FixedScores(parts["fixed"], scored["fixed"]) if "fixed" in parts else None
        return Rescored(rows, logp_new, metrics, fixed)

    def _sample(self, n: int) -> list[int]:
        """A spread of n rows, in whole groups where not all are taken."""
        # By the number of rows alone, and without chance: `parts` and `read` must choose the same ones.
        size = min(self.settings.displacement_size or n, n)
        if size == n:
            return list(range(n))
        groups = -(-n // self.group_size)
        taken = np.linspace(0, groups - 1, max(1, size // self.group_size)).astype(int)
        rows = (np.unique(taken)[:, None] * self.group_size + np.arange(self.group_size)).ravel()
        return rows[rows < n].tolist()

    def _freeze(self, step: int, batch: TokenBatch) -> None:
        have = len(self.fixed) if self.fixed else 0
        rows = _right_rows(batch)[: self.settings.fixed_size - have]
        if step > FREEZE_BY_STEP or not rows:
            return
        part = batch.take(rows)
        part = TokenBatch(
            part.uid,
            part.offsets,
            part.token_ids,
            part.action_ids,
            logp_old=part.logp_old,
            step=np.full(len(rows), step, np.int64),
        )
        self.fixed = TokenBatch.joined([self.fixed, part]) if self.fixed else part
        self._tags = None
        write_atomically(self._file, pack_tokens(self.fixed))

    def _fixed(self, step: int) -> TokenBatch | None:
        """The fixed set once it is closed: before, its mean would move with its members."""
        full = self.fixed is not None and len(self.fixed) >= self.settings.fixed_size
        return self.fixed if full or step > FREEZE_BY_STEP else None

    def ask(self, step: int) -> None:
        """Begin to fetch what the lag probe of `step` needs. Returns at once; while an earlier answer is
        still awaited nothing more is asked."""
        past = step - self.settings.lag_steps
        asking = self._asked and not self._answer.done()
        if past < 1 or step % self.settings.every or asking or self._asked == step:
            return
        self._asked = step
        self._asked_at = time.monotonic()
        self._answer = Future()
        thread = threading.Thread(
            target=self._fetch, args=(past, self._answer), name="lag-probe", daemon=True
        )
        thread.start()

    def _fetch(self, step: int, answer: Future[TokenBatch | None]) -> None:
        try:
            answer.set_result(self.store.get_tokens(self.run, step, timeout_seconds=ASK_SECONDS))
        except Exception as error:  # otherwise this and every later probe would be waited for in vain
            answer.set_exception(error)

    def _lag(self, step: int) -> TokenBatch | None:
        past = step - self.settings.lag_steps
        self.missing = None
        if past < 1:
            return None
        batch = self._answered(step)
        if batch is None:
            self.missed += 1
            self.missing = self.missing or f"the likelihood service gave no token arrays of step {past}"
            return None
        return batch.take(_right_rows(batch)[: self.settings.lag_size])

    def _answered(self, step: int) -> TokenBatch | None:
        """The store's answer for `step`, if it comes in time."""
        # Nothing new mostly: it was asked when the step began, unless an earlier answer was still awaited.
        self.ask(step)
        left = 0.0 if self._late else self._asked_at + ASK_SECONDS - time.monotonic()
        try:
            answer = self._answer.result(max(0.0, left))
        except TimeoutError:
            self._late = True
            self.missing = (
                f"the likelihood service has not answered for {time.monotonic() - self._asked_at:.0f} s"
            )
            return None
        self._late = False
        if self._asked == step:
            return answer
        self.missing = "the likelihood service answered too late"
        return None


def _right_rows(batch: TokenBatch) -> list[int]:
    """Rows of right answers that the update did not push down; none where the arrays do not say what is
    right."""
    if batch.right is None:
        return []
    advantages = np.zeros(len(batch)) if batch.advantages is None else batch.advantages
    return probe_rows(batch.right.astype(bool), advantages).tolist()
