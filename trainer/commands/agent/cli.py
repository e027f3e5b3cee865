"""The commands that talk to a trained agent: `ask` and `serve agent`. Their work needs an engine, and is
imported when they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.printing.help_pages import CHECKPOINT, INDEX, in_a_sentence
from trainer.commands import completion
from trainer.commands.examples import example_of
from trainer.commands.options import OF_ANY_RUN, names_run
from trainer.config.schema import Config
from trainer.data import models
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its models (lab:0)

if TYPE_CHECKING:
    from trainer.commands.agent import ask as asking
    from trainer.commands.agent import serve as serving
else:  # they need torch and an engine
    asking = LazyModule("trainer.commands.agent.ask")
    serving = LazyModule("trainer.commands.agent.serve")

Checkpoint = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.checkpoints,
        help=f"{CHECKPOINT}, a model's folder, {OF_ANY_RUN}. May stand alone, as the first word.",
    ),
]
Retriever = Annotated[
    str | None,
    typer.Option(
        metavar="URL|INDEX",
        help=f"Address of a retriever; or what to start one on: {in_a_sentence(INDEX)}, or the "
        "import path of a function. Default: the run's own.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.changes,
        help="The same as KEY=VALUE at the end. Repeatable.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of the sampling. Default: the run's. Greedy needs none.")
]


def _say(text: str) -> None:
    typer.echo(text, err=True)


def checkpoint_and_words(command: str, option: str | None, words: list[str]) -> tuple[str, list[str]]:
    """What names the weights, behind --checkpoint or as the first word that is no KEY=VALUE, and the other
    words. Raises UserError where none does."""
    if option is not None:
        return option, words
    at = next((n for n, word in enumerate(words) if not is_change(word)), None)
    expected = f"expected a checkpoint, a run or latest. {example_of(command)}"
    if at is None:
        raise UserError(f"{command}: no checkpoint is named; {expected}")
    if not words[at].strip():  # an unset variable, which would mean the current folder
        raise UserError(f"{command}: an empty word where a checkpoint is named; {expected}")
    rest = [*words[:at], *words[at + 1 :]]
    if all(map(is_change, rest)) and not models.is_there(words[at]) and not names_run(words[at]):
        raise UserError(f"{command}: {words[at]} names no checkpoint; {expected}")
    return words[at], rest


def question_and_changes(words: list[str]) -> tuple[str | None, list[str]]:
    """The question, if there is one, and the changes KEY=VALUE of settings. Raises UserError for a question
    in several words, which a shell makes of one without quotes."""
    changes = [word for word in words if is_change(word)]
    asked = [word for word in words if not is_change(word)]
    if len(asked) > 1:
        for word in asked:
            if "=" in word and word.partition("=")[0].isidentifier():
                raise UserError(
                    f"ask: {word}: no key {word.partition('=')[0]}; expected such as rollout.topk=5"
                )
        raise UserError(f"ask: {len(asked)} questions; quote the question: 'who wrote Hamlet?'")
    return (asked[0] if asked else None), changes


def is_change(word: str) -> bool:
    """Whether it is KEY=VALUE, with SECTION.KEY or a key such as seed."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (
        key in Config.model_fields or ("." in key and key.replace(".", "_").isidentifier())
    )


def ask(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT QUESTION KEY=VALUE",
            autocompletion=completion.checkpoint_and_changes,
            help=f"{CHECKPOINT}, a model's folder, latest or best, where --checkpoint is not given. The "
            "question; without it those that are typed, or each line of a pipe. Then changes to the "
            "run's settings, such as rollout.engine=transformers.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    retriever: Retriever = None,
    overrides: Set = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Seed = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Show the log-prob of each token that the model wrote.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per question, with token ids and log-probs.")
    ] = False,
) -> None:
    """Ask a trained agent, and watch it think, search and answer: the loop, template and engine of
    training."""
    checkpoint, words = checkpoint_and_words("ask", checkpoint, words or [])
    question, changes = question_and_changes(words)
    asking.run_ask(
        checkpoint,
        question,
        retriever=retriever,
        overrides=[*(overrides or []), *changes],
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
        as_json=as_json,
        say=_say,
    )


def serve_agent(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT KEY=VALUE",
            autocompletion=completion.checkpoint_and_changes,
            help=f"{CHECKPOINT}, a model's folder, latest or best, where --checkpoint is not given. Then "
            "changes to the run's settings, such as rollout.topk=5.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    retriever: Retriever = None,
    overrides: Set = None,
    seed: Seed = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model. Default: that of the run and checkpoint.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8300,
    running: Annotated[int, typer.Option(min=1, help="Questions worked on at the same time.")] = 8,
    waiting: Annotated[int, typer.Option(min=0, help="Questions that may wait; past it a 429.")] = 32,
    connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Most open connections.")
    ] = 1000,
) -> None:
    """Serve a trained agent as an OpenAI-compatible chat endpoint: /v1/models, /v1/chat/completions."""
    checkpoint, changes = checkpoint_and_words("serve agent", checkpoint, words or [])
    raise typer.Exit(
        serving.run_serve_agent(
            checkpoint,
            retriever=retriever,
            overrides=[*(overrides or []), *changes],
            seed=seed,
            name=name,
            host=host,
            port=port,
            running=running,
            waiting=waiting,
            connections=connections,
            say=_say,
        )
    )
