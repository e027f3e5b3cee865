"""The kinds of index that a server can search: the one place where a new kind is added.

A kind is a `Backend`: which `--index` it takes, a check that loads nothing, and the function that opens it.
What it opens has the protocol `SearchIndex`; nothing else in the package knows the kinds apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from retriever_service.dense.encoder import family_of
from retriever_service.dense.model_files import check_model
from retriever_service.dense.on_device import OnDevice
from retriever_service.dense.rerank import CrossEncoderReranker
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import IndexInfo, is_faiss, read_info, told_file, verify
from retriever_service.ranking import Reranker
from retriever_service.search.index import Index
from retriever_service.search.published import PublishedIndex
from retriever_service.search.remote import PREFIX, QdrantIndex
from retriever_service.search.search_index import SearchIndex
from retriever_service.search.users_index import UsersIndex, load_search
from retriever_service.settings import SHARDS, ServerSettings
from retriever_service.shards.asking import parse
from retriever_service.shards.index import ShardedIndex
from services.common.counting import counted
from services.common.errors import UserError
from services.common.loading.user_code import is_import_path
from services.common.names import near_path

Tell = Callable[[str], None]
"""Told, while an index is opened, what that waits for."""


@dataclass(frozen=True)
class Backend:
    """One kind of index."""

    name: str
    takes: Callable[[ServerSettings], bool]
    """Whether `settings.index` names an index of this kind."""
    check: Callable[[ServerSettings], str]
    """What will be searched, in a few words. Raises what is wrong with it, as far as it shows unloaded."""
    open: Callable[[ServerSettings, Reranker | None], SearchIndex]
    open_telling: Callable[[ServerSettings, Reranker | None, Tell], SearchIndex] | None = None
    """In place of `open`, of a kind that says what its opening waits for."""


def _check_remote(settings: ServerSettings) -> str:
    return settings.index  # the engine is asked when the index is opened


def _open_remote(settings: ServerSettings, reranker: Reranker | None) -> SearchIndex:
    return QdrantIndex(
        settings.index,
        name=settings.retriever_name,
        model=settings.retriever_model,
        dtype=settings.encoder_dtype,
        reranker=reranker,
        rerank_depth=settings.rerank_depth,
    )


def _check_shards(settings: ServerSettings) -> str:
    shards = parse(settings.index.removeprefix(SHARDS))
    return f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"


def _open_shards(
    settings: ServerSettings, reranker: Reranker | None, tell: Tell = lambda line: None
) -> SearchIndex:
    return ShardedIndex(
        settings.index,
        timeout_seconds=settings.shard_seconds,
        partial=settings.partial_answers,
        token=settings.shard_token.get_secret_value() if settings.shard_token is not None else None,
        tell=tell,
        reranker=reranker,
        rerank_depth=settings.rerank_depth,
    )


def _check_file(settings: ServerSettings) -> str:
    path = Path(settings.index)
    if not settings.corpus and not is_faiss(path):
        raise IndexInvalid(f"index {path}: {told_file(path)}")
    if not settings.corpus or not Path(settings.corpus).is_file():
        raise UserError(
            f"index {path} is a FAISS file: it needs --corpus_path, the JSONL file that it was made from"
        )
    return f"{path.name} over {Path(settings.corpus).name}"


def _open_file(settings: ServerSettings, reranker: Reranker | None) -> SearchIndex:
    return PublishedIndex(
        settings.index,
        settings.corpus,
        name=settings.retriever_name,
        model=settings.retriever_model,
        gpu=settings.faiss_gpu,
        on_device=_on_device(settings),
        dtype=settings.encoder_dtype,
        reranker=reranker,
        rerank_depth=settings.rerank_depth,
    )


def _check_folder(settings: ServerSettings) -> str:
    path = Path(settings.index)
    info = verify(path, settings.corpus)
    name = settings.retriever_name
    if name and ("bm25" in name.lower()) != (info.backend == "bm25") and name != info.backend:
        raise UserError(f"--retriever_name {name}: index {path} is {info.backend}")
    if family := _family(settings, info):
        made_with = info.settings["encoder"]
        known = made_with["family"] != "auto" or made_with["model"]
        if known and family_of(family, "") != made_with["family"]:
            raise UserError(
                f"--retriever_name {name}: index {path} was made with an encoder of the family "
                f"{made_with['family']}"
            )
    if info.backend == "bm25" and settings.faiss_gpu:
        raise UserError(
            f"--faiss_gpu: index {path} is bm25, which is searched on the CPU; accepted with a dense index"
        )
    if info.backend == "bm25" and settings.dense_device:
        raise UserError(
            f"--dense-device {settings.dense_device}: index {path} is bm25, which has no vectors; accepted "
            "with a dense or hybrid index"
        )
    return f"{counted(info.passages, 'passage')} ({info.backend})"


def _open_folder(
    settings: ServerSettings, reranker: Reranker | None, tell: Tell = lambda line: None
) -> SearchIndex:
    if not Path(settings.index).exists() and settings.index.endswith(".index"):
        raise IndexInvalid(f"index {settings.index}: no such file{near_path(settings.index)}")
    return Index(
        settings.index,
        settings.corpus,
        name=_family(settings, read_info(settings.index)),
        model=settings.retriever_model,
        gpu=settings.faiss_gpu,
        on_device=_on_device(settings),
        dtype=settings.encoder_dtype,
        reranker=reranker,
        rerank_depth=settings.rerank_depth,
        tell=tell,
    )


def _on_device(settings: ServerSettings) -> OnDevice | None:
    return OnDevice.of(settings.dense_device, settings.dense_dtype)


def _family(settings: ServerSettings, info: IndexInfo) -> str | None:
    """`--retriever_name` where it is the family of an encoder and not the backend."""
    name = settings.retriever_name
    return None if info.backend == "bm25" or name == info.backend else name


def _check_function(settings: ServerSettings) -> str:
    load_search("--index", settings.index)
    return settings.index


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "function",
        lambda s: is_import_path(s.index) and not Path(s.index).exists(),
        _check_function,
        lambda s, reranker: UsersIndex(
            s.index, reranker, concurrency=s.concurrency, timeout_seconds=s.request_timeout_seconds
        ),
    ),
    Backend("shards", lambda s: s.index.startswith(SHARDS), _check_shards, _open_shards, _open_shards),
    Backend("qdrant", lambda s: s.index.startswith(PREFIX), _check_remote, _open_remote),
    Backend("faiss file", lambda s: Path(s.index).is_file(), _check_file, _open_file),
    Backend("folder", lambda s: True, _check_folder, _open_folder, _open_folder),
)
"""All kinds; the first that takes the settings is theirs. Only the last takes whatever is left."""


def backend_of(settings: ServerSettings) -> Backend:
    """The kind of the index that the settings name."""
    return next(backend for backend in BACKENDS if backend.takes(settings))


def check_settings(settings: ServerSettings) -> str:
    """What will be searched, in a few words. Raises what is wrong with the index or the models, as far as it
    shows without loading them."""
    for flag, model in (("--retriever_model", settings.retriever_model), ("--reranker", settings.reranker)):
        if model:
            check_model(flag, model)
    backend = backend_of(settings)
    what = backend.check(settings)
    if settings.faiss_gpu and settings.workers > 1:
        raise UserError(
            f"--workers {settings.workers}: each would load the vectors on the same GPUs; --faiss_gpu goes "
            "with --workers 1"
        )
    if _on_device(settings) is not None:
        flag = f"--dense-device {settings.dense_device}"
        if settings.faiss_gpu:
            raise UserError(f"{flag}: does not go with --faiss_gpu; give one of the two")
        if settings.dense_device == "cuda" and settings.workers > 1:
            raise UserError(
                f"--workers {settings.workers}: each would load the vectors on the same GPUs; "
                f"{flag} goes with --workers 1"
            )
        if backend.name not in ("faiss file", "folder"):
            raise UserError(f"{flag}: {settings.index} is not searched by this server")
    return what


def open_index(settings: ServerSettings, tell: Tell = lambda line: None) -> SearchIndex:
    """The index of a server, with its reranker if the settings name one. `tell` is told what it waits for."""
    reranker = CrossEncoderReranker(settings.reranker) if settings.reranker else None
    backend = backend_of(settings)
    if backend.open_telling is not None:
        return backend.open_telling(settings, reranker, tell)
    return backend.open(settings, reranker)
