"""Dense search: encoders as their families want them, exact ranks, fusion, conversion, published files,
reranking, Qdrant."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import httpx
import numpy as np
import pytest

from retriever_service.__main__ import main
from retriever_service.dense.build import flat_header
from retriever_service.dense.encoder import BGE_QUERY, Encoder, EncoderSettings, family_of
from retriever_service.errors import IndexInvalid, RetrieverUnavailable
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import verify
from retriever_service.indexing.build import build_index
from retriever_service.indexing.convert import convert_index
from retriever_service.indexing.sinks import VectorSink
from retriever_service.ranking import fuse
from retriever_service.search.backends import open_index
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_models import tiny_encoder, tiny_reranker  # noqa: F401

pytest.importorskip("sentence_transformers")
faiss = pytest.importorskip("faiss")

ROWS = [json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()]
TEXTS = [row["contents"] for row in ROWS]
QUERIES = [
    "Which river flows past Morwen?",
    "the weaver born in Aldersea",
    "Mina Frost",
    "largest house of Fennick",
]


@pytest.fixture(scope="session")
def dense_index(tmp_path_factory, tiny_encoder):
    out = tmp_path_factory.mktemp("dense") / "flat"
    build_index(CORPUS, out, backend="dense", model=tiny_encoder, family="e5")
    return out


def by_hand(folder: str, texts: list[str], pooling: str) -> np.ndarray:
    """Unit vectors by transformers alone, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer, vectors = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
        [],
    )
    for text in texts:
        with torch.no_grad():
            hidden = model(
                **tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
            ).last_hidden_state[0]
        vector = hidden[0] if pooling == "cls" else hidden.mean(0)
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize(
    ("family", "query", "passage", "pooling"),
    [("e5", "query: ", "passage: ", "mean"), ("bge", BGE_QUERY, "", "cls"), ("contriever", "", "", "mean")],
)
def test_families_have_their_prefixes_and_pooling(tiny_encoder, family, query, passage, pooling):
    encoder = Encoder(EncoderSettings(tiny_encoder, family))
    np.testing.assert_allclose(
        encoder.queries(QUERIES), by_hand(tiny_encoder, [query + q for q in QUERIES], pooling), atol=1e-5
    )
    np.testing.assert_allclose(
        encoder.passages(TEXTS[:3]),
        by_hand(tiny_encoder, [passage + t for t in TEXTS[:3]], pooling),
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_encoders_are_close_and_wrong_ones_named(tiny_encoder, dtype):
    exact = Encoder(EncoderSettings(tiny_encoder, "e5")).queries(QUERIES)
    half = Encoder(EncoderSettings(tiny_encoder, "e5"), dtype=dtype).queries(QUERIES)
    assert half.dtype == np.float32 and np.all(np.sum(exact * half, 1) > 0.999)
    np.testing.assert_allclose(np.linalg.norm(half, axis=1), 1, atol=1e-6)
    with pytest.raises(UserError, match="accepted are auto, float32, bfloat16, float16"):
        Encoder(EncoderSettings(tiny_encoder, "e5"), dtype="int3")


def test_the_family_is_read_from_upstreams_names():
    assert family_of("e5", "/models/x") == family_of(None, "intfloat/e5-base-v2") == "e5"
    assert (
        family_of(None, "BAAI/bge-small-en-v1.5") == "bge" and family_of(None, "all-MiniLM-L6-v2") == "auto"
    )
    with pytest.raises(UserError, match="e5, bge, contriever, auto"):
        family_of("dpr", "/models/x")


def test_dense_ranks_equal_exact_inner_products(dense_index, tiny_encoder):
    encoder = Encoder(EncoderSettings(tiny_encoder, "e5"))
    products = encoder.queries(QUERIES) @ encoder.passages(TEXTS).T
    index = Index(dense_index)
    for ranked, scores in zip(index.ranker.rank(QUERIES, 10), products, strict=True):
        best = np.lexsort((np.arange(len(scores)), -scores))[:10]
        assert [row for row, _ in ranked] == best.tolist()
        np.testing.assert_allclose([s for _, s in ranked], scores[best], atol=1e-5)
    assert index.search(["", "  "], 3) == [[], []]


def test_the_flat_file_is_what_faiss_itself_would_write(dense_index, tiny_encoder, tmp_path):
    vectors = Encoder(EncoderSettings(tiny_encoder, "e5")).passages(TEXTS)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    faiss.write_index(flat, str(tmp_path / "x"))
    ours, theirs = (dense_index / "dense" / "faiss.index").read_bytes(), (tmp_path / "x").read_bytes()
    header = len(theirs) - vectors.nbytes
    assert ours[:header] == theirs[:header] == flat_header(vectors.shape[1], len(vectors)) and len(
        ours
    ) == len(theirs)


def test_a_dense_build_that_broke_off_goes_on_where_it_was(dense_index, tiny_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(VectorSink, "chunk_passages", 50)
    write, chunks = VectorSink.write, []

    def breaks(self, texts):
        chunks.append(len(texts))
        if len(chunks) == 3:
            raise KeyboardInterrupt
        write(self, texts)

    monkeypatch.setattr(VectorSink, "write", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(CORPUS, tmp_path / "i", backend="dense", model=tiny_encoder, family="e5")
    build_index(CORPUS, tmp_path / "i", backend="dense", model=tiny_encoder, family="e5")
    assert chunks == [50, 50, 50, 50, 36]
    whole, resumed = (
        faiss.read_index(str(f / "dense" / "faiss.index")) for f in (dense_index, tmp_path / "i")
    )
    np.testing.assert_allclose(whole.reconstruct_n(0, 186), resumed.reconstruct_n(0, 186), atol=1e-6)


def test_hybrid_is_reciprocal_rank_fusion_of_both(tmp_path, tiny_encoder, dense_index, small_index):
    build_index(CORPUS, tmp_path / "h", backend="hybrid", model=tiny_encoder, family="e5")
    hybrid, bm25, dense = Index(tmp_path / "h"), Index(small_index), Index(dense_index)
    for query in QUERIES:
        expected: dict[int, float] = {}
        for index in (bm25, dense):
            for place, (row, _) in enumerate(index.ranker.rank([query], 100)[0], 1):
                expected[row] = expected.get(row, 0) + 1 / (60 + place)
        best = sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:5]
        assert hybrid.ranker.rank([query], 5)[0] == best
    assert fuse([[(1, 9.0), (2, 8.0)], [(2, 0.5)]], 2) == [(2, 1 / 62 + 1 / 61), (1, 1 / 61)]


@pytest.mark.parametrize(
    ("kind", "least"),
    [("Flat", 1.0), ("SQfp16", 0.97), ("SQ8", 0.9), ("IVF,Flat", 0.2), ("IVF,SQ8", 0.2), ("HNSW32", 0.9)],
)
def test_conversion_keeps_the_recall_that_it_reports(dense_index, tmp_path, kind, least):
    info, recall = convert_index(dense_index, tmp_path / "c", kind, nprobe=2, ef_search=64, sample=100)
    assert info.settings["type"] == kind and info.passages == 186 and least <= recall[10] <= 1
    exact, converted = Index(dense_index), Index(tmp_path / "c")
    overlap = np.mean(
        [
            len(set(dict(a)) & set(dict(b))) / 10
            for a, b in zip(exact.ranker.rank(QUERIES, 10), converted.ranker.rank(QUERIES, 10), strict=True)
        ]
    )
    assert overlap >= least - 0.1
    if kind == "SQ8":
        assert (tmp_path / "c/dense/faiss.index").stat().st_size < (
            dense_index / "dense/faiss.index"
        ).stat().st_size / 3


def test_the_convert_command_prints_recall_over_questions(dense_index, tmp_path, monkeypatch, capsys):
    (tmp_path / "q.jsonl").write_text(
        '{"question": "who was born in Morwen?"}\n{"question": "where does Fennick live?"}\n'
    )
    words = [
        "index",
        "convert",
        "--index",
        dense_index,
        "--type",
        "SQ8",
        "--out",
        tmp_path / "c",
        "--queries",
        tmp_path / "q.jsonl",
    ]
    words += ["--model", verify(dense_index).settings["encoder"]["model"], "--family", "e5"]
    monkeypatch.setattr("sys.argv", ["x", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        main()
    out = capsys.readouterr().out
    assert (
        not done.value.code
        and "dense SQ8" in out
        and "recall of the exact search, over the questions of" in out
        and "@10 " in out
    )


def test_published_files_are_served_beside_their_corpus_and_converted(dense_index, tiny_encoder, tmp_path):
    shutil.copy(dense_index / "dense" / "faiss.index", tmp_path / "e5_Flat.index")
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps(row | {"extra": 1}) for row in ROWS), "utf-8")
    settings = ServerSettings(
        index=str(tmp_path / "e5_Flat.index"),
        corpus=str(tmp_path / "corpus.jsonl"),
        retriever_name="e5",
        retriever_model=tiny_encoder,
        port=0,
    )
    with serve_in_thread(settings) as published:
        answer = httpx.post(
            f"{published.url}/retrieve",
            json={"queries": QUERIES, "topk": 5, "return_scores": True},
            trust_env=False,
        ).json()
    expected = Index(dense_index).search(QUERIES, 5)
    assert [[h["document"] for h in hits] for hits in answer["result"]] == [
        [json.loads(d) for d, _ in hits] for hits in expected
    ]
    _, recall = convert_index(
        tmp_path / "e5_Flat.index",
        tmp_path / "c",
        "SQfp16",
        corpus=tmp_path / "corpus.jsonl",
        model=tiny_encoder,
        family="e5",
        sample=50,
    )
    assert recall[10] > 0.95 and Index(tmp_path / "c").search(QUERIES[:1], 1)[0][0][0] == expected[0][0][0]

    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:-1]), "utf-8")
    with pytest.raises(IndexInvalid, match="186 vectors for 185 passages"):
        open_index(settings)
    (tmp_path / "e5_Flat.index").write_bytes((tmp_path / "e5_Flat.index").read_bytes()[:5000])
    with pytest.raises(IndexInvalid, match="not a readable FAISS index"):
        open_index(settings)


