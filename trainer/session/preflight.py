"""Checks before anything slow starts: room on disk and in memory, files of the retriever, length of
the prompts, held-out questions."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from retriever_service.addresses import check_address
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.description import read_info
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.search.users_index import load_search
from services.common import hub
from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.user_code import is_import_path
from services.common.names import accepted
from services.common.redaction import address_without_secrets
from services.common.users_files import load_object, reading
from services.contracts import Question
from services.rollout.worker.loop import prompt_of
from services.rollout.worker.templates import Template, make_template
from services.settings import CPU_CACHE_GIB, RetrieverSettings, RolloutSettings
from trainer.config.held_out_scores import source_in
from trainer.config.learner import LoRASettings
from trainer.config.schema import Config
from trainer.data import models
from trainer.data.checks.overlap import repeated
from trainer.data.demonstrations import read_demonstrations
from trainer.data.questions import load_questions
from trainer.loop.run.sources import label, largest
from trainer.loop.update.matched_step import read_series

GIB = 1 << 30
LISTEN_SECONDS = 5.0
"""Longest wait, before Ray starts, for a server to take a connection at a retriever's address: one that is
being started beside the run may need a moment."""
TRY_SECONDS = 0.25
LOOKED_AT = 100
"""Rows at the start of a question file that are read before anything slow starts."""


def check_named_files(config: Config) -> None:
    """What a run is to read, before its folder is made; what is on the hub is fetched. Raises UserError: one
    line with the key of each file and folder that is not there; EnvironmentLacks where the hub is out of
    reach."""
    named = {
        "model.path": config.model.path,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
    }
    for key, settings in _retrievers(config):
        named[f"{key}.corpus"] = settings.corpus
    named |= indexes_of(config)
    missing = [f"{key}: {value}" for key, value in named.items() if value and not _is_there(key, value)]
    if len(missing) == 1 and missing[0].startswith("model.path: "):
        models.resolve(config.model.path)  # it says what a model may be
    if missing:
        raise UserError(f"{'; '.join(missing)}: no such file or folder")
    for key, value in named.items():
        if value and models.on_hub(value) and not key.endswith(("model.path", ".index")):
            hub.local_file(key, value, models.aside)
    if models.on_hub(config.model.path):
        models.resolve(config.model.path)
    if not config.data.skip_bad:
        for file in (config.data.train, config.data.eval):
            if file and Path(file).exists():
                load_questions(file, first=LOOKED_AT)


def _is_there(key: str, value: str) -> bool:
    return Path(value).expanduser().exists() if key.endswith(".index") else models.is_there(value)


def _retrievers(config: Config) -> Iterator[tuple[str, RetrieverSettings]]:
    """Those that are set, by key."""
    yield "retriever", config.retriever
    if config.evaluation.retriever:
        yield "evaluation.retriever", config.evaluation.retriever


def indexes_of(config: Config) -> dict[str, str]:
    """Index folders that a configuration names, by key."""
    return {
        f"{key}.index": settings.index
        for key, settings in _retrievers(config)
        if settings.index and not is_import_path(settings.index)
    }


def check_retrievers(config: Config) -> None:
    """Raises UserError where an index folder or a corpus file is not there."""
    for key, index in indexes_of(config).items():
        check_index(key, index)
    for key, settings in _retrievers(config):
        if settings.index and is_import_path(settings.index):
            load_search(f"{key}.index", settings.index)
        corpus = settings.corpus
        if corpus and not models.is_there(corpus):
            raise UserError(f"{key}.corpus: {corpus}: no such file or folder; docs/data.md says what is read")
        check_corpus(key, settings)


def keys_of(settings: RetrieverSettings) -> CorpusKeys:
    """Columns of the corpus that the configuration names."""
    return CorpusKeys(settings.text_key, settings.title_key, settings.id_key)


def check_corpus(key: str, settings: RetrieverSettings) -> None:
    """Raises UserError where the first row of a corpus file is no passage: after the start of Ray it would be
    learnt late. The other rows are read by the build."""
    if not settings.corpus or not Path(settings.corpus).exists():  # a name of the laboratory or the hub
        return
    try:
        next(read_corpus(settings.corpus, skip_bad=settings.skip_bad, keys=keys_of(settings)), None)
    except UserError as e:
        raise UserError(f"{key}.corpus: {e}") from None


def check_addresses(config: Config) -> None:
    """Raises EnvironmentLacks where nothing listens at a retriever's address. Asked last of all checks, since
    it may wait for LISTEN_SECONDS, and before Ray starts."""
    for key, settings in _retrievers(config):
        if settings.url:
            _check_listener(f"{key}.url", settings.url, min(LISTEN_SECONDS, settings.start_timeout_seconds))


def _check_listener(key: str, url: str, seconds: float) -> None:
    """A server that still loads its index takes a connection too, and is waited for later."""
    check_address(key, url, "http://HOST:PORT or https://HOST:PORT is accepted")
    parts = httpx.URL(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((parts.host, port), max(0.1, until - time.monotonic())).close()
            return
        except OSError as e:
            if time.monotonic() + TRY_SECONDS > until:
                raise EnvironmentLacks(
                    f"{key}: nothing listens at {address_without_secrets(url)}, tried for {seconds:g} s "
                    f"({e.strerror or e}); expected a running retriever there, such as `unspiral serve "
                    f"retriever INDEX --port {port}`; or give {key.removesuffix('url')}index or .corpus, and "
                    "the run starts one itself"
                ) from e
        time.sleep(TRY_SECONDS)


def check_index(key: str, folder: str) -> None:
    """Raises UserError, with the key, where a folder is no index; the index's files are not looked at."""
    try:
        read_info(folder)
    except IndexInvalid as e:
        raise UserError(f"{key}: {str(e).removeprefix('index ')}") from None


