"""Question files: Search-R1 parquet, FlashRAG JSONL and plain JSONL, told apart by the file's name and each row's own fields."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.contracts import Question
from trainer.data.errors import DataError

SPLITS = {"train", "training", "dev", "valid", "val", "validation", "eval", "test"}
"""File names that say nothing of the source; the folder's name is taken instead."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
COLUMNS = ("id", "question", "golden_answers", "data_source", "prompt", "reward_model", "extra_info")
"""What a question is made from."""
BATCH_ROWS = 4096
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escapes of surrogates: half a pair alone is no text, and can't be written again."""


@dataclass(frozen=True)
class Questions:
    """The rows of a file, in its order."""

    rows: list[Question]
    skipped: int = 0
    """Malformed rows left out."""


@dataclass
class Row:
    """One row as the file has it: where it stands (for messages), and its fields, or what is wrong with it."""

    place: str
    number: int
    fields: dict[str, Any] | None
    problem: str = ""


@dataclass
class Report:
    """What `unspiral data validate` found."""

    sources: Counter[str] = field(default_factory=Counter)
    """Good rows of each data source."""
    problems: list[str] = field(default_factory=list)
    """One line for each malformed row."""

    @property
    def good(self) -> int:
        return self.sources.total()


def load_questions(path: str | Path, *, skip_bad: bool = False) -> Questions:
    """Read a question file. The first malformed row raises DataError; with `skip_bad` such rows are left out and counted.

    A file without a single good row is refused either way.
    """
    path, rows, problems = Path(path), [], []
    for item in parsed(path):
        if isinstance(item, str):
            if not skip_bad:
                raise DataError(item)
            problems.append(item)
        else:
            rows.append(item[1])
    if not rows:
        raise DataError(nothing_in(path, problems))
    return Questions(rows, len(problems))


def validate(path: str | Path) -> Report:
    """Read the whole file and count. Raises DataError only where the file cannot be read at all, or is empty."""
    path, report = Path(path), Report()
    for item in parsed(path):
        if isinstance(item, str):
            report.problems.append(item)
        else:
            report.sources[item[1].data_source] += 1
    if not report.good and not report.problems:
        raise DataError(nothing_in(path, []))
    return report


def nothing_in(path: Path, problems: list[str]) -> str:
    """The line for a file without good rows."""
    if problems:
        return f"{path}: none of its {len(problems)} rows is good; the first: {problems[0]}"
    return f"{path}: empty; expected at least one question"


def parsed(path: Path, *, all_columns: bool = False) -> Iterator[tuple[Row, Question] | str]:
    """Each row with its question, or one line on what is wrong with it. Parquet columns that no question needs are read only on request."""
    default_source = source_of(path)
    for row in raw_rows(path, all_columns=all_columns):
        if row.fields is None:
            yield f"{row.place}: {row.problem}"
            continue
        try:
            question = question_of(row.fields, row.number, default_source)
        except DataError as e:
            yield f"{row.place}: {e}"
        else:
            yield row, question


def suffix_of(path: Path) -> str:
    """`.parquet`, `.jsonl` or `.jsonl.gz`. Raises DataError."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise DataError(f"{path}: unknown kind of question file; accepted are {', '.join(SUFFIXES)}")


def source_of(path: Path) -> str:
    """Data source of rows that name none: the file's name, or its folder's where the file is called test, dev, ..."""
    stem = path.name.split(".")[0]
    parent = path.resolve().parent.name
    return parent if stem.lower() in SPLITS and parent else stem


def raw_rows(path: Path, *, all_columns: bool) -> Iterator[Row]:
    """The file's rows. Raises DataError where the file itself is at fault."""
    suffix = suffix_of(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected questions as {', '.join(SUFFIXES)}")
    try:
        yield from _parquet_rows(path, all_columns) if suffix == ".parquet" else _json_rows(path, suffix)
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path}: cannot be read: {e}") from e


