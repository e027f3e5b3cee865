"""A made-up encyclopaedia and questions about it, from a seed.

People live in towns and belong to guilds; every entity has one document, and every fact is one token. All
names and values come from one pool of tokens, dealt anew for each seed, so a token says nothing about what it
stands for, and nothing learnt by heart in one world helps
in another: a policy can only search, read and copy. A blind guess is right one time in 240.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = tuple(f"n{i}" for i in range(240))
"""The shared pool of name tokens."""

PEOPLE, FIRST_NAMES, LAST_NAMES, TOWNS, GUILDS = 120, 50, 50, 40, 30

QUESTIONS = {
    ("born",): "what is the town where {} was born ?",
    ("guild",): "what is the guild of {} ?",
    ("craft",): "what is the craft of {} ?",
    ("born", "river"): "what is the river of the town where {} was born ?",
    ("born", "mayor"): "who is the mayor of the town where {} was born ?",
    ("guild", "colour"): "what is the colour of the guild of {} ?",
    ("guild", "hall"): "what is the hall of the guild of {} ?",
}
"""The chains of relations that are asked for, each with its wording; `{}` is the person."""


@dataclass(frozen=True)
class Hop:
    """One fact on the way to an answer: the `relation` of `subject` is `value` (a subject may be two tokens
    long)."""

    subject: str
    relation: str
    value: str


@dataclass(frozen=True)
class LabQuestion:
    """A question and the chain of facts that answers it: one hop or two; the last value is the answer."""

    id: str
    text: str
    hops: tuple[Hop, ...]

    @property
    def answer(self) -> str:
        return self.hops[-1].value

    @property
    def data_source(self) -> str:
        return "lab_one_hop" if len(self.hops) == 1 else "lab_two_hop"


@dataclass(frozen=True)
class World:
    """`facts[subject][relation] = value`; `documents` are `(id, contents)` in the retriever's form; 7
    questions a person."""

    seed: int
    facts: dict[str, dict[str, str]]
    documents: list[tuple[str, str]]
    questions: list[LabQuestion]

    def write_corpus(self, path: Path) -> None:
        """JSONL of `{"id", "contents"}`, one document an entity."""
        with path.open("w", encoding="utf-8") as f:
            for id_, contents in self.documents:
                f.write(json.dumps({"id": id_, "contents": contents}) + "\n")

    def write_questions(self, path: Path, limit: int | None = None) -> None:
        """JSONL of `{"id", "question", "golden_answers", "data_source"}`, at most `limit` rows."""
        with path.open("w", encoding="utf-8") as f:
            for q in self.questions[:limit]:
                row = {
                    "id": q.id,
                    "question": q.text,
                    "golden_answers": [q.answer],
                    "data_source": q.data_source,
                }
                f.write(json.dumps(row) + "\n")


def make_world(seed: int) -> World:
    """The world of a seed; the same on every machine. Questions and documents come shuffled."""
    rng = random.Random(f"unspiral-lab-{seed}")
    pool = list(NAMES)
    rng.shuffle(pool)

    def deal(n: int) -> list[str]:
        return [pool.pop() for _ in range(n)]

    first, last, towns, guilds = deal(FIRST_NAMES), deal(LAST_NAMES), deal(TOWNS), deal(GUILDS)
    words = pool  # what is left: rivers, mayors, colours, halls and crafts
    people = [f"{a} {b}" for a, b in rng.sample([(a, b) for a in first for b in last], PEOPLE)]
    facts: dict[str, dict[str, str]] = {}
    for town in towns:
        facts[town] = {"river": rng.choice(words), "mayor": rng.choice(words)}
    for guild in guilds:
        facts[guild] = {"colour": rng.choice(words), "hall": rng.choice(words)}
    for person in people:
        facts[person] = {"born": rng.choice(towns), "guild": rng.choice(guilds), "craft": rng.choice(words)}

    questions = []
    for person in people:
        for chain, wording in QUESTIONS.items():
            hops = []
            subject = person
            for relation in chain:
                hops.append(Hop(subject, relation, facts[subject][relation]))
                subject = hops[-1].value
            name = f"w{seed}-{person.replace(' ', '-')}-{'-'.join(chain)}"
            questions.append(LabQuestion(name, wording.format(person), tuple(hops)))
    rng.shuffle(questions)

    subjects = list(facts)
    rng.shuffle(subjects)
    documents = []
    for i, subject in enumerate(subjects):
        items = list(facts[subject].items())
        rng.shuffle(items)
        documents.append(
            (str(i), f'"{subject}"\n' + " ".join(f"{relation} {value}" for relation, value in items))
        )
    return World(seed, facts, documents, questions)
