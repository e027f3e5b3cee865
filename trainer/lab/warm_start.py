"""The supervised warm start: a tiny Qwen3 learns the tags, to copy and to read, but only half of when to
search.

180 steps on generated sequences (about a minute and a half on one core). First the reading drills (see
trainer.lab.demonstrations), then a mixture in which most of the demonstrations guess without searching: a
policy that can search, yet often does not, is what GRPO has to improve.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.files import folder_written_aside
from services.common.loading.no_bars import without_bars
from services.common.loading.quick_transformers import skip_scikit_learn
from trainer.data.models import cache_dir
from trainer.lab.demonstrations import Kind, Library, Piece, demonstration, drill
from trainer.lab.tokenizer import build_tokenizer, vocabulary
from trainer.lab.world import make_world

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Progress = Callable[[int, int, float], None]
"""Called as `(steps done, steps, loss in nats per token)`."""

DRILL_MIX: dict[Kind, float] = {"right": 0.8, "guess": 0.1, "poor": 0.05, "stop": 0.05}
FINAL_MIX: dict[Kind, float] = {"right": 0.25, "guess": 0.6, "poor": 0.08, "stop": 0.07}


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start. A change of any of them, or of `revision`, makes another cached model."""

    seed: int = 0
    steps: int = 180
    batch: int = 48
    """Sequences of a step."""
    lr: float = 2e-3
    warmup_steps: int = 50
    decay_share: float = 0.4
    """Share of the steps, at the end, over which the learning rate falls to 0."""
    drill_share_of_steps: float = 0.8
    """Share of the steps, at the start, with reading drills."""
    drills: float = 0.8
    """Share of drills in the sequences of those steps; the others are mostly right demonstrations."""
    worlds: int = 24
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    feed_forward: int = 256
    linear_std: float = 0.015
    embedding_std: float = 0.02
    revision: int = 2
    """Raised whenever the text form, the world or the demonstrations change."""

    def key(self) -> str:
        return hashlib.sha256(json.dumps([asdict(self), vocabulary()]).encode()).hexdigest()[:16]


def new_model(settings: WarmStart) -> Qwen3ForCausalLM:
    """An untrained policy, fp32, with exactly the tokenizer's rows. The caller seeds torch."""
    skip_scikit_learn()
    from torch import nn
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = vocabulary()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokens),
            hidden_size=settings.hidden,
            intermediate_size=settings.feed_forward,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=512,
            initializer_range=0.035,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=tokens.index("<bos>"),
            eos_token_id=tokens.index("<eos>"),
            pad_token_id=tokens.index("<pad>"),
            dtype="float32",
        )
    )
    # The start decides whether reading forms in so few steps: with Qwen2 and transformers' default of .02
    # throughout it did in 1 of 4 seeds by step 250; with Qwen3's query and key norms, these two, and two
    # passes in each drill, in 5 of 5 by step 120.
    for module in model.model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(
                module.weight,
                std=settings.linear_std if isinstance(module, nn.Linear) else settings.embedding_std,
            )
    return model


def train(settings: WarmStart, progress: Progress | None = None) -> Qwen3ForCausalLM:
    """Train a fresh policy on one thread. The same settings give the same weights on the same machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return _train(settings, progress)
    finally:
        torch.set_num_threads(threads)


def _train(settings: WarmStart, progress: Progress | None) -> Qwen3ForCausalLM:
    import torch
    import torch.nn.functional as F

    rng = random.Random(f"warm-start-{settings.seed}")
    # Worlds that no run trains or evaluates on: theirs have seeds >= 0 (trainer.lab.demo).
    libraries = [
        Library(make_world(-1 - i - settings.worlds * settings.seed)) for i in range(settings.worlds)
    ]
    tokenizer = build_tokenizer()
    model = new_model(settings)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0)
    decay = max(1, round(settings.steps * settings.decay_share))

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / settings.warmup_steps, (settings.steps - step) / decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, scale)
    model.train()
    for step in range(settings.steps):
        drilling = step < settings.steps * settings.drill_share_of_steps
        ids, learnt = padded_batch(
            [_sequence(settings, libraries, drilling, rng) for _ in range(settings.batch)], tokenizer
        )
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits[learnt[:, 1:]], ids[:, 1:][learnt[:, 1:]])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, settings.steps, loss.item())
    return model.eval()


def warm_started_model(settings: WarmStart, *, fresh: bool = False, progress: Progress | None = None) -> Path:
    """Folder of the trained policy in Hugging Face form: from the cache where these settings were trained
    before, unless `fresh`."""
    folder = cache_dir() / "lab" / f"warm-start-{settings.key()}"
    if (folder / "model.safetensors").is_file() and not fresh:
        return folder
    model = train(settings, progress)
    with folder_written_aside(folder, keep=not fresh) as aside, without_bars():
        model.save_pretrained(aside)
        build_tokenizer().save_pretrained(aside)
        (aside / "warm_start.json").write_text(json.dumps(asdict(settings), indent=1))
    return folder


def _sequence(
    settings: WarmStart, libraries: list[Library], drilling: bool, rng: random.Random
) -> list[Piece]:
    library = rng.choice(libraries)
    if drilling and rng.random() < settings.drills:
        return drill(library, rng)
    mix = DRILL_MIX if drilling else FINAL_MIX
    kind = rng.choices(list(mix), weights=list(mix.values()))[0]
    return demonstration(rng.choice(library.world.questions), library, kind, rng)


def padded_batch(sequences: list[list[Piece]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and the mask of learnt tokens, bool [B, T]."""
    import torch

    rows = []
    for pieces in sequences:
        encoded = tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
        ids = [i for piece in encoded for i in piece]
        learnt = [is_learnt for piece, (_, is_learnt) in zip(encoded, pieces, strict=True) for _ in piece]
        rows.append((ids, learnt))
    width = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r, _ in rows])
    mask = torch.tensor([m + [False] * (width - len(m)) for _, m in rows])
    return padded, mask
