"""Exact search by PyTorch, on the CPU: equal to adding up products, in blocks of any size and streamed."""

from __future__ import annotations

import json
import sys
from unittest.mock import ANY

import numpy as np
import pytest

from benchmarks.gpu import exact as gpu_exact
from benchmarks.made_vectors import Made
from services.common.errors import UserError

pytest.importorskip("torch")
import torch

from retriever_service.dense.torch_exact import GROUP, TorchExact, top_by_groups

MADE = Made(32)
VECTORS = MADE.chunk(0)[:5_000]
QUESTIONS = MADE.questions(VECTORS[::50])
SCORES = QUESTIONS @ VECTORS.T
TRUTH = np.argsort(-SCORES, axis=1, kind="stable")


@pytest.mark.parametrize("block_rows", [1, 700, 5_000, 9_000])
@pytest.mark.parametrize("device_bytes", [None, 1000], ids=["held", "streamed"])
def test_float32_is_exact_in_blocks_of_any_size(block_rows, device_bytes):
    vectors = VECTORS if block_rows > 1 else VECTORS[:300]
    truth = np.argsort(-(QUESTIONS @ vectors.T), axis=1, kind="stable")
    index = TorchExact(vectors, dtype="float32", block_rows=block_rows, device_bytes=device_bytes)
    assert index.resident is (device_bytes is None)
    scores, rows = index.search(QUESTIONS, 5)
    assert (rows == truth[:, :5]).all()
    assert scores == pytest.approx(np.take_along_axis(QUESTIONS @ vectors.T, truth[:, :5], 1), abs=1e-6)


@pytest.mark.parametrize("columns", [1, 5, 4 * 5 * GROUP - 1, 4 * 5 * GROUP, 40 * GROUP + 17])
def test_the_top_by_groups_is_the_top(columns):
    scores = torch.from_numpy(
        np.random.default_rng(columns).permuted(np.tile(np.arange(columns), (7, 1)), axis=1)
    )
    if columns > GROUP:
        scores[0, :GROUP] += columns  # a row whose best are all of one group
        scores[1, -3:] += columns  # and one whose best are in the rest behind the groups
    found, at = top_by_groups(torch, scores, 5)
    assert torch.equal(found, scores.topk(min(5, columns), dim=1).values)
    assert torch.equal(scores.gather(1, at), found)


@pytest.mark.parametrize(("dtype", "least", "error"), [("float16", 0.99, 1e-3), ("int8", 1.0, 1e-6)])
def test_smaller_numbers_keep_the_best(dtype, least, error):
    scores, rows = TorchExact(VECTORS, dtype=dtype, block_rows=700).search(QUESTIONS, 3)
    kept = np.mean([len({*a} & {*b}) / 3 for a, b in zip(rows.tolist(), TRUTH[:, :3].tolist(), strict=True)])
    assert kept >= least
    assert scores == pytest.approx(np.take_along_axis(SCORES, rows, 1), abs=error)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_float16_is_exact_for_vectors_of_float16():
    """Products rounded to float16 find candidates; what is returned are float32 products of the rows."""
    rounded = VECTORS.astype(np.float16)
    exact = QUESTIONS @ rounded.astype(np.float32).T
    scores, rows = TorchExact(rounded, dtype="float16", block_rows=4_000).search(QUESTIONS, 3)
    assert (rows == np.argsort(-exact, axis=1, kind="stable")[:, :3]).all()
    assert scores == pytest.approx(np.take_along_axis(exact, rows, 1), abs=1e-6)


@pytest.mark.parametrize("bytes_at_once", [1, 7 * 12 * 32 * 6, 1 << 28])
def test_rows_are_gathered_for_as_many_queries_as_their_bytes_allow(monkeypatch, bytes_at_once):
    """12 candidates of 32 numbers in float16 and float32 are 2304 bytes a query."""
    whole = TorchExact(VECTORS, dtype="float16").search(QUESTIONS, 3)
    sizes = []
    einsum = torch.einsum

    def watched(form, asked, rows):
        sizes.append(rows.shape[0] * rows.shape[1] * rows.shape[2] * 6)
        return einsum(form, asked, rows)

    monkeypatch.setattr("retriever_service.dense.torch_exact.GATHERED_BYTES", bytes_at_once)
    monkeypatch.setattr(torch, "einsum", watched)
    scores, rows = TorchExact(VECTORS, dtype="float16").search(QUESTIONS, 3)
    assert max(sizes) <= max(bytes_at_once, 2304) and sum(sizes) == 2304 * len(QUESTIONS)
    assert (rows == whole[1]).all() and scores == pytest.approx(whole[0], abs=1e-6)
    assert TorchExact(VECTORS, dtype="float16").search(QUESTIONS[:0], 3)[0].shape == (0, 3)


def test_equal_vectors_go_by_row_and_more_than_there_are_is_all():
    twice = np.concatenate([VECTORS[:10], VECTORS[:10]])
    _, rows = TorchExact(twice, dtype="float32", block_rows=7).search(VECTORS[:10], 100)
    assert rows.shape == (10, 20) and (rows[:, 0] == np.arange(10)).all()
    assert (rows[:, 1] == np.arange(10, 20)).all()


def test_another_number_type_is_one_line():
    with pytest.raises(UserError, match="dtype 'int4'"):
        TorchExact(VECTORS, dtype="int4")


def test_the_script_for_a_card_checks_itself(monkeypatch, capsys):
    words = ["--vectors", "25000", "--dimension", "32", "--device", "cpu", "--checked", "16", "--rounds", "1"]
    monkeypatch.setattr(gpu_exact, "CHUNK_LIMIT", 2)  # so that the third chunk is a turned one

    def run(*more: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["x", *words, "--batch", "8", *more])
        gpu_exact.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = run("--recall", "0.99", "--rate", "0.001")
    assert [one["dtype"] for one in found] == ["float16", "int8"]
    assert all(one["recall_at_3"] >= 0.99 and one["queries_per_second"] > 0 for one in found)
    assert run("--dtype", "float32") == [
        found[0] | {"dtype": "float32", "recall_at_3": 1.0} | {"load_seconds": ANY, "queries_per_second": ANY}
    ]
    for refused in (("--recall", "1.5"), ("--recall", "0", "--rate", "1e12")):
        with pytest.raises(SystemExit) as done:
            run(*refused)
        assert done.value.code == 1
