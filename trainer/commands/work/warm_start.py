"""`unspiral warm-start`: teach a model the tags before it is trained, where it does not write them by itself.

Demonstrations are composed from training questions and the real retriever: search for the question, read,
answer with a golden answer that one of the documents holds. Where the first search does not find it, a second
one asks with the first document's title. Questions whose answer is not found are left out, so nothing is
taught that was not read. With --trajectories they are the right trajectories of a run instead (rejection
sampling).

The learner itself trains: with pi_old = pi and advantage 1 the policy loss's gradient is that of the
cross-entropy of the action tokens, so one optimiser step per batch with LLDS and KL off is supervised
training, in every layout (ranks, ZeRO, packing, LoRA) that the run will use.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from retriever_service.client import Hit, RetrieverClient
from services.common.counting import counted
from services.common.errors import UserError
from services.common.loading.own_packages import refuse_others_here
from services.common.processes import signals
from services.common.users_files import make_folder
from services.contracts import (
    Action,
    ActionKind,
    Observation,
    Question,
    TokenBatch,
    TrainBatch,
    Trajectory,
)
from services.rollout.worker.loop import prompt_of
from services.rollout.worker.plain_text import Outside, TextEncoder
from services.rollout.worker.templates import ParsedAction, Template, make_template, reading_of
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings
from trainer.commands.work.rejection import right_trajectories
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.named_columns import questions_in
from trainer.learner.export import may_export_to
from trainer.learner.group import LearnerGroup
from trainer.learner.model.asked import how_asked
from trainer.rewards import normalize
from trainer.session.on_ray.start import connect_ray, leave_ray
from trainer.session.on_ray.watch import leave_without_ray, ray_watched
from trainer.session.preflight.prompts import check_one_sequence, check_prompts
from trainer.session.preflight.retrievers import check_addresses, check_retrievers
from trainer.session.run_services import retriever_address
from trainer.session.waits import told

Search = Callable[[str], Awaitable[list[Hit]]]
NOTHING_FOUND = "the search returns no passage"
NOT_READ = (
    "no golden answer stands in the passages that are found, as far as rollout.max_obs_tokens shows them"
)
YES_OR_NO = "the answer is yes or no, which no passage shows"
NO_ROOM = "longer than rollout.max_response_tokens or max_model_tokens"
TAGS = "question, title or answer holds tags that would be read as the model's own"
NO_WORDS = "the model's tokenizer does not give the text back: words that its vocabulary lacks, say"
UNREADABLE = ("", "yes", "no")
SEARCHES_AT_ONCE = 32
TELL_SECONDS = 10.0
"""Steps that end so long after the last line get one of their own."""


async def demonstration(
    question: Question, search: Search, template: Template, encoder: TextEncoder, settings: RolloutSettings
) -> Trajectory | str:
    """A trajectory that searches, reads and answers; otherwise why there is none: one of NOTHING_FOUND,
    NOT_READ, YES_OR_NO, NO_ROOM, TAGS and NO_WORDS."""
    prompt = prompt_of(question, template, settings)
    segments: list[Action | Observation] = []
    used = len(prompt)
    query = question.text.strip().rstrip("?")
    thought = "I need to look this up."

    def act(kind: ActionKind, thought: str, content: str) -> Action | str:
        pieces = written(template, kind, thought, content)
        ids = encoder.encode(*pieces)
        text = template.decode(ids)
        if template.parse(text) != ParsedAction(kind, content):
            whole = all(piece in text for piece in pieces if isinstance(piece, Outside))
            return TAGS if whole else NO_WORDS
        return Action(ids, [0.0] * len(ids), 0, kind, text)

    for _ in range(min(2, settings.max_turns)):
        action = act("search", thought, query)
        if isinstance(action, str):
            return action
        hits = await search(query)
        action.query = query
        action.document_ids = [hit.id for hit in hits]
        observation = template.observation_ids(hits, settings.max_obs_tokens)
        if following := getattr(template, "following", None):
            observation = following(action.token_ids, observation)
        segments += [action, observation]
        used += len(action.token_ids) + len(observation.token_ids)
        if found := _found(question, hits, observation.text):
            number, title, answer = found
            final = act("answer", f"Doc {number}, {title}, tells it.", answer)
            if isinstance(final, str):
                return final
            whole = Trajectory(
                f"demo-{question.id}",
                question.id,
                question,
                prompt,
                [*segments, final],
                "answer",
                reading=reading_of(template),
            )
            too_long = any(len(a.token_ids) > settings.max_response_tokens for a in whole.actions)
            return NO_ROOM if too_long or used + len(final.token_ids) > settings.max_model_tokens else whole
        if not hits:
            return NOTHING_FOUND
        title = _title(hits[0])
        thought = f"The documents do not say it. I try again with {title}."
        query = f"{title} {query}"
    return YES_OR_NO if all(normalize(a) in UNREADABLE for a in question.golden_answers) else NOT_READ


def written(template: Template, kind: str, thought: str, content: str) -> Sequence[str]:
    """An action as pieces of text: in the template's own form where it has one, otherwise in tags."""
    if form := getattr(template, "written", None):
        return form(kind, thought, content)
    return ("<think> ", Outside(thought), f" </think>\n<{kind}> ", Outside(content), f" </{kind}>")


