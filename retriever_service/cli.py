"""Commands of the retriever: `index build|info|search` and their like. The trainer's command line mounts
them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from retriever_service.index_folder.description import BACKENDS, LEFT_OUT, IndexInfo, stamp_of, verify
from retriever_service.index_folder.in_words import in_words
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.settings import ServerSettings
from services.common import hub
from services.common.counting import counted
from services.common.counting import left_out as left_out_lines
from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.printing.completed import kept_in, one_of
from services.common.printing.console import Console
from services.common.printing.harmless import harmless
from services.common.printing.help_pages import CORPUS, INDEX
from services.common.progress import progress_on
from services.common.records.columns import SUCH_AS

index_app = typer.Typer(help="Build, inspect and search indexes.", no_args_is_help=True)
_out = Console()
_err = Console(stderr=True)

if TYPE_CHECKING:
    from retriever_service import client
    from retriever_service.index_folder import remarks
    from retriever_service.index_folder.remarks import Remarks
    from retriever_service.indexing import build as building
    from retriever_service.indexing import changes as changing
    from retriever_service.indexing import convert as converting
    from retriever_service.indexing import merge as merging
    from retriever_service.search import backends, remote
else:  # FastAPI, numba and httpx take seconds, which `unspiral --help` need not wait for
    backends = LazyModule("retriever_service.search.backends")
    client = LazyModule("retriever_service.client")
    remarks = LazyModule("retriever_service.index_folder.remarks")
    remote = LazyModule("retriever_service.search.remote")
    building = LazyModule("retriever_service.indexing.build")
    changing = LazyModule("retriever_service.indexing.changes")
    converting = LazyModule("retriever_service.indexing.convert")
    merging = LazyModule("retriever_service.indexing.merge")


def _report(out: Path, info: IndexInfo, *, left_out: bool = True) -> None:
    """What an index is now. left_out: with the lines that this command left out."""
    kind = " ".join([info.backend, *([info.settings["type"]] if "type" in info.settings else [])])
    _out.print(
        f"{out}: {counted(info.passages, 'passage')}, {kind}, {info.bytes / 2**20:,.1f} MiB",
        soft_wrap=True,
        markup=False,
    )
    if left_out:
        for text in left_out_lines(info.skipped, LEFT_OUT, info.skipped_reasons, one="line"):
            _err.print(text, markup=False, soft_wrap=True)


def _say(found: Remarks) -> None:
    """What is better known of the passages of an index that was made just now."""
    for text in found.lines():
        _err.print(text, markup=False, soft_wrap=True)


def one_index(command: str, positional: str | None, option: str | None) -> str:
    """The index, which may stand alone or behind `--index`. Raises UserError where it does neither, or
    both."""
    given = [value for value in (positional, option) if value is not None]
    if len(given) != 1:
        what = "--index is missing" if not given else f"two indexes given, {' and '.join(given)}"
        raise UserError(
            f"{command}: {what}; expected `{command} INDEX`, a folder made by `unspiral index build`"
        )
    return given[0]


def in_order(command: str, words: Sequence[str | None], **options: str | None) -> list[str]:
    """The values of options that may stand alone too: those that are not given take the words, in their
    order. Raises UserError where one is missing, and for a word too many."""
    left = [word for word in words if word is not None]
    found = [value if value is not None or not left else left.pop(0) for value in options.values()]
    expected = f"expected `{' '.join([command, *map(str.upper, options)])}`"
    if left:
        given = next(name for name, value in options.items() if value is not None)
        raise UserError(
            f"{command}: two of {given.upper()} given, {left[0]} and {options[given]}; {expected}"
        )
    whole = [value for value in found if value is not None]
    if len(whole) < len(found):
        missing = [name.upper() for name, value in zip(options, found, strict=True) if value is None]
        raise UserError(f"{command}: {' and '.join(missing)} missing; {expected}")
    return whole


VECTOR_TYPES = ("Flat", "SQfp16", "SQ8", "HNSW32", "IVF,Flat", "IVF,SQ8")
"""Those that a help page names. FAISS takes more."""
IndexPlace = Annotated[str | None, typer.Argument(metavar="INDEX", help=f"{INDEX}; --index takes it too.")]
IndexOption = Annotated[
    str | None, typer.Option("--index", "--index_path", help="The index, if not given alone.")
]
Corpus = Annotated[
    str | None,
    typer.Option("--corpus", "--corpus_path", help="The corpus, if not given alone."),
]
CorpusPlace = Annotated[
    str | None,
    typer.Argument(
        metavar="CORPUS",
        help=f"{CORPUS}; --corpus takes it too.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "--retriever_model", "--retriever-model", help="Encoder: folder or hub name."),
]
Family = Annotated[
    str | None,
    typer.Option(
        "--family",
        "--retriever_name",
        "--retriever-name",
        autocompletion=kept_in("retriever_service.dense.encoder:FAMILIES"),
        help="e5, bge, contriever or auto; by default from the model's name.",
    ),
]
VectorType = Annotated[
    str,
    typer.Option(
        "--type",
        autocompletion=one_of(VECTOR_TYPES),
        help="Flat, SQfp16, SQ8, HNSW32, `IVF,Flat`, `IVF,SQ8`, or a factory string of FAISS.",
    ),
]
Nprobe = Annotated[int | None, typer.Option(min=1, help="Lists that a search of an IVF index visits.")]
Dtype = Annotated[
    str,
    typer.Option(
        autocompletion=kept_in("retriever_service.dense.encoder:DTYPES"),
        help="Numbers of the encoder: auto, float32, bfloat16, float16.",
    ),
]
EfSearch = Annotated[int | None, typer.Option(min=1, help="Width of a search in an HNSW index.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave malformed lines and repeated ids out and count them.")
]
TextKey = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of the passages' text, if it has a name of its own."),
]
TitleKey = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Column of the title, which is put before the text.")
]
NullIsEmpty = Annotated[
    bool, typer.Option("--null-is-empty", help=f"Take cells such as {SUCH_AS} for empty.")
]
IdKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the passages' ids.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace another index in the folder.")]
Topk = Annotated[int, typer.Option(min=1, help="Most passages to show.")]


@index_app.command("build")
def build(
    *,
    place: CorpusPlace = None,
    corpus: Corpus = None,
    out: Annotated[Path, typer.Option(help="Folder of the index to be made.")],
    backend: Annotated[
        str, typer.Option(autocompletion=one_of(BACKENDS), help="bm25, dense or hybrid (both, fused).")
    ] = "bm25",
    skip_bad: SkipBad = False,
    text_key: TextKey = None,
    title_key: TitleKey = None,
    id_key: IdKey = None,
    null_is_empty: NullIsEmpty = False,
    language: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("retriever_service.bm25.analysis:languages"),
            help="Language of stemmer and stop words; `none` leaves words as they are. docs/retriever.md "
            "says which have stop words.",
        ),
    ] = "english",
    stem: Annotated[bool, typer.Option(help="Reduce words to their stems.")] = True,
    stop_words: Annotated[bool, typer.Option(help="Leave out stop words.")] = True,
    k1: Annotated[float, typer.Option(help="Saturation of term frequency.")] = 0.9,
    b: Annotated[float, typer.Option(help="Weight of the passage's length, 0 to 1.")] = 0.4,
    postings: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("retriever_service.indexing.build:POSTINGS"),
            help="bm25s (the format of that library), packed (compressed, can be added to), or auto: packed "
            "from two million passages on.",
        ),
    ] = "auto",
    model: Model = None,
    family: Family = None,
    vector_type: VectorType = "Flat",
    nprobe: Nprobe = None,
    ef_search: EfSearch = None,
    encoder_dtype: Dtype = "auto",
    encoders: Annotated[
        int,
        typer.Option(min=0, help="Processes that encode side by side; 0 is one per GPU, and one on a CPU."),
    ] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Index a corpus. An interrupted build goes on where it was."""
    keys = CorpusKeys(text_key, title_key, id_key, null_is_empty)
    (given,) = in_order("index build", [place], corpus=corpus)
    file = hub.local_file("--corpus", given, _err.print)
    before = stamp_of(out)
    found = remarks.Remarks()
    with progress_on(_err) as tell:
        info = building.build_index(
            file, out, backend=backend, skip_bad=skip_bad,
            keys=keys,
            language=language, stem=stem,
            stop_words=stop_words, k1=k1, b=b, postings=postings, model=model, family=family,
            vector_type=vector_type, nprobe=nprobe, ef_search=ef_search, encoder_dtype=encoder_dtype,
            encoders=encoders, overwrite=overwrite, progress=tell,
            remarks=found,
        )  # fmt: skip
    if before is not None and before == stamp_of(out):
        text = f"{out}: is the index of this corpus with these settings already; kept as it is"
        _err.print(text, markup=False, soft_wrap=True)
    _report(out, info)
    _say(found)
    for line in remarks.of_build(file, keys, backend):
        _err.print(line, markup=False, soft_wrap=True)


