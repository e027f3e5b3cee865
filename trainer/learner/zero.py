"""DeepSpeed's ZeRO engine behind a few plain operations: build, step, read and write whole weights and
optimiser state.

What each rank holds with two ranks, for parameters p, gradients g and optimiser state o (fp32 master weights
in bf16 runs, Adam's moments):

    stage 0   p p   g g   o o        stage 2   p p   g/2 g/2   o/2 o/2
    stage 1   p p   g g   o/2 o/2    stage 3   p/2 p/2   g/2 g/2   o/2 o/2

Every function here that reads whole tensors is a collective operation: all ranks call it, in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from services.common.errors import UserError
from trainer.config.learner import LearnerSettings
from trainer.learner.model.policy import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
NamedParams = list[tuple[str, nn.Parameter]]


class Partitioned(Protocol):
    """What DeepSpeed adds to a parameter under ZeRO stage 3."""

    ds_tensor: Tensor
    """This rank's shard, flat; the last rank's is padded."""
    ds_shape: torch.Size
    """Of the whole parameter, which looks empty itself."""
    ds_numel: int


def partitioned(p: Any) -> Partitioned:
    """A parameter under ZeRO stage 3, by its type."""
    partition: Partitioned = p
    return partition


class GuardedAdamW(torch.optim.AdamW):
    """AdamW for ZeRO stage 0, where DeepSpeed neither gives a gradient norm nor refuses a gradient that is
    not finite."""

    def __init__(self, params: Iterable[nn.Parameter], *, grad_clip: float, **options: Any):
        super().__init__(params, **options)
        self.grad_clip = grad_clip
        self.overflow = False  # DeepSpeed reads these two after each step
        self._global_grad_norm: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """Clip to `grad_clip` and step; with a norm that is not finite leave weights and state as they
        are."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self._global_grad_norm = nn.utils.clip_grad_norm_(params, self.grad_clip)
        self.overflow = not bool(norm.isfinite())
        if not self.overflow:
            super().step(closure)


