"""From one row, as any of the field's data sets has it, to a question: its text, answers, prompt, source and
id."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.printing.kinds import kind_of
from services.common.records import field_of, read_records
from services.common.records.columns import (
    CONTENTS,
    IDENTITY,
    QUESTION,
    column_of,
    columns_told,
    is_missing,
    plain_name,
    value_at,
    without_null,
)
from services.contracts import Question
from trainer.data.lists_in_texts import list_in

REWARD = ("reward_model", "reward_spec")
"""Columns of verl and SkyRL: `{"style": "rule", "ground_truth": ...}`."""
ANSWERS = (
    "golden_answers", "gold_answers", "golden_answer", "gold_answer", "answers", "answer", "possible_answers",
    "ground_truth", "ground_truths", "target", "targets", "final_answer", "correct_answer", "expected_answer",
    "reference_answer", "short_answers",
)  # fmt: skip
"""Columns that hold the golden answers; the first that has one counts."""
ALIASES = ("answer_aliases", "aliases")
"""Columns with other spellings of the answer, as MuSiQue and 2WikiMultihopQA have them."""
SOURCE = ("data_source", "dataset")
PROMPT = ("prompt", "messages", "conversations")
_INSIDE = ("target", "targets", "golden_answers", "answers", "answer", "value", "text", "ground_truth")
"""Keys under which a dict keeps its answers."""
_WANTED = {*REWARD, *ANSWERS, *ALIASES, *SOURCE, *PROMPT, *QUESTION, *IDENTITY, "extra_info", "answerable"}
_CELLS = {*REWARD, *ANSWERS, *ALIASES, *SOURCE, *QUESTION, *IDENTITY}
"""Columns in which `null_is_empty` counts."""
_SPLIT = "<|answer_split|>"
"""Separator of answers in one text, in some data sets."""
_NUMPY = re.compile(r"array\(\s*(\[.*\])\s*(?:,\s*dtype=\w+\s*)?\)", re.DOTALL)
_LIST = re.compile(r"\[.*\]|\(.*,.*\)", re.DOTALL)
_CUT_LIST = re.compile(r"\[+[\"']")
"""The start of a list of texts, which may have been cut off later."""
_OTHER_TAGS = re.compile(r"</?(?:tool_call|tool_response|tool|function|python|code)\b")
_NO = ("false", "no", "0", "0.0")
"""How tables write that a question has no answer, in small letters."""
_SHOWN = 80


@dataclass(frozen=True)
class Parsed:
    """A question, and the row's own names of the columns that it was read from."""

    question: Question
    read_from: tuple[str, str]
    """Of the question's text and of the answers."""