@index_app.command("add")
def add(
    place: IndexPlace = None,
    corpus_place: CorpusPlace = None,
    index: IndexOption = None,
    corpus: Corpus = None,
    skip_bad: SkipBad = False,
) -> None:
    """Add passages to an index that was built with `--postings packed`, by the columns of that build. An
    interrupted addition goes on where it was."""
    name, given = in_order("index add", [place, corpus_place], index=index, corpus=corpus)
    folder = Path(name)
    file = hub.local_file("--corpus", given, _err.print)
    before = stamp_of(folder)
    found = remarks.Remarks()
    with progress_on(_err) as tell:
        info = changing.add_to_index(folder, file, skip_bad=skip_bad, progress=tell, remarks=found)
    if before == stamp_of(folder):
        text = f"{folder}: has the id of every passage of {file} already; kept as it is"
        _err.print(text, markup=False, soft_wrap=True)
    _report(folder, info)
    _say(found)


@index_app.command("delete")
def delete(
    place: IndexPlace = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Ids of passages; --id takes one too.")
    ] = None,
    index: IndexOption = None,
    identity: Annotated[
        list[str] | None, typer.Option("--id", help="Id of a passage; may be repeated.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="File of ids, one a line.")] = None,
) -> None:
    """Delete passages from an index that was built with `--postings packed`: all that are named, or none if
    one is not there."""
    words = [word for word in (place, *(more or [])) if word is not None]
    folder = Path(one_index("index delete", words.pop(0) if words and index is None else None, index))
    wanted = [*words, *(identity or []), *(changing.read_ids(ids) if ids else [])]
    if not wanted:
        raise UserError(
            "index delete: no id; expected `index delete INDEX ID`, or --ids FILE with one a line"
        )
    _report(folder, changing.delete_from_index(folder, wanted), left_out=False)


@index_app.command("merge")
def merge(place: IndexPlace = None, index: IndexOption = None) -> None:
    """Make one index of all that was built and added, less what was deleted. Interrupted, it goes on."""
    folder = Path(one_index("index merge", place, index))
    with progress_on(_err) as tell:
        _report(folder, merging.merge_index(folder, progress=tell), left_out=False)


@index_app.command("convert")
def convert(
    out: Annotated[Path, typer.Option(help="Folder of the index to be made.")],
    vector_type: VectorType,
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="INDEX", help=f"{INDEX}: a dense one of type Flat; or a FAISS file (with --corpus)."
        ),
    ] = None,
    index: IndexOption = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", "--corpus_path", help="The corpus that a FAISS file was made from."),
    ] = None,
    model: Model = None,
    family: Family = None,
    nprobe: Nprobe = None,
    ef_search: EfSearch = None,
    rescore: Annotated[
        int,
        typer.Option(
            min=0,
            help="Keep the vectors beside the index, and score this many candidates per passage again by "
            "them.",
        ),
    ] = 0,
    rescore_dtype: Annotated[
        str,
        typer.Option(
            autocompletion=kept_in("retriever_service.dense.exact:DTYPES"),
            help="Numbers of these vectors on disk: float16 or float32.",
        ),
    ] = "float16",
    queries: Annotated[
        Path | None,
        typer.Option(help="Questions to measure recall with: JSONL with `question`, or one a line."),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Queries to measure recall with.")] = 1000,
    skip_bad: SkipBad = False,
    overwrite: Overwrite = False,
) -> None:
    """Make a smaller or faster index from an exact one, and print the recall that it keeps."""
    exact = Path(one_index("index convert", place, index))
    with progress_on(_err) as tell:
        info, measured = converting.convert_index(
            exact, out, vector_type, corpus=corpus, model=model, family=family, nprobe=nprobe,
            ef_search=ef_search, rescore=rescore, rescore_dtype=rescore_dtype,
            queries=queries, sample=sample, skip_bad=skip_bad, overwrite=overwrite,
            progress=tell,
        )  # fmt: skip
    _report(out, info)
    over = (
        f"the questions of {queries}"
        if queries
        else f"{min(sample, info.passages):,} vectors between stored ones"
    )
    shares = converting.as_percent(measured)
    _out.print(f"recall of the exact search, over {over}: {shares}", soft_wrap=True, markup=False)


