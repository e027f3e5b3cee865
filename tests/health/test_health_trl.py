"""TRL itself, on the CPU: a real GRPO run with LLDS in its loss, watched by a likelihood service."""

from __future__ import annotations

import os

import httpx
import pytest

if os.environ.get("UNSPIRAL_REAL_TRAINERS") != "1":
    pytest.importorskip("trl", reason="TRL is not installed; `make test-adapters` runs this with TRL 1.16")

from services.common.errors import UserError
from tests.health.trl_tiny import trainer_of
from tests.likelihood.likelihood_service import serving
from unspiral_health import LLDS
from unspiral_health.adapters import last_of, wrap
from unspiral_health.adapters.trl import LikelihoodCallback
from unspiral_health.llds import action_ids, llds_loss


class Compared(LLDS):
    """Records its terms, and what `llds_loss` gives on the same tensors."""

    def __init__(self, lam):
        super().__init__(lam)
        self.terms = []
        self.ours = []

    def __call__(self, logp, logp_old, advantages, mask):
        term = super().__call__(logp, logp_old, advantages, mask)
        whole = llds_loss(logp, logp_old, advantages, action_ids(mask))
        self.terms.append(float(term))
        self.ours.append((self.lam * float(whole.loss_sum) / max(whole.count, 1.0), whole.stats))
        return term


def test_llds_acts_in_a_real_grpo_run_and_every_step_is_posted(tmp_path, capsys):
    llds = Compared(0.5)
    added = []
    with serving(tmp_path) as server:
        spool = tmp_path / "spool"
        callback = LikelihoodCallback(server.url, "trl", llds=llds, spool_dir=spool, right_at=0.3)
        trainer = trainer_of(tmp_path, [callback])
        plain = last_of(trainer, "_compute_loss")
        callback.attach(trainer)
        wrap(trainer, "_compute_loss", lambda loss, *given: added.append(float(loss - plain())) or loss)
        trainer.train()
        series = httpx.get(f"{server.url}/v1/runs/trl/series", trust_env=False).json()
        rows = httpx.get(f"{server.url}/v1/runs/trl/steps/8/trajectories", trust_env=False).json()
    ours = [value for value, _ in llds.ours]
    assert llds.terms == pytest.approx(ours, rel=1e-6) and len(ours) == 8
    assert added == pytest.approx(ours, abs=1e-6), "what TRL trains on is its own loss and ours"
    size = sum(p.numel() for p in trainer.model.parameters())
    assert size < 5000
    assert llds.acts and llds.seen.active_tokens == sum(stats["active_tokens"] for _, stats in llds.ours) > 0
    assert llds.seen.moved == 4, "the second step of each generation batch; the first has its own weights"
    assert "LLDS acts: " in capsys.readouterr().out
    assert series["step"] == list(range(1, 9))
    curves = series["series"]
    assert [v > 0 for v in curves["llds/active_tokens"]["mean"]] == [False, True] * 4
    assert set(curves["llds/lambda"]["mean"]) == {0.5}
    assert all(v is not None for v in curves["displacement/mean"]["mean"])
    assert [v is not None for v in curves["probe/lag"]["mean"]] == [False] * 5 + [True] * 3
    assert all(0 <= v <= 1 for v in curves["reward/mean"]["mean"])
    assert len(rows) == 32 and len({row["group"] for row in rows}) <= 8


def test_one_optimiser_step_per_batch_is_refused_with_what_to_set(tmp_path):
    callback = LikelihoodCallback("http://127.0.0.1:9", "trl", llds=LLDS(), spool_dir=tmp_path / "spool")
    trainer = trainer_of(tmp_path, [callback], steps_per_generation=1)
    callback.attach(trainer)
    with pytest.raises(UserError, match="no log-probs from before the update are kept"):
        trainer.train()
    callback.run.client.close(timeout=0.1)