def check_learner_files(config: Config) -> None:
    """Raises UserError where a file that the update needs is not there, or malformed."""
    if config.learner.match_kl:
        read_series(config.learner.match_kl)
    if config.algorithm.supervised.every and config.algorithm.supervised.data:
        read_demonstrations(config.algorithm.supervised.data)


def check_prompts(
    key: str,
    questions: list[Question],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    trained: bool = False,
) -> None:
    """Raises UserError for the first question whose prompt is too long, and for a template whose trajectories
    cannot be trained on where they are to be. `key` says where questions are from."""
    template = make_template(settings.template, tokenizer, settings)
    if trained:
        check_one_sequence(template, settings)
    for question in questions:
        try:
            prompt_of(question, template, settings)
        except UserError as e:
            raise UserError(f"{key}: {e}") from None


def check_one_sequence(template: Template, settings: RolloutSettings) -> None:
    """Raises UserError where a turn is shown without the thoughts of earlier ones: there is no one sequence
    of tokens to train on."""
    if getattr(template, "drops_thoughts", False):
        raise UserError(
            f"rollout.template={settings.template}: the model's chat template drops the thoughts of earlier "
            "turns, so that the tokens of a turn are no prefix of those of the next, and a trajectory is no "
            "one sequence to train on; accepted is rollout.thoughts=keep, which leaves them in"
        )


def parameter_count(model: Path) -> int:
    """Parameters of a Hugging Face folder."""
    return sum(math.prod(shape) for _, shape in _shapes(model))


def parameters_by_config(model: Path) -> int | None:
    """Parameters by the sizes in config.json, of a folder that has it and no weights yet; None for another.
    Raises UserError where it is no decoder whose layers are alike: experts are counted by their weights."""
    file = model / "config.json"
    if not file.is_file() or any(model.glob("*.safetensors")):
        return None
    settings = load_object(file, f"{model}: config.json")
    experts = any("expert" in name for name in settings)
    with reading(f"{model}: no weights there, and config.json", "the sizes of a decoder"):
        if experts:
            raise ValueError("it has experts; fetch the weights first")
        width, heads = settings["hidden_size"], settings["num_attention_heads"]
        head = settings.get("head_dim") or width // heads
        attention = width * head * 2 * (heads + (settings.get("num_key_value_heads") or heads))
        layer = attention + 3 * width * settings["intermediate_size"] + 2 * width
        embeddings = (1 if settings.get("tie_word_embeddings") else 2) * settings["vocab_size"] * width
        return int(settings["num_hidden_layers"] * layer + embeddings + width)


