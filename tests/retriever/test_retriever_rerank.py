"""Reranking by a cross-encoder."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from test_retriever_dense import QUERIES, ROWS, TEXTS

from retriever_service.dense.encoder import Encoder, EncoderSettings
from retriever_service.dense.rerank import CrossEncoderReranker
from retriever_service.http.launch import serve_in_thread
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_models import tiny_encoder, tiny_reranker  # noqa: F401

pytest.importorskip("sentence_transformers")


def test_a_text_cannot_hold_the_models_separator(tiny_encoder, tiny_reranker):
    """`[SEP]` in a passage is read as `[`, `SEP`, `]`, whichever core encodes it."""
    encoder = Encoder(EncoderSettings(tiny_encoder, "e5"))
    assert encoder._model.tokenizer("a [SEP] b")["input_ids"].count(3) == 1
    hostile, spelled = encoder.passages(["river [SEP] town", "river [ SEP ] town"])
    assert np.abs(hostile - spelled).max() < 1e-6
    together = encoder.passages(["river [SEP] town", *TEXTS[:20]])
    assert np.abs(together[0] - hostile).max() < 1e-5
    reranker = CrossEncoderReranker(tiny_reranker)
    pair = ['"x"\nriver [SEP] town', '"x"\nriver [ SEP ] town']
    (scores,) = reranker.order([("river [SEP]", pair)], 2)
    assert [i for i, _ in scores] == [0, 1] and abs(scores[0][1] - scores[1][1]) < 1e-6


def test_rerank_orders_list_i_by_query_i(small_index, tiny_reranker):
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(tiny_reranker)

    def ordered(query, rows):
        pairs = [(query, "(Title: {}) {}".format(*row["contents"].split("\n", 1))) for row in rows]
        return [rows[i]["id"] for i in np.argsort(-model.predict(pairs), kind="stable")]

    lists = [ROWS[:6], ROWS[40:43], []]
    with serve_in_thread(
        ServerSettings(index=str(small_index), port=0, reranker=tiny_reranker, rerank_depth=8)
    ) as running:
        with httpx.Client(base_url=running.url, trust_env=False, timeout=30) as http:
            wrapped = [[{"document": row, "score": 1.0} for row in one] for one in lists]
            scored = http.post(
                "/rerank",
                json={"queries": QUERIES[:3], "documents": wrapped, "rerank_topk": 4, "return_scores": True},
            ).json()
            got = [[h["document"]["id"] for h in hits] for hits in scored["result"]]
            assert got == [ordered(q, one)[:4] if one else [] for q, one in zip(QUERIES, lists, strict=False)]
            plain = http.post("/rerank", json={"queries": QUERIES[:1], "documents": [lists[0]]}).json()[
                "result"
            ]
            assert plain == [
                [next(r for r in ROWS if r["id"] == i) for i in ordered(QUERIES[0], lists[0])[:3]]
            ]
            assert http.post("/rerank", json={"queries": [], "documents": []}).json() == {"result": []}
            for given in (
                {"contents": "x"},
                {"document": {"contents": "x"}},
                {"document": {"id": None, "contents": "x"}},
            ):
                without = http.post("/rerank", json={"queries": ["a"], "documents": [[given]]})
                assert without.status_code == 200 and without.json() == {
                    "result": [[{"id": "", "contents": "x"}]]
                }
            for body, field in (
                ({"queries": ["a"], "documents": []}, "documents"),
                ({"queries": ["a"], "documents": [[{"id": "1"}]]}, "documents[0][0]"),
                (
                    {"queries": ["a"], "documents": [[{"document": {"id": "1"}}]]},
                    "documents[0][0].document.contents",
                ),
                ({"queries": ["a"], "documents": [ROWS[:1] * 1001]}, "documents[0]"),
                ({"queries": ["a"], "documents": [[]], "rerank_topk": -1}, "rerank_topk"),
            ):
                answer = http.post("/rerank", json=body)
                assert (answer.status_code, answer.json()["field"]) == (422, field)

            first_stage = [json.loads(d) for d, _ in Index(small_index).search(QUERIES[:1], 8)[0]]
            retrieved = http.post("/retrieve", json={"queries": QUERIES[:1], "topk": 3}).json()["result"][0]
            assert [d["id"] for d in retrieved] == ordered(QUERIES[0], first_stage)[:3]


def test_rerank_without_a_reranker_is_a_404_that_says_how_to_get_one(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0)) as running:
        answer = httpx.post(
            f"{running.url}/rerank", json={"queries": ["a"], "documents": [[]]}, trust_env=False
        )
        odd = {"queries": ["a"], "documents": [3]}
        assert httpx.post(f"{running.url}/rerank", json=odd, trust_env=False).status_code == 404
        assert answer.status_code == 404 and "--reranker" in answer.json()["detail"]
