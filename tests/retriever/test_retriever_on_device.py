"""Exact search by PyTorch in a server, on the CPU: the answers of FAISS, and refusals in one line."""

from __future__ import annotations

import sys

import httpx
import numpy as np
import pytest

from benchmarks.made_vectors import Made, write_flat
from retriever_service.dense import on_device
from retriever_service.dense.search import DenseRanker
from retriever_service.http.launch import serve_in_thread
from retriever_service.indexing.build import build_index
from retriever_service.indexing.convert import convert_index
from retriever_service.search.backends import check_settings, open_index
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

pytest.importorskip("sentence_transformers")
pytest.importorskip("faiss")

COUNT = 6_000
WIDTH = 64
MADE = Made(WIDTH)
QUERIES = ["Which river flows past Morwen?", "Mina Frost", " ", "the weaver born in Aldersea"]


class Given:
    """In place of an encoder: queries are numbers of questions."""

    dimension = WIDTH

    def __init__(self) -> None:
        self._vectors = MADE.questions(MADE.chunk(0)[:COUNT:60])

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._vectors[[int(text) for text in texts]]


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    path = tmp_path_factory.mktemp("flat") / "faiss.index"
    write_flat(MADE, COUNT, path)
    return path


@pytest.mark.parametrize("devices", [1, 3], ids=["one device", "three devices"])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 1e-6)])
def test_the_ranks_are_those_of_faiss(flat, monkeypatch, devices, dtype, error):
    monkeypatch.setattr(on_device, "devices_of", lambda device: ["cpu"] * devices)
    monkeypatch.setattr("retriever_service.dense.search.devices_of", on_device.devices_of)
    wanted = on_device.OnDevice.of("cpu", dtype)
    theirs = DenseRanker(flat, Given(), COUNT, kind="Flat")
    ours = DenseRanker(flat, Given(), COUNT, on_device=wanted, kind="Flat")
    assert theirs.how == "FAISS Flat"
    assert ours.how == f"PyTorch {dtype} on {', '.join(['cpu'] * devices)}"
    asked = [str(number) for number in range(100)]
    for topk in (1, 10):
        kept = []
        for mine, exact in zip(ours.rank(asked, topk), theirs.rank(asked, topk), strict=True):
            scores = dict(exact)
            assert [score for _, score in mine] == pytest.approx([score for _, score in exact], abs=error)
            if dtype == "float32":
                assert [row for row, _ in mine] == [row for row, _ in exact]
            kept += [row in scores for row, _ in mine]
        assert np.mean(kept) >= 0.99
    assert [len(one) for one in ours.rank(["0", " "], COUNT + 5)] == [COUNT, 0]


def test_vectors_that_do_not_fit_are_streamed_and_health_says_so(flat, monkeypatch):
    monkeypatch.setattr(on_device, "free_bytes", lambda device: 1000)
    ours = DenseRanker(flat, Given(), COUNT, on_device=on_device.OnDevice("cpu", "float32"))
    assert ours.how == "PyTorch float32 on cpu, streamed from the disk"
    (mine,), (exact,) = ours.rank(["3"], 5), DenseRanker(flat, Given(), COUNT).rank(["3"], 5)
    assert [row for row, _ in mine] == [row for row, _ in exact]
    assert [score for _, score in mine] == pytest.approx([score for _, score in exact])


@pytest.fixture(scope="module")
def dense_index(tmp_path_factory, tiny_encoder):
    out = tmp_path_factory.mktemp("dense") / "flat"
    build_index(CORPUS, out, backend="dense", model=tiny_encoder, family="e5")
    return out


def test_a_server_searches_by_it_and_its_health_says_by_what(dense_index, tmp_path):
    convert_index(dense_index, tmp_path / "small", "SQ8", rescore=10, rescore_dtype="float32")
    body = {"queries": QUERIES, "topk": 5, "return_scores": True}
    found = {}
    for name, index, options, how in (
        ("faiss", dense_index, {}, "FAISS Flat"),
        ("torch", dense_index, {"dense_device": "cpu"}, "PyTorch float32 on cpu"),
        ("int8", dense_index, {"dense_device": "cpu", "dense_dtype": "int8"}, "PyTorch int8 on cpu"),
        ("rescored", tmp_path / "small", {"dense_device": "cpu"}, "PyTorch float32 on cpu"),
    ):
        with serve_in_thread(ServerSettings(index=str(index), port=0, **options)) as server:
            for path in ("/readyz", "/health"):
                assert httpx.get(server.url + path, trust_env=False).json()["search"] == how
            answer = httpx.post(f"{server.url}/retrieve", json=body, trust_env=False, timeout=60)
            found[name] = answer.json()["result"]
    for name in ("torch", "int8", "rescored"):
        for mine, exact in zip(found[name], found["faiss"], strict=True):
            assert [hit["score"] for hit in mine] == pytest.approx([hit["score"] for hit in exact], abs=1e-5)
            # Scores of a model without training lie close together: such rows may change places.
            near = {hit["document"]["id"] for hit in exact if hit["score"] > exact[-1]["score"] + 1e-5}
            assert near <= {hit["document"]["id"] for hit in mine}


def test_a_hybrid_index_uses_it_for_its_vectors(tmp_path, tiny_encoder):
    build_index(CORPUS, tmp_path / "both", backend="hybrid", model=tiny_encoder, family="e5")
    index = open_index(ServerSettings(index=str(tmp_path / "both"), dense_device="cpu"))
    assert index.how == "BM25 and PyTorch float32 on cpu"
    assert b"Mina Frost" in index.search(["Mina Frost"], 1)[0][0][0]
    index.close()


def test_what_cannot_be_searched_so_is_one_line(dense_index, tmp_path, monkeypatch):
    convert_index(dense_index, tmp_path / "sq8", "SQ8")
    for options, line in (
        ({"faiss_gpu": True}, "--dense-device cpu: does not go with --faiss_gpu"),
        (
            {"index": "shards+http://a"},
            r"shards\+http://a is not searched by this server",
        ),
    ):
        with pytest.raises(UserError, match=line):
            check_settings(ServerSettings(**{"index": str(dense_index), "dense_device": "cpu"} | options))
    for place in (dense_index, tmp_path / "sq8"):
        settings = ServerSettings(index=str(place), faiss_gpu=True, workers=2)
        with pytest.raises(UserError, match=r"^--workers 2: .* --faiss_gpu goes with --workers 1$"):
            check_settings(settings)
    with pytest.raises(UserError, match=r"does not hold its vectors as they are \(SQ8\); accepted with"):
        open_index(ServerSettings(index=str(tmp_path / "sq8"), dense_device="cpu"))
    settings = ServerSettings(index=str(dense_index), dense_device="cuda")
    with monkeypatch.context() as one_gpu:
        one_gpu.setattr(on_device, "gpu_count", lambda: 1)
        assert "186 passages" in check_settings(settings)
        with pytest.raises(UserError, match="--workers 2: each would load the vectors on the same GPUs"):
            check_settings(settings.model_copy(update={"workers": 2}))
    check_settings(settings.model_copy(update={"workers": 2, "dense_device": "cpu"}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvironmentLacks, match="--dense-device cuda: torch sees no GPU here; give"):
        check_settings(settings)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EnvironmentLacks, match="torch is not installed; in a checkout"):
        check_settings(settings)
