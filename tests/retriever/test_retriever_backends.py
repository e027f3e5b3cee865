"""The registry of index kinds: whoever adds one writes the protocol and one entry, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from retriever_service.cli import index_app
from retriever_service.errors import RetrieverUnavailable
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import IndexInfo
from retriever_service.index_folder.documents import encode_document
from retriever_service.search import backends
from retriever_service.search.backends import Backend, backend_of, check_settings
from retriever_service.settings import ServerSettings
from tests.retriever.retriever_fixtures import small_index  # noqa: F401


class Shelf:
    """What the protocol SearchIndex asks for, and no more."""

    quick = False
    rows = None
    reranker = None

    def __init__(self) -> None:
        self.info = IndexInfo(backend="shelf", corpus="shelf:1", passages=2, settings={})
        self.closed = False

    def search(self, queries, topk):
        if "fire" in queries:
            raise RetrieverUnavailable("shelf:1: burnt")
        return [[(encode_document("7", f'"Found"\n{query}'), 1.5)][:topk] for query in queries]

    def normalise(self, query):
        return query

    def close(self):
        self.closed = True


@pytest.fixture
def shelf(monkeypatch):
    opened = Shelf()
    kind = Backend(
        "shelf", lambda s: s.index.startswith("shelf:"), lambda s: "one shelf", lambda s, reranker: opened
    )
    monkeypatch.setattr(backends, "BACKENDS", (kind, *backends.BACKENDS))
    return opened


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("/srv/secret/e5-base", "e5-base"),
        ("~/e5-base/checkpoint-500", "e5-base"),
        ("ORG/e5-base", "ORG/e5-base"),
    ],
)
def test_readiness_names_the_encoder_and_no_folder_of_the_server(shelf, model, shown):
    encoder = {"model": model, "family": "e5", "max_tokens": 256}
    shelf.info.settings["encoder"] = encoder
    with serve_in_thread(ServerSettings(index="shelf:1", port=0)) as server:
        told = httpx.get(f"{server.url}/readyz", trust_env=False).json()["settings"]
    assert told == {"encoder": encoder | {"model": shown}}
    assert shelf.info.settings["encoder"]["model"] == model, "what searches still finds it"


def test_a_kind_of_ones_own_is_served_by_its_protocol_alone(shelf):
    settings = ServerSettings(index="shelf:1", port=0)
    assert check_settings(settings) == "one shelf"
    with serve_in_thread(settings) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/readyz").json()["backend"] == "shelf"
        body = {"queries": ["a book", " "], "topk": 1, "return_scores": True}
        found = {"document": {"id": "7", "contents": '"Found"\na book'}, "score": 1.5}
        assert client.post("/retrieve", json=body).json() == {"result": [[found], []]}
        assert client.post("/access", json={"urls": ["7"]}).status_code == 422
        assert client.post("/rerank", json={"queries": [], "documents": []}).status_code == 404
        burnt = client.post("/retrieve", json={"query": "fire"})
        assert burnt.status_code == 503 and burnt.headers["retry-after"] == "1"
        assert burnt.json() == {"detail": "shelf:1: burnt", "field": None, "limit": None}
    assert shelf.closed


def test_the_command_searches_a_kind_of_ones_own(shelf):
    done = CliRunner().invoke(index_app, ["search", "--index", "shelf:1", "a book"])
    assert done.exit_code == 0 and "(id 7, score 1.500)" in done.stdout and shelf.closed


def test_each_index_is_of_the_kind_that_its_name_shows(small_index, tmp_path):
    file = tmp_path / "flat.index"
    file.write_bytes(b"")
    kinds = {
        "qdrant+http://127.0.0.1:6333/wiki": "qdrant",
        str(file): "faiss file",
        str(small_index): "folder",
        str(tmp_path / "none"): "folder",
    }
    assert {index: backend_of(ServerSettings(index=index)).name for index in kinds} == kinds


def test_a_backend_of_a_later_version_is_refused(small_index, tmp_path):
    folder = tmp_path / "i"
    folder.mkdir()
    for file in small_index.iterdir():
        (folder / file.name).symlink_to(file)
    meta = orjson.loads((small_index / "meta.json").read_bytes()) | {"backend": "splade"}
    (folder / "meta.json").unlink()
    (folder / "meta.json").write_bytes(orjson.dumps(meta))
    with pytest.raises(backends.IndexInvalid, match="backend 'splade' is unknown"):
        check_settings(ServerSettings(index=str(folder)))


def test_a_server_over_vectors_or_qdrant_loads_no_numba():
    seen = "import retriever_service.http.launch, sys; print('numba' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", seen], text=True) == "False\n"


def test_an_index_of_ones_own_may_lack_what_is_optional(shelf, monkeypatch):
    monkeypatch.delattr(Shelf, "reranker")
    monkeypatch.delattr(Shelf, "rows")
    with serve_in_thread(ServerSettings(index="shelf:1", port=0)) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.post("/retrieve", json={"query": "a book"}).status_code == 200
            assert client.post("/access", json={"urls": ["7"]}).status_code == 422
            assert client.post("/rerank", json={"queries": [], "documents": []}).status_code == 404


def test_an_index_that_lacks_what_is_required_is_a_failure_with_its_reason(shelf, monkeypatch):
    monkeypatch.delattr(Shelf, "quick")
    with pytest.raises(AttributeError, match="quick"):
        serve_in_thread(ServerSettings(index="shelf:1", port=0), start_timeout_seconds=20)
