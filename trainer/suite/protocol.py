"""The protocol of an evaluation: what can move its numbers beside the weights and the questions.

Two results are comparable where all of these facts are equal; `unspiral eval compare` names those that are
not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from services.contracts import Question
from services.rollout.worker.loop import prompt_of
from services.rollout.worker.plain_text import put_before
from services.rollout.worker.templates import Template, make_template, reading_of
from services.settings import RolloutSettings

UNKNOWN = "unknown"
"""A fact of a retriever that does not tell it."""
SHOWN = 4000
"""Characters of the example prompt that are kept."""
NORMALISATION = (
    "em, f1, subem: lower case, no ASCII punctuation, no a/an/the, single spaces; em_strict: numbers, "
    "signs and "
    "symbols kept, Unicode folded; the last complete <answer> that the model wrote counts"
)
STOP_HANDLING = (
    "generation stops at the tag; the tokens stay as they were sampled, and are never encoded again"
)


def protocol_of(
    settings: RolloutSettings,
    tokenizer: Any,
    question: Question,
    *,
    given_prompts: int,
    retriever: dict[str, Any],
    retrieves: bool,
    untagged: bool,
    seed: int,
    versions: dict[str, str],
) -> dict[str, Any]:
    """JSON-able facts by name. question: whose prompt is the example; given_prompts: rows whose data file
    brings a prompt of its own; retriever: its description."""
    template = make_template(settings.template, tokenizer, settings)
    searches = settings.max_turns > 0 or retrieves
    return {
        "template": settings.template,
        **_prompt_facts(template, tokenizer, question, settings),
        # Absent where they stay, as in results that were written before there was another way.
        **({"thoughts_of_earlier_turns": "dropped"} if getattr(template, "drops_thoughts", False) else {}),
        "prompts_of_the_data": given_prompts if getattr(template, "reads_prompts", True) else 0,
        "reading": reading_of(template),
        "stop": list(template.stop),
        "stop_handling": STOP_HANDLING,
        "normalisation": NORMALISATION,
        "untagged_text_is_an_answer": untagged,
        "max_turns": settings.max_turns,
        "top_k": settings.topk if searches else None,
        "max_response_tokens": settings.max_response_tokens,
        "max_obs_tokens": settings.max_obs_tokens if searches else None,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "max_model_tokens": settings.max_model_tokens,
        "retriever": retriever if searches else None,
        "engine": settings.engine,
        "dtype": settings.dtype,
        "deterministic": settings.deterministic,
        "seed": seed,
        "sampling_temperature": settings.temperature,
        "versions": versions,
    }


def _prompt_facts(
    template: Template, tokenizer: Any, question: Question, settings: RolloutSettings
) -> dict[str, Any]:
    """The prompt as the model is given it."""
    ids = prompt_of(question, template, settings)
    text = template.decode(ids)
    before = put_before(tokenizer)
    chat = tokenizer.chat_template
    # The question stands for any: the digest is of the words around it.
    around = text.replace(question.text.strip().rstrip("?"), "")
    return {
        "chat_template": _digest(str(chat)) if chat else "none",
        "bos": tokenizer.decode(before) if before and ids[: len(before)] == before else "none",
        "prompt_digest": _digest(around),
        "prompt_example": text[:SHOWN],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


NOT_COMPARED = ("prompt_example", "seed", "sampling_temperature", "versions")
"""Facts that need not be equal for two greedy results to be comparable."""


def differing(before: dict[str, Any], now: dict[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """`key: value | value` for each fact that is not the same."""
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f"{key}: {_shown(before.get(key))} | {_shown(now.get(key))}"
        for key in keys
        if key not in ignored and before.get(key) != now.get(key)
    ]


def unknown_to_both(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Facts of the retriever that neither result knows: they may differ."""
    a, b = (one.get("retriever") or {} for one in (first, second))
    return [key for key in a if a[key] == b.get(key) == UNKNOWN]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
