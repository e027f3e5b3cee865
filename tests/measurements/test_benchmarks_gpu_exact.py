"""The truth that the benchmark of exact search compares with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import exact
from benchmarks.made_vectors import CHUNK


@pytest.fixture
def few_chunks(monkeypatch):
    monkeypatch.setattr(exact, "CHUNK_LIMIT", 2)


def test_repeated_rows_are_the_same_by_slice_and_by_number_and_differ_between_turns(few_chunks):
    vectors = exact.Repeated(3 * CHUNK, 16)
    rows = np.array([0, CHUNK + 7, 2 * CHUNK + 7])
    by_slice = np.stack([vectors[int(row) : int(row) + 1][0] for row in rows])
    assert np.array_equal(vectors[rows], by_slice)
    first = vectors[7:8].astype(np.float32)
    again = vectors[2 * CHUNK + 7 : 2 * CHUNK + 8].astype(np.float32)
    assert np.array_equal(abs(first), abs(again)) and not np.array_equal(first, again)


def test_the_truth_is_the_top_of_all_products_across_blocks(few_chunks):
    vectors = exact.Repeated(12 * CHUNK, 16)
    questions = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    products = questions @ vectors[0 : len(vectors)].astype(np.float32).T
    best = np.argsort(-products, axis=1)[:, :3]
    assert np.array_equal(exact.exact_rows(vectors, questions, 3), best)
