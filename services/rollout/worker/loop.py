"""The agent loop: generate to a tag, search, append ids, go on. Token in, token out.

    ids = prompt | action 0 | observation 0 | action 1 | observation 1 | ... | action n

Each engine call is given all ids so far, so the ids of turn k are an exact prefix of those of turn k + 1, and
the engine's prefix cache holds them. What the model wrote is never encoded again: text is decoded only to
look for tags (Search-R1, arXiv 2503.09516, section 3.2). A template that drops the thoughts of earlier turns
gives later calls fewer ids (`shown_later`); its trajectories are sampled and scored, and never trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from services.common.errors import UnspiralError, UserError
from services.contracts import MAX_DOCUMENT_CHARS, Action, FinishReason, Trajectory, TrajectoryRequest
from services.rollout.engines.base import GenerateCall
from services.rollout.worker.templates import Template, reading_of
from services.rollout.worker.tools import Toolbox

if TYPE_CHECKING:
    from retriever_service.client import Hit
    from services.contracts import Observation, Question
    from services.rollout.engines.base import Generation, Sampler
    from services.settings import RolloutSettings

Search = Callable[[str], Awaitable[list["Hit"]]]
"""Hits of one query, best first; `Found` where the failed tries were counted."""
Observe = Callable[["list[Hit] | str", int], Awaitable["Observation"]]
"""An observation of hits, or of a tool's result, in at most so many tokens."""
SAMPLING_ATTEMPTS = 3
"""Times that a trajectory is sampled before non-finite log-probs are taken for the policy's own fault."""
KNOWN_PROMPTS = 256
"""Prompts that are kept. A question's trajectories are sampled close to each other."""
THINK = "<think>"
PROMPT_END_TOKENS = 16
"""Newest tokens before an action in which a chat template may have opened a think block."""


class Found(list["Hit"]):
    """Hits of one query, best first, and how many tries failed before they came."""

    def __init__(self, hits: Iterable[Hit], failures: int) -> None:
        super().__init__(hits)
        self.failures = failures


async def run_trajectory(
    request: TrajectoryRequest,
    *,
    engine: Sampler,
    template: Template,
    search: Search,
    settings: RolloutSettings,
    observe: Observe | None = None,
    tools: Mapping[str, Callable[..., object]] | None = None,
    known: Prompts | None = None,
) -> Trajectory:
    """Sample one trajectory. observe: the template's `observation_ids` and `result_ids`, made elsewhere than
    on this loop. tools: those of `load_tools`. known: prompts of this template, which trajectories of one
    group share.

    `max_turns` generations may search or call a tool; one more follows in which neither is carried out. An
    action without a tag gets the template's notice and uses its turn up. `finish` is `answer`, `turns` (no
    answer in the last turn) or `length` (no room left in `max_model_tokens`).

    Raises FloatingPointError after SAMPLING_ATTEMPTS samples with non-finite log-probs,
    UserError, and whatever `search` and the engine raise.
    """
    started = time.monotonic()
    for attempt in range(SAMPLING_ATTEMPTS):
        toolbox = Toolbox(tools or {}, request.question, settings.tool_timeout_seconds)
        try:
            world = _World(template, search, settings, observe, toolbox, known)
            try:
                trajectory = await _sample(request, attempt, engine, world)
            except asyncio.CancelledError:
                await toolbox.close(wait=False)  # whoever has cancelled us waits for the end
                raise
            except BaseException:
                await toolbox.close()
                raise
            await toolbox.close()
        except FloatingPointError as e:
            error = e
        else:
            trajectory.seconds = time.monotonic() - started
            return trajectory
    raise error


class Prompts:
    """The last prompts of one template."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Question, str], list[int]] = {}

    def ids(self, question: Question, template: Template) -> list[int]:
        """A list of the caller's own."""
        # A template may show other columns of the row, by which questions are not compared.
        asked = question, question._kept
        if asked not in self._ids:
            made = template.prompt_ids(question)
            if len(self._ids) >= KNOWN_PROMPTS:
                del self._ids[next(iter(self._ids))]
            self._ids[asked] = made
        # The caller appends to it, and the group's other trajectories begin with the same prompt.
        return list(self._ids[asked])


