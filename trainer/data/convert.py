"""From one question file format to another. Formats go by the file's ending."""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import EnvironmentLacks, UserError
from services.common.files import written_aside
from services.contracts import Question
from services.rollout.worker.templates.search_r1 import user_turn
from trainer.data.columns import Keys
from trainer.data.questions import NO_KEYS, BadRow, Questions, nothing_in, parsed, read, refused

SEARCH_R1_COLUMNS = (
    "data_source",
    "prompt",
    "ability",
    "reward_model",
    "extra_info",
    "id",
    "question",
    "golden_answers",
)
"""Columns of every parquet file that is written; the source's other columns follow."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
"""Endings of files that are written."""
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors that another path on the same disk would meet too; all others are of the path that was given."""


def convert(src: str | Path, dst: str | Path, *, skip_bad: bool = False, keys: Keys = NO_KEYS) -> Questions:
    """Write the questions of `src` to `dst`: `.parquet` in Search-R1's columns, `.jsonl` and `.jsonl.gz` as
    FlashRAG has them.

    Written aside and renamed. Other columns of the source are kept (in parquet as JSON text where their
    values have no common type).
    Raises UserError, also for the first malformed row, unless `skip_bad`; EnvironmentLacks where the disk is
    full.
    """
    src = Path(src)
    dst = Path(dst)
    suffix = suffix_of(dst)
    if dst.exists() and src.exists() and dst.samefile(src):
        raise UserError(f"{dst}: is the source itself; give another file to write")
    if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
        raise UserError(
            f"{dst}: lies in the folder {src}, whose files are all read; give a file outside of it to write"
        )
    rows: list[tuple[Mapping[str, Any], Question]] = []
    problems: list[BadRow] = []
    items = parsed(src, all_columns=True, keys=keys)
    for item in items:
        if isinstance(item, BadRow):
            if not skip_bad:
                raise refused(item, items, len(rows), "--skip-bad")
            problems.append(item)
        else:
            record, found = item
            rows.append((record.fields or {}, found.question))
    if not rows:
        raise UserError(nothing_in(src, problems))
    with _writing(f"the folder of {dst}", "made"):
        dst.parent.mkdir(parents=True, exist_ok=True)
    with _writing(str(dst), "written"), written_aside(dst) as aside:
        if suffix == ".parquet":
            _write_parquet(rows, aside)
        else:
            _write_json(rows, aside, suffix)
    return read([q for _, q in rows], problems)


@contextmanager
def _writing(name: str, done: str) -> Iterator[None]:
    """Raises EnvironmentLacks where the disk takes no more, and UserError where the path is wrong."""
    try:
        yield
    except OSError as error:
        kind = EnvironmentLacks if error.errno in _OF_THE_DISK else UserError
        raise kind(f"{name}: cannot be {done} ({error.strerror or error})") from error


def suffix_of(path: Path) -> str:
    """`.parquet`, `.jsonl` or `.jsonl.gz`. Raises UserError."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise UserError(f"{path}: unknown kind of question file to write; accepted are {', '.join(SUFFIXES)}")


def _write_json(rows: list[tuple[Mapping[str, Any], Question]], path: Path, suffix: str) -> None:
    with (gzip.open if suffix.endswith(".gz") else open)(path, "wt", encoding="utf-8") as f:
        for fields, question in rows:
            f.write(json.dumps(_flash_rag(fields, question), ensure_ascii=False, default=str) + "\n")


def _flash_rag(fields: Mapping[str, Any], question: Question) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
    }
    row["data_source"] = question.data_source
    row |= {k: v for k, v in fields.items() if k not in SEARCH_R1_COLUMNS and v is not None}
    if question.prompt is not None and question.prompt != user_turn(question.text):
        row["prompt"] = _turns(question)  # its wording differs from the template's, and must be kept
    return row


def _write_parquet(rows: list[tuple[Mapping[str, Any], Question]], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = list(zip(*(_search_r1(*row, number=i) for i, row in enumerate(rows)), strict=True))
    text, texts = pyarrow.string(), pyarrow.list_(pyarrow.string())
    types = [
        text,
        pyarrow.list_(pyarrow.struct([("role", text), ("content", text)])),
        text,
        pyarrow.struct([("style", text), ("ground_truth", pyarrow.struct([("target", texts)]))]),
        pyarrow.struct([("split", text), ("index", pyarrow.int64())]),
        text,
        text,
        texts,
    ]
    arrays = {
        name: pyarrow.array(column, kind)
        for name, column, kind in zip(SEARCH_R1_COLUMNS, columns, types, strict=True)
    }
    for name in dict.fromkeys(k for fields, _ in rows for k in fields if k not in SEARCH_R1_COLUMNS):
        arrays[name] = _column([fields.get(name) for fields, _ in rows])
    parquet.write_table(pyarrow.table(arrays), path)


def _turns(question: Question) -> list[dict[str, str]]:
    system = [] if question.system is None else [{"role": "system", "content": question.system}]
    return [*system, {"role": "user", "content": question.prompt or user_turn(question.text)}]


def _search_r1(fields: Mapping[str, Any], question: Question, *, number: int) -> tuple[Any, ...]:
    golden = list(question.golden_answers)
    given = fields.get("extra_info")
    info: dict[str, Any] = given if isinstance(given, dict) else {}
    index = info.get("index")
    kept = isinstance(index, int) and abs(index) < 2**63
    return (
        question.data_source,
        _turns(question),
        str(fields.get("ability") or "fact-reasoning"),
        {"style": "rule", "ground_truth": {"target": golden}},
        {"split": str(info.get("split") or "train"), "index": index if kept else number},
        question.id,
        question.text,
        golden,
    )


def _column(values: list[Any]) -> Any:
    """A column of the values, or of their JSON text where parquet has no type for all of them (mixed kinds,
    empty objects)."""
    import pyarrow

    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        array = None
    if array is None or any(_is_empty_struct(t) for t in _types(array.type)):
        return pyarrow.array(
            [None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in values],
            pyarrow.string(),
        )
    return array


def _types(kind: Any) -> Iterator[Any]:
    yield kind
    for i in range(kind.num_fields):
        yield from _types(kind.field(i).type)


def _is_empty_struct(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_struct(kind) and kind.num_fields == 0
