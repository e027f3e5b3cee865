"""The measurement of a served index asks for exactness itself, and would see a wrong score."""

from __future__ import annotations

import numpy as np

from benchmarks.bm25_serving import exact
from benchmarks.retriever_load.http_load import load, post
from retriever_service.bm25.packed.search import PackedRanker
from retriever_service.http.launch import serve_in_thread
from retriever_service.indexing.build import build_index
from retriever_service.settings import ServerSettings
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


def test_clients_with_a_rate_ask_no_more_than_it_and_others_as_much_as_they_can(tmp_path):
    build_index(CORPUS, tmp_path / "i", postings="packed")
    requests = [post("/retrieve", {"queries": [question]}) for question in QUESTIONS]
    with serve_in_thread(ServerSettings(index=str(tmp_path / "i"), port=0)) as server:
        paced = load(server.url, requests, 4, 2, warm_up=0, rate=5)
        free = load(server.url, requests, 4, 2, warm_up=0)
    assert not paced["failures"]
    assert not free["failures"]
    assert 1 <= paced["n"] <= 24  # 10 are expected, and the four that set up
    assert free["n"] > paced["n"]
