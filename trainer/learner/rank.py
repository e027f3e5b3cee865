"""One data-parallel rank of the learner: it scores token batches and takes optimiser steps. No Ray in here.

A batch's update, in order:
    1. cut the batch into `minibatches_per_batch` parts, deal each part to ranks, pack each rank's rows into
       micro-batches, once;
    2. score pi_old (and the reference model, and the LLDS snapshot) over those very micro-batches;
    3. for each epoch, for each part: forward and backward over its micro-batches, then one optimiser step.
Where no term of the loss can act, 3 is left out: weights, optimiser, warm-up stay as they are, and only the
batch is counted.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.common.errors import UserError
from services.contracts import TokenBatch, TrainBatch
from services.weight_sync.meeting_place import listening_store
from trainer.algorithms import nll_loss
from trainer.config.schema import Config
from trainer.learner import zero
from trainer.learner.batches.micro_batches import MicroBatch, Rows, deal, make_microbatch, minibatches, scored
from trainer.learner.batches.selection import choose_tokens, mark, whole_logp
from trainer.learner.model.model_folder import fault_of_model_folder
from trainer.learner.model.model_identity import weights_digest
from trainer.learner.model.policy import PolicyModel, load_policy
from trainer.learner.objective import TERMS, Objective, StepStats, can_act
from trainer.learner.rank_steps import RankSteps
from trainer.learner.results import RankInfo, RankScores, RankUpdate
from trainer.learner.steps.schedule import lr_factor


class LearnerRank(RankSteps):
    """Rank `rank` of `config.learner.ranks`. `host_store` (rank 0), then `setup`, then everything else; all
    ranks make the same calls."""

    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        reference: bool,
        rank: int,
        masked_ids: list[int] | None = None,
    ):
        super().__init__(config, model_path=model_path, rank=rank)
        self.reference = reference
        self.masked_ids = masked_ids
        self.packed = {"auto": self.device.type == "cuda"}.get(
            self.settings.packing, self.settings.packing == "packed"
        )
        self.store: Any = None
        self._loaded: PolicyModel | None = None
        """The policy in host memory, until `setup` takes it."""

    def prepare(self) -> None:
        """Load the model into host memory, and what takes a while to import: nothing of the device is used.
        May be left out. Raises UserError where the model's folder cannot be used, also on this host alone."""
        if missing := fault_of_model_folder(self.model_path):
            # The driver's host has the folder, so that the host must be named.
            raise UserError(f"learner rank {self.rank} on {socket.gethostname()}: {missing}")
        torch.manual_seed(self.config.seed)
        if self.device.type == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        zero.import_deepspeed()
        self._loaded = self._load_policy()

    def host_store(self, host: str) -> int:
        """Rank 0 opens the ranks' meeting point at its own address. Returns its port."""
        self.store = listening_store(host, self.settings.start_timeout_seconds)
        return self.store.port

    def setup(self, host: str, port: int) -> RankInfo:
        """Load the model where `prepare` has not, join the other ranks, build the engine. Raises what
        `prepare` raises."""
        if self._loaded is None:
            self.prepare()
        assert self._loaded is not None
        if self.store is None:
            self.store = torch.distributed.TCPStore(host, port, is_master=False)
        zero.init_distributed(
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            store=self.store,
            timeout_seconds=self.settings.step_timeout_seconds,
        )
        policy = self._loaded.to(self.device)
        self._loaded = None
        embedding = policy.hf.get_input_embeddings()
        self.vocabulary = embedding.num_embeddings
        head = policy.hf.get_output_embeddings().weight
        ends = {id(w): w.numel() for w in (embedding.weight, head)}  # one and the same where they are tied
        parameters = sum(p.numel() for p in policy.hf.parameters()) - sum(ends.values())
        self.engine = zero.ZeroEngine(
            policy, self.settings, dtype=self.dtype, device=self.device, world_size=self.world_size
        )
        self._plan_memory(policy)
        if self.settings.lora:
            self.base_weights = weights_digest(self.model_path)
        # In host memory, and exchanged with the policy's while they score: a second model on the device would
        # take the room of activations, for one pass per batch.
        self.reference_weights = self.engine.copy_weights() if self.reference else None
        on_gpu = self.device.type == "cuda"
        return RankInfo(
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.device),
            device_name=torch.cuda.get_device_name(0) if on_gpu else "CPU",
            device_uuid=str(torch.cuda.get_device_properties(0).uuid) if on_gpu else "",
            dtype=self._dtype_name,
            lora=self.settings.lora is not None,
            parameters=parameters,
            head_parameters=ends[id(head)],
            activations=self.activations,
        )

    def _load_policy(self) -> PolicyModel:
        return load_policy(self.model_path, dtype=self.dtype, packed=self.packed, **self._policy_options())

    def _policy_options(self) -> dict[str, Any]:
        return {
            "temperature": self.config.rollout.temperature,
            "chunk_tokens": self.settings.logit_chunk_tokens,
            "gradient_checkpointing": self.settings.gradient_checkpointing is True,
            "masked_ids": self.masked_ids,
            "compiled": self.settings.compile,
            "adapters": self.settings.lora,
        }

    def shutdown(self) -> None:
        """Leave the process group, and let go of the weights. Another rank may follow in this process."""
        engine, self.reductions = vars(self).pop("engine", None), None
        try:
            if engine is not None and torch.distributed.is_initialized():
                engine.close()
        finally:
            zero.leave_distributed()
            del engine
            gc.collect()  # it is full of circles, and its groups end their threads with it

    # Scoring

    def score(self, batch: TokenBatch) -> RankScores:
        """This rank's share of the batch under the current weights."""
        self._check(batch)
        return self._collect(self._score_old(batch, self._deal(list(range(len(batch))), batch)))

    def _deal(self, rows: Rows, batch: TokenBatch) -> list[Rows]:
        """This rank's micro-batches of some rows."""
        lengths = np.diff(batch.offsets)
        budget = self.settings.tokens_per_microbatch
        return deal(rows, lengths, self.world_size, budget, packed=self.packed)[self.rank]

    def _score_old(self, batch: TokenBatch, packs: list[Rows]) -> list[MicroBatch]:
        micros = [make_microbatch(batch, rows, self.device, packed=self.packed) for rows in packs]
        for m in micros:
            m.logp_old, m.entropy_old = self._score(m)
        return micros

    @torch.no_grad()
    def _score(self, m: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._forward(m)

    def _forward(self, m: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies float32 [B, T], 0 outside the action mask. A float64 model's are rounded:
        the sampler's come as float32 too, and the two can then be equal to the bit."""
        blank = torch.zeros(m.action_ids.shape, device=self.device)
        logp, entropy = self._forward_of(self.engine, m)
        return blank.index_put(m.at, logp.float()), blank.index_put(m.at, entropy.float())

    def _collect(self, micros: list[MicroBatch]) -> RankScores:
        rows = [b for m in micros for b in m.rows]
        nothing = np.zeros(0, np.float32)  # a rank without rows has an array too
        logp = np.concatenate([nothing, *(m.unpad(scored(m.logp_old)) for m in micros)])
        entropy = np.concatenate([nothing, *(m.unpad(scored(m.entropy_old)) for m in micros)])
        return RankScores(rows, logp, entropy)

    def _check(self, batch: TokenBatch) -> None:
        ids = batch.token_ids
        # On a GPU an embedding ends such an id with an assertion that names nothing, and the process is of no
        # use after it.
        for extreme in (int(ids.min(initial=0)), int(ids.max(initial=0))):
            if not 0 <= extreme < self.vocabulary:
                raise ValueError(f"token id {extreme} is outside the model's vocabulary of {self.vocabulary}")

    @torch.no_grad()
    def hidden_states(self, batch: TokenBatch) -> list[np.ndarray]:
        """The last layer's states under the current weights: for each row float32 [T, D], with the state from
        which token t + 1 is drawn at position t. For one rank: the rows of others are not there."""
        self._check(batch)
        found: dict[int, np.ndarray] = {}
        for rows in self._deal(list(range(len(batch))), batch):
            m = make_microbatch(batch, rows, self.device, packed=self.packed)
            if p := m.packed:
                [states] = self.engine.policy.states(p.input_ids, p.position_ids, p.segments)
                parts = torch.split(states[: sum(m.lengths)], m.lengths)
            else:
                padded = self.engine.policy.states(m.input_ids)
                parts = tuple(padded[i, :length] for i, length in enumerate(m.lengths))
            for row, part in zip(rows, parts, strict=True):
                found[row] = part.float().cpu().numpy()
        return [found[row] for row in range(len(batch))]

    # Updating

    def update(
        self,
        batch: TrainBatch,
        *,
        llds_lambda: float,
        answer_beta: float,
        lr_scale: float,
        supervised: list[TokenBatch] | None = None,
    ) -> RankUpdate:
        """All optimiser steps of one batch. Rows that are not `valid` are scored, and take no part in any
        loss or count. supervised: demonstrations, one batch for each supervised step that comes after. The
        metrics are `llds/min_drop`, `lr`, the tokens scored, `supervised/*` and `time/update_compute`."""
        began = time.monotonic()
        self._check(batch)
        valid = batch.valid
        rows = [b for b in range(len(batch)) if valid[b]]
        # One packing for scoring and training: with another, rows would meet other neighbours, and the
        # kernels' rounding would look like a drop of likelihood.
        parts = [self._deal(p, batch) for p in minibatches(rows, self.settings.minibatches_per_batch)]
        left_out = [b for b in range(len(batch)) if not valid[b]]
        self._refresh_snapshot()
        micros = [self._score_old(batch, packs) for packs in parts]
        # These are scored too: the step's records hold the log-probs of every row.
        unused = self._score_old(batch, self._deal(left_out, batch)) if left_out else []
        self._score_kept(micros)
        if self.algorithm.loss in ("clip_cov", "kl_cov"):
            self._choose_tokens(batch, rows, micros)

        # Every rank sees the whole batch, and so decides alike: a rank that took no step alone would hang the
        # others in their next collective operation.
        anchored = self.snapshot is not None and self.snapshot_batch != self.batches
        acts = can_act(self.algorithm, batch, llds_lambda=llds_lambda, anchored=anchored)
        # Before the first backward pass: a micro-batch's loss is divided by what its whole step counts, or
        # the gradient would depend on the split.
        counts = self._global_counts(micros, Objective(self.algorithm, llds_lambda, answer_beta))
        # With "auto" the first step measures the noise, and needs no threshold itself: its drops are exactly
        # 0, since pi_old is taken from its own forward pass.
        min_drop = 0.0 if self.algorithm.llds.min_drop == "auto" else self.algorithm.llds.min_drop
        steps: list[StepStats] = []
        if acts:
            self._check_room(micros)
        lr = self._lr(lr_scale)  # a metric of batches without a step as well
        for _ in range(self.settings.epochs if acts else 0):
            for part, count in zip(micros, counts, strict=True):
                lr = self._lr(lr_scale)
                objective = Objective(
                    self.algorithm, llds_lambda, answer_beta, min_drop, self._seed(len(steps))
                )
                stats, noise = self._step(part, objective, count, lr, on_policy=not steps)
                if not steps and self.algorithm.llds.min_drop == "auto":
                    min_drop = noise
                steps.append(stats)
        # Last, so that pi_old and the ratios of the batch know nothing of the demonstrations.
        extra = self._supervise(supervised, lr_scale) if supervised else {}
        self.batches += 1
        scores = self._collect([m for part in micros for m in part] + unused)
        metrics = (
            ({"llds/min_drop": min_drop} if steps else {})
            | extra
            | {
                "lr": lr,
                "learner/scored_tokens": float(len(batch.token_ids)),
                "learner/scored_action_tokens": float((batch.action_ids >= 0).sum()),
                "time/update_compute": time.monotonic() - began,
            }
        )
        told, self.told = tuple(self.told), []
        return RankUpdate(scores, steps, metrics, told)

    def _step(
        self,
        part: list[MicroBatch],
        objective: Objective,
        counts: dict[str, float],
        lr: float,
        *,
        on_policy: bool,
    ) -> tuple[StepStats, float]:
        """One optimiser step. on_policy: pi_old is the very policy of this forward pass, so its log-probs
        *are* pi_old; what was scored before differs from them by rounding alone, and the largest difference
        is the re-scoring noise (second result, over all ranks)."""
        stats = StepStats()
        noise = torch.zeros((), device=self.device)

        def losses() -> Iterator[Tensor]:
            # Called a second time where memory ran out: what the first try has counted must not count.
            nonlocal stats
            stats = StepStats()
            noise.zero_()
            for m in part:
                logp, entropy = self._forward(m)
                if on_policy:
                    # The ratio is then exactly 1 and LLDS's drop exactly 0, whatever kernels round
                    # differently with and without gradients.
                    torch.maximum(noise, (logp.detach() - scored(m.logp_old)).abs().max(), out=noise)
                    m.logp_old = logp.detach()
                terms = objective.terms(logp, entropy, m)
                yield objective.loss(terms, counts)
                stats.add(terms, m)

        stats.grad_norm, taken = self._take_step(part, losses, lr)
        if on_policy and self.world_size > 1:
            # One threshold for all ranks: otherwise the pull on a row would depend on the rank that it was
            # dealt to.
            torch.distributed.all_reduce(noise, op=torch.distributed.ReduceOp.MAX)
        stats.skipped = not taken
        self.optimiser_steps += taken
        # A difference that is not finite is no noise. As a threshold it would switch LLDS off; the step
        # itself is skipped by its gradient norm.
        return stats, float(noise.nan_to_num(0.0, 0.0, 0.0))

    def _supervise(self, batches: list[TokenBatch], lr_scale: float) -> dict[str, float]:
        """One optimiser step on each batch of demonstrations, by the same optimiser. Returns the mean loss in
        nats per token, before each step, and the steps that were taken."""
        losses = []
        taken = 0
        for batch in batches:
            self._check(batch)
            part = [
                make_microbatch(batch, rows, self.device, packed=self.packed)
                for rows in self._deal(list(range(len(batch))), batch)
            ]
            # Of the whole batch, which every rank holds: nothing is to be summed over ranks.
            count = max(1.0, float((batch.action_ids >= 0).sum()))
            self._check_room([part])
            total = torch.zeros((), device=self.device)
            rate = self._lr(lr_scale) * self.algorithm.supervised.lr_scale
            _, moved = self._take_step(part, partial(self._nll, part, count, total), rate)
            if self.world_size > 1:
                torch.distributed.all_reduce(total)
            taken += moved
            losses.append(float(total))
        return {"supervised/loss": sum(losses) / len(losses), "supervised/steps": float(taken)}

    def _nll(self, part: list[MicroBatch], count: float, total: Tensor) -> Iterator[Tensor]:
        """Each micro-batch's share of the mean loss over `count` tokens; `total` becomes their sum."""
        total.zero_()
        for m in part:
            logp, _ = self._forward(m)
            loss = nll_loss(logp, m.action_ids).loss_sum / count
            yield loss
            total += loss.detach()

    def _choose_tokens(self, batch: TrainBatch, rows: Rows, micros: list[list[MicroBatch]]) -> None:
        logp = whole_logp(
            batch, [m for part in micros for m in part], self.device, several_ranks=self.world_size > 1
        )
        for i, part in enumerate(minibatches(rows, self.settings.minibatches_per_batch)):
            generator = torch.Generator().manual_seed(self._seed(i))
            mark(batch, micros[i], choose_tokens(self.algorithm, batch, logp, part, generator))

    def _seed(self, step: int) -> int:
        """Of what is drawn by lot in an optimiser step of this batch: the same on all ranks, and in a resumed
        run."""
        return int(np.random.SeedSequence([self.config.seed, self.batches, step]).generate_state(1)[0])

    def _global_counts(self, micros: list[list[MicroBatch]], objective: Objective) -> list[dict[str, float]]:
        """For each optimiser step of a pass, each term's count over all micro-batches of all ranks."""
        # float64: counts of tokens beyond 2**24 are no longer exact in float32.
        counts = torch.zeros((len(micros), len(TERMS)), dtype=torch.float64, device=self.device)
        for i, part in enumerate(micros):
            for m in part:
                counts[i] += torch.tensor(objective.counts(m), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(counts)
        return [dict(zip(TERMS, row, strict=True)) for row in counts.tolist()]

    def _score_kept(self, micros: list[list[MicroBatch]]) -> None:
        """Log-probs under weights kept in host memory: the reference model's, and those of the snapshot that
        LLDS compares with."""
        if self.algorithm.kl and self.reference_weights is not None:
            with self.engine.exchanged(self.reference_weights):
                for m in (m for part in micros for m in part):
                    m.logp_ref, _ = self._score(m)
        # A snapshot that was taken at this very batch holds the weights of pi_old: its log-probs are there
        # already.
        if self.snapshot is not None and self.snapshot_batch != self.batches:
            with self.engine.exchanged(self.snapshot):
                for m in (m for part in micros for m in part):
                    m.logp_anchor, _ = self._score(m)

    def _refresh_snapshot(self) -> None:
        if self.algorithm.llds.anchor != "snapshot":
            return
        if self.snapshot is None or self.batches - self.snapshot_batch >= self.algorithm.llds.snapshot_every:
            self.snapshot = self.engine.copy_weights()
            self.snapshot_batch = self.batches

    def _lr(self, scale: float) -> float:
        """The rate of the next optimiser step."""
        factor = lr_factor(
            self.settings,
            batch=self.batches,
            optimiser_step=self.optimiser_steps,
            batches=self.config.trainer.steps,
        )
        return self.settings.lr * factor * scale
