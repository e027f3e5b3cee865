"""What the model of a configuration would be shown: prompts and search results in tokens, and how many of
them are refused or cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retriever_service.answer import Hit
from services.contracts import Question
from services.rollout.worker.templates import make_template
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings
from trainer.config.schema import Config
from trainer.data import models

WHOLE = 1 << 30
"""A budget that cuts nothing."""


@dataclass
class Shown:
    """Lengths in tokens."""

    settings: RolloutSettings
    first: str = ""
    """The first prompt, as the model sees it."""
    prompts: list[int] = field(default_factory=list)
    observations: list[int] = field(default_factory=list)
    """Of the passages of one search with their tags, uncut."""

    def lines(self) -> list[str]:
        """The findings in words."""
        most = min(self.settings.max_prompt_tokens, self.settings.max_model_tokens - 1)
        longer = sum(length > most for length in self.prompts)
        said = [
            f"prompts: {np.median(self.prompts):.0f} tokens at the median, {max(self.prompts)} at most; "
            f"{longer:,} of {len(self.prompts):,} are longer than rollout.max_prompt_tokens allows ({most})"
        ]
        if self.observations:
            budget = self.settings.max_obs_tokens
            cut = sum(length > budget for length in self.observations)
            said.append(
                f"search results: {np.median(self.observations):.0f} tokens at the median, "
                f"{max(self.observations)} at most; {cut / len(self.observations):.1%} are cut at "
                f"rollout.max_obs_tokens={budget}"
            )
        return said


class Prompts:
    """Renders prompts and search results with the tokenizer and the template of a configuration."""

    def __init__(self, config: Config) -> None:
        tokenizer = load_tokenizer(models.resolve(config.model.path))
        self._template = make_template(config.rollout.template, tokenizer, config.rollout)
        self.shown = Shown(config.rollout)

    def add(self, question: Question, passages: Iterable[dict[str, Any]] = ()) -> None:
        """Count the prompt of a question, and the result of a search that found these passages."""
        ids = self._template.prompt_ids(question)
        self.shown.first = self.shown.first or self._template.decode(ids)
        self.shown.prompts.append(len(ids))
        if hits := [Hit(one["id"], one["contents"], 0.0) for one in passages]:
            self.shown.observations.append(len(self._template.observation_ids(hits, WHOLE).token_ids))