def _title(hit: Hit) -> str:
    return hit.contents.partition("\n")[0].strip().strip('"')


def _found(question: Question, hits: list[Hit], shown: str) -> tuple[int, str, str] | None:
    """Number and title of the first document that holds a golden answer, and that answer; what was cut off
    does not count."""
    seen = f" {normalize(shown)} "
    for number, hit in enumerate(hits, 1):
        text = f" {normalize(hit.contents)} "
        for answer in question.golden_answers:
            wanted = normalize(answer)
            if wanted not in UNREADABLE and f" {wanted} " in text and f" {wanted} " in seen:
                return number, _title(hit), answer.strip()
    return None


async def compose(
    questions: list[Question],
    search: Search,
    template: Template,
    encoder: TextEncoder,
    settings: RolloutSettings,
    left_out: Counter[str] | None = None,
) -> list[Trajectory]:
    """Demonstrations of the questions whose answer can be found, in their order. encoder: of the template's
    tokenizer. left_out: counts the other questions by reason. Raises UserError where the template does not
    read the tags of demonstrations."""
    for kind in ("search", "answer"):
        if template.parse("".join(written(template, kind, "y", "x"))) != ParsedAction(kind, "x"):
            raise UserError(
                f"rollout.template={settings.template}: it does not read <{kind}> x </{kind}>; "
                "a warm start demonstrates <search> and <answer> alone, or what the template's own "
                "`written` gives"
            )
    gate = asyncio.Semaphore(SEARCHES_AT_ONCE)

    async def one(question: Question) -> Trajectory | str:
        async with gate:
            return await demonstration(question, search, template, encoder, settings)

    made = await asyncio.gather(*map(one, questions))
    if left_out is not None:
        left_out.update(reason for reason in made if isinstance(reason, str))
    return [t for t in made if isinstance(t, Trajectory)]


