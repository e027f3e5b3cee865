"""The start: a laboratory policy that has learnt to search once and then to answer, and seldom twice."""

from __future__ import annotations

import random
from pathlib import Path

from services.common.files import folder_written_aside
from services.common.loading.no_bars import without_bars
from trainer.data.models import cache_dir
from trainer.lab.demo import lab_model
from trainer.lab.demonstrations import Library, Piece, demonstration
from trainer.lab.tokenizer import build_tokenizer
from trainer.lab.warm_start import padded_batch
from trainer.lab.world import LabQuestion, make_world

STEPS, BATCH, RATE = 40, 48, 5e-4
TWICE = 0.04
WORLDS = 12
FIRST_WORLD = -1_000_000
"""The worlds of the demonstrations count down from here: no run and no warm start has them."""
WARM_STARTS = (0, 500)
"""Seeds of the laboratory's warm starts that the seeds take by turns."""


def shown(question: LabQuestion, library: Library, rng: random.Random) -> list[Piece]:
    """A demonstration of one search and an answer: a question of two hops is answered with the value of the
    first, which is wrong. A share TWICE of these is searched twice and right: a policy that never does has
    nothing to learn from."""
    once = len(question.hops) == 2 and rng.random() >= TWICE
    return demonstration(question, library, "stop" if once else "right", rng)


def stuck_model(seed: int) -> Path:
    """Folder of the policy of a seed: trained at the first call, then from the cache."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    warm = lab_model(WARM_STARTS[seed % len(WARM_STARTS)])
    folder = cache_dir() / "lab" / f"one-search-{warm.name}-{seed}-{STEPS}-{BATCH}-{RATE:g}-{TWICE:g}"
    if (folder / "model.safetensors").is_file():
        return folder
    rng = random.Random(f"one-search-{seed}")
    libraries = [Library(make_world(FIRST_WORLD - WORLDS * seed - i)) for i in range(WORLDS)]
    tokenizer = build_tokenizer()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(warm, dtype=torch.float32).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(STEPS):
        rows = []
        for _ in range(BATCH):
            library = rng.choice(libraries)
            rows.append(shown(rng.choice(library.world.questions), library, rng))
        ids, learnt = padded_batch(rows, tokenizer)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits[learnt[:, 1:]], ids[:, 1:][learnt[:, 1:]])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    with folder_written_aside(folder) as aside, without_bars():
        model.eval().save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return folder
