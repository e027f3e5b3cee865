"""The disk that a build needs, estimated before it; rows of a plain corpus that turn out bad while it is
served; models in folders."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import resource
import shutil

import httpx
import numpy as np
import pytest

from retriever_service.bm25 import build as bm25_build
from retriever_service.errors import IndexInvalid
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.corpus import estimate
from retriever_service.index_folder.description import verify
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index
from retriever_service.indexing.convert import convert_index
from retriever_service.indexing.merge import merge_index
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_models import tiny_encoder, tiny_reranker  # noqa: F401

faiss = pytest.importorskip("faiss")
MIB = 1 << 20


@pytest.fixture
def disk(monkeypatch):
    """Sets the MiB that the disk has free."""

    def free(mib: float) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 39, int(mib * MIB))
        )

    return free


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same 60,000 passages, 19 MiB, plain and gzipped (to a hundredth)."""
    folder = tmp_path_factory.mktemp("room")
    text = "".join(
        json.dumps({"id": str(i), "contents": "the same words again " * 15}) + "\n" for i in range(60_000)
    )
    (folder / "c.jsonl").write_text(text)
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write(text)
    return folder / "c.jsonl", folder / "c.jsonl.gz"


def test_a_gzipped_corpus_is_taken_for_what_it_unpacks_to(corpora, tmp_path, disk):
    plain, gzipped = corpora
    (text, passages), (same_text, same_passages) = estimate(plain), estimate(gzipped)
    assert text == plain.stat().st_size > 50 * gzipped.stat().st_size and passages == pytest.approx(
        60_000, rel=0.01
    )
    assert same_text == pytest.approx(text, rel=0.25) and same_passages == pytest.approx(passages, rel=0.25)
    disk(40)
    with pytest.raises(
        EnvironmentLacks, match=r"GiB free, about 0\.1 GiB needed for the build \(.* passages, .* of vectors"
    ):
        build_index(gzipped, tmp_path / "i")
    disk(73)  # 16 + 3 x 19 of text + 4 of rows
    with pytest.raises(EnvironmentLacks, match="needed for the build"):
        build_index(plain, tmp_path / "i", postings="bm25s")
    assert build_index(plain, tmp_path / "i", postings="packed").passages == 60_000  # 16 + 2 x 19 + 4


def test_a_merge_that_does_not_fit_says_so_before_it_begins(corpora, tmp_path, disk):
    plain, _ = corpora
    index = tmp_path / "i"
    disk(1000)
    build_index(plain, index, postings="packed")
    (tmp_path / "more.jsonl").write_text('{"id": "more", "contents": "other words"}')
    add_to_index(index, tmp_path / "more.jsonl")
    before = {path: path.read_bytes() for path in index.rglob("*") if path.is_file()}
    size = sum(map(len, before.values())) / MIB
    disk(size)
    told = []
    with pytest.raises(EnvironmentLacks, match=r"GiB needed for the merge; the index stays as it is"):
        merge_index(index, progress=lambda *said: told.append(said))
    assert not told
    assert {path: path.read_bytes() for path in index.rglob("*") if path.is_file()} == before
    disk(size + 16 + 2.2)  # 36 bytes for each of 60,001 passages, and no second copy of the postings
    assert merge_index(index).passages == 60_001


def test_vectors_count_for_the_disk_that_a_build_needs(corpora, tiny_encoder, tmp_path, disk):
    plain, _ = corpora
    flat = faiss.IndexFlatIP(1024)
    flat.add(np.ones((4, 1024), np.float32))
    faiss.write_index(flat, str(tmp_path / "x.index"))
    disk(80)  # 16 + 19 of text + 4 of rows, and 59 of vectors in SQ8
    with pytest.raises(EnvironmentLacks, match=r"0\.1 GiB of vectors"):
        convert_index(tmp_path / "x.index", tmp_path / "o", "SQ8", corpus=plain)
    disk(41)  # vectors of 32 numbers: 7 MiB
    with pytest.raises(EnvironmentLacks, match="needed for the build"):
        build_index(plain, tmp_path / "i", backend="dense", model=tiny_encoder, family="e5")


def test_what_a_broken_build_left_counts_as_room(tmp_path, disk):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "a"}\n')
    disk(20)
    (tmp_path / "i.building").mkdir()
    (tmp_path / "i.building" / "lock").touch()
    (tmp_path / "i.building" / "terms").write_bytes(bytes(9 * MIB))
    disk(8)
    build_index(corpus, tmp_path / "i")
    with pytest.raises(EnvironmentLacks):
        build_index(corpus, tmp_path / "j")


@pytest.mark.parametrize(
    "broken", ["os:posix_fallocate", "retriever_service.indexing.sinks:PostingsSink.write"]
)
def test_a_disk_that_fills_up_on_the_way_is_one_line_and_the_build_goes_on_later(
    small_index, tmp_path, monkeypatch, broken
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken.replace(":", "."), full)
        with pytest.raises(
            EnvironmentLacks,
            match=r"i.building: No space left on device; make room and give the same command",
        ) as e:
            build_index(CORPUS, tmp_path / "i")
        assert e.value.exit_code == 3
    build_index(CORPUS, tmp_path / "i")
    assert verify(tmp_path / "i").files == verify(small_index).files