class ZeroEngine:
    """The DeepSpeed engine of one rank. `weights` are those of the policy that are trained."""

    def __init__(
        self,
        policy: PolicyModel,
        settings: LearnerSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        world_size: int,
    ):
        import deepspeed
        from deepspeed.utils import logger

        # At INFO it prints its whole configuration.
        logger.setLevel("WARNING")
        # With bf16 DeepSpeed keeps fp32 master weights only where ZeRO is on; ZeRO 1 is stage 0 with the
        # state divided.
        self.stage = max(settings.zero_stage, 1) if dtype == torch.bfloat16 else settings.zero_stage
        self.world_size = world_size
        self.device = device
        self.dtype = dtype
        self.offloads = settings.offload_optimizer
        options: dict[str, Any] = {
            "lr": settings.lr,
            "betas": settings.betas,
            "weight_decay": settings.weight_decay,
        }
        if device.type == "cuda" or settings.offload_optimizer:
            options["fused"] = True
        params = [p for p in policy.parameters() if p.requires_grad]
        optimizer = (
            GuardedAdamW(params, grad_clip=settings.grad_clip, **options)
            if self.stage == 0
            else torch.optim.AdamW(params, **options)
        )
        sizes = [p.numel() for p in params]
        self.policy = policy
        self.engine, *_ = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=self._config(settings, max(sizes), sum(sizes))
        )
        if dtype == torch.float64:
            # DeepSpeed reduces no float64 gradients. The settings allow a single rank: nothing is to reduce.
            self.engine.enable_backward_allreduce = False

    def _config(self, settings: LearnerSettings, largest: int, total: int) -> dict[str, Any]:
        bucket = max(largest, min(total, 100_000_000))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's own counters read it
            "gradient_accumulation_steps": 1,
            # An optimiser step is what lies between two calls of step().
            "managed_gradient_accumulation": False,
            "gradient_clipping": settings.grad_clip if self.stage else 0.0,
            "zero_allow_untested_optimizer": True,
            # Never: the run has a progress line of its own.
            "steps_per_print": 2**31,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                # Every parameter is partitioned: a small one that stayed whole would be missed when weights
                # are exchanged.
                "stage3_param_persistence_threshold": 0,
                "stage3_model_persistence_threshold": 0,
            },
        }
        if settings.offload_optimizer:
            config["zero_optimization"]["offload_optimizer"] = {
                "device": "cpu",
                "pin_memory": self.device.type == "cuda",
            }
            # PyTorch's fused AdamW steps on the CPU as well, and needs no compiler.
            config["zero_force_ds_cpu_optimizer"] = False
        if self.dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True, "check_grad_overflow": True}
            # In bf16 a sum of many micro-batches would lose the small ones.
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    @property
    def weights(self) -> NamedParams:
        return self.policy.named_weights()

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        """PolicyModel.forward."""
        logp, entropy = self.engine(*args)
        return logp, entropy

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient. The loss is this rank's share of a sum over ranks (DeepSpeed takes the
        mean, so it is scaled up)."""
        self.engine.backward(loss * self.world_size)

    def step(self, lr: float) -> tuple[float, bool]:
        """Take the optimiser step. Returns the global gradient norm before clipping, and whether the step was
        taken: with a norm that is not finite weights and optimiser stay as they were, on every rank, and the
        norm returned is NaN."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        taken = bool(self.engine.was_step_applied())
        return (float(self.engine.get_global_grad_norm()) if taken else float("nan")), taken

    def iter_weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each parameter in the compute dtype, on the device; valid for as long as it
        is held."""
        if self.policy.lora_scale:
            return self.policy.merged_weights()
        return self.iter_trained(bucket_bytes)

    def iter_trained(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """As `iter_weights`, of the parameters that are trained: with LoRA the adapters alone."""
        if self.stage < 3:
            return ((name, p.detach()) for name, p in self.weights)
        return iter_partitioned(self.weights, bucket_bytes)

    def close(self) -> None:
        """Let go of what DeepSpeed's tables hold of this engine: it would keep its memory and its group."""
        self.engine.destroy()

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, whole shape) of each parameter, in the order of `iter_weights`. Gathers nothing."""
        if self.policy.lora_scale:
            return self.policy.merged_shapes()
        return [(name, tuple(self._shape(p))) for name, p in self.weights]

    def iter_master(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """(name, master weight, Adam's moments) of each parameter, whole; of float64 in a float64 model, of
        float32 otherwise. The moments are empty before the
        first step."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        started = self.adam_steps > 0
        for name, p in self.weights:
            if self.stage == 0:
                state = self.engine.optimizer.state.get(p, {})
                yield name, p.detach(), {k: state[k] for k in MOMENTS if started}
            else:
                yield (
                    name,
                    safe_get_full_fp32_param(p),
                    {k: safe_get_full_optimizer_state(p, k) for k in MOMENTS if started},
                )

    def due_bytes(self) -> int:
        """Memory of the device that gradients and Adam's moments will take, beyond what is taken by now: the
        moments come with the first step."""
        sharers = self.world_size if self.stage else 1
        trained = sum(self._shape(p).numel() for _, p in self.weights)
        # The optimiser of ZeRO 1 in bfloat16 has its sums in float32 from the start; float32 without ZeRO
        # adds to the gradients themselves.
        kept = hasattr(self.engine.optimizer, "fp32_groups_gradients_flat")
        sums = 0 if kept or (self.stage == 0 and self.dtype == torch.float32) else 4
        own = (self.dtype.itemsize + sums) * trained
        moments = 0 if self.offloads or self.adam_steps else 8 * trained
        return (own // sharers if self.stage == 3 else own) + moments // sharers

    @property
    def adam_steps(self) -> int:
        """Steps that Adam's bias correction counts."""
        states = [s for s in self.engine.basic_optimizer.state.values() if "step" in s]
        return int(states[0]["step"]) if states else 0

    def load_master(
        self, weights: Callable[[str], Tensor], moments: Callable[[str], Tensor] | None, adam_steps: int
    ) -> None:
        """Write whole master weights and moments back: weights("NAME") and, where adam_steps > 0,
        moments("NAME.exp_avg"), ... Raises UserError for weights of another model.

        Bits are those that `iter_master` gave, whatever the ranks and stage were then."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if adam_steps and not self.adam_steps:
            self._start_optimizer()
        kept_as = torch.float64 if self.dtype == torch.float64 else torch.float32
        for name, p in self.weights:
            values: dict[str | None, Tensor] = {None: weights(name)}
            if self.engine.basic_optimizer.state:
                for k in MOMENTS:
                    values[k] = moments(f"{name}.{k}") if moments else torch.zeros_like(values[None])
            shape = self._shape(p)
            if values[None].shape != shape:
                raise UserError(
                    f"the checkpoint's weight {name} has shape {tuple(values[None].shape)}, the model's "
                    f"{tuple(shape)}: it is of another model"
                )
            for key, value in values.items():
                value = value.to(self.device, kept_as)
                if self.stage == 0:
                    (p.data if key is None else self.engine.optimizer.state[p][key]).copy_(value)
                elif self.stage == 3:
                    _set_shard(p, value, key)
                elif key is None:
                    safe_set_full_fp32_param(p, value)
                else:
                    safe_set_full_optimizer_state(p, value, key)
            if self.stage in (1, 2):
                # The setter writes the master weights; those of the forward pass follow at the next step.
                p.data.copy_(values[None])
        for state in self.engine.basic_optimizer.state.values():
            state["step"].fill_(adam_steps)
        if self.stage == 3:
            self.engine.optimizer.empty_partition_cache()

    def _start_optimizer(self) -> None:
        """One step with a gradient of 0, so that Adam's state exists and can be written."""
        self.engine.backward(self.no_loss())
        self.step(0.0)

    def no_loss(self) -> Tensor:
        """A loss whose gradient is 0 everywhere."""
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        logp, _ = self.engine(ids, none, none)
        return logp.sum()

    def copy_weights(self) -> dict[str, Tensor]:
        """This rank's part of the weights (compute dtype), in host memory."""
        # `cpu()` of a tensor that is there already is the tensor itself, not a copy.
        return {name: self._local(p).cpu().clone() for name, p in self.weights}

    def local_copies(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """As `copy_weights`, from whole tensors elsewhere: read("NAME")."""
        whole = {name: read(name).to(self.dtype) for name, _ in self.weights}
        return {name: _shard(p, whole[name]) if self.stage == 3 else whole[name] for name, p in self.weights}

    @contextlib.contextmanager
    def exchanged(self, kept: dict[str, Tensor]) -> Iterator[None]:
        """Compute under kept weights: they and the current ones trade places, and trade back on leaving. No
        step may be taken within."""
        self._exchange(kept)
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, kept: dict[str, Tensor]) -> None:
        if self.stage == 3:
            # DeepSpeed may still hold gathered parameters of the last pass, and would compute with those.
            self.engine.optimizer.empty_partition_cache()
        for name, p in self.weights:
            mine = self._local(p)
            # A copy on the CPU too, where `cpu()` returns `mine` itself, which is written next.
            current = mine.cpu().clone()
            mine.copy_(kept[name])
            kept[name].copy_(current)

    def _local(self, p: nn.Parameter) -> Tensor:
        return partitioned(p).ds_tensor.data if self.stage == 3 else p.data

    def _shape(self, p: nn.Parameter) -> torch.Size:
        """Of the whole parameter."""
        return partitioned(p).ds_shape if self.stage == 3 else p.shape


def iter_partitioned(
    weights: NamedParams,
    bucket_bytes: int,
    gather: Callable[[list[nn.Parameter]], contextlib.AbstractContextManager] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole copy) of ZeRO-3 parameters, gathered in buckets of at most `bucket_bytes` (a larger
    parameter goes alone).

    A partitioned parameter looks empty (`numel()` is 0): sizes come from `ds_numel`, shapes from `ds_shape`.
    Raises RuntimeError when a gathered tensor has another shape than that. gather: for tests; default
    `deepspeed.zero.GatheredParameters`.
    """
    if gather is None:
        import deepspeed

        gather = deepspeed.zero.GatheredParameters
    bucket: NamedParams = []
    room = bucket_bytes
    for name, p in [*weights, ("", None)]:
        size = 0 if p is None else partitioned(p).ds_numel * p.element_size()
        if bucket and (p is None or size > room):
            with gather([q for _, q in bucket]), torch.no_grad():
                # Copies: outside of `gather` each rank holds its shard alone again.
                whole = [(n, q.data.clone()) for n, q in bucket]
            for (n, tensor), (_, q) in zip(whole, bucket, strict=True):
                expected = partitioned(q).ds_shape
                if tensor.shape != expected:
                    raise RuntimeError(
                        f"weight {n}: gathered shape {tuple(tensor.shape)} is not its shape {tuple(expected)}"
                    )
            yield from whole
            del whole
            bucket = []
            room = bucket_bytes
        if p is not None:
            bucket.append((name, p))
            room -= size


def _shard(p: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's flat shard of a tensor laid out as the ZeRO-3 parameter is; the last shard is padded with
    zeros."""
    size = partitioned(p).ds_tensor.numel()
    rank = torch.distributed.get_rank()
    mine = whole.flatten()[rank * size : (rank + 1) * size]
    return nn.functional.pad(mine, (0, size - mine.numel()))


def _set_shard(p: nn.Parameter, value: Tensor, key: str | None) -> None:
    """Write this rank's shard of a ZeRO-3 parameter (key None: master and compute weights) or moment."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    shard = _shard(p, value)
    if key is None:
        safe_set_local_fp32_param(p, shard)
        partitioned(p).ds_tensor.data.copy_(shard)
    else:
        safe_set_local_optimizer_state(p, shard, key)


def import_deepspeed() -> Any:
    """The package, with its table of operations. Takes seconds."""
    import deepspeed
    import deepspeed.ops

    return deepspeed


def init_distributed(
    *, device: torch.device, rank: int, world_size: int, store: Any, timeout_seconds: float
) -> None:
    """Join the process group of the learner: NCCL on GPU, gloo on CPU. `store` is a torch TCPStore that all
    ranks share."""
    deepspeed = import_deepspeed()
    os.environ["LOCAL_RANK"] = "0"  # each rank is a process that sees one device
    # DeepSpeed would compile a shared-memory extension (minutes on a laptop, and it needs a C++ compiler)
    # that only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    if torch.distributed.is_initialized():
        # DeepSpeed keeps groups of the first process group for the life of the process.
        return
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds)
    )
    deepspeed.init_distributed(dist_backend=backend)


def leave_distributed() -> None:
    """Leave the process group, and the one that DeepSpeed makes beside it. Does nothing outside of one.

    Threads of gloo ask for Python's lock when they let go of a tensor, and one that asks while the
    interpreter ends takes the process with it (SIGABRT, "terminate called without an active exception")."""
    if torch.distributed.is_initialized():
        import_deepspeed().comm.destroy_process_group()
