"""FAISS files that are not what they seem, what another build left, and which family a model's name means."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

from retriever_service.__main__ import main
from retriever_service.dense.encoder import family_of
from retriever_service.errors import IndexInvalid
from retriever_service.http.web import error_answer
from retriever_service.index_folder.description import read_info, verify
from retriever_service.indexing import convert as conversion
from retriever_service.indexing.build import build_index
from retriever_service.indexing.convert import convert_index
from retriever_service.search.published import open_corpus_documents
from services.common.errors import UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

faiss = pytest.importorskip("faiss")
PASSAGES = sum(1 for _ in CORPUS.open("rb"))


@pytest.fixture
def vectors():
    made = np.random.default_rng(0).normal(size=(PASSAGES, 32)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def written(path, kind, vectors):
    index = kind(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def test_an_index_by_distance_is_refused_and_not_served_upside_down(tmp_path, vectors):
    file = written(tmp_path / "l2.index", faiss.IndexFlatL2, vectors)
    with pytest.raises(
        IndexInvalid,
        match=r"l2.index: ranks by FAISS metric 1 \(1 is L2 distance\); expected one by inner product",
    ):
        convert_index(file, tmp_path / "out", "SQ8", corpus=CORPUS)


def test_questions_without_an_encoder_are_one_line(tmp_path, vectors, monkeypatch, capsys):
    file = written(tmp_path / "ip.index", faiss.IndexFlatIP, vectors)
    (tmp_path / "q.txt").write_text("who?\n")
    arguments = [
        "index",
        "convert",
        "--index",
        file,
        "--corpus",
        CORPUS,
        "--type",
        "SQ8",
        "--out",
        tmp_path / "o",
    ]
    monkeypatch.setattr("sys.argv", ["retriever", *map(str, arguments), "--queries", str(tmp_path / "q.txt")])
    with pytest.raises(SystemExit) as e:
        main()
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.count("\n") == 1 and "give --model" in said


def test_what_another_build_left_is_no_part_of_the_index(tmp_path, vectors, monkeypatch):
    file, out = written(tmp_path / "ip.index", faiss.IndexFlatIP, vectors), tmp_path / "i"

    def breaks(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("retriever_service.indexing.parts.write_bm25", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(CORPUS, out)
    work = tmp_path / "i.building"
    (work / "bm25").mkdir(exist_ok=True)
    (work / "bm25" / "data.npy").write_bytes(b"half")
    assert (work / "documents.jsonl").stat().st_size
    convert_index(file, out, "Flat", corpus=CORPUS)
    assert sorted(read_info(out).files) == [
        "dense/faiss.index",
        "documents.jsonl",
        "documents.offsets",
        "lookup.keys",
        "lookup.rows",
    ]
    assert not (out / "bm25").exists() and json.loads((out / "meta.json").read_text())["passages"] == PASSAGES


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/multilingual-e5-large/", "e5"),
        ("/cache/models--intfloat--e5-base-v2/snapshots/1c644c92ad3ba1efdad3f1451a637716616a20e8", "e5"),
        ("/cache/models--sentence-transformers--all-MiniLM-L6-v2/snapshots/1e5aa243bge0", "auto"),
        ("intfloat/e5-mistral-7b-instruct", "auto"),
        ("BAAI/bge-m3", "bge"),
        ("facebook/contriever-msmarco", "contriever"),
        ("/models/note5", "auto"),
        ("/models/e5-base-v2/checkpoint-500", "e5"),  # the state of a model is not its name
        ("/models/bge-small-en/final/", "bge"),
        ("/srv/bge/all-MiniLM-L6-v2", "auto"),
        ("/models/final", "auto"),
        ("intfloat/multilingual-e5-large-instruct", "auto"),
        ("/models/e5-mistral-7b-instruct/checkpoint_2", "auto"),
        ("", "auto"),
    ],
)
def test_the_family_is_a_word_of_the_models_own_name(model, family):
    assert family_of(None, model) == family
    assert family_of("e5", model) == "e5" and family_of("auto", model) == "auto"


def test_a_corpus_beside_vectors_is_looked_at_and_a_bad_line_is_named(tmp_path):
    good = '{"id": "a", "contents": "x"}'
    marked = tmp_path / "bom.jsonl"
    marked.write_text(f"\ufeff{good}\n{good}\n", encoding="utf-8")
    assert open_corpus_documents(marked).get(0) == ("a", "x")
    for lines in (["{", good, good], [good, "{", good], [good, good, "{"], [good, "", good]):
        (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
        bad = next(i for i, line in enumerate(lines, 1) if line != good)
        with pytest.raises(UserError, match=rf"bad.jsonl, line {bad}: not JSON"):
            open_corpus_documents(tmp_path / "bad.jsonl")
    assert not list(tmp_path.glob("bad.jsonl.*"))
    (tmp_path / "inside.jsonl").write_text(f"{good}\n{good}\n{good}\n")
    documents = open_corpus_documents(tmp_path / "inside.jsonl")
    with (tmp_path / "inside.jsonl").open("r+b") as file:  # changed behind the server's back
        file.seek(len(good) + 1)
        file.write(b"{}".ljust(len(good)))
    with pytest.raises(UserError, match=r"inside.jsonl, line 2: no .id.") as e:
        documents.raw(1)
    status, body, _ = error_answer(e.value)
    assert status == 500 and "inside.jsonl, line 2: no" in json.loads(body)["detail"]


def test_a_break_while_ids_are_looked_at_counts_no_bad_line_twice(tmp_path, monkeypatch):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "a", "contents": "x y"}\n{"id": "b", "contents": "y z"}\n{\n[]\n')
    from retriever_service.indexing.scan import Scanner

    whole = Scanner._refuse_repeated_ids

    def breaks(self):
        monkeypatch.setattr(Scanner, "_refuse_repeated_ids", whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scanner, "_refuse_repeated_ids", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "i", skip_bad=True)
    made = build_index(corpus, tmp_path / "i", skip_bad=True)
    assert (made.passages, made.skipped, len(made.skipped_reasons)) == (2, 2, 2)


def test_more_passages_by_default_than_a_request_may_ask_for_are_refused_at_the_start(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["retriever", "serve", "--index", str(tmp_path), "--topk", "5000"])
    with pytest.raises(SystemExit) as e:
        main()
    assert e.value.code == 2 and "--topk 5000: at most --max-topk, 1000" in capsys.readouterr().err


PROGRAM = """
import importlib, os, signal, sys
from retriever_service.indexing import build
from services.common.errors import UserError
module, _, name = sys.argv[3].rpartition(":")
part, options = importlib.import_module(module), dict(a.split("=") for a in sys.argv[5:])
owner = part
for step in name.split(".")[:-1]:
    owner = getattr(owner, step)
