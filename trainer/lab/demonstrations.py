"""Supervised sequences for the warm start: reading drills, and demonstrations of good and of bad search
behaviour.

A sequence is a list of `(text, learnt)` pieces; the loss is taken on the tokens of the learnt ones. The
documents are those that the real retriever returns for the same queries (BM25, k1 .9, b .4, top 2),
distractors included.
"""

from __future__ import annotations

import random
from typing import Literal

from services.common.loading.extras import needed_for
from services.rollout.worker.templates.lab_text import observation, question_prompt
from trainer.lab.world import NAMES, LabQuestion, World

TOPK = 2
Kind = Literal["right", "guess", "poor", "stop"]
Piece = tuple[str, bool]


class Library:
    """A world with its search results."""

    def __init__(self, world: World):
        with needed_for("the demo's warm start", "cpu"):
            import bm25s
        import Stemmer

        self.world = world
        self._stemmer = Stemmer.Stemmer("english")
        self._index = bm25s.BM25(k1=0.9, b=0.4)
        self._contents = [contents for _, contents in world.documents]
        self._index.index(self._tokens(self._contents), show_progress=False)
        queries = [f"{subject} {relation}" for subject, facts in world.facts.items() for relation in facts]
        self._known = dict(zip(queries, self._retrieve(queries), strict=True))

    def search(self, query: str) -> list[str]:
        """Contents of the documents found, best first."""
        if query not in self._known:
            self._known[query] = self._retrieve([query])[0]
        return self._known[query]

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        import bm25s

        return bm25s.tokenize(
            texts, stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        rows, scores = self._index.retrieve(self._tokens(queries), k=TOPK, show_progress=False)
        return [
            [self._contents[i] for i, s in zip(row, score, strict=True) if s > 0]
            for row, score in zip(rows, scores, strict=True)
        ]


def search_action(stage: str, query: str) -> str:
    """`stage` is what the policy has in mind: `first born`, or `then born n123` once it has read a value."""
    return f"<think> {stage} </think> <search> {query} </search>"


def answer_action(relation: str, value: str) -> str:
    return f"<think> found {relation} {value} </think> <answer> {value} </answer>"


def demonstration(question: LabQuestion, library: Library, kind: Kind, rng: random.Random) -> list[Piece]:
    """A whole trajectory. `right` searches each hop; `guess` answers at once with any name; `poor` searches
    for half of the name and reads what comes; `stop` answers with the value of the first hop."""
    hops = question.hops
    pieces = [(question_prompt(question.text), False)]
    if kind == "guess":
        return [*pieces, (answer_action(hops[-1].relation, rng.choice(NAMES)), True)]
    stage = f"first {hops[0].relation}"
    subject = hops[0].subject
    value = ""
    for hop in hops[:1] if kind == "stop" else hops:
        query = f"{subject} {hop.relation}"
        if kind == "poor" and subject == hops[0].subject:
            query = f"{rng.choice(subject.split())} {hop.relation}"
        found = library.search(query)
        pieces += [(search_action(stage, query), True), (observation(found), False)]
        value = _read(found, hop.relation) or rng.choice(NAMES)
        stage = f"then {hop.relation} {value}"
        subject = value
    relation = hops[0].relation if kind == "stop" else hops[-1].relation
    return [*pieces, (answer_action(relation, value), True)]


def drill(library: Library, rng: random.Random) -> list[Piece]:
    """One search result, then every fact of every document in it, in random order, in two passes; only the
    values are learnt. Without these the policy learns to copy names but not to read values (8 to 12 readings
    in a sequence, against 1 or 2 in a demonstration)."""
    subject = rng.choice(list(library.world.facts))
    query = f"{subject} {rng.choice(list(library.world.facts[subject]))}"
    found = library.search(query)
    pieces: list[Piece] = [(f"<bos> <search> {query} </search> {observation(found)} <think>", False)]
    for contents in found * 2:
        title, body = contents.split("\n")
        words = body.split()
        facts = list(zip(words[::2], words[1::2], strict=True))
        rng.shuffle(facts)
        pieces += [(title.strip('"'), False)]
        for relation, value in facts:
            pieces += [(relation, False), (value, True)]
    return pieces


def _read(found: list[str], relation: str) -> str | None:
    """The value of a relation in the best document."""
    words = found[0].split() if found else []
    return words[words.index(relation) + 1] if relation in words[:-1] else None
