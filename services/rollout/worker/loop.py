"""The agent loop: generate to a tag, search, append ids, go on. Token in, token out.

    ids = prompt | action 0 | observation 0 | action 1 | observation 1 | ... | action n

Each engine call is given all ids so far, so the ids of turn k are an exact prefix of those of turn k + 1, and the engine's prefix cache
holds them. What the model wrote is never encoded again: text is decoded only to look for tags (Search-R1, arXiv 2503.09516, section 3.2).
"""

from __future__ import annotations

import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from services.contracts import Action, FinishReason, Trajectory, TrajectoryRequest

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.contracts import Observation, Question
    from services.rollout.engines.base import Engine
    from services.rollout.worker.templates import Template
    from services.settings import RolloutSettings

SAMPLING_ATTEMPTS = 3
"""Times that a trajectory is sampled before non-finite log-probs are taken for the policy's own fault."""


class RolloutError(RuntimeError):
    """A trajectory could not be sampled."""


class NonFiniteLogprobError(RolloutError):
    """The sampler reported a log-prob that is not finite: the trajectory must not be trained on."""


class PromptTooLongError(RolloutError):
    """The question's prompt leaves no room to write."""

    exit_code = 2


async def run_trajectory(
    request: TrajectoryRequest,
    *,
    engine: Engine,
    template: Template,
    search: Callable[[str], Awaitable[list[Hit]]],
    settings: RolloutSettings,
    observe: Callable[[list[Hit], int], Awaitable[Observation]] | None = None,
) -> Trajectory:
    """Sample one trajectory. observe: the template's `observation_ids`, made elsewhere than on this loop.

    `max_turns` generations may search; one more follows in which a search is not carried out. An action without a tag gets the template's
    notice and uses its turn up. `finish` is `answer`, `turns` (no answer in the last turn) or `length` (no room left in `max_model_tokens`).

    Raises NonFiniteLogprobError after SAMPLING_ATTEMPTS samples with non-finite log-probs, PromptTooLongError, and whatever `search` and
    the engine raise.
    """
    started = time.monotonic()
    for attempt in range(SAMPLING_ATTEMPTS):
        try:
            trajectory = await _sample(request, attempt, engine, template, search, settings, observe)
        except NonFiniteLogprobError as e:
            error = e
        else:
            trajectory.seconds = time.monotonic() - started
            return trajectory
    raise error


def prompt_of(question: Question, template: Template, settings: RolloutSettings) -> list[int]:
    """The question's prompt as token ids. Raises PromptTooLongError."""
    prompt = template.prompt_ids(question)
    if len(prompt) > min(settings.max_prompt_tokens, settings.max_model_tokens - 1):
        raise PromptTooLongError(
            f"question {question.id}: its prompt has {len(prompt)} tokens; rollout.max_prompt_tokens={settings.max_prompt_tokens}, "
            f"rollout.max_model_tokens={settings.max_model_tokens}"
        )
    return prompt


async def _sample(request, attempt, engine, template, search, settings, observe) -> Trajectory:
    prompt = prompt_of(request.question, template, settings)
    ids, segments = list(prompt), []
    finish: FinishReason = "turns"
    for turn in range(settings.max_turns + 1):
        room = settings.max_model_tokens - len(ids)
        generation = await engine.generate(
            f"{request.uid}.{attempt}.{turn}",
            list(ids),
            max_tokens=min(settings.max_response_tokens, room),
            temperature=request.temperature,
            seed=turn_seed(request.seed, attempt, turn) if settings.deterministic else None,
            stop=template.stop,
        )
        action = _action(generation, template, request)
        segments.append(action)
        ids += action.token_ids
        room -= len(action.token_ids)
        if action.kind == "answer":
            finish = "answer"
            break
        if turn == settings.max_turns:
            break
        if action.kind == "search":
            # One token at least must be left to write after the observation.
            if room <= template.min_observation_tokens:
                finish = "length"
                break
            action.query = template.parse(action.text).content
            hits = await search(action.query)
            action.document_ids = [hit.id for hit in hits]
            budget = min(settings.max_obs_tokens, room - 1)
            if observe is None:
                observation = template.observation_ids(hits, budget)
            else:
                observation = await observe(hits, budget)
        else:
            observation = template.notice()
        if len(observation.token_ids) >= room:
            finish = "length"
            break
        segments.append(observation)
        ids += observation.token_ids
    return Trajectory(request.uid, request.group, request.question, prompt, segments, finish)


def _action(generation, template: Template, request: TrajectoryRequest) -> Action:
    ids, logprobs = generation.token_ids, generation.logprobs
    if len(ids) != len(logprobs):
        raise RolloutError(
            f"trajectory {request.uid}: the engine returned {len(ids)} tokens with {len(logprobs)} log-probs"
        )
    if not ids:
        raise RolloutError(f"trajectory {request.uid}: the engine returned no token")
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteLogprobError(
            f"trajectory {request.uid}: a sampler log-prob is not finite (policy version {generation.policy_version})"
        )
    keep = tokens_through_stop(ids, template.stop, template.decode)
    written_eos = generation.finish == "eos" and keep == len(ids)
    text = template.decode(ids[: keep - written_eos])
    return Action(
        list(ids[:keep]), list(logprobs[:keep]), generation.policy_version, template.parse(text).kind, text
    )


def tokens_through_stop(ids: list[int], stop: tuple[str, ...], decode: Callable[[list[int]], str]) -> int:
    """Length of the shortest prefix of `ids` whose text holds a stop string; all of them where none does.

    A tag may end inside a token: then that token stays, with the text past the tag, which is the model's own.
    """

    def holds(n: int) -> bool:
        text = decode(ids[:n])
        return any(s in text for s in stop)

    if not holds(len(ids)):
        return len(ids)
    return 1 + bisect_left(range(1, len(ids) + 1), True, key=holds)


def turn_seed(seed: int, attempt: int, turn: int) -> int:
    """A seed for one engine call: the same for the same trajectory, independent between turns."""
    digest = hashlib.blake2b(f"{seed}/{attempt}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
