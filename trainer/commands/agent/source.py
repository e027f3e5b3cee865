"""From what a user names to an agent: a run's checkpoint with the settings that it was trained under, or a
model's folder.

A checkpoint holds the settings of its run, and an exported model those of its rollouts, so one that was
copied elsewhere knows its template too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from retriever_service.search.users_index import load_search
from retriever_service.settings import ServerSettings
from services.agent.agent import AgentSpec, Curves
from services.common.errors import UserError
from services.common.files import hints
from services.common.http.addresses import is_http
from services.common.loading.extras import not_installed
from services.common.loading.lazy import LazyModule
from services.common.loading.user_code import is_import_path
from services.common.runs.paths import CONFIG, is_run
from services.common.scratch import scratch_folder
from services.rollout.worker.templates import template_class
from services.rollout.worker.tools import load_tools
from trainer.config.schema import Config, load_config, override, parse_config
from trainer.data import models
from trainer.learner.checkpoint import find
from trainer.learner.export import export_checkpoint
from trainer.learner.model.asked import kept_in, unlike

if TYPE_CHECKING:
    from retriever_service.http import launch as retriever
    from retriever_service.search import backends
else:  # numba and FastAPI take seconds, which a mistake in the words need not wait for
    retriever = LazyModule("retriever_service.http.launch")
    backends = LazyModule("retriever_service.search.backends")

Say = Callable[[str], None]
INDEX = "retriever_index"
"""Where a run keeps the index of its corpus."""
EVAL_INDEX = "eval_retriever_index"
"""Where it keeps that of its held-out questions, if they have a corpus of their own."""
MASKED = "***"


@dataclass(frozen=True)
class Named:
    """What a user has named: the weights, and the settings that go with them."""

    name: str
    config: Config
    checkpoint: Path | None
    """None: `model` is a folder in Hugging Face form already."""
    model: Path | None
    run: Path | None
    """The run's folder, if the checkpoint lies in one."""


def named(given: str, overrides: list[str], say: Say = lambda line: None) -> Named:
    """The checkpoint, run or model of this name. say: as of `find`. Raises UserError."""
    if given in models.KNOWN or ":" in given or (Path(given) / "config.json").is_file():
        model = models.resolve(given)
        raw = {
            "model": {"path": given},
            "data": {"train": "none"},
            "retriever": {"url": "http://none"},
            "rollout": kept_in(model),
        }
        override(raw, overrides)
        return Named(Path(given).name, parse_config(raw), None, model, None)
    checkpoint = find(given, say=say)
    parents = checkpoint.absolute().parents[:2]
    run = next((folder for folder in parents if is_run(folder)), None)
    return Named(
        f"{run.name if run else checkpoint.parent.name}/{checkpoint.name}",
        _config_of(checkpoint, run, overrides),
        checkpoint,
        None,
        run,
    )


def _config_of(checkpoint: Path, run: Path | None, overrides: list[str]) -> Config:
    """The settings of a checkpoint, by itself or by its run."""
    identity = hints(checkpoint / "state.json").get("identity")
    # An earlier version kept none.
    settings = identity.get("settings") if isinstance(identity, dict) else None
    if isinstance(settings, dict):
        override(settings, overrides)
        return parse_config(settings)
    if run is None:
        raise UserError(
            f"checkpoint {checkpoint}: it holds no settings and lies in no run's folder; expected one that "
            "does"
        )
    return load_config(run / CONFIG, overrides)


