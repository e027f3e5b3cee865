"""The seven question sets of the search-agent papers, read from a folder of any layout in docs/data.md."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.counting import left_out as left_out_lines
from services.common.errors import UserError
from services.common.names import accepted
from services.common.records import ACCEPTED, data_files
from services.contracts import Question
from trainer.data.columns import Keys
from trainer.data.questions import NO_KEYS, SPLITS, TRAIN, load_questions, source_of

GENERAL = ("nq", "triviaqa", "popqa")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SETS = (*GENERAL, *MULTI_HOP)
"""In the order of the papers' columns."""
TITLES = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
SUITES = ("search7",)
AUTO = "auto"
_SPELLED: dict[str, tuple[str, ...]] = {
    "test": ("test", "eval"),
    "dev": ("dev", "valid", "val", "validation"),
    "train": tuple(sorted(TRAIN)),
}
"""A split, and the words by which files name it."""
PREFERRED = (*_SPELLED["test"], *_SPELLED["dev"], "")
"""Splits that `auto` takes, the first that a set has: Search-R1 takes test where the answers are public, and
otherwise dev. "": a file whose name says none."""
_OTHER_NAMES = {
    "naturalquestions": "nq",
    "naturalquestionsopen": "nq",
    "nqopen": "nq",
    "trivia": "triviaqa",
    "tqa": "triviaqa",
    "hotpot": "hotpotqa",
    "2wiki": "2wikimultihopqa",
    "2wikimultihop": "2wikimultihopqa",
    "2wikimqa": "2wikimultihopqa",
    "2wikihotpotqa": "2wikimultihopqa",
    "musiqueans": "musique",
}
_NOT_A_NAME = SPLITS | {"searchr1", "distractor", "fullwiki", "ans", "prerelease"}
"""Words of file names that say nothing of the set: the makers' (`hotpot_dev_distractor_v1`,
`musique_ans_v1.0_dev`, `Bamboogle Prerelease - Sheet1`), and those of collections."""
_NUMBERED = re.compile(r"rand\d+|v\d+|sheet\d+")


@dataclass(frozen=True)
class Item:
    """One question of a set. The key is unique in the suite, and the same in every run over the same file."""

    key: str
    set: str
    question: Question


@dataclass(frozen=True)
class QuestionSet:
    """The rows of one set that are scored, in the order of their file."""

    name: str
    split: str
    """"" where the file's name says none."""
    items: tuple[Item, ...]
    of: int
    """Rows of the whole set."""
    seed: int | None
    """Seed of the subset; None for the whole set."""

    def describe(self) -> dict[str, Any]:
        """JSON-able: which rows these are. Equal digests are the same questions with the same answers."""
        digest = hashlib.sha256()
        for item in sorted(self.items, key=lambda item: item.key):
            digest.update("\0".join((item.key, item.question.text, *item.question.golden_answers)).encode())
        subset = "all" if self.seed is None else f"{len(self.items)} of {self.of}, seed {self.seed}"
        return {
            "split": self.split or "unnamed",
            "n": len(self.items),
            "of": self.of,
            "subset": subset,
            "seed": self.seed,
            "digest": digest.hexdigest()[:12],
        }


@dataclass
class Suite:
    """The sets that were found, in the order of SETS."""

    sets: list[QuestionSet]
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows of data sets that are none of the seven, by their name."""

    @property
    def repeated(self) -> dict[str, int]:
        """By set: rows that are scored and stand in its files more than once, counted without the first."""
        counts = {
            one.name: len(one.items) - len({(i.question.id, i.question.text) for i in one.items})
            for one in self.sets
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def items(self) -> list[Item]:
        return [item for one in self.sets for item in one.items]

    @property
    def missing(self) -> list[str]:
        """Sets of which there is no row."""
        found = {one.name for one in self.sets}
        return [name for name in SETS if name not in found]


def set_of(name: str) -> str | None:
    """The set that a data source means (`searchR1_nq`, `2WikiMultiHopQA`, `hotpotqa_dev`); None for
    another."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    plain = "".join(w for w in words if w not in _NOT_A_NAME and not _NUMBERED.fullmatch(w))
    plain = _OTHER_NAMES.get(plain, plain)
    return plain if plain in SETS else None


