"""The methods of the papers' tables that a model and a retriever suffice for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import UserError
from services.common.names import accepted
from services.settings import RolloutSettings

PROMPTED = "services.rollout.worker.templates.prompted"


@dataclass(frozen=True)
class Method:
    """How a question is put to the model."""

    name: str
    settings: Callable[[RolloutSettings], RolloutSettings]
    """The run's rollout settings as the method has them."""
    retrieves: bool = False
    """Whether one search for the question itself comes before the prompt."""
    untagged: bool = False
    """Whether a text without tags is an answer as a whole: these methods ask for nothing else, and models
    that were never taught the tags write none."""


def _unchanged(settings: RolloutSettings) -> RolloutSettings:
    return settings


def _alone(template: str) -> Callable[[RolloutSettings], RolloutSettings]:
    """One turn without search."""
    return lambda settings: settings.model_copy(update={"template": f"{PROMPTED}:{template}", "max_turns": 0})


def _with_documents(settings: RolloutSettings) -> RolloutSettings:
    """One turn, with room for documents in its prompt."""
    longest = max(1, settings.max_model_tokens - settings.max_response_tokens)
    room = min(longest, settings.max_prompt_tokens + settings.max_obs_tokens)
    return _alone("RetrievedTemplate")(settings).model_copy(
        update={"max_prompt_tokens": max(room, settings.max_prompt_tokens)}
    )


def _prompted_search(settings: RolloutSettings) -> RolloutSettings:
    return settings.model_copy(update={"template": f"{PROMPTED}:SearchO1Template"})


METHODS = {
    method.name: method
    for method in (
        Method("agent", _unchanged),
        Method("direct", _alone("DirectTemplate"), untagged=True),
        Method("cot", _alone("ChainOfThoughtTemplate")),
        Method("rag", _with_documents, retrieves=True, untagged=True),
        Method("search-o1", _prompted_search),
    )
}


def method_of(name: str, settings: RolloutSettings) -> Method:
    """The method of that name. Raises UserError, also where the run's model cannot read the method's
    prompt."""
    if name not in METHODS:
        raise UserError(f"--method {name}: {accepted(name, METHODS)}")
    if settings.template == "lab" and name != "agent":
        raise UserError(
            f"--method {name}: its prompt is English, which a model of rollout.template=lab does not read; "
            "accepted for it is agent"
        )
    return METHODS[name]
