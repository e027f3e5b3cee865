"""The measurement of a served index asks for exactness itself, and would see a wrong score."""

from __future__ import annotations

import numpy as np

from benchmarks.bm25_serving import exact
from retriever_service.bm25.packed.search import PackedRanker
from retriever_service.indexing.build import build_index
from tests.retriever.retriever_fixtures import CORPUS

QUESTIONS = [
    "Which river flows past Morwen?",
    "the weaver born in Aldersea weaver",
    "town",
    "nothingofthekind",
]


BOTH = {"impacts": 4, "blocks": 4}


def test_exactness_is_measured_and_a_wrong_score_is_seen(tmp_path, monkeypatch):
    build_index(CORPUS, tmp_path / "i", postings="packed")
    found = exact(tmp_path / "i", QUESTIONS)
    assert (found["passages"], found["questions"], found["same"]) == (186, 4, BOTH)
    rank = PackedRanker.rank

    def off(ranker, queries, topk):
        return [[(row, float(np.nextafter(np.float32(s), np.float32(0)))) for row, s in r]
                for r in rank(ranker, queries, topk)]  # fmt: skip

    monkeypatch.setattr(PackedRanker, "rank", off)
    assert exact(tmp_path / "i", QUESTIONS)["same"] == {
        "impacts": 1,
        "blocks": 1,
    }  # the one that nothing matches
