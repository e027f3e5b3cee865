"""Commands of the retriever: `index build|info|search` and `serve retriever`. The trainer's command line mounts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .errors import BadSetting

index_app = typer.Typer(help="Build, inspect and search indexes.", no_args_is_help=True)
_out, _err = Console(), Console(stderr=True)


@index_app.command("build")
def build(
    corpus: Annotated[Path, typer.Option(help="Corpus file: JSONL, gzipped or not.")],
    out: Annotated[Path, typer.Option(help="Folder of the index to be made.")],
    backend: Annotated[str, typer.Option(help="bm25 (dense needs the extra `dense`).")] = "bm25",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")] = False,
    language: Annotated[
        str, typer.Option(help="Language of stemmer and stop words; `none` leaves words as they are.")
    ] = "english",
    stem: Annotated[bool, typer.Option(help="Reduce words to their stems.")] = True,
    stop_words: Annotated[bool, typer.Option(help="Leave out stop words.")] = True,
    k1: Annotated[float, typer.Option(help="Saturation of term frequency.")] = 0.9,
    b: Annotated[float, typer.Option(help="Weight of the passage's length, 0 to 1.")] = 0.4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another index in the folder.")] = False,
) -> None:
    """Index a corpus. An interrupted build goes on where it was."""
    from .build import build_index

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def tell(stage: str, share: float, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0, note=note)
            bars.update(tasks[stage], completed=share, note=note)

        info = build_index(
            corpus, out, backend=backend, skip_bad=skip_bad, language=language, stem=stem, stop_words=stop_words, k1=k1, b=b,
            overwrite=overwrite, progress=tell,
        )  # fmt: skip
    _out.print(f"{out}: {info.passages:,} passages, {info.backend}, {info.bytes / 2**20:,.1f} MiB")
    if info.skipped:
        _err.print(f"{info.skipped:,} malformed lines were left out, the first: {info.skipped_reasons[0]}", markup=False)


@index_app.command("info")
def info(
    index: Annotated[Path, typer.Option(help="Folder of an index.")],
    corpus: Annotated[Path | None, typer.Option(help="Check that the index was built from this file.")] = None,
) -> None:
    """Check an index and print what it is, as JSON."""
    from dataclasses import asdict

    from .index import verify

    _out.print_json(data=asdict(verify(index, corpus)))


@index_app.command("search")
def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    index: Annotated[Path, typer.Option(help="Folder of an index.")],
    topk: Annotated[int, typer.Option(min=1, help="Most passages to show.")] = 3,
) -> None:
    """Search an index without a server."""
    from .client import clean_query
    from .index import Index

    opened = Index(index)
    (ranked,) = opened.ranker.rank([clean_query(query)], topk)
    if not ranked:
        _out.print("no passage matches")
    for place, (row, score) in enumerate(ranked, 1):
        identity, contents = opened.documents.get(row)
        title, _, text = contents.partition("\n")
        _out.print(f"{place}. {title}  (id {identity}, score {score:.3f})", style="bold", markup=False, highlight=False)
        _out.print(f"   {text}", markup=False, highlight=False)


def serve_retriever(
    index: Annotated[Path | None, typer.Option("--index", "--index_path", help="Folder of an index.")] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", "--corpus_path", help="Check that the index was built from this file.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000,
    topk: Annotated[int, typer.Option(min=1, help="Passages returned when a request names no number.")] = 3,
    retriever_name: Annotated[
        str | None, typer.Option("--retriever_name", "--retriever-name", help="Must fit the index: bm25.")
    ] = None,
    retriever_model: Annotated[
        str | None, typer.Option("--retriever_model", "--retriever-model", help="Encoder of a dense index.")
    ] = None,
    faiss_gpu: Annotated[bool, typer.Option("--faiss_gpu", "--faiss-gpu", help="Search a dense index on the GPU.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Most queries searched together.")] = 256,
    batch_wait_ms: Annotated[float, typer.Option(min=0, help="How long a batch that is not full waits for company.")] = 0.0,
    max_queued: Annotated[int, typer.Option(min=1, help="Most queries that may wait; past it 503 with Retry-After.")] = 8192,
    cache_size: Annotated[int, typer.Option(min=0, help="Queries whose results are kept; 0 keeps none.")] = 10_000,
    timeout_seconds: Annotated[float, typer.Option(min=0.001, help="Deadline of one request.")] = 30.0,
    token_env: Annotated[str | None, typer.Option(help="Ask for the token that is in this environment variable.")] = None,
) -> None:
    """Serve an index over HTTP: Search-R1's /retrieve, /healthz, /readyz, /metrics, /docs."""
    from .index import read_info
    from .launch import run
    from .settings import ServerSettings

    if index is None:
        raise BadSetting("serve retriever: --index is missing; expected a folder made by `unspiral index build`")
    info = read_info(index)
    if retriever_name and retriever_name != info.backend:
        raise BadSetting(f"--retriever_name {retriever_name}: index {index} is {info.backend}")
    if info.backend == "bm25" and faiss_gpu:
        raise BadSetting(f"--faiss_gpu: index {index} is bm25, which is searched on the CPU; accepted with a dense index")
    if token_env and not os.environ.get(token_env):
        raise BadSetting(f"--token-env {token_env}: that variable is not set")
    settings = ServerSettings(
        index=str(index), corpus=str(corpus) if corpus else None, host=host, port=port, topk=topk, batch_size=batch_size,
        batch_wait_ms=batch_wait_ms, max_queued=max_queued, cache_size=cache_size, request_timeout_seconds=timeout_seconds,
        token=os.environ[token_env] if token_env else None,
    )  # fmt: skip

    def started(url: str) -> None:
        _out.print(
            f"retriever: {info.passages:,} passages ({info.backend}) at {url}, documentation at {url}/docs", soft_wrap=True
        )

    raise typer.Exit(run(settings, started))
