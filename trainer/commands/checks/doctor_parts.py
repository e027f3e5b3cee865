"""Checks of `unspiral doctor --config`: the parts of the user's own, loaded as a run loads them, the reward
called, and the prompts and held-out questions; without a cluster, and without a model that is not here
yet."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from services.common.counting import counted
from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.loading.user_code import is_import_path
from services.common.loading.what_it_has import defined_at
from services.contracts import Question
from trainer.commands.checks.doctor_calls import check_call, check_template
from trainer.commands.checks.doctor_reward import check_reward, first_question
from trainer.commands.checks.doctor_said import after_tools
from trainer.commands.checks.findings import Finding, tried
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.checks.overlap import repeated
from trainer.data.named_columns import keys_of, named_in, validating
from trainer.data.questions import load_questions, parsed
from trainer.learner.model.asked import unlike
from trainer.rewards import Reward
from trainer.session.own_parts import parts_of

if TYPE_CHECKING:
    from services.rollout.worker import templates, tokenizer
    from trainer.session.preflight import prompts, template_trial
else:  # transformers takes seconds
    prompts = LazyModule("trainer.session.preflight.prompts")
    template_trial = LazyModule("trainer.session.preflight.template_trial")
    templates = LazyModule("services.rollout.worker.templates")
    tokenizer = LazyModule("services.rollout.worker.tokenizer")

PROMPTS = 100
"""Questions whose prompts are made."""


def check_parts(config: Config) -> Iterator[Finding]:
    """One line per part, then one for the prompts that the template makes with the model's tokenizer."""
    bad = False
    question = first_question(config)
    here = _here(config)
    folder = _model_here(config.model.path)
    can_encode = here["the model"] and here["transformers"]
    for part in parts_of(config):
        loaded = tried(part.key, part.value, part.load)
        if isinstance(loaded, Finding):
            bad |= part.key == "rollout.template"
            yield loaded
        elif part.key == "reward.kind" and is_import_path(part.value):
            yield check_reward(config, cast("Reward", loaded), after_tools)
        elif part.key == "rollout.template" and folder and can_encode and is_import_path(part.value):
            found = check_template(part.key, part.value, folder, config, question)
            bad |= found.level == "bad"
            yield found
        elif trial := check_call(part.key, part.value, loaded, config, question):
            yield _placed(trial, loaded)
        else:
            yield Finding(part.key, "good", f"{part.value}: loaded")
    if not bad:
        yield _prompts(config, here)
    if folder is not None and (line := unlike(folder, config.rollout)):
        yield Finding("model.path", "note", config.model.path, line.removeprefix("warning: "))


def _placed(found: Finding, loaded: object) -> Finding:
    """A bad finding with the place of the user's function, where it names none: of what this returned."""
    if found.level != "bad" or ", line " in found.advice:
        return found
    function = next(iter(loaded.values())) if isinstance(loaded, Mapping) else loaded
    return replace(found, advice=f"{found.advice}{defined_at(function)}")


def _here(config: Config) -> dict[str, bool]:
    """What prompts are made of, and whether it is here."""
    folder = _model_here(config.model.path)
    return {
        "the model": folder is not None and not isinstance(_checked(folder, config), Finding),
        "data.train": Path(config.data.train).exists(),
        "transformers": importlib.util.find_spec("transformers") is not None,
    }


def _prompts(config: Config, here: dict[str, bool]) -> Finding:
    """Whether the template makes prompts of the first questions that are short enough."""
    folder = _model_here(config.model.path)
    if folder is None or not all(here.values()):
        lacking = " and ".join(part for part, found in here.items() if not found)
        why = f"they need {lacking}, not here yet; a run checks them when it starts"
        return Finding("prompts", "note", "not made", why)
    made = tried("prompts", config.rollout.template, _prompts_made, config, folder)
    if isinstance(made, Finding):
        return made
    count, notes = made
    seen = f"made of the first {counted(count, 'question')}"
    return Finding("prompts", "note" if notes else "good", seen, "; ".join(notes))


def _checked(folder: Path, config: Config) -> Path | Finding:
    return tried("model.path", config.model.path, models.check_folder, folder, config.model.path)


def _prompts_made(config: Config, model: Path) -> tuple[int, list[str]]:
    """How many, and what they do not tell of the tools where the template comes with Unspiral. Raises
    UserError as a run's start does."""
    train = config.data.train
    rows = islice(parsed(Path(train), keys=keys_of(config.data, train)), PROMPTS)
    questions = [item[1].question for item in rows if isinstance(item, tuple)]
    loaded = tokenizer.load_tokenizer(model)
    prompts.check_prompts("data.train", questions, loaded, config.rollout, trained=True)
    if is_import_path(config.rollout.template) or not config.rollout.tools or not questions:
        return len(questions), []
    template = templates.make_template(config.rollout.template, loaded, config.rollout)
    return len(questions), template_trial.untold(template, config.rollout, questions[0])


def _model_here(given: str) -> Path | None:
    """The folder of a model that needs neither a download nor a conversion."""
    folder = models.cached(given) if given in models.KNOWN else Path(given).expanduser()
    return folder if folder.is_dir() else None


def check_leak(config: Config) -> Iterator[Finding]:
    """Whether held-out questions are trained on, which a run says too."""
    files = [config.data.train, config.data.eval]
    if not all(file and Path(file).exists() for file in files):
        return
    try:
        train, held_out = (_questions(config, str(file)) for file in files)
    except UserError:  # the line of the file says it
        return
    held_out = held_out[: config.evaluation.limit]
    if count := repeated(held_out, train):
        data = config.data
        command = validating(
            str(data.eval), data.train, null_is_empty=data.null_is_empty, **named_in(data).given
        )
        advice = f"held-out scores then measure memory; {command} lists them"
        yield Finding(
            "held-out questions",
            "note",
            f"{count:,} of {len(held_out):,} of data.eval stand in data.train too",
            advice,
        )


def _questions(config: Config, file: str) -> list[Question]:
    return load_questions(file, skip_bad=True, keys=keys_of(config.data, file)).rows
