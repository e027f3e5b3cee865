"""The measurement of a compressed index: built, searched and compared with all products."""

from __future__ import annotations

import json
import sys

import faiss
import numpy as np
import pytest

from benchmarks import dense_sizes
from benchmarks.dense_sizes import QUESTIONS, TOPK, build, recall, truth
from benchmarks.made_vectors import CHUNK, Made
from retriever_service.dense.build import make_type


def test_all_lists_find_what_all_products_find(tmp_path):
    made, took = build(tmp_path, 20_000, 16)
    assert took["vectors"] == made.count == 20_000
    assert took["bytes"]["exact.vectors"] == 2 * 16 * 20_000
    expected = truth(made)
    assert expected.shape == (QUESTIONS, TOPK)
    vectors = np.memmap(made.folder / "exact.vectors", np.float16, "r", shape=(20_000, 16))
    for row in (0, CHUNK, 2 * CHUNK - 1):  # whichever process made it
        of_chunk = Made(16).chunk(row // CHUNK)[row % CHUNK]
        assert vectors[row].tobytes() == of_chunk.astype(np.float16).tobytes()
    asked = np.load(made.folder / "questions.npy")
    products = asked @ vectors.astype(np.float32).T
    assert (np.sort(expected, 1) == np.sort(np.argsort(-products, 1)[:, :TOPK], 1)).mean() > 0.999
    everything = recall(made, took["lists"], expected)["recall"]
    one_list = recall(made, 1, expected)["recall"]
    assert everything > 0.995
    assert one_list < everything
    wrong = np.roll(expected, 1, axis=0)
    assert recall(made, took["lists"], wrong)["recall"] < 0.1
    index = made.open(1)
    assert json.loads(index.search(["7"], 1)[0][0][0])["contents"].startswith("made passage 0000")
    index.close()


def test_what_does_not_fit_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    """The clock stands still until a block of vectors is in lists, which then has taken too long."""
    clock = [0.0]

    class Budget(dense_sizes.Budget):
        def left(self) -> float:
            return self._seconds - clock[0]

    def tick(what):
        def note(done: int, of: int) -> None:
            clock[0] += 40.0 if what == "vectors in lists" else 0.0

        return note

    monkeypatch.setattr(dense_sizes, "Budget", Budget)
    monkeypatch.setattr(dense_sizes, "progress", tick)
    monkeypatch.setattr(dense_sizes, "BLOCK_ROWS", 5_000)
    monkeypatch.setattr(dense_sizes, "write_inverted", _in_blocks(dense_sizes.write_inverted))
    monkeypatch.setattr(faiss, "omp_set_num_threads", lambda threads: None)
    words = [
        tmp_path,
        20_000,
        16,
        "--type",
        "IVF_HNSW32,SQ8",
        "--processes",
        1,
        "--budget",
        120,
        "--seconds",
        5,
    ]
    monkeypatch.setattr(sys, "argv", ["dense_sizes", *map(str, words), "--nprobe", "4"])
    dense_sizes.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {line["what"]: line for line in said}
    assert by_name["cut"] | {"load_average": 0} == {
        "what": "cut", "asked": 20_000, "vectors": 10_000, "why": "no time for more", "load_average": 0
    }  # fmt: skip
    assert (
        by_name["build"]["vectors"] == 10_000
        and by_name["build"]["bytes"]["exact.vectors"] == 2 * 16 * 10_000
    )
    skipped = [line["stage"] for line in said if line["what"] == "skipped"]
    assert skipped == ["load of 4 lists, 2 threads", "recall"]
    assert "recall" not in by_name and "load" not in by_name


def _in_blocks(write):
    return lambda *given, **options: write(*given, **options, block_rows=5_000)


@pytest.mark.parametrize(
    ("kind", "speed", "rate"),
    [
        ("IVF,SQ8", "products_per_second", lambda *_: 1e12),
        ("IVF_HNSW32,SQ8", "lookups_per_second", lambda *_: 1e12 / (2 * 18_330 * 768)),
    ],
)
def test_fewer_vectors_are_learnt_from_where_time_is_short(monkeypatch, kind, speed, rate):
    monkeypatch.setattr(dense_sizes, speed, rate)
    made = make_type(768, kind, 21_000_000)
    assert made.nlist == 18_330
    learnt = [dense_sizes._learnt_from(made, 32, left) for left in (1e9, 480.0, 10.0, float("inf"))]
    assert learnt == [64, pytest.approx(32, abs=2), 16, 64]