@index_app.command("push")
def push(
    to: Annotated[
        str, typer.Option(help="qdrant+http://HOST:PORT/COLLECTION; an API key is read from QDRANT_API_KEY.")
    ],
    place: IndexPlace = None,
    index: IndexOption = None,
) -> None:
    """Copy a dense index into a Qdrant collection, which `serve retriever --index qdrant+...` then
    searches."""
    dense = Path(one_index("index push", place, index))
    with progress_on(_err) as tell:
        points = remote.push(dense, to, lambda done, of: tell("push", done / of, f"{done:,} points"))
    _out.print(f"{to}: {points:,} points", soft_wrap=True, markup=False)


@index_app.command("info")
def info(
    place: IndexPlace = None,
    index: IndexOption = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", "--corpus_path", help="Check that the index was built from this file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that is recorded, with a checksum of each file.")
    ] = False,
) -> None:
    """Check an index, and print what it is."""
    folder = Path(one_index("index info", place, index))
    found = verify(folder, corpus)
    if as_json:
        _out.print_json(data=asdict(found))
        return
    _report(folder, found, left_out=False)
    for line in in_words(found):
        _out.print(line, soft_wrap=True, markup=False, highlight=False)


@index_app.command("search")
def search(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="INDEX",
            help=f"{INDEX}, or what else `serve retriever` takes; --index takes it too.",
        ),
    ] = None,
    query: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            "--index_path",
            help="The index, if not given alone.",
        ),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", "--corpus_path", help="As for `serve retriever`.")
    ] = None,
    model: Model = None,
    family: Family = None,
    topk: Topk = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON: rank, id, score and contents of each passage.")
    ] = False,
) -> None:
    """Search an index without a server."""
    index, query = in_order("index search", [place, query], index=index, query=None)
    if not query.strip():
        raise UserError("index search: the query is empty")
    settings = ServerSettings(
        index=index, corpus=str(corpus) if corpus else None, retriever_model=model, retriever_name=family
    )
    backends.check_settings(settings)
    with closing(backends.open_index(settings)) as opened:
        (hits,) = opened.search([client.clean_query(query)], topk)
        found = [
            {"rank": n, "score": float(score), **orjson.loads(d)} for n, (d, score) in enumerate(hits, 1)
        ]
    if as_json:
        _out.print_json(data=found)
        return
    if not found:
        _out.print("no passage matches")
    for one in found:
        title, _, text = one["contents"].partition("\n")
        heading = harmless(f"{one['rank']}. {title}  (id {one['id']}, score {one['score']:.3f})")
        _out.print(heading, style="bold", markup=False, highlight=False)
        _out.print(f"   {harmless(text)}", markup=False, highlight=False)