def agent_spec(
    given: str,
    retriever_given: str | None,
    overrides: list[str],
    seed: int | None,
    parts: ExitStack,
    say: Say,
) -> AgentSpec:
    """What an agent of this name is made of: its weights are exported, and its retriever is started, until
    `parts` is closed. Raises UserError, and what these two raise."""
    source = named(given, overrides, say)
    place = retriever_place(source, retriever_given)
    check_own_parts(source, place, given=retriever_given is not None)  # before the weights: they take a while
    model = source.model
    if source.checkpoint is not None:
        folder = parts.enter_context(scratch_folder("agent"))
        say(f"weights of {source.checkpoint}")
        model = export_checkpoint(source.checkpoint, folder / "model")
    assert model is not None  # one of both is set
    if line := unlike(model, source.config.rollout, task=True, name=source.checkpoint):
        say(line)
    url = retriever_url(source, retriever_given, parts, say)
    config = source.config
    return AgentSpec(
        source.name,
        str(model),
        url,
        config.retriever.timeout_seconds,
        config.rollout,
        config.seed if seed is None else seed,
        curves_of(source),
    )


def check_own_parts(source: Named, place: str, *, given: bool) -> None:
    """Load what is the user's own code, and look at the index. place: the retriever's; given: by an option.
    Raises UserError: of a part that the run's configuration names, with its key, and with the packages that
    are missing too."""
    rollout = source.config.rollout
    is_function = is_import_path(place) and not Path(place).exists()
    try:
        template_class(rollout.template)
        load_tools(rollout.tools)
        if is_function and not given:
            load_search("retriever.index", place)
    except UserError as error:
        lacks = [not_installed(name) for name in ("torch", "transformers") if find_spec(name) is None]
        line = f"{error}; the key is of the configuration of {source.name}"
        raise UserError("; and ".join([line, *lacks[:1]])) from error
    if is_function and given:
        load_search("--retriever", place)
    elif not is_function and not is_http(place):
        backends.check_settings(ServerSettings(index=place))


def curves_of(source: Named) -> Curves | None:
    """The way to the curves of a checkpoint's run; None for a model's folder."""
    if source.run is None:
        return None
    store = source.config.store.url or ""
    if is_http(store) and MASKED not in store:
        return Curves(f"{store.rstrip('/')}/#runs={quote(quote(source.run.name))}", None)
    place = store or shlex.quote(str(source.run))
    return Curves(None, None if MASKED in place else f"unspiral serve likelihood --store {place}")


def retriever_url(source: Named, given: str | None, parts: ExitStack, say: Say) -> str:
    """Address of the retriever: the one given, that of the run, or one that is started here on the index
    given, or on the run's. Raises UserError."""
    place = retriever_place(source, given)
    held_out = source.run / EVAL_INDEX if source.run else None
    if given is None and held_out and held_out.is_dir():
        say(f"the run's held-out questions have an index of their own: --retriever {held_out}")
    return place if is_http(place) else _served(place, source, parts, say)


def retriever_place(source: Named, given: str | None) -> str:
    """The address of the retriever, or the index to start one on: what is given, otherwise the run's. Raises
    UserError."""
    settings = source.config.retriever
    if given is not None:
        return given
    if source.checkpoint is None:
        raise UserError(f"--retriever is missing: {source.name} is a model's folder, which names none")
    if settings.url:
        if MASKED in settings.url:
            raise UserError(
                f"--retriever is missing: the address {settings.url} is kept without its password"
            )
        return settings.url
    kept = source.run / INDEX if source.run else None
    if settings.corpus and kept is not None and kept.is_dir():
        return str(kept)
    if settings.index and (Path(settings.index).exists() or is_import_path(settings.index)):
        return settings.index
    wanted = settings.index or kept or settings.corpus
    raise UserError(
        f"--retriever is missing: the run's own index, {wanted}, is not there; expected an http address or "
        "a folder made by `unspiral index build`"
    )


def _served(index: str, source: Named, parts: ExitStack, say: Say) -> str:
    """A retriever on an index, in this process."""
    say(f"retriever on {index}")
    run = source.config
    settings = ServerSettings(
        index=index, port=0, topk=run.rollout.topk, concurrency=run.retriever.concurrency
    )
    seconds = run.retriever.start_timeout_seconds
    started = retriever.serve_in_thread(settings, start_timeout_seconds=seconds)
    parts.callback(started.stop)
    return started.url