def _json_rows(path: Path, suffix: str) -> Iterator[Row]:
    with (gzip.open if suffix.endswith(".gz") else open)(path, "rb") as f:
        number = 0
        for line_number, line in enumerate(f, 1):
            if line_number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            place = f"{path}, line {line_number}"
            try:
                fields = json.loads(line)
                if HALF_PAIR.search(line):
                    json.dumps(fields, ensure_ascii=False).encode()
            except (
                ValueError,
                RecursionError,
            ) as e:  # JSONDecodeError, UnicodeDecodeError, UnicodeEncodeError
                yield Row(place, number, None, f"expected a JSON object: {e}")
            else:
                good = isinstance(fields, dict)
                yield Row(
                    place,
                    number,
                    fields if good else None,
                    f"expected a JSON object, got {type(fields).__name__}",
                )
            number += 1


def _parquet_rows(path: Path, all_columns: bool) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number, names = 0, file.schema_arrow.names
            if not {"golden_answers", "reward_model"} & set(names):
                raise DataError(
                    f"{path}: expected a column golden_answers or reward_model; it has {', '.join(names)}"
                )
            wanted = None if all_columns else [c for c in COLUMNS if c in names]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for fields in batch.to_pylist():
                    yield Row(f"{path}, row {number + 1}", number, fields)
                    number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as e:
        raise DataError(f"{path}: not a readable parquet file: {' '.join(str(e).split())}") from e


def question_of(fields: dict[str, Any], number: int, default_source: str) -> Question:
    """One row's question. Raises DataError that says what was expected (without the place, which the caller knows)."""
    golden = _golden(fields)
    prompt = _prompt(fields.get("prompt"))
    text = fields.get("question")
    if text is None and prompt is not None:
        text = prompt.rpartition("Question:")[2]
    if not isinstance(text, str) or not text.strip():
        raise DataError("expected `question`: a text (or `prompt`: one user turn)")
    source = fields.get("data_source") or default_source
    if not isinstance(source, str):
        raise DataError(f"expected `data_source`: a text, got {type(source).__name__}")
    return Question(_id(fields, number, source), text.strip(), golden, source, prompt)


def _golden(fields: dict[str, Any]) -> tuple[str, ...]:
    """`reward_model.ground_truth.target`, which Search-R1 scores by, else `golden_answers`. Blank answers do not count."""
    golden: Any = fields
    for key in ("reward_model", "ground_truth", "target"):
        golden = golden.get(key) if isinstance(golden, dict) else None
    golden = golden or fields.get("golden_answers")
    if isinstance(golden, str):
        golden = [golden]
    if golden is None:
        raise DataError(
            "expected `golden_answers` (or `reward_model.ground_truth.target`): a list of texts; it has none"
        )
    if not isinstance(golden, list) or not all(isinstance(g, str) for g in golden):
        raise DataError(
            f"expected `golden_answers`: a list of texts, got {json.dumps(golden, default=str)[:80]}"
        )
    kept = tuple(g for g in golden if g.strip())
    if not kept:
        raise DataError("expected `golden_answers`: a list of at least one text, got none")
    return kept


def _prompt(prompt: Any) -> str | None:
    """Content of Search-R1's `prompt: [{"role": "user", "content": ...}]`."""
    if prompt is None:
        return None
    turn = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else None
    content = turn.get("content") if isinstance(turn, dict) and turn.get("role") == "user" else None
    if not isinstance(content, str) or not content.strip():
        raise DataError('expected `prompt`: one user turn, [{"role": "user", "content": ...}]')
    return content


def _id(fields: dict[str, Any], number: int, source: str) -> str:
    """The row's `id`; without one, source, split and index of `extra_info`; without that, the row's number in the file."""
    given = fields.get("id")
    if given is not None and str(given).strip():
        return str(given)
    info = fields.get("extra_info")
    if isinstance(info, dict) and info.get("index") is not None:
        return f"{source}_{info.get('split') or 'row'}_{info['index']}"
    return f"{source}_row_{number}"
