"""The tokens that clip-cov and kl-cov act on, chosen over a whole optimiser step.

The choice is by log-probs at the start of the batch. So it depends on neither micro-batch nor rank, and the
gradient does not either; the papers' code chooses in each micro-batch anew, by the log-probs of the moment.
"""

from __future__ import annotations

import numpy as np
import torch

from services.contracts import TrainBatch
from trainer.algorithm_names import is_known_loss
from trainer.algorithms import chosen_tokens
from trainer.config.algorithm import AlgorithmSettings
from trainer.learner.batches.micro_batches import MicroBatch, Rows


def whole_logp(
    batch: TrainBatch, micros: list[MicroBatch], device: torch.device, *, several_ranks: bool
) -> np.ndarray:
    """The batch's log-probs from the micro-batches that all ranks have scored: float32 [sum T]."""
    whole = np.zeros(len(batch.token_ids), np.float32)
    for m in micros:
        assert m.logp_old is not None, "scored before"
        values = m.logp_old.detach().float().cpu().numpy()
        for i, row in enumerate(m.rows):
            whole[batch.row(row)] = values[i, : m.lengths[i]]
    if several_ranks:
        shared = torch.from_numpy(whole).to(device)
        torch.distributed.all_reduce(shared)
        whole = shared.cpu().numpy()
    return whole


def choose_tokens(
    algorithm: AlgorithmSettings, batch: TrainBatch, logp: np.ndarray, rows: Rows, generator: torch.Generator
) -> np.ndarray:
    """The chosen tokens of one optimiser step's rows: bool [sum T]. logp: of `whole_logp`."""
    of_row = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
    at = np.flatnonzero((batch.action_ids >= 0) & np.isin(of_row, rows))
    chosen = np.zeros(len(batch.token_ids), bool)
    loss = algorithm.loss
    if not is_known_loss(loss) or loss not in ("clip_cov", "kl_cov"):
        return chosen
    chosen[at] = chosen_tokens(
        loss,
        torch.from_numpy(logp[at]),
        torch.from_numpy(batch.advantages[of_row[at]]),
        share=algorithm.cov_share,
        low=algorithm.cov_low,
        high=algorithm.cov_high,
        generator=generator,
    ).numpy()
    return chosen


def mark(batch: TrainBatch, micros: list[MicroBatch], chosen: np.ndarray) -> None:
    """Give each micro-batch its chosen tokens."""
    for m in micros:
        marked = torch.zeros(m.action_ids.shape, dtype=torch.bool)
        for i, row in enumerate(m.rows):
            marked[i, : m.lengths[i]] = torch.from_numpy(chosen[batch.row(row)])
        m.chosen = marked.to(m.action_ids.device)