def prompt_of(
    question: Question, template: Template, settings: RolloutSettings, known: Prompts | None = None
) -> list[int]:
    """The question's prompt as token ids. Raises UserError."""
    prompt = template.prompt_ids(question) if known is None else known.ids(question, template)
    if len(prompt) > min(settings.max_prompt_tokens, settings.max_model_tokens - 1):
        raise UserError(
            f"question {question.id}: its prompt has {len(prompt)} tokens; "
            f"rollout.max_prompt_tokens={settings.max_prompt_tokens}, "
            f"rollout.max_model_tokens={settings.max_model_tokens}"
        )
    return prompt


async def _sample(
    request: TrajectoryRequest,
    attempt: int,
    engine: Sampler,
    world: _World,
) -> Trajectory:
    template = world.template
    settings = world.settings
    prompt = prompt_of(request.question, template, settings, world.known)
    ids = list(prompt)
    segments: list[Action | Observation] = []
    finish: FinishReason = "turns"
    following = getattr(template, "following", None)
    shown_later = getattr(template, "shown_later", None)
    one_sequence = True
    thinking = _opens_thought(prompt, template)
    # One turn beyond those that may search: the last results must be readable too.
    for turn in range(settings.max_turns + 1):
        room = settings.max_model_tokens - len(ids)
        call = _Call(
            engine=engine,
            template=template,
            uid=request.uid,
            name=f"{request.uid}.{attempt}.{turn}",
            temperature=request.temperature,
            seed=turn_seed(request.seed, attempt, turn) if settings.deterministic else None,
            thinking=thinking,
        )
        action = await _act(call, ids, min(settings.max_response_tokens, room))
        segments.append(action)
        written = len(ids) + len(action.token_ids)
        ids = [*ids, *action.token_ids] if shown_later is None else shown_later(ids, action.token_ids)
        room = settings.max_model_tokens - len(ids)
        if action.kind == "answer":
            finish = "answer"
            break
        if turn == settings.max_turns:
            break
        observation = await _observation(action, room, world)
        if observation is not None and following is not None:
            observation = following(action.token_ids, observation)
        # An observation that fills the sequence would leave no token for the next action: it is left out,
        # since a trajectory ends with an action.
        if observation is None or len(observation.token_ids) >= room:
            finish = "length"
            break
        segments.append(observation)
        one_sequence = one_sequence and len(ids) == written
        ids += observation.token_ids
        thinking = _opens_thought(observation.token_ids, template)
    return Trajectory(
        request.uid,
        request.group,
        request.question,
        prompt,
        segments,
        finish,
        reading=reading_of(template),
        one_sequence=one_sequence,
    )


def _opens_thought(ids: list[int], template: Template) -> bool:
    """Whether the text before an action opens a think block, as some chat templates do."""
    return template.decode(ids[-PROMPT_END_TOKENS:]).rstrip().endswith(THINK)


@dataclass(frozen=True)
class _World:
    """What surrounds the policy in one trajectory."""

    template: Template
    search: Search
    settings: RolloutSettings
    observe: Observe | None
    toolbox: Toolbox
    known: Prompts | None


async def _observation(action: Action, room: int, world: _World) -> Observation | None:
    """The observation after an action. None where its tags alone do not fit into `room` tokens: then no
    search is carried out, and no tool called. Otherwise the query and its documents are noted in the
    action."""
    template = world.template
    if action.kind not in ("search", "tool"):
        return template.notice()
    # One token at least must be left to write after the observation.
    if room <= template.min_observation_tokens:
        return None
    parsed = template.parse(_as_read(action))
    action.query = parsed.content
    budget = min(world.settings.max_obs_tokens, room - 1)
    began = time.monotonic()
    if parsed.tool is not None:
        action.tool = parsed.tool
        result = await world.toolbox.call(parsed.tool, parsed.content)
        action.search_seconds = time.monotonic() - began
        if world.observe is None:
            return template.result_ids(result, budget)  # type: ignore[attr-defined]  # `make_template` saw it
        return await world.observe(result, budget)
    hits = await world.search(action.query)
    action.search_seconds = time.monotonic() - began
    action.document_ids = [hit.id for hit in hits]
    action.documents = [hit.contents[:MAX_DOCUMENT_CHARS] for hit in hits]
    action.search_failures = hits.failures if isinstance(hits, Found) else 0
    if world.observe is None:
        return template.observation_ids(hits, budget)
    return await world.observe(hits, budget)