def adapter_count(model: Path, lora: LoRASettings) -> int:
    """Parameters of the adapters that `learner.lora` puts beside a model's layers."""
    return sum(lora.rank * sum(shape) for name, shape in _shapes(model) if _gets_adapter(name, shape, lora))


def _gets_adapter(name: str, shape: list[int], lora: LoRASettings) -> bool:
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or layer.endswith("embed_tokens"):
        return False
    if lora.targets == "all-linear":
        return not layer.endswith("lm_head")
    return layer.endswith(tuple(lora.targets))


def _shapes(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a folder's tensors, from the headers of its safetensors files."""
    for file in sorted(model.glob("*.safetensors")):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]


def check_room(
    config: Config, model: Path, *, disk_free: int | None = None, memory_free: int | None = None
) -> None:
    """Raises EnvironmentLacks if checkpoints won't fit on the run's disk, or learner and CPU workers in
    memory.

    Counted: 16 bytes per trained parameter for a checkpoint (fp32 weights, two moments, export) times those
    kept plus the one being written; 16 bytes per trained parameter of a CPU learner, 4 per frozen one and per
    parameter of each CPU worker, and each worker's cache. With `learner.lora` the adapters alone are trained.
    """
    import torch

    parameters = parameter_count(model)
    lora = config.learner.lora
    trained = adapter_count(model, lora) if lora else parameters
    frozen = parameters if lora else 0
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    disk_free = shutil.disk_usage(folder).free if disk_free is None else disk_free
    kept = config.trainer.keep_checkpoints
    best = config.trainer.keep_best
    disk = 16 * trained * (kept + best + 1) + GIB // 4
    if disk_free < disk:
        raise EnvironmentLacks(
            f"run.dir: {folder} has {disk_free / GIB:.1f} GiB free; {disk / GIB:.1f} GiB are needed for "
            f"checkpoints of {trained / 1e6:.0f} M parameters: {kept} (trainer.keep_checkpoints), "
            f"{'the best (trainer.keep_best), ' if best else ''}and the one that is being written"
        )
    if torch.cuda.is_available() or os.environ.get(
        "RAY_ADDRESS"
    ):  # on a cluster, learner and workers have nodes of their own
        return
    memory_free = psutil.virtual_memory().available if memory_free is None else memory_free
    workers = config.rollout.workers if isinstance(config.rollout.workers, int) else 1
    cache = config.rollout.kv_cache_gib or CPU_CACHE_GIB
    memory = 16 * trained + 4 * frozen + 4 * workers * parameters + workers * int((cache + 0.75) * GIB) + GIB
    if memory_free < memory:
        raise EnvironmentLacks(
            f"memory: {memory_free / GIB:.1f} GiB are free; about {memory / GIB:.1f} GiB are needed for "
            f"{parameters / 1e6:.0f} M parameters and "
            f"{workers} rollout workers (rollout.workers, rollout.kv_cache_gib)"
        )


def check_held_out(
    config: Config, train: Sequence[Question], held_out: Sequence[Question], say: Callable[[str], None]
) -> None:
    """Raises UserError where `trainer.best_by` names a data source without a score of its own; says how many
    questions of data.eval stand in data.train too."""
    if not held_out:
        return
    _check_source(config.trainer.best_by, held_out)
    if count := repeated(held_out, train):
        say(
            f"warning: {count:,} of {len(held_out):,} questions of data.eval stand in data.train too, with "
            "an answer in common; `unspiral data validate --against` lists them"
        )


def _check_source(by: str, held_out: Sequence[Question]) -> None:
    wanted = source_in(by)
    if wanted is None:
        return
    scored = largest(Counter(label(question.data_source) for question in held_out))
    if label(wanted) not in scored:
        raise UserError(
            f"trainer.best_by={by}: data.eval has no score of a source {wanted}; {accepted(wanted, scored)}"
        )