whole = getattr(owner, name.split(".")[-1])
def dies(*arguments, **named):
    if sys.argv[4] == "after":
        whole(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name.split(".")[-1], dies)
build.build_index(sys.argv[1], sys.argv[2], **options)
"""


def killed_and_gone_on_with(tmp_path, where, when, **options):
    out = tmp_path / "i"
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(CORPUS),
        str(out),
        where,
        when,
        *(f"{k}={v}" for k, v in options.items()),
    ]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists() or where == "os:rename"
    told = []
    build_index(CORPUS, out, **options, progress=lambda stage, share, text: told.append((stage, text)))
    # all of the corpus was read before
    assert {text for stage, text in told if stage == "scan"} <= {f"going on after {PASSAGES} passages"}
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("i")) == ["i"]
    return verify(out).files


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("retriever_service.indexing.scan:Scanner._refuse_repeated_ids", "before"),
        ("retriever_service.indexing.parts:write_bm25", "before"),
        ("retriever_service.indexing.parts:write_bm25", "after"),
        ("retriever_service.indexing.build:Build.seal", "after"),
        ("retriever_service.indexing.build:put", "before"),
        ("os:rename", "before"),
        ("os:rename", "after"),
    ],
)
@pytest.mark.slow
def test_a_build_killed_in_its_later_stages_goes_on_to_the_same_bytes(tmp_path, small_index, where, when):
    assert killed_and_gone_on_with(tmp_path, where, when) == verify(small_index).files


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("os:rename", "after"),
        ("retriever_service.indexing.build:put", "before"),
        ("retriever_service.indexing.build:put", "after"),
    ],
)
@pytest.mark.slow
def test_an_index_that_is_replaced_is_there_until_another_one_is(tmp_path, small_index, where, when):
    """Killed between the one and the other, and with the same command given again."""
    out = tmp_path / "i"
    build_index(CORPUS, out, k1=1.5)
    command = [sys.executable, "-c", PROGRAM, str(CORPUS), str(out), where, when, "overwrite=1"]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    places = [p for p in (out, tmp_path / "i.building" / "replaced") if p.exists()]
    assert places and verify(places[0])
    build_index(CORPUS, out, overwrite=True)
    assert verify(out).files == verify(small_index).files
    assert [p.name for p in tmp_path.iterdir()] == ["i"] and not (out / "replaced").exists()


@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.chaos)])
@pytest.mark.slow
def test_so_does_a_build_of_vectors(tmp_path, tiny_encoder, when):
    pytest.importorskip("sentence_transformers")
    options = {"backend": "dense", "model": tiny_encoder, "family": "e5"}
    build_index(CORPUS, tmp_path / "whole", **options)
    made = killed_and_gone_on_with(tmp_path, "retriever_service.indexing.parts:write_dense", when, **options)
    assert made == verify(tmp_path / "whole").files


def test_a_recall_that_cannot_be_measured_leaves_the_index_that_was_there(tmp_path, vectors, monkeypatch):
    file = written(tmp_path / "x.index", faiss.IndexFlatIP, vectors)
    convert_index(file, tmp_path / "out", "Flat", corpus=CORPUS)

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "recall", fails)
        with pytest.raises(MemoryError):
            convert_index(file, tmp_path / "out", "SQ8", corpus=CORPUS, overwrite=True)
    assert verify(tmp_path / "out").settings["type"] == "Flat"
    info, recall = convert_index(file, tmp_path / "out", "SQ8", corpus=CORPUS, overwrite=True)
    assert info.settings["type"] == "SQ8" and recall[10] > 0.9
    assert convert_index(file, tmp_path / "out", "SQ8", corpus=CORPUS) == (info, recall)  # kept, and measured
