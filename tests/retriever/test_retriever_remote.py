"""A Qdrant collection that is not what `push` makes, or does not answer: one line, and no passages of two
indexes in one collection."""

from __future__ import annotations

import orjson
import pytest

from retriever_service.errors import RetrieverUnavailable
from retriever_service.indexing.build import build_index
from retriever_service.search.backends import open_index
from retriever_service.search.remote import push
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

pytest.importorskip("sentence_transformers")
qdrant = pytest.importorskip("qdrant_client")


def built(folder, encoder: str, passages: int):
    corpus = folder / f"{passages}.jsonl"
    corpus.write_text("".join(f'{{"id": "{i}", "contents": "river {i}"}}\n' for i in range(passages)))
    build_index(corpus, folder / str(passages), backend="dense", model=encoder, family="e5")
    return folder / str(passages)


def test_a_push_that_would_leave_passages_of_another_index_is_refused(tiny_encoder, tmp_path):
    address = f"qdrant+file://{tmp_path}/store/wiki"
    push(built(tmp_path, tiny_encoder, 5), address)
    with pytest.raises(UserError, match="holds 5 points, more than the 3 passages"):
        push(built(tmp_path, tiny_encoder, 3), address)
    assert push(tmp_path / "5", address) == 5  # the same one again, as after a break


def test_a_push_to_an_engine_that_is_down_is_one_line(tiny_encoder, tmp_path):
    with pytest.raises(RetrieverUnavailable, match=r"qdrant at qdrant\+http://127.0.0.1:9/wiki") as error:
        push(built(tmp_path, tiny_encoder, 1), "qdrant+http://127.0.0.1:9/wiki")
    assert "\n" not in str(error.value)


def test_collections_of_another_make_are_refused_for_serving_and_for_pushing(tiny_encoder, tmp_path):
    from qdrant_client import models

    vectors = models.VectorParams(size=32, distance=models.Distance.COSINE)
    client = qdrant.QdrantClient(path=str(tmp_path / "store"))
    client.create_collection("named", {"a": vectors})
    client.create_collection("distance", vectors.model_copy(update={"distance": models.Distance.EUCLID}))
    client.create_collection("small", vectors.model_copy(update={"size": 8}))
    index = built(tmp_path, tiny_encoder, 1)
    with pytest.raises(EnvironmentLacks, match="already accessed"):
        push(index, f"qdrant+file://{tmp_path}/store/small")
    client.close()
    for name, words in (
        ("named", "vectors have names"),
        ("distance", "Euclid distance; expected"),
        ("small", "of 8 numbers"),
    ):
        address = f"qdrant+file://{tmp_path}/store/{name}"
        with pytest.raises(UserError, match=words):
            push(index, address)
        with pytest.raises(UserError, match=words):
            open_index(ServerSettings(index=address, retriever_name="e5", retriever_model=tiny_encoder))


def test_points_of_another_program_are_left_out_and_alone_they_are_no_empty_result(tiny_encoder, tmp_path):
    from qdrant_client import models

    address = f"qdrant+file://{tmp_path}/store/wiki"
    push(built(tmp_path, tiny_encoder, 2), address)
    client = qdrant.QdrantClient(path=str(tmp_path / "store"))
    strange = [{"title": "x"}, {"contents": None}, None, {"contents": "no id"}]
    points = [models.PointStruct(id=10 + i, vector=[0.1] * 32, payload=p) for i, p in enumerate(strange)]
    client.upsert("wiki", points, wait=True)
    client.close()
    index = open_index(ServerSettings(index=address, retriever_name="e5", retriever_model=tiny_encoder))
    (hits,) = index.search(["river 1"], 9)
    assert {orjson.loads(document)["id"] for document, _ in hits} == {"0", "1", "13"}
    index._client.delete("wiki", models.PointIdsList(points=[0, 1, 13]))
    with pytest.raises(RetrieverUnavailable, match=r"point 1\d has no text under `contents`"):
        index.search(["river 1"], 9)
    index.close()
