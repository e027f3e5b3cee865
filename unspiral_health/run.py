"""One run of anybody's trainer, posted to a likelihood service."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from services.common.answers import read_json
from services.common.errors import EnvironmentLacks, UserError
from services.common.names import accepted
from services.likelihood.client import LikelihoodClient
from services.likelihood.exports.trainers import MAPS
from services.likelihood.metrics.padded import LagMemory, array, padded_records
from services.likelihood.metrics.verdicts import BEST_REWARD, is_right
from services.likelihood.records import METRIC_NAME, EventRecord, StepRecord, check_run_name

log = logging.getLogger("unspiral.health")
SPOOL = ".likelihood-spool"
DELIVERY_SECONDS = 60.0
LLDS = "llds/"
"""Metrics of the loss keep their names, whatever a trainer puts before them."""


class Run:
    """Posts return at once, and what cannot be delivered waits on disk (`LikelihoodClient`).

    url: the service's address, otherwise the variable UNSPIRAL_LIKELIHOOD_URL. name: the run's, otherwise
    UNSPIRAL_RUN. token: bearer token, otherwise UNSPIRAL_API_TOKEN. spool_dir: each rank has a folder of its
    own in it. attempt: one more each time the run is resumed. trainer: `verl`, `trl`, `openrlhf`, `skyrl` or
    `slime`; its metrics are posted under the monitor's names too. right_at: the least reward of a right
    answer. rank: of this process; each posts its own rows, metrics come from rank 0 alone.
    Raises UserError for what is missing or misspelt.
    """

    def __init__(
        self,
        url: str | None = None,
        name: str | None = None,
        *,
        token: str | None = None,
        spool_dir: str | Path = SPOOL,
        attempt: int = 0,
        trainer: str | None = None,
        right_at: float = BEST_REWARD,
        rank: int = 0,
        lag_steps: int = 5,
    ):
        url = _given(url, "UNSPIRAL_LIKELIHOOD_URL", "the likelihood service's address")
        self.name = check_run_name(_given(name, "UNSPIRAL_RUN", "the run's name"))
        if trainer is not None and trainer not in MAPS:
            raise UserError(f"trainer {trainer!r}: {accepted(trainer, list(MAPS))}")
        token = token or os.environ.get("UNSPIRAL_API_TOKEN")
        self.client = LikelihoodClient(url, spool_dir=Path(spool_dir) / f"rank-{rank}", token=token)
        self.attempt = attempt
        self.map = MAPS[trainer] if trainer else None
        self.right_at = right_at
        self.rank = rank
        self.lag = LagMemory(lag_steps)
        self.rows = 0
        """Trajectories that were handed over."""
        self._told = False
        self._left_out: set[str] = set()
        """Names of metrics that were told to be none."""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def post(
        self, step: int, metrics: Mapping[str, Any] | None = None, trajectories: Sequence[Any] = ()
    ) -> None:
        """Hand over a step, or a part of it: metrics by name, and trajectory records. Text among the metrics
        is passed over, and of an array the mean counts."""
        named: dict[str, float | None] = {}
        if self.rank == 0:
            named |= self._metrics(metrics or {})
        rows = list(trajectories)
        record = StepRecord.model_construct(
            step=step, attempt=self.attempt, policy_version=None, metrics=named, trajectories=rows
        )
        self.client.post_step(self.name, record)
        self.rows += len(rows)

    def update(
        self,
        step: int,
        mask: Any,
        before: Any,
        advantages: Any,
        groups: Sequence[str],
        *,
        rewards: Any = None,
        after: Any = None,
        batch: Mapping[str, Any] | None = None,
        score: Callable[[Mapping[str, Any]], Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand over one update of the policy, after it: the rows of this rank and the lag probe.

        mask, before, advantages, groups, rewards, after: as in `padded_records`. batch, score: as in
        `LagMemory.probe`; score(batch) is `after` too where that is not given. Without them there is no lag
        probe, without `after` no displacement. Raises UserError where shapes do not fit each other.
        """
        right = None if rewards is None else is_right(array(rewards), self.right_at)
        if after is None and batch is not None and score is not None:
            after = score(batch)
        uids = [f"{self.rank}-{row}" for row in range(len(groups))]
        records = padded_records(
            mask, before, advantages, groups, after=after, rewards=rewards, right=right, uids=uids
        )
        said = dict(metrics or {})
        if batch is not None and score is not None:
            lag = self.lag.probe(batch, mask, before, advantages, score, right=right)
            said |= {} if lag is None else {"probe/lag": lag}
        self.post(step, said, records)

    def event(self, step: int, kind: str, text: str) -> None:
        """Hand over something that happened, in one line."""
        self.client.post_event(self.name, EventRecord(step=step, kind=kind, text=text))

    def alarms(self, timeout: float = DELIVERY_SECONDS) -> list[dict[str, Any]]:
        """Every alarm of the run so far, oldest first, once all that was handed over is stored: dicts with
        `rule, metric, since, step, seen, confidence, advice, cleared`. Raises EnvironmentLacks where the
        service is away, or has not stored everything in time."""
        return self._asked("alarms", timeout)

    def phase(self, timeout: float = DELIVERY_SECONDS) -> str:
        """The run's phase, once all that was handed over is stored; raises as `alarms` does."""
        return str(self._asked("phase", timeout)["phase"])

    def confirm(self, step: int) -> None:
        """Say once, after the first step, what became of its rows. Raises EnvironmentLacks where none was
        handed over (the adapter's hook was not called), UserError where the service refused them."""
        if self._told:
            return
        self._told = True
        if not self.rows:
            raise EnvironmentLacks(f"run {self.name}: no update of the policy was seen; nothing was posted")
        stored = self.client.flush(DELIVERY_SECONDS)
        if self.client.refused:
            raise UserError(f"run {self.name}: {self.client.url} refused step {step}; the log says why")
        kept = "stored" if stored else "not stored yet: they wait in the spool folder"
        text = f"step {step} of run {self.name}: {self.rows} trajectories posted to {self.client.url}, {kept}"
        print(f"likelihood: {text}", flush=True)

    def close(self) -> None:
        """Deliver what can be delivered; the rest stays on disk for the next Run on the same folder."""
        self.client.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        numbers = {name: _number(value) for name, value in metrics.items()}
        known = {name: value for name, value in numbers.items() if value is not None}
        texts = [name for name in metrics if name not in known and name not in self._left_out]
        if texts:
            self._left_out.update(texts)
            log.warning("run %s: no numbers, and left out: %s", self.name, ", ".join(map(repr, texts[:5])))
        known = {n[n.index(LLDS) :] if LLDS in n else n: v for n, v in known.items() if METRIC_NAME.match(n)}
        return self.map.translated(known) if self.map else known

    def _asked(self, what: str, timeout: float) -> Any:
        url = f"{self.client.url}/v1/runs/{self.name}/{what}"
        if not self.client.flush(timeout):
            waiting = f"{self.client.waiting} messages are not stored after {timeout:g} s"
            raise EnvironmentLacks(f"likelihood service {url}: {waiting}; its answer would lack them")
        try:
            answer = httpx.get(url, headers=self._headers, timeout=timeout, trust_env=False)
            answer.raise_for_status()
            return read_json(answer.content)
        except (httpx.HTTPError, ValueError) as e:
            raise EnvironmentLacks(f"likelihood service {url}: {' '.join(str(e).split())[:200]}") from e


def _given(value: str | None, variable: str, what: str) -> str:
    found = value or os.environ.get(variable)
    if not found:
        raise UserError(f"{what}: not given; pass it, or set {variable}")
    return found


def _number(value: Any) -> float | None:
    """A number of whatever a trainer logs: a tensor, an array or a list gives its mean. None for text."""
    try:
        values = np.asarray(array(value), np.float64)
    except (TypeError, ValueError):
        return None
    return float(values.mean()) if values.size else None