@dataclass(frozen=True)
class Keys:
    """Columns that the user has named, where a data set has names of its own; `metadata.answer` is a key in a
    column."""

    question: str | None = None
    answer: str | None = None
    source: str | None = None
    id: str | None = None
    null_is_empty: bool = False
    """Whether cells such as NULL, of these columns or those that are known, count as empty."""
    keep: tuple[str, ...] | None = None
    """Other columns that go along with a question; None: those that are short (`other_columns`)."""

    def __post_init__(self) -> None:
        for name, key in self._named.items():
            if key is not None and not key.strip():  # an unset variable, which would not count
                raise UserError(f"--{name}-key (of a run: data.{name}_key): is empty; expected a column")

    def __bool__(self) -> bool:
        return any(self.given.values())

    @property
    def _named(self) -> dict[str, str | None]:
        return {"question": self.question, "answer": self.answer, "source": self.source, "id": self.id}

    @property
    def given(self) -> dict[str, str]:
        """Those that are set."""
        return {name: key for name, key in self._named.items() if key}

    def is_wanted(self, name: str) -> bool:
        """As the function: whether a question may be made from a column of that name."""
        named = (*self.given.values(), *(self.keep or ()))
        return is_wanted(name) or any(column_of({name: None}, key) for key in named)

    def check(self, path: str | Path) -> None:
        """Raises UserError, for a configuration, where the first row has no such column."""
        first = first_row(path)
        for name, key in self.given.items():
            if first is not None and column_of(first, key) is None:
                columns = columns_told(first, key)
                raise UserError(f"data.{name}_key: {path} has no column {key!r}; its columns are {columns}")

    def of_file(self, path: str | Path) -> Keys:
        """Those of which the first row has the column: another file may have names that need no key."""
        first = first_row(path) or {}
        return self._of({name for name, key in self.given.items() if column_of(first, key)})

    def beside(self, path: str | Path, other: str | Path) -> Keys:
        """Those by which `path` is read where `other` is compared with it: those of which it has the column,
        and those of which neither has it, a mistake that the reading tells."""
        mine, others = self.of_file(path).given, self.of_file(other).given
        return self._of({name for name in self.given if name in mine or name not in others})

    def _of(self, names: set[str]) -> Keys:
        """Those of these names."""
        kept = {name: key for name, key in self.given.items() if name in names}
        return Keys(**kept, null_is_empty=self.null_is_empty, keep=self.keep)

    def applied(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with the named columns in the place of those that count otherwise. Raises UserError where
        it lacks one."""
        values: dict[str, Any] = {}
        clean = without_null if self.null_is_empty else lambda value: value
        row = {name: clean(held) if plain_name(name) in _CELLS else held for name, held in row.items()}
        for name, key in self.given.items():
            if not is_missing(value := clean(value_at(row, key))):
                values[_PLACES[name][0]] = value if name in ("question", "answer") else _label(value, key)
            elif (own := column_of(row, key)) is None or plain_name(own) != plain_name(key):
                raise UserError(
                    f"--{name}-key {key}: nothing is there; the columns are {columns_told(row, key)}"
                )
            elif name in ("question", "answer"):
                what = "a question" if name == "question" else "an answer"
                raise UserError(f"`{own}` is empty; expected {what}")
        others = {other for name in self.given for other in _PLACES[name][1]}
        return {name: held for name, held in row.items() if plain_name(name) not in others} | values

    def in_own_words(self, text: str, row: Mapping[str, Any]) -> str:
        """A message on the row as `applied` makes it, with the file's names of the columns."""
        for name, key in self.given.items():
            for end in "`.":
                text = text.replace(f"`{_PLACES[name][0]}{end}", f"`{_own(row, key)}{end}")
        return text

    def read_from(self, row: Mapping[str, Any], found: tuple[str, str]) -> tuple[str, str]:
        """The file's names of the columns that the question and the answers were read from. found: those of
        the row as `applied` makes it."""
        question, answers = (self.in_own_words(f"`{name}`", row)[1:-1] for name in found)
        return question, answers


_PLACES = {
    "question": ("question", QUESTION),
    "answer": ("golden_answers", (*REWARD, *ANSWERS, *ALIASES)),
    "source": ("data_source", SOURCE),
    "id": ("id", IDENTITY),
}
"""By the key: the name under which its column is read, and the columns that count otherwise."""


def first_row(path: str | Path) -> dict[str, Any] | None:
    """The first row of a file that can be read."""
    return next((one.fields for one in read_records(path) if one.fields is not None), None)


def _label(value: Any, key: str) -> str:
    """A source or an id. Years and numbers are named as they are written."""
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _number(value, key)
    if not isinstance(value, str):
        raise UserError(f"expected `{key}`: a text or a number, got {kind_of(value)}")
    return value


def _own(row: Mapping[str, Any], key: str) -> str:
    """The row's own name of a column, or the key that is in one."""
    own = column_of(row, key)
    return own if own is not None and plain_name(own) == plain_name(key) else key


def is_wanted(name: str) -> bool:
    """Whether a question may be made from a column of that name."""
    return plain_name(name) in _WANTED


def question_of(
    row: Mapping[str, Any], number: int, default_source: str, names: Iterable[str] | None = None
) -> Parsed:
    """The question of one row. Raises UserError that says what was expected (without the place, which the
    caller knows).

    names: all columns of the file, for that message; None where the row has them all.
    """
    names = ", ".join(map(str, row if names is None else names)) or "none"
    row = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    marked = field_of(row, ["answerable"])
    if marked is not None and str(marked[1]).strip().lower() in _NO:
        raise UserError("is marked as not answerable")
    answers_from, golden = _golden(row, names)
    system, user = _prompt(row)
    text_from, text = _text(row, user, names)
    given = field_of(row, SOURCE)
    source_from, source = given if given is not None else ("", default_source)
    if not isinstance(source, str):
        raise UserError(f"expected `{source_from}`: a text, got {kind_of(source)}")
    source = source.strip() or default_source  # ` nq` of a table written with blanks is no other source
    kept = None if user is None or user.strip() == text or _is_for_others(user) else user
    question = Question(
        _id(row, number, source), text, golden, source, kept, system if kept is not None else None
    )
    return Parsed(question, (text_from, answers_from))


def _golden(row: Mapping[str, Any], names: str) -> tuple[str, tuple[str, ...]]:
    """The column and the golden answers. The columns that Search-R1 and verl score by go first; blank
    answers do not count."""
    for name in (*REWARD, *ANSWERS):
        found = field_of(row, [name])
        if found is None:
            continue
        own, value = found
        if name in REWARD:
            own, value = _ground_truth(own, value)
        golden = _texts(value, own)
        if not golden:
            continue
        for alias in ALIASES:
            more = field_of(row, [alias])
            golden += _texts(more[1], more[0]) if more is not None else []
        return own, tuple(dict.fromkeys(golden))
    empty = next((name for name in row if plain_name(name) in (*REWARD, *ANSWERS)), None)
    if empty is not None and isinstance(row[empty], str | None):
        raise UserError(f"`{empty}` is empty; expected an answer")
    if empty is not None:
        raise UserError(f"expected `{empty}`: a list of at least one text, got none")
    plain = {plain_name(name) for name in (*row, *names.split(", "))}
    if plain.isdisjoint((*QUESTION, *PROMPT, "extra_info")):
        yours = _name_yours("--question-key COLUMN --answer-key COLUMN", names)
        if not plain.isdisjoint(CONTENTS):
            raise UserError(
                f"these are columns of a corpus, not of questions: {names}; a corpus goes to "
                f"retriever.corpus or `unspiral index build`{yours}"
            )
        raise UserError(
            "expected `question` (or query, problem, prompt, ...) and `golden_answers` (or answers, answer, "
            f"...); it has neither, its columns are {names}{yours}{OF_A_CORPUS if yours else ''}"
        )
    raise UserError(
        "expected `golden_answers` (or answers, answer, possible_answers, ground_truth, "
        "reward_model.ground_truth): "
        f"a list of texts; it has none, its columns are {names}{_name_yours('--answer-key COLUMN', names)}"
    )


def _name_yours(options: str, names: str) -> str:
    """The end of a message about columns of other names."""
    known = {*QUESTION, *ANSWERS, *REWARD, *PROMPT}
    if all(plain_name(name) in known for name in names.split(", ")):
        return ""
    keys = options.replace("--", "data.").replace("-key", "_key").replace(" COLUMN ", " and ")
    return f"; columns of other names are given by {options} (of a run: {keys.removesuffix(' COLUMN')})"


OF_A_CORPUS = "; if it is a corpus, name its columns by --text-key, --title-key and --id-key"


def _ground_truth(own: str, value: Any) -> tuple[str, Any]:
    """The `ground_truth` of a reward column, which is a dict or the JSON text of one."""
    value = _unpacked(value)
    if not isinstance(value, dict):
        raise UserError(f"expected `{own}`: an object with ground_truth, got {kind_of(value)}")
    found = field_of(value, ["ground_truth", "target", "answer"])
    return (f"{own}.{found[0]}", found[1]) if found is not None else (own, None)


def _texts(value: Any, column: str) -> list[str]:
    """Answers in a value: a text, a number, a list of these, a list written as text, or a dict that holds one
    of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if is_missing(value):
        return []
    if isinstance(value, bool):
        raise UserError(f'`{column}` is {json.dumps(value)}; expected a text, such as "yes" or "no"')
    if isinstance(value, int | float | Decimal):
        return [_number(value, column)]
    if isinstance(value, str):
        return _texts_of_text(value, column)
    if isinstance(value, list | tuple | set):
        return [text for one in value for text in _texts(one, column)]
    if isinstance(value, dict):
        return _texts_of_dict(value, column)
    raise UserError(f"expected `{column}`: a list of texts, got {kind_of(value)}")


def _number(value: int | float | Decimal, column: str) -> str:
    """As it is written: a table's 1955.0 was 1955."""
    if isinstance(value, int | Decimal):
        return str(value)
    if not math.isfinite(value):
        raise UserError(f"`{column}` is {value}, which is no number")
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _texts_of_dict(value: dict[str, Any], column: str) -> list[str]:
    found = field_of(value, _INSIDE)
    more = field_of(value, ALIASES)
    if found is None and more is None:
        if any(plain_name(key) in _INSIDE for key in value):
            return []
        raise UserError(
            f"expected `{column}`: a list of texts, got an object with {', '.join(map(str, value))}"
        )
    return [text for one in (found, more) if one is not None for text in _texts(one[1], f"{column}.{one[0]}")]


def _texts_of_text(text: str, column: str) -> list[str]:
    if _SPLIT in text:
        return [part.strip() for part in text.split(_SPLIT) if part.strip()]
    stripped = text.strip()
    inner = _NUMPY.fullmatch(stripped)
    stripped = inner[1] if inner else stripped
    if stripped.startswith("{") and isinstance(held := _unpacked(stripped), dict):
        return _texts_of_dict(held, column)
    if not _LIST.fullmatch(stripped) and not _CUT_LIST.match(stripped):
        return [text]
    held = list_in(stripped)
    if held is not None:
        return [
            str(one) if isinstance(one, str) else _number(one, column) for one in held if not is_missing(one)
        ]
    if stripped[0] == "[" and re.search(r"^[\[\s]+[\"']|[\"'][\s\]]+$", stripped):
        raise UserError(
            f"`{column}` looks like a list written as text that can't be read: {stripped[:_SHOWN]}"
        )
    return [text]


def _text(row: Mapping[str, Any], user: str | None, names: str) -> tuple[str, str]:
    """The column and the question's text."""
    info = _unpacked(row.get("extra_info"))
    for own, found in (("", field_of(row, QUESTION)), ("extra_info.", _of_dict(info, QUESTION))):
        if found is not None and isinstance(found[1], str):
            return own + found[0], found[1].strip()
        if found is not None and not own:
            raise UserError(f"expected `{found[0]}`: a text, got {kind_of(found[1])}")
    if user is not None:
        return "prompt", user.rpartition("Question:")[2].strip() or user.strip()
    raise UserError(
        "expected `question`: a text (or query, problem, prompt, ...); it has none, its columns are "
        f"{names}{_name_yours('--question-key COLUMN', names)}"
    )


def _prompt(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(system turn, user turn) of a prompt: a text, or `[{"role": "user", "content": ...}]` with a system
    turn before it or not."""
    found = field_of(row, PROMPT)
    if found is None:
        return None, None
    own, prompt = found
    expected = f'expected `{own}`: one user turn, [{{"role": "user", "content": ...}}], or a text'
    if isinstance(prompt, str) and not (
        prompt.lstrip().startswith("[") and isinstance(_unpacked(prompt), list)
    ):
        return None, prompt
    turns = _unpacked(prompt)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(expected)
    plain = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in turns]
    system = plain.pop(0)[1] if plain and plain[0][0] == "system" else None
    asked = plain[0][1] if plain and plain[0][0] in ("user", "human") else None
    answered = len(plain) > 1 and own != "prompt" and plain[1][0] in ("assistant", "gpt")
    if not isinstance(asked, str) or not asked.strip() or (len(plain) > 1 and not answered):
        raise UserError(expected)
    return system if isinstance(system, str) and system.strip() else None, asked


def _is_for_others(prompt: str) -> bool:
    """Whether a prompt tells the model to search by tags that the rollout does not act on, as verl's
    preprocessing of Search-R1 does.

    Such a prompt is left to the template, which writes its own.
    """
    return "<search>" not in prompt and _OTHER_TAGS.search(prompt) is not None


def _of_dict(value: Any, names: tuple[str, ...]) -> tuple[str, Any] | None:
    return field_of(value, names) if isinstance(value, dict) else None


def _unpacked(value: Any) -> Any:
    """The value, parsed where it is the JSON or Python text of one (columns of a table hold both)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, str) or not value.strip().startswith(("{", "[")):
        return value
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value)
    return value


def _id(row: Mapping[str, Any], number: int, source: str) -> str:
    """The row's id; without one, source, split and index of `extra_info`; without that, the row's number in
    the file, from 0."""
    found = field_of(row, IDENTITY)
    if found is not None and not isinstance(found[1], dict | list) and (own := str(found[1]).strip()):
        return own
    info = _unpacked(row.get("extra_info"))
    if isinstance(info, dict) and info.get("index") is not None:
        return f"{source}_{info.get('split') or 'row'}_{info['index']}"
    return f"{source}_row_{number}"