def test_the_wrong_encoder_a_missing_one_and_a_wrong_type_are_refused(
    dense_index, tiny_encoder, tiny_reranker, tmp_path
):
    with pytest.raises(IndexInvalid, match="was not made by the encoder"):
        Index(dense_index, model=tiny_reranker)
    with pytest.raises(UserError, match="no such folder; expected the folder of a model"):
        Index(dense_index, model=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentLacks, match="can't be loaded"):
        Index(dense_index, model=str(tmp_path / "empty"))
    with pytest.raises(UserError, match="needs a model"):
        build_index(CORPUS, tmp_path / "i", backend="dense")
    with pytest.raises(UserError, match="accepted are Flat, SQfp16"):
        build_index(CORPUS, tmp_path / "i", backend="dense", model=tiny_encoder, vector_type="Cube")
    shutil.copytree(tiny_encoder, tmp_path / "moved")
    assert Index(dense_index, model=str(tmp_path / "moved")).search(["Mina Frost"], 1) == Index(
        dense_index
    ).search(["Mina Frost"], 1)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line_without_those_of_the_loader(small_index):
    command = [
        sys.executable,
        "-m",
        "retriever_service",
        "serve",
        "--index",
        str(small_index),
        "--port",
        "0",
        "--reranker",
        "org/none",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 3
    assert (
        done.stderr.startswith("error: reranker org/none: can't be loaded") and done.stderr.count("\n") == 1
    )
    assert done.stderr.endswith("; where the hub is in reach, fetch it with: hf download org/none\n")


def test_many_dense_requests_at_once_are_each_answered_rightly(dense_index):
    from concurrent.futures import ThreadPoolExecutor

    queries = [f"{row['contents'].split(chr(10))[0]} {i}" for i, row in enumerate(ROWS[:64])]
    expected = [[d for d, _ in hits] for hits in Index(dense_index).search(queries, 3)]
    with (
        serve_in_thread(ServerSettings(index=str(dense_index), port=0)) as running,
        ThreadPoolExecutor(64) as pool,
    ):
        answers = list(
            pool.map(
                lambda q: httpx.post(
                    f"{running.url}/retrieve", json={"query": q}, trust_env=False, timeout=30
                ).json()["result"][0],
                queries,
            )
        )
        page = httpx.get(f"{running.url}/metrics", trust_env=False).text
    assert answers == [[json.loads(d) for d in documents] for documents in expected]
    batches = float(
        next(line for line in page.splitlines() if line.startswith("retriever_batch_queries_count")).split()[
            1
        ]
    )
    assert batches < 64


def test_a_qdrant_collection_answers_like_the_index_it_was_pushed_from(
    dense_index, tiny_encoder, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("qdrant_client")
    address = f"qdrant+file://{tmp_path}/store/wiki"
    monkeypatch.setattr("sys.argv", ["x", "index", "push", "--index", str(dense_index), "--to", address])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code and "186 points" in capsys.readouterr().out
    with serve_in_thread(
        ServerSettings(index=address, retriever_name="e5", retriever_model=tiny_encoder, port=0)
    ) as remote:
        answer = httpx.post(
            f"{remote.url}/retrieve",
            json={"queries": [*QUERIES, ""], "topk": 5, "return_scores": True},
            trust_env=False,
        ).json()
        assert httpx.get(f"{remote.url}/readyz", trust_env=False).json()["passages"] == 186
    expected = Index(dense_index).search([*QUERIES, ""], 5)
    assert [[h["document"] for h in hits] for hits in answer["result"]] == [
        [json.loads(d) for d, _ in hits] for hits in expected
    ]
    for hits, want in zip(answer["result"], expected, strict=True):
        np.testing.assert_allclose([h["score"] for h in hits], [s for _, s in want], atol=1e-4)


def test_an_engine_that_is_down_or_lacks_the_collection_is_named(tiny_encoder, tmp_path):
    pytest.importorskip("qdrant_client")
    for address, error, words in (
        ("qdrant+http://127.0.0.1:9/wiki", RetrieverUnavailable, "qdrant at qdrant.http://127.0.0.1:9/wiki"),
        (f"qdrant+file://{tmp_path}/store/none", UserError, "no such collection"),
        ("qdrant+ftp://x/y", UserError, "expected qdrant"),
    ):
        with pytest.raises(error, match=words):
            open_index(ServerSettings(index=address, retriever_model=tiny_encoder))


def break_off(stage: str, **options) -> None:
    """A build that is interrupted when it comes to a stage."""

    def tell(now: str, share: float, text: str) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(progress=tell, **options)


@pytest.mark.parametrize("left", ["bm25", "dense"])
def test_what_a_build_of_another_kind_left_gets_into_no_index(dense_index, tiny_encoder, tmp_path, left):
    dense = {"backend": "dense", "model": tiny_encoder, "family": "e5", "vector_type": "SQ8"}
    stage, options = ("invert", {}) if left == "bm25" else ("scan", dense)
    break_off(stage, corpus=CORPUS, out=tmp_path / "i", **options)
    assert (tmp_path / "i.building" / ("terms" if left == "bm25" else "vectors")).exists()
    info, _ = convert_index(dense_index, tmp_path / "i", "SQ8", sample=10)
    assert set(info.files) == {
        "dense/faiss.index",
        "documents.jsonl",
        "documents.offsets",
        "lookup.keys",
        "lookup.rows",
    }


def test_a_working_folder_that_is_of_no_build_is_left_alone(tmp_path):
    (tmp_path / "i.building").mkdir()
    (tmp_path / "i.building" / "thesis.txt").touch()
    with pytest.raises(IndexInvalid, match=r"i\.building: holds files that are of no build"):
        build_index(CORPUS, tmp_path / "i")
    assert (tmp_path / "i.building" / "thesis.txt").exists()