def test_vectors_that_a_broken_build_had_linked_count_once(tmp_path, disk):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "a"}\n')
    (tmp_path / "i.building" / "dense").mkdir(parents=True)
    (tmp_path / "i.building" / "lock").touch()
    (tmp_path / "i.building" / "vectors").write_bytes(b"x" * 6 * MIB)
    (tmp_path / "i.building" / "dense" / "faiss.index").hardlink_to(tmp_path / "i.building" / "vectors")
    disk(8)  # of 16
    with pytest.raises(EnvironmentLacks, match="needed for the build"):
        build_index(corpus, tmp_path / "i")


def test_a_full_disk_is_known_by_its_number_wherever_an_array_is_written(tmp_path):
    """`np.save` says `100000 requested and 24968 written`, without the number that tells it from other
    faults."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError) as e:
            bm25_build._save(tmp_path / "maxima.npy", np.zeros(100_000, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert e.value.errno == errno.EFBIG
    bm25_build._save(tmp_path / "maxima.npy", np.arange(5))
    assert np.load(tmp_path / "maxima.npy").tolist() == [0, 1, 2, 3, 4]


def test_vectors_of_two_precisions_get_into_no_index(tiny_encoder, tmp_path, monkeypatch):
    dense = {"backend": "dense", "model": tiny_encoder, "family": "e5"}
    build_index(CORPUS, tmp_path / "half", **dense, encoder_dtype="bfloat16")
    with pytest.raises(IndexInvalid, match="other settings"):
        build_index(CORPUS, tmp_path / "half", **dense, encoder_dtype="float32")
    assert (
        build_index(CORPUS, tmp_path / "half", **dense).settings["dtype"] == "bfloat16"
    )  # auto takes what is there

    def breaks(stage, share, text):
        if stage == "scan":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(CORPUS, tmp_path / "i", **dense, encoder_dtype="bfloat16", progress=breaks)
    build_index(CORPUS, tmp_path / "i", **dense)
    build_index(CORPUS, tmp_path / "whole", **dense)
    broken, whole = (
        faiss.read_index(str(tmp_path / name / "dense" / "faiss.index")) for name in ("i", "whole")
    )
    np.testing.assert_allclose(broken.reconstruct_n(0, 186), whole.reconstruct_n(0, 186), atol=1e-6)


def test_a_bad_row_found_while_serving_is_a_500_that_names_it_and_one_line_in_the_log(
    tiny_encoder, tmp_path, caplog
):
    from retriever_service.dense.encoder import Encoder, EncoderSettings

    encoder = Encoder(EncoderSettings(tiny_encoder, "e5"))
    flat = faiss.IndexFlatIP(encoder.dimension)
    flat.add(encoder.passages(["a river", "a town", "a weaver"]))
    faiss.write_index(flat, str(tmp_path / "e5_Flat.index"))
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"id": "0", "contents": "a river"}\n{"id": "1", "contents": "a"}\n'
        '{"id": "2", "contents": "a weaver"}\n'
    )
    settings = ServerSettings(
        index=str(tmp_path / "e5_Flat.index"),
        corpus=str(corpus),
        retriever_name="e5",
        retriever_model=tiny_encoder,
        port=0,
    )
    with caplog.at_level(logging.ERROR, "retriever_service"), serve_in_thread(settings) as server:
        with corpus.open("r+b") as file:  # changed behind the server's back
            file.seek(35)
            file.write(b'{"id": 5.5}'.ljust(28))
        answer = httpx.post(
            f"{server.url}/retrieve", json={"query": "a town", "topk": 3}, trust_env=False, timeout=20
        )
        said = answer.json()["detail"]
        assert answer.status_code == 500 and said.startswith(
            f"corpus {corpus}, line 2: expected `id`: a string that"
        )
    assert [(r.getMessage().partition(" expected")[0], r.exc_info) for r in caplog.records] == [
        (f"search failed: corpus {corpus}, line 2:", None)
    ]


def test_an_index_that_does_not_name_its_encoder_asks_for_it_and_reads_the_family_from_it(
    tiny_encoder, tmp_path
):
    from retriever_service.dense.encoder import Encoder, EncoderSettings

    model = tmp_path / "e5-tiny"
    model.symlink_to(tiny_encoder)
    flat = faiss.IndexFlatIP(Encoder(EncoderSettings(tiny_encoder, "e5")).dimension)
    flat.add(np.eye(2, flat.d, dtype=np.float32))
    faiss.write_index(flat, str(tmp_path / "x.index"))
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "a"}\n{"id": "1", "contents": "b"}\n')
    convert_index(tmp_path / "x.index", tmp_path / "i", "Flat", corpus=corpus)
    with pytest.raises(UserError, match="/i: does not name its encoder; give it with --retriever_model"):
        Index(tmp_path / "i")
    index = Index(tmp_path / "i", model=str(model))
    ((_, score), _) = index.ranker.rank(["town"], 2)[0]
    assert score == pytest.approx(
        Encoder(EncoderSettings(tiny_encoder, "e5")).queries(["town"])[0, :2].max(), abs=1e-5
    )


def test_a_reranker_with_several_numbers_for_a_passage_is_refused_at_the_start(tiny_reranker, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from retriever_service.dense.rerank import CrossEncoderReranker

    AutoModelForSequenceClassification.from_pretrained(
        tiny_reranker, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_reranker).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="gives 3 numbers for a passage, expected a model with one"):
        CrossEncoderReranker(str(tmp_path))