def in_order(names: Iterable[str]) -> list[str]:
    """The seven in the order of SETS, then other data sources by name."""
    places = {name: at for at, name in enumerate(SETS)}
    return sorted(names, key=lambda name: (places.get(name, len(SETS)), name))


def split_of(file: Path) -> str:
    """`dev` of `hotpotqa/dev.jsonl`, `hotpotqa_dev.jsonl` and `dev-00000-of-00002.parquet`; "" where neither
    the name nor the folder says one."""
    words = [*re.findall(r"[a-z0-9]+", file.name.lower()), file.resolve().parent.name.lower()]
    return next((word for word in words if word in SPLITS), "")


def _set_of_row(question: Question, file: Path) -> str | None:
    """The set of a row: by its own source, otherwise by the file's name or its folder's."""
    found = set_of(question.data_source)
    by_name = question.data_source == source_of(file)
    return set_of(file.resolve().parent.name) if found is None and by_name else found


def read_suite(
    path: str | Path,
    *,
    split: str = "auto",
    limit: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    keys: Keys = NO_KEYS,
    say: Callable[[str], None] = print,
) -> Suite:
    """Read the seven sets below a folder, or from one file.

    split: of each set; `auto` is described at PREFERRED, and never takes a training set. limit: rows of each
    set, drawn by `seed`; a smaller limit draws some of the same rows. keys: columns of other names, where a
    file has them. Raises UserError.
    """
    order = _order(split)
    path = Path(path)
    files = data_files(path, f"questions as {ACCEPTED}")
    by_split: dict[str, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for file in files:
        named = split_of(file)
        if named not in order:
            continue
        loaded = load_questions(file, skip_bad=skip_bad, keys=keys.of_file(file))
        for line in left_out_lines(loaded.skipped, "malformed (data.skip_bad)", loaded.reasons):
            say(line)
        for question in loaded.rows:
            name = _set_of_row(question, file)
            if name is None:
                left_out[question.data_source] += 1
            else:
                by_split[name][named].append(question)
    sets = [
        _limited(name, taken, by_split[name][taken], limit, seed)
        for name in SETS
        if name in by_split
        for taken in [next(one for one in order if one in by_split[name])]
    ]
    if not sets:
        others = ", ".join(left_out) or "none"
        own = (
            "; questions of your own go without --suite: `unspiral eval --data FILE` keeps each answer, and "
            "`unspiral eval compare` compares two such files"
            if left_out
            else ""
        )
        raise UserError(
            f"{path}: holds no questions of {', '.join(SETS)} (split {split}); data sets there: {others}{own}"
        )
    return Suite(sets, left_out)


def _order(split: str) -> tuple[str, ...]:
    """The words by which files name the splits to take, those that come first preferred. Raises UserError."""
    if split == AUTO:
        return PREFERRED
    spelled = next((words for words in _SPELLED.values() if split in words), None)
    if spelled is None:
        raise UserError(f"--split {split}: {accepted(split, splits())}")
    return (*spelled, "")


def splits() -> tuple[str, ...]:
    """The names that `--split` takes; the other words of a split are taken too."""
    return (AUTO, *_SPELLED)


def numbered(ids: Iterable[str]) -> list[str]:
    """Ids that are unique: the second `7` is `7#2`."""
    seen: Counter[str] = Counter()
    keys = []
    for one in ids:
        seen[one] += 1
        keys.append(f"{one}#{seen[one]}" if seen[one] > 1 else one)
    return keys


def _limited(name: str, split: str, questions: list[Question], limit: int | None, seed: int) -> QuestionSet:
    keys = numbered([question.id for question in questions])
    items = [Item(f"{name}/{key}", name, question) for key, question in zip(keys, questions, strict=True)]
    if limit is None or limit >= len(items):
        return QuestionSet(name, split, tuple(items), len(items), None)
    chosen = drawn([item.key for item in items], limit, seed)
    return QuestionSet(name, split, tuple(i for i in items if i.key in chosen), len(items), seed)


def drawn(keys: Iterable[str], limit: int, seed: int) -> set[str]:
    """The subset of a set's rows: by a hash of each key, so that a larger limit draws the same rows and more,
    wherever they stand in the file."""
    order = sorted(keys, key=lambda key: hashlib.blake2b(f"{seed}:{key}".encode()).digest())
    return set(order[:limit])
