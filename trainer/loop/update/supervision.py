"""Which demonstrations the learner is shown after which batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.contracts import TokenBatch
from trainer.config.schema import Config
from trainer.data.demonstrations import demonstration_batch, read_demonstrations


class Supervision:
    """The batches of demonstrations of each step. Seed and step decide them, so that a resumed run sees the
    same ones."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Raises UserError where the demonstrations cannot be used."""
        self.settings = config.algorithm.supervised
        self.seed = config.seed
        self.all: TokenBatch | None = None
        if self.settings.every and self.settings.data:
            rows = read_demonstrations(self.settings.data)
            self.all = demonstration_batch(rows, tokenizer, longest=config.rollout.max_model_tokens)

    def batches(self, step: int) -> list[TokenBatch]:
        """One batch for each supervised step that comes after the update of `step`; none where none is
        due."""
        if self.all is None or step % self.settings.every:
            return []
        rng = np.random.default_rng([self.seed, step])
        size = min(self.settings.rows, len(self.all))
        return [
            self.all.take(sorted(rng.choice(len(self.all), size, replace=False).tolist()))
            for _ in range(self.settings.updates)
        ]
