"""Benchmark of the losses: what LLDS costs in an update, and what the fused log-probs save against full
logits.

    python benchmarks/losses.py [--device cuda|cpu] [--out DIR]

Needs torch and numpy alone. With CUDA the sizes are those of a small Qwen2.5 at a vocabulary of 152k; on a
CPU they are small. Also checks, on the device: the golden vectors in float64, and the fused log-probs against
full logits in float32 and bfloat16. Prints a table, writes DIR/losses.json, and exits with 1 if a check
fails. All ratios are of one run on one machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.algorithms import (  # noqa: E402
    LossTerm,
    kl_k3,
    llds_loss,
    plain_token_logprobs,
    policy_loss,
    token_logprobs,
)

# head: tokens, width, vocabulary
# update: trajectories, positions, layers, width, feed-forward width, vocabulary
SIZES = {
    "cuda": {
        "head": (8192, 2048, 151936),
        "dtype": torch.bfloat16,
        "update": (8, 2048, 24, 896, 4864, 151936),
        "repeats": 5,
    },
    "cpu": {
        "head": (1024, 128, 16384),
        "dtype": torch.float32,
        "update": (8, 256, 4, 256, 1024, 8192),
        "repeats": 3,
    },
}


class Meter:
    """Wall time and peak memory of a call on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], repeats: int | None = None, warm_up: int = 1) -> float:
        """Median of several calls, after one that warms up."""
        times = []
        for _ in range((repeats or self.repeats) + warm_up):
            self.sync()
            start = time.perf_counter()
            call()
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times[warm_up:])

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Peak of allocated memory during the call (CUDA: all tensors alive; CPU: resident memory above that
        before the call)."""
        gc.collect()
        if self.device.type == "cuda":
            self.sync()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            self.sync()
            return torch.cuda.max_memory_allocated(self.device)
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed; only new pages may count
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark to the present size
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def golden_error(device: torch.device) -> dict[str, float]:
    """Largest relative error of all sums and gradients of tests/data/golden.json in float64; counts must be
    equal."""
    cases = json.loads((ROOT / "tests" / "data" / "golden.json").read_text())["cases"]
    worst, compared = 0.0, 0

    def compare(term, logp: Tensor, want: dict) -> None:
        nonlocal worst, compared
        (grad,) = torch.autograd.grad(term.loss_sum, logp)
        wanted = torch.tensor(want["grad_sum"], dtype=torch.float64, device=device)
        if term.count != want["count"]:
            worst = float("inf")
        for a, b in (
            (grad, wanted),
            (term.loss_sum, torch.tensor(want["loss_sum"], dtype=torch.float64, device=device)),
        ):
            scale = max(b.abs().max().item(), 1e-2)  # some sums are 0 but for rounding
            worst = max(worst, (a - b).abs().max().item() / scale)
        compared += 1

    for case in cases:
        floats = ("logp", "logp_old", "logp_ref", "importance_weights")
        x = {k: torch.tensor(case[k], dtype=torch.float64, device=device) for k in floats}
        logp, old = x["logp"].requires_grad_(), x["logp_old"]
        ids, answer = (torch.tensor(case[k], device=device) for k in ("action_ids", "answer_mask"))
        advantages = {
            k: torch.tensor(v, dtype=torch.float64, device=device) for k, v in case["advantages"].items()
        }
        for key, want in case["policy"].items():
            clips = {k: want[k] for k in ("clip_low", "clip_high")}
            weights = x["importance_weights"] if key.endswith("+iw") else None
            kind = key.removesuffix("+iw").removesuffix("_tight")
            term = policy_loss(
                kind,
                logp,
                old,
                advantages[want["advantage"]],
                ids,
                max_response_tokens=500,
                importance_weights=weights,
                **clips,
            )
            compare(term, logp, want)
        for key, want in case["llds"].items():
            gate, denominator, *weight = key.split("/")
            options = (
                {"answer_mask": answer, "answer_weight": float(weight[0].split("=")[1])} if weight else {}
            )
            term = llds_loss(
                logp, old, advantages["grpo"], ids, gate=gate, denominator=denominator, **options
            )
            compare(term, logp, want)
        compare(kl_k3(logp, x["logp_ref"], ids), logp, case["kl_k3"])
    return {"vectors": compared, "worst_relative_error": worst}


def _head_inputs(
    n: int, d: int, v: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, d, generator=g, device=device).to(dtype).requires_grad_()
    weight = (2 * torch.randn(v, d, generator=g, device=device) / d**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=g, device=device)


def agreement(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Largest error of the fused path and of full logits in `dtype`, each relative to the largest exact value
    (float64)."""
    n, d, v = (256, 512, 151936) if device.type == "cuda" else (64, 64, 8192)
    hidden, weight, targets = _head_inputs(n, d, v, dtype, device)
    upstream = torch.randn(2, n, generator=torch.Generator(device).manual_seed(1), device=device)

    def run(function, h: Tensor, w: Tensor, **options) -> list[Tensor]:
        logp, entropy = function(h, w, targets, temperature=0.9, **options)
        loss = (logp * upstream[0]).sum() + (entropy * upstream[1]).sum()
        return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, (h, w))]

    exact = run(plain_token_logprobs, *(x.detach().double().requires_grad_() for x in (hidden, weight)))
    out = {}
    for name, results in {
        "fused": run(token_logprobs, hidden, weight, chunk_tokens=48),
        "full": run(plain_token_logprobs, hidden, weight),
    }.items():
        errors = [
            ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(results, exact, strict=True)
        ]
        out[f"{name}_values"], out[f"{name}_gradients"] = max(errors[:2]), max(errors[2:])
    return out


