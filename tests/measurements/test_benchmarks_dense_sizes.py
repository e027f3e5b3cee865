"""The measurement of a compressed index: built, searched and compared with all products."""

from __future__ import annotations

import numpy as np

from benchmarks.dense_sizes import QUESTIONS, TOPK, build, recall, truth


def test_all_lists_find_what_all_products_find(tmp_path):
    built = build(tmp_path, 20_000, 16)
    assert built["vectors"] == 20_000
    assert built["bytes"]["exact.vectors"] == 2 * 16 * 20_000
    expected = truth(tmp_path, 20_000, 16)
    assert expected.shape == (QUESTIONS, TOPK)
    everything = recall(tmp_path, 20_000, built["lists"], expected)["recall"]
    one_list = recall(tmp_path, 20_000, 1, expected)["recall"]
    assert everything > 0.995
    assert one_list < everything
    wrong = np.roll(expected, 1, axis=0)
    assert recall(tmp_path, 20_000, built["lists"], wrong)["recall"] < 0.1
