"""FAISS files beside their corpus: the places of its lines, the family of an encoder that no index names,
types that can't be made."""

from __future__ import annotations

import json
import os
import tempfile

import numpy as np
import pytest

from retriever_service.dense.encoder import Encoder, EncoderSettings
from retriever_service.indexing.convert import convert_index
from retriever_service.search.backends import check_settings, open_index
from retriever_service.search.index import Index
from retriever_service.search.published import open_corpus_documents
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

faiss = pytest.importorskip("faiss")
TEXTS = [json.loads(line)["contents"] for line in CORPUS.read_text("utf-8").splitlines()]


def test_a_place_that_is_being_written_is_no_place(tmp_path, monkeypatch):
    """What another process has begun under a name of its own is not taken, and not written over."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(b'{"id": "0", "contents": "a"}\n' * 3)
    replace = os.replace

    def other(source, target):
        replace(source, target)
        begun = f"{target}.new"  # the one name that all processes used
        assert str(source) != begun

    monkeypatch.setattr(os, "replace", other)
    assert open_corpus_documents(corpus).count == 3


def test_no_room_for_the_places_of_the_lines_is_said_and_nothing_is_left(tmp_path, monkeypatch):
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(b'{"id": "0", "contents": "a"}\n' * 3)

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(
        EnvironmentLacks, match=r"c.jsonl: 0.0 MiB for the places of its lines can't be written in "
    ):
        open_corpus_documents(corpus)
    assert list(tmp_path.iterdir()) == [corpus]
    corpus.write_bytes(b"")
    with pytest.raises(UserError, match=r"c.jsonl: holds no passage"):
        open_corpus_documents(corpus)


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory, tiny_encoder):
    """An index folder that does not say which encoder made it, and the FAISS file that it is made of (by e5's
    prefixes)."""
    folder = tmp_path_factory.mktemp("unnamed")
    vectors = Encoder(EncoderSettings(tiny_encoder, "e5")).passages(TEXTS)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    faiss.write_index(flat, str(folder / "x.index"))
    convert_index(folder / "x.index", folder / "i", "Flat", corpus=CORPUS)
    return folder


def test_the_family_that_is_given_is_that_of_an_encoder_which_the_index_does_not_name(unnamed, tiny_encoder):
    served = open_index(
        ServerSettings(index=str(unnamed / "i"), retriever_name="e5", retriever_model=tiny_encoder)
    )
    vectors = Encoder(EncoderSettings(tiny_encoder, "e5"))
    best = float((vectors.queries(["Mina Frost"]) @ vectors.passages(TEXTS).T).max())
    assert served.search(["Mina Frost"], 1)[0][0][1] == pytest.approx(best, abs=1e-5)


def test_a_family_that_the_index_contradicts_is_refused(unnamed, tiny_encoder, tmp_path):
    convert_index(unnamed / "x.index", tmp_path / "i", "Flat", corpus=CORPUS, model=tiny_encoder, family="e5")
    for name in ("e5", "dense", None):
        check_settings(ServerSettings(index=str(tmp_path / "i"), retriever_name=name))
    with pytest.raises(
        UserError, match=r"--retriever_name bge: index .* was made with an encoder of the family e5"
    ):
        check_settings(ServerSettings(index=str(tmp_path / "i"), retriever_name="bge"))
    assert Index(tmp_path / "i").search(["Mina Frost"], 1)


@pytest.mark.parametrize("kind", ["IVF4096,Flat", "PQ8", "IDMap,Flat"])
def test_a_type_that_cannot_be_made_of_these_vectors_is_one_line(unnamed, tmp_path, kind):
    with pytest.raises(
        UserError, match=f"type '{kind}': can't be made of 186 vectors of 32 numbers"
    ) as error:
        convert_index(unnamed / "x.index", tmp_path / "i", kind, corpus=CORPUS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["Flat", "SQ8", "IVF,Flat", "IVF,SQ8", "HNSW32"])
def test_one_passage_is_enough(tmp_path, kind):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "a"}\n')
    flat = faiss.IndexFlatIP(8)
    flat.add(np.eye(1, 8, dtype=np.float32))
    faiss.write_index(flat, str(tmp_path / "x.index"))
    info, recall = convert_index(tmp_path / "x.index", tmp_path / "i", kind, corpus=corpus)
    assert info.passages == 1 and recall == {1: 1, 3: 1, 10: 1}