def head(meter: Meter, sizes: dict) -> dict[str, dict]:
    """Forward and backward of the head: seconds and peak bytes, for several ways to get log-probs."""
    n, d, v = sizes["head"]
    hidden, weight, targets = _head_inputs(n, d, v, sizes["dtype"], meter.device)
    upstream = torch.randn(n, generator=torch.Generator(meter.device).manual_seed(1), device=meter.device)

    def full_logp() -> tuple[Tensor, None]:  # the leanest form of full logits: no entropy
        return -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none"), None

    ways = {
        "full logits, log-prob": (full_logp, False),
        "full logits, log-prob + entropy": (lambda: plain_token_logprobs(hidden, weight, targets), True),
    }
    for chunk in (n // 16, n // 8, n // 4):
        run = lambda chunk=chunk: token_logprobs(hidden, weight, targets, chunk_tokens=chunk)  # noqa: E731
        ways[f"fused {chunk}, log-prob"] = (run, False)
        ways[f"fused {chunk}, log-prob + entropy"] = (run, True)

    results: dict[str, dict] = {}
    for name, (forward, with_entropy) in ways.items():

        def step(forward=forward, with_entropy=with_entropy) -> Tensor:
            logp, entropy = forward()
            loss = (logp * upstream).sum()
            if with_entropy:
                loss = loss + 0.01 * entropy.sum()
            torch.autograd.grad(loss, (hidden, weight))
            return logp.detach()

        results[name] = {
            "forward_s": meter.seconds(forward),
            "step_s": meter.seconds(step),
            "peak_bytes": meter.peak_bytes(step),
        }
    difference = (token_logprobs(hidden, weight, targets)[0] - full_logp()[0]).abs().max().item()
    results["largest difference of log-probs, nats"] = {"value": difference}
    return results


class Layer(nn.Module):
    """One pre-norm decoder layer, enough to cost what a real one costs."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, wide), (width, wide), (wide, width))
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(2, 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def update(meter: Meter, sizes: dict) -> dict[str, float]:
    """Seconds of one update (forward, losses, backward, AdamW) with and without LLDS, and of LLDS alone."""
    b, t, layers, width, wide, v = sizes["update"]
    device, dtype = meter.device, sizes["dtype"]
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Embedding(v, width), *(Layer(width, wide) for _ in range(layers)), nn.RMSNorm(width)
        ).to(dtype)
        head_weight = nn.Parameter((torch.randn(v, width) * 0.02).to(dtype))
        tokens = torch.randint(0, v, (b, t))
        turn = t // 8  # four turns: an action, then an observation of the same length
        ids = torch.arange(t).div(turn, rounding_mode="floor").expand(b, t)
        ids = torch.where(ids % 2 == 1, ids // 2, -1)
        advantages = torch.linspace(-1, 1, b)
    optimizer = torch.optim.AdamW([*model.parameters(), head_weight], lr=1e-6, fused=device.type == "cuda")
    old = torch.full((b, t), -11.0, device=device) + torch.randn(b, t, device=device)
    inside = (ids >= 0).nonzero(as_tuple=True)

    held = ids[advantages >= 0]
    counts = {
        "policy": float((ids >= 0).sum()),
        "llds": float((held >= 0).sum()),
    }  # from masks alone, before any forward pass

    def llds_term(logp: Tensor) -> LossTerm:
        return llds_loss(logp, old, advantages, ids, min_drop=1e-3)

    def llds_alone(logp: Tensor) -> Tensor:
        return 0.2 * llds_term(logp).loss_sum / counts["llds"]

    def step(with_llds: bool) -> None:
        """As the learner does it: counts are known before, statistics are read after the backward pass."""
        hidden = model(tokens)[inside]
        found, _ = token_logprobs(hidden, head_weight, tokens[inside])
        logp = old.new_zeros(b, t).index_put(inside, found)
        terms = [policy_loss("grpo", logp, old, advantages, ids, clip_low=0.2, clip_high=0.2)]
        loss = terms[0].loss_sum / counts["policy"]
        if with_llds:
            terms.append(llds_term(logp))
            loss = loss + 0.2 * terms[1].loss_sum / counts["llds"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(term.stats for term in terms)

    with_llds, without = [], []
    step(True)
    for _ in range(4 * meter.repeats):  # in turn, so that drift hits both
        without.append(meter.seconds(lambda: step(False), repeats=1, warm_up=0))
        with_llds.append(meter.seconds(lambda: step(True), repeats=1, warm_up=0))
    leaf = (old - 0.1).requires_grad_()
    alone = meter.seconds(lambda: torch.autograd.grad(llds_alone(leaf), leaf), repeats=20)
    whole = statistics.median(without)
    extra = statistics.median(a - b for a, b in zip(with_llds, without, strict=True))
    return {
        "parameters": sum(p.numel() for p in model.parameters()) + head_weight.numel(),
        "tokens": b * t,
        "action_tokens": len(inside[0]),
        "update_s": whole,
        "update_with_llds_s": statistics.median(with_llds),
        "llds_s": alone,
        "extra_s": extra,
        "llds_share": extra / whole,
    }


def machine(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    cpu = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "unknown",
    )
    return {
        "device": device.type,
        "gpu": gpu,
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {numpy.__version__}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="folder for losses.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: this torch sees no GPU", file=sys.stderr)
        return 3
    device, sizes = torch.device(args.device), SIZES[args.device]
    torch.backends.cuda.matmul.allow_tf32 = False
    meter, start = Meter(device, sizes["repeats"]), time.perf_counter()

    result: dict = {"machine": machine(device), "golden_float64": golden_error(device)}
    result["agreement"] = {
        str(t).removeprefix("torch."): agreement(device, t) for t in (torch.float32, torch.bfloat16)
    }
    n, d, v = sizes["head"]
    result["head"] = {
        "tokens": n,
        "width": d,
        "vocabulary": v,
        "dtype": str(sizes["dtype"]),
        "ways": head(meter, sizes),
    }
    gc.collect()
    result["update"] = update(meter, sizes)
    result["seconds"] = time.perf_counter() - start

    ways, single, half = result["head"]["ways"], *result["agreement"].values()
    lean, fused = ways["full logits, log-prob"], ways[f"fused {n // 8}, log-prob"]
    result["head"]["memory_ratio"] = lean["peak_bytes"] / fused["peak_bytes"]
    result["head"]["time_ratio"] = fused["step_s"] / lean["step_s"]
    checks = {
        "golden vectors, float64: error < 1e-9": result["golden_float64"]["worst_relative_error"] < 1e-9,
        "fused, float32: error < 1e-5": max(single["fused_values"], single["fused_gradients"]) < 1e-5,
        "fused, bfloat16: values to 1e-5, gradients to 1e-2": half["fused_values"] < 1e-5
        and half["fused_gradients"] < 1e-2,
        "fused: at least 2 x less peak memory than the leanest full logits": result["head"]["memory_ratio"]
        >= 2,
        "LLDS: less than 1 % of an update": result["update"]["llds_share"] < 0.01,
    }
    result["checks"] = checks
    report(result)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "losses.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


def report(result: dict) -> None:
    for key, value in result["machine"].items():
        print(f"{key}: {value}")
    golden = result["golden_float64"]
    print(f"\ngolden vectors: {golden['vectors']}, worst relative error {golden['worst_relative_error']:.1e}")
    for dtype, errors in result["agreement"].items():
        print(
            f"error against float64, {dtype} input: "
            + ", ".join(f"{k.replace('_', ' ')} {e:.1e}" for k, e in errors.items())
        )
    h = result["head"]
    print(f"\nhead: {h['tokens']} tokens, width {h['width']}, vocabulary {h['vocabulary']}, {h['dtype']}")
    print(f"{'':38}{'forward ms':>12}{'fwd+bwd ms':>12}{'peak MiB':>10}")
    for name, row in h["ways"].items():
        if "value" in row:
            print(f"{name}: {row['value']:.1e}")
        else:
            print(
                f"{name:38}{row['forward_s'] * 1e3:12.1f}{row['step_s'] * 1e3:12.1f}"
                f"{row['peak_bytes'] / 2**20:10.0f}"
            )
    print(
        f"full / fused {h['tokens'] // 8}: peak {h['memory_ratio']:.2f} x; "
        f"fused / full: time {h['time_ratio']:.2f} x"
    )
    u = result["update"]
    print(
        f"\nupdate: {u['parameters'] / 1e6:.0f} M parameters, {u['tokens']} tokens, "
        f"{u['action_tokens']} in actions"
    )
    print(f"without LLDS {u['update_s'] * 1e3:.1f} ms, with {u['update_with_llds_s'] * 1e3:.1f} ms; ", end="")
    print(
        f"median difference {u['extra_s'] * 1e3:+.2f} ms = {u['llds_share']:+.2%}; "
        f"LLDS alone, launches included, {u['llds_s'] * 1e3:.2f} ms"
    )
    print(f"\n{result['seconds']:.0f} s")
    for name, ok in result["checks"].items():
        print(f"{'ok  ' if ok else 'FAIL'} {name}")


if __name__ == "__main__":
    sys.exit(main())
