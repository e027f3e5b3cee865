"""How the questions of an evaluation were asked: its method, model and protocol, which are kept beside its
answers."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from services.contracts import Question
from trainer.commands.version import SHOWN, commit, own_version, version
from trainer.config.schema import Config
from trainer.loop.run.system import Serving
from trainer.suite.methods import METHODS, Method
from trainer.suite.protocol import protocol_of
from trainer.suite.retriever_facts import retriever_facts

PLAIN = METHODS["agent"]
"""The method of `eval` without --suite."""


async def asked_how(
    config: Config,
    name: str,
    weights: str | None,
    tokenizer: Any,
    questions: Sequence[Question],
    serving: Serving,
    method: Method = PLAIN,
) -> dict[str, Any]:
    """JSON-able: `method`, `model` and `protocol`. name, weights: of the model, the latter its digest;
    questions: at least one."""
    own = sum(question.prompt is not None for question in questions) if method is PLAIN else 0
    protocol = protocol_of(
        config.rollout,
        tokenizer,
        questions[0],
        given_prompts=own,
        retriever=await retriever_facts(serving.eval_retriever_url or serving.retriever_url),
        retrieves=method.retrieves,
        untagged=method.untagged,
        seed=config.seed,
        versions=_versions(),
    )
    return {"method": method.name, "model": {"name": name, "weights": weights}, "protocol": protocol}


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in SHOWN}
    return {
        "unspiral": f"{own_version()} {commit() or ''}".strip(),
        "python": platform.python_version(),
        **{name: number for name, number in found.items() if number},
    }