def supervised(config: Config, lr: float, batches: int) -> Config:
    """The configuration of a learner whose update is one step of supervised training."""
    raw = config.model_dump(by_alias=True)
    raw["algorithm"] |= {"loss": "dapo", "kl": 0.0, "entropy": 0.0, "importance": {"mode": "off"}}
    raw["algorithm"]["llds"] |= {"lambda": 0.0, "anchor": "batch_start", "answer_weight": "off"}
    raw["learner"] |= {
        "lr": lr,
        "warmup_steps": max(1, batches // 10),
        "minibatches_per_batch": 1,
        "epochs": 1,
    }
    raw["monitor"]["action"] = "none"
    raw["rollout"] |= {"temperature": 1.0, "max_staleness": 0}
    return Config.model_validate(raw)


def as_batch(demonstrations: list[Trajectory]) -> TrainBatch:
    """Demonstrations with advantage 1. There is no sampler: its log-probs are left out."""
    tokens = TokenBatch.of(demonstrations)
    tokens.logp_sampler = None
    all_rows = np.ones(len(tokens), bool)
    return TrainBatch.of_tokens(
        tokens, advantages=all_rows.astype(np.float32), preserved=all_rows, valid=all_rows
    )


def train_on(
    learner: Any,
    demonstrations: list[Trajectory],
    *,
    batch: int,
    epochs: int,
    seed: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
):
    """Passes over the demonstrations in a seeded order, `batch` of them in each optimiser step. Returns the
    mean log-prob of an action token in the first and in the last step (before it was taken)."""
    rng = random.Random(seed)
    means: list[float] = []
    told_at = clock()
    steps = epochs * math.ceil(len(demonstrations) / batch)
    for _ in range(epochs):
        order = rng.sample(demonstrations, len(demonstrations))
        for start in range(0, len(order), batch):
            tokens = as_batch(order[start : start + batch])
            with told(say, f"optimiser step {len(means) + 1} of {steps}"):
                result = learner.update(tokens, llds_lambda=0.0)
            means.append(float(result.logp_old[tokens.action_ids >= 0].mean(dtype=np.float64)))
            slow = clock() - told_at >= TELL_SECONDS
            if slow or len(means) in (1, steps) or len(means) % 10 == 0:
                told_at = clock()
                say(f"warm start {len(means)} of {steps}: log-prob of a token {means[-1]:+.3f}")
    return means[0], means[-1]


async def write_whole(
    learner: Any, out: Path, say: Callable[[str], None], asked: dict[str, Any] | None = None
) -> None:
    """Write the policy to its end, also where a signal cancels the task meanwhile: half a model would be left
    behind, and what was taught be lost for the sake of some seconds."""
    writing = asyncio.ensure_future(asyncio.to_thread(learner.export_hf, out, asked))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        say(f"written to {out}")
        raise


def run_warm_start(
    config: Config,
    out: Path,
    *,
    questions: int,
    epochs: int,
    batch: int,
    lr: float,
    trajectories: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Compose, train, and write the policy to `out` as a Hugging Face folder. Returns what was done.
    trajectories: a run, whose right trajectories take the place of composed demonstrations.

    Raises UserError, Stopped after a signal, and what a run's start raises.
    """
    if not may_export_to(out):
        raise UserError(f"--out {out}: exists and is no earlier export; give a new folder")
    make_folder(out.parent, f"--out {out}: its folder")
    refuse_others_here()
    if trajectories is None:
        check_retrievers(config)
    recorded: list[Trajectory] = []
    chosen: list[Question] = []
    with signals.raised():
        model = models.check_trainable(models.resolve(config.model.path), config.model.path)
        rows = questions_in(config.data, config.data.train).rows
        tokenizer = load_tokenizer(model)
        template = make_template(config.rollout.template, tokenizer, config.rollout)
        check_one_sequence(template, config.rollout)
        encoder = TextEncoder(tokenizer)
        if trajectories is not None:
            recorded = right_trajectories(trajectories, rows, template, encoder, config.rollout, say)
        else:
            chosen = random.Random(config.seed).sample(rows, min(questions, len(rows)))
            check_prompts("data.train", chosen, tokenizer, config.rollout)

    async def composed(stack: AsyncExitStack) -> list[Trajectory]:
        url = await retriever_address(config.retriever, "retriever", config, stack, say)
        client = RetrieverClient(url, timeout_seconds=config.retriever.timeout_seconds)
        stack.push_async_callback(client.aclose)

        async def search(query: str) -> list[Hit]:
            return (await client.retrieve([query], config.rollout.topk))[0]

        left_out: Counter[str] = Counter()
        found = await compose(chosen, search, template, encoder, config.rollout, left_out)
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in left_out.most_common())
        if not found:
            raise UserError(
                f"data.train: no demonstration of any of {counted(len(chosen), 'question')} ({reasons})"
            )
        of = f"{counted(len(found), 'demonstration')} of {counted(len(chosen), 'question')}"
        say(f"{of}; left out {reasons}" if reasons else of)
        return found

    async def run() -> dict[str, float]:
        async with signals.cancelled(say), AsyncExitStack() as stack:
            if trajectories is None:
                await asyncio.to_thread(check_addresses, config)
            connect_ray(say)
            stack.callback(leave_ray)
            stack.enter_context(ray_watched(leave_without_ray))
            demonstrations = recorded or await composed(stack)
            steps = epochs * math.ceil(len(demonstrations) / batch)
            learner = LearnerGroup(supervised(config, lr, steps), model_path=str(model))
            stack.callback(learner.close)
            await asyncio.to_thread(learner.start)
            first, last = await asyncio.to_thread(
                train_on, learner, demonstrations, batch=batch, epochs=epochs, seed=config.seed, say=say
            )
            await write_whole(learner, out, say, how_asked(config.rollout, model))
            return {
                "demonstrations": len(demonstrations),
                "steps": steps,
                "logp_first": first,
                "logp_last": last,
            }

    return asyncio.run(run())
