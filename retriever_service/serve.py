"""The command `serve retriever`. The trainer's command line mounts it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import SecretStr, ValidationError

from retriever_service.cli import Dtype, one_index
from retriever_service.settings import SHARDS, ServerSettings
from services.common.errors import UserError
from services.common.http.auth import token_of
from services.common.loading.lazy import LazyModule
from services.common.names import accepted
from services.common.printing.completed import Completion, kept_in, literals, one_of
from services.common.printing.console import Console
from services.common.printing.help_pages import INDEX
from services.common.printing.messages import said
from services.common.processes import signals
from services.common.validation import fitting

_out = Console()

if TYPE_CHECKING:
    from retriever_service.http import launch, mcp
else:  # FastAPI and numba take seconds, which `unspiral --help` need not wait for
    launch = LazyModule("retriever_service.http.launch")
    mcp = LazyModule("retriever_service.http.mcp")


def _words_of(field: str) -> Completion:
    """The words of a setting that is one of a few."""
    annotation = ServerSettings.model_fields[field].annotation
    return one_of(word for word in literals(annotation) if word != "null")


def serve_retriever(
    place: Annotated[
        str | None, typer.Argument(metavar="INDEX", help=f"{INDEX}; or what else --index takes.")
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            "--index_path",
            help=f"{INDEX}; a FAISS file (with --corpus); qdrant+http://HOST:PORT/NAME; a function of yours, "
            "PACKAGE.MODULE:NAME.",
        ),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", "--corpus_path", help="Corpus that the index must have been built from."),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            help="Servers of this package, each with a part of the passages, in place of an index: "
            "URL,URL,... (URL|URL for replicas of one).",
        ),
    ] = None,
    shard_seconds: Annotated[
        float, typer.Option(min=0.001, help="Longest wait for the shards of a search.")
    ] = 10.0,
    partial_answers: Annotated[
        bool,
        typer.Option("--partial-answers", help="Answer without shards that fail; such answers are marked."),
    ] = False,
    shard_token_env: Annotated[
        str | None, typer.Option(help="Send the shards the token that is in this environment variable.")
    ] = None,
    reload_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds between two looks for a new index in the place of the old one; 0 for none."
        ),
    ] = 0.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000,
    topk: Annotated[int, typer.Option(min=1, help="Passages returned when a request names no number.")] = 3,
    retriever_name: Annotated[
        str | None,
        typer.Option(
            "--retriever_name",
            "--retriever-name",
            "--family",
            autocompletion=kept_in("retriever_service.dense.encoder:FAMILIES", "bm25"),
            help="bm25, or the encoder's family: e5, bge, contriever, auto.",
        ),
    ] = None,
    retriever_model: Annotated[
        str | None,
        typer.Option(
            "--retriever_model", "--retriever-model", "--model", help="Encoder: folder or hub name."
        ),
    ] = None,
    faiss_gpu: Annotated[
        bool, typer.Option("--faiss_gpu", "--faiss-gpu", help="Search a dense index on all GPUs.")
    ] = False,
    dense_device: Annotated[
        str | None,
        typer.Option(
            autocompletion=_words_of("dense_device"),
            help="Search vectors by brute force in PyTorch, not FAISS: cuda (all GPUs) or cpu.",
        ),
    ] = None,
    dense_dtype: Annotated[
        str | None,
        typer.Option(
            autocompletion=_words_of("dense_dtype"),
            help="Numbers of that search: float16 (default on GPUs), int8, float32 (on a CPU).",
        ),
    ] = None,
    encoder_dtype: Dtype = "auto",
    reranker: Annotated[
        str | None,
        typer.Option(help="Cross-encoder (folder or hub name) that reorders the best passages."),
    ] = None,
    rerank_depth: Annotated[
        int, typer.Option(min=1, help="Passages of each query that the reranker reads.")
    ] = 20,
    dialect: Annotated[
        str,
        typer.Option(
            autocompletion=_words_of("dialect"),
            help="Whose answer `query` with `top_k` gets: zerosearch, or auto (rLLM's but on port 6002).",
        ),
    ] = "auto",
    as_tool: Annotated[
        bool,
        typer.Option(
            "--mcp",
            help="Serve the tool `search` of the Model Context Protocol: at /mcp too, or on stdin and stdout "
            "alone, where a client started this with pipes.",
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that serve, sharing the memory-mapped index.")
    ] = 1,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Most queries searched together; with a reranker, most passages it reads together."
        ),
    ] = 256,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Most calls at a time of a function that is the index (PACKAGE.MODULE:NAME).",
        ),
    ] = 1,
    batch_wait_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds that a batch waits for more queries if it is not full.")
    ] = 0.0,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Most queries that may wait; past it 503 with Retry-After.")
    ] = 8192,
    cache_size: Annotated[
        int, typer.Option(min=0, help="Queries whose results are kept; 0 keeps none.")
    ] = 10_000,
    timeout_seconds: Annotated[float, typer.Option(min=0.001, help="Deadline of one request.")] = 30.0,
    max_topk: Annotated[int, typer.Option(min=1, help="Most passages that a request may ask for.")] = 1000,
    max_passages: Annotated[
        int, typer.Option(min=1, help="Most passages of one answer: queries times topk.")
    ] = 1_000_000,
    max_queries: Annotated[int, typer.Option(min=1, help="Most queries of one request.")] = 16_384,
    max_query_chars: Annotated[int, typer.Option(min=1, help="Longest query, in characters.")] = 8192,
    max_connections: Annotated[int, typer.Option(min=1, help="Most open connections of a process.")] = 4000,
    max_bodies_bytes: Annotated[
        int,
        typer.Option(min=1024, help="Most bytes of request bodies in flight; past it 503 with Retry-After."),
    ] = 512 << 20,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request body.")] = 32 << 20,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that requests in flight may go on at a stop.")
    ] = 10.0,
    token_env: Annotated[
        str | None, typer.Option(help="Ask for the token that is in this environment variable.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="UNSPIRAL_RETRIEVER_INSECURE",
            help="Listen beyond this machine without a token, inside a private network.",
        ),
    ] = False,
) -> None:
    """Serve an index over HTTP: Search-R1's /retrieve and /rerank, a search page, /healthz, /readyz,
    /metrics, /docs."""
    signals.hold(signal.SIGUSR1)
    if shards is not None:
        if place is not None or index is not None:
            raise UserError("--shards: takes the place of an index; give one of the two")
        index = SHARDS + shards
    index = one_index("serve retriever", place, index)
    if topk > max_topk:
        raise UserError(f"--topk {topk}: at most --max-topk, {max_topk}, passages are answered")
    token = _token("--token-env", token_env)
    shard_token = _token("--shard-token-env", shard_token_env)
    with fitting(_flag_refused):
        settings = ServerSettings(
            index=index, corpus=str(corpus) if corpus else None, host=host, port=port, topk=topk,
            retriever_name=retriever_name, retriever_model=retriever_model, encoder_dtype=encoder_dtype,
            faiss_gpu=faiss_gpu, dense_device=dense_device, dense_dtype=dense_dtype, reranker=reranker,
            rerank_depth=rerank_depth, dialect=dialect, mcp=as_tool,
            workers=workers, batch_size=batch_size, batch_wait_ms=batch_wait_ms, max_queued=max_queued,
            concurrency=concurrency, cache_size=cache_size, request_timeout_seconds=timeout_seconds,
            max_topk=max_topk,
            max_passages=max_passages, max_queries=max_queries, max_query_chars=max_query_chars,
            max_body_bytes=max_body_bytes, max_bodies_bytes=max_bodies_bytes,
            max_connections=max_connections, insecure=insecure, drain_seconds=drain_seconds,
            token=token, shard_token=shard_token, shard_seconds=shard_seconds,
            partial_answers=partial_answers, reload_seconds=reload_seconds,
        )  # fmt: skip

    def say(line: str) -> None:
        _out.print(f"retriever: {line}", soft_wrap=True, highlight=False, markup=False)

    if as_tool:
        mcp.require_mcp()
        if mcp.is_started_by_client():
            raise typer.Exit(mcp.run_stdio(settings))
    raise typer.Exit(
        launch.run(
            settings,
            lambda url, what: say(f"loading {what} at {url}"),
            lambda url: say(f"ready at {url}, documentation at {url}/docs"),
            say,
        )
    )


def _flag_refused(mistakes: ValidationError) -> UserError:
    first = mistakes.errors()[0]
    flag = str(first["loc"][0]).removeprefix("request_").replace("_", "-")
    words = _words_of(str(first["loc"][0]))("") if first["type"] == "literal_error" else []
    given = str(first["input"])
    return UserError(f"--{flag} {given}: {accepted(given, words) if words else said(first['msg'])}")


def _token(flag: str, variable: str | None) -> SecretStr | None:
    token = token_of(variable) if variable else None
    if variable and token is None:
        raise UserError(f"{flag} {variable}: that variable is not set")
    return SecretStr(token) if token else None
