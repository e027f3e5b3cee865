"""The order in which a run takes its questions, and how a resumed run goes on in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from services.common.errors import UserError
from services.common.names import accepted
from services.contracts import Question


class PromptCursor:
    """Goes through the questions pass after pass. Each pass has its own order, which seed and pass alone
    decide (on any machine).

    The state is a few numbers and checksums of the questions, so that a resumed run takes exactly the prompts
    that an undisturbed one takes, and scores their answers by the same ones.
    """

    def __init__(
        self,
        questions: list[Question],
        seed: int,
        shuffle: bool,
        may_change: frozenset[str] = frozenset(),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """may_change: those of `seed`, `data.shuffle`, `data.train` and `data.weights` that may differ from
        the saved state's. weights: `data.weights`."""
        if not questions:
            raise UserError("data.train: no questions")
        self.weights = {name: float(weight) for name, weight in sorted((weights or {}).items())}
        there = {question.data_source for question in questions}
        if unknown := next((name for name in self.weights if name not in there), None):
            raise UserError(
                f"data.weights.{unknown}: no such data source; {accepted(unknown, sorted(there))}"
            )
        self.questions = questions
        if not any(self.weights.get(name, 1.0) for name in there):
            raise UserError("data.weights: leave no question to train on; accepted is one above 0")
        self.seed = seed
        self.shuffle = shuffle
        self.may_change = may_change
        self.epoch, self.position = 0, 0
        self.checksum = _checksum(questions)
        self.answers = _checksum_of_answers(questions)
        self._order = self._order_of(0)

    def take(self, n: int) -> list[Question]:
        """The next n questions; past the end of a pass the next one begins."""
        taken: list[Question] = []
        while len(taken) < n:
            while self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self._order = self._order_of(self.epoch)
            indices = self._order[self.position : self.position + n - len(taken)]
            taken += [self.questions[i] for i in indices]
            self.position += len(indices)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "questions": len(self.questions),
            "checksum": self.checksum,
            "answers": self.answers,
            **({"weights": self.weights} if self.weights else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where that state was taken. Raises UserError where data set, seed or shuffling are others
        now, or something is missing.

        With one that is other and may be, a new pass begins."""
        mine = self.state_dict()
        missing = sorted(
            mine.keys() - state.keys() - {"weights", "answers"}
        )  # earlier versions kept no answers
        if missing:
            raise UserError(
                f"prompt cursor: the saved state lacks {', '.join(missing)}; the run cannot go on with the "
                "same prompts"
            )
        for key, name in (("seed", "seed"), ("shuffle", "data.shuffle")):
            if state[key] != mine[key] and name not in self.may_change:
                raise UserError(
                    f"{name}: the run began with {state[key]} and cannot go on with {mine[key]}: its "
                    "prompts would be others "
                    f"(--allow-changed {name} begins a new pass)"
                )
        before = state.get("weights", {})
        if before != self.weights and "data.weights" not in self.may_change:
            raise UserError(
                f"data.weights: the run began with {before or 'none'} and cannot go on with "
                f"{self.weights or 'none'}: its prompts would be others "
                "(--allow-changed data.weights begins a new pass)"
            )
        if state["checksum"] != mine["checksum"] and "data.train" not in self.may_change:
            raise UserError(
                f"data.train: not the questions that the run began with ({state['questions']} then, "
                f"{mine['questions']} now, checksums "
                f"{state['checksum']} and {mine['checksum']}); resume with the same file, or begin a new "
                "pass with --allow-changed data.train"
            )
        if (
            state["checksum"] == mine["checksum"]
            and state.get("answers", mine["answers"]) != mine["answers"]
            and "data.train" not in self.may_change
        ):
            raise UserError(
                "data.train: the questions are those that the run began with, their golden answers are not: "
                "its rewards would be others (--allow-changed data.train goes on with them)"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        others = any(state[key] != mine[key] for key in ("seed", "shuffle", "checksum"))
        if others or before != self.weights:
            self.epoch += 1
            self.position = 0
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        indices = self._drawn(epoch)
        if not self.shuffle:
            return indices
        # Sorting by hashes: unlike a generator's shuffle, the same in every version of Python and NumPy.
        salt = f"{self.seed}:{epoch}:"
        if not self.weights:
            return sorted(indices, key=lambda i: _hash(f"{salt}{i}"))
        # A question that is taken several times stands at places of its own each time.
        places = sorted(range(len(indices)), key=lambda at: _hash(f"{salt}{indices[at]}:{at}"))
        return [indices[at] for at in places]

    def _drawn(self, epoch: int) -> list[int]:
        """The questions of a pass, in their order, each as often as its source's weight says: the whole part
        always, and once more in that share of the passes which the rest is."""
        if not self.weights:
            return list(range(len(self.questions)))
        drawn: list[int] = []
        for i, question in enumerate(self.questions):
            weight = self.weights.get(question.data_source, 1.0)
            whole = int(weight)
            lot = int.from_bytes(_hash(f"{self.seed}:{epoch}:weight:{i}"), "big") / 2**64
            drawn += [i] * (whole + (lot < weight - whole))
        return drawn


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _checksum(questions: list[Question]) -> str:
    """Of ids and texts in order: a file whose rows are merely numbered has the same ids after an edit."""
    digest = hashlib.blake2b(digest_size=8)
    for q in questions:
        digest.update(f"{q.id}\0{q.text}\0".encode())
    return digest.hexdigest()


def _checksum_of_answers(questions: list[Question]) -> str:
    """Of the golden answers in order: by other ones the same text earns another reward."""
    digest = hashlib.blake2b(digest_size=8)
    for q in questions:
        digest.update("".join(f"{answer}\0" for answer in q.golden_answers).encode() + b"\1")
    return digest.hexdigest()
