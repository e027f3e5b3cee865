"""Checkpoints of search agents by their names on the Hugging Face hub, with what each was trained to read.

Search-R1 (arXiv 2503.09516) published its policies, with later releases under the same names and a suffix
(`-v0.2`, `-v0.3`); the names here were found in public code. LLDS (arXiv 2512.04220) publishes under
LLDS_HUB; two names there were found in copies of their model cards, and the other rows of its tables have no
name here. Settings are those of the papers' own evaluations.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from services.settings import RolloutSettings

SEARCH_R1 = "Search-R1"
LLDS_HUB = "SEGAgentRL"
RETRIEVER = "intfloat/e5-base-v2 over the Wikipedia of 2018 (21 M passages)"
TAGS = "<think> <search> <information> <answer>"


class Checkpoint(NamedTuple):
    """A policy, and how it is asked."""

    hub: str | None
    """Its name on the hub; None where none is known here."""
    base: str
    """The hub's name of the model that it was trained from."""
    model: str
    """The same, as tables print it (`trainer.suite.shown.published`)."""
    method: str
    """As tables print it."""
    max_turns: int
    """Searches per question: `rollout.max_turns`."""
    template: str = "search_r1"
    """`rollout.template`. The prompt stands in the tokenizer's chat template where it has one."""
    bos: str = "none"
    """`rollout.bos`, of a tokenizer without a chat template."""
    tags: str = TAGS
    reading: str = "search_r1"
    """`rollout.reading`."""
    topk: int = 3
    retriever: str = RETRIEVER
    later: tuple[str, ...] = ()
    """Names of later releases, by the same method from the same base."""


def _search_r1(base: str, algorithm: str, *releases: str) -> Checkpoint:
    """releases: suffixes of the names, the earliest first; none where no name is known here."""
    hub, model = _BASES[base]
    method = {"ppo": f"{SEARCH_R1} PPO", "grpo": "GRPO"}[algorithm]
    names = [f"PeterJinGo/SearchR1-nq_hotpotqa_train-{base}-em-{algorithm}{suffix}" for suffix in releases]
    return Checkpoint(next(iter(names), None), hub, model, method, max_turns=4, later=tuple(names[1:]))


def _llds(base: str, model: str, method: str, name: str | None = None) -> Checkpoint:
    return Checkpoint(name and f"{LLDS_HUB}/{name}", base, model, method, max_turns=3)


_QWEN = {
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "Qwen2.5-3B-Base"),
    "qwen2.5-3b-it": ("Qwen/Qwen2.5-3B-Instruct", "Qwen2.5-3B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Base"),
    "qwen2.5-7b-it": ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
}
_BASES = _QWEN | {
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", "Qwen2.5-14B-Base"),
    "qwen2.5-14b-it": ("Qwen/Qwen2.5-14B-Instruct", "Qwen2.5-14B-Instruct"),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", "Qwen2.5-32B-Base"),
    "llama3.2-3b": ("meta-llama/Llama-3.2-3B", "Llama-3.2-3B-Base"),
    "llama3.2-3b-it": ("meta-llama/Llama-3.2-3B-Instruct", "Llama-3.2-3B-Instruct"),
}
_WITHOUT_CHAT = {"meta-llama/Llama-3.2-3B"}
"""Bases whose tokenizer has no chat template, so that `rollout.bos` changes the prompt."""
CHECKPOINTS = (
    _search_r1("qwen2.5-3b", "ppo", "", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-3b-it", "ppo", "", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-7b", "ppo", "", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-7b-it", "ppo", "", "-v0.2"),
    _search_r1("qwen2.5-14b", "ppo", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-14b-it", "ppo"),
    _search_r1("llama3.2-3b", "ppo", ""),
    _search_r1("llama3.2-3b-it", "ppo", ""),
    _search_r1("qwen2.5-3b", "grpo", "", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-3b-it", "grpo", "", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-7b", "grpo", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-7b-it", "grpo", "-v0.2", "-v0.3"),
    _search_r1("qwen2.5-14b", "grpo", "-v0.3"),
    _search_r1("qwen2.5-14b-it", "grpo", "-v0.3"),
    _search_r1("qwen2.5-32b", "grpo", "-v0.3"),
    _search_r1("llama3.2-3b", "grpo", ""),
    _search_r1("llama3.2-3b-it", "grpo", ""),
    *(_llds(*base, "GRPO + LLDS") for base in _QWEN.values()),
    _llds(*_QWEN["qwen2.5-3b"], "GRPO + LLDS-MA"),
    _llds(*_QWEN["qwen2.5-3b-it"], "GSPO + LLDS", "LLDS-A-GSPO-Qwen2.5-3B-Ins"),
    _llds(*_QWEN["qwen2.5-3b"], "GRPO + LLDS-R", "LLDS-R-GRPO-Qwen2.5-3B-Base"),
)
BY_HUB_NAME = {name: one for one in CHECKPOINTS if one.hub is not None for name in (one.hub, *one.later)}
_BY_FOLDER = {name.rpartition("/")[2]: one for name, one in BY_HUB_NAME.items()}


def known(path: str) -> Checkpoint | None:
    """The checkpoint that a hub name means, or a folder that keeps the name: one that it was downloaded to
    (`models/SearchR1-...`), or one in the hub's cache (`models--PeterJinGo--SearchR1-.../snapshots/...`).
    None for another model."""
    if path in BY_HUB_NAME:
        return BY_HUB_NAME[path]
    parts = PurePath(path).parts
    cached = [
        part.removeprefix("models--").replace("--", "/") for part in parts if part.startswith("models--")
    ]
    if cached:
        return BY_HUB_NAME.get(cached[-1])
    return _BY_FOLDER.get(parts[-1]) if parts else None


def asked_otherwise(name: str, rollout: RolloutSettings) -> list[str]:
    """Settings of a run that are not those which a named checkpoint was trained with, as `rollout.topk=5,
    trained with 3`; empty for a model of another name. name: on the hub, or a folder's (`known`)."""
    one = known(name)
    if one is None:
        return []
    trained = {"template": one.template, "reading": one.reading, "topk": one.topk, "max_turns": one.max_turns}
    if one.base in _WITHOUT_CHAT:
        trained["bos"] = one.bos
    return [
        f"rollout.{key}={getattr(rollout, key)}, trained with {value}"
        for key, value in trained.items()
        if getattr(rollout, key) != value
    ]