@dataclass(frozen=True)
class _Call:
    """The constants of one action."""

    engine: Sampler
    template: Template
    uid: str
    name: str
    temperature: float
    seed: int | None
    thinking: bool


async def _act(call: _Call, ids: list[int], budget: int) -> Action:
    """One action of at most `budget` tokens. Engines stop at each stop string; where one is only mentioned
    (in a think block, say), they are asked to go on from there, and the ids of one call are a prefix of those
    of the next."""
    template = call.template
    ends = getattr(template, "ends", None) or partial(_holds_any, template.stop)
    opener = THINK if call.thinking else ""
    began = time.monotonic()
    written: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    while True:
        part = len(versions)
        generation = await call.engine.generate(
            GenerateCall(
                request_id=f"{call.name}.{part}" if part else call.name,
                token_ids=ids + written,
                max_tokens=budget - len(written),
                temperature=call.temperature,
                seed=call.seed if call.seed is None or not part else turn_seed(call.seed, part, 0),
                stop=template.stop,
            )
        )
        _check(generation, call.uid)
        written += generation.token_ids
        logprobs += generation.logprobs
        versions.append(generation.policy_version)
        keep = tokens_through_end(written, lambda text: ends(opener + text), template.decode)
        if keep is not None or generation.finish != "stop" or len(written) >= budget:
            break
    # The end-of-sequence token is trained on like any other, and is no part of the text.
    written_eos = generation.finish == "eos" and keep in (None, len(written))
    written = written[:keep]
    text = template.decode(written[: len(written) - written_eos])
    # Where a sync came between two parts the older version counts: staleness must not be understated.
    action = Action(written, logprobs[: len(written)], min(versions), "invalid", text, thinking=call.thinking)
    action.seconds = time.monotonic() - began
    action.kind = template.parse(_as_read(action)).kind
    return action


def _as_read(action: Action) -> str:
    """The action's text, with the think block that it began in."""
    return THINK + action.text if action.thinking else action.text


def _check(generation: Generation, uid: str) -> None:
    ids = generation.token_ids
    logprobs = generation.logprobs
    if len(ids) != len(logprobs):
        raise UnspiralError(
            f"trajectory {uid}: the engine returned {len(ids)} tokens with {len(logprobs)} log-probs"
        )
    if not ids:
        raise UnspiralError(f"trajectory {uid}: the engine returned no token")
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            f"trajectory {uid}: a sampler log-prob is not finite (policy version {generation.policy_version})"
        )


def _holds_any(stop: tuple[str, ...], text: str) -> bool:
    return any(s in text for s in stop)


def tokens_through_end(
    ids: list[int], ends: Callable[[str], bool], decode: Callable[[list[int]], str]
) -> int | None:
    """Length of the shortest prefix of `ids` whose text ends the action; None where none does.

    A tag may end inside a token: then that token stays, with the text past the tag, which is the model's own.
    """

    def holds(n: int) -> bool:
        return ends(decode(ids[:n]))

    if not holds(len(ids)):
        return None
    if not holds(len(ids) - 1):  # an engine stops at the tag
        return len(ids)
    # Once a prefix ends the action, all longer ones do: a bisection decodes log2(n) prefixes instead of n.
    return 1 + bisect_left(range(1, len(ids)), True, key=holds)


def turn_seed(seed: int, attempt: int, turn: int) -> int:
    """A seed for one engine call: the same for the same trajectory, independent between turns."""
    digest = hashlib.blake2b(f"{seed}/{attempt}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
