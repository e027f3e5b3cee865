"""Made corpora keep the statistics of their source."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from benchmarks.made_corpus import OWN_SHARE, OWN_WORDS, Statistics, passages, write
from tests.retriever.retriever_fixtures import CORPUS

LINES = CORPUS.read_text("utf-8").splitlines()


def test_a_made_corpus_begins_with_the_source_and_a_larger_one_with_a_smaller(tmp_path):
    write(CORPUS, tmp_path / "small", 500, seed=3)
    write(CORPUS, tmp_path / "large", 800, seed=3)
    small = (tmp_path / "small").read_text("utf-8").splitlines()
    large = (tmp_path / "large").read_text("utf-8").splitlines()
    assert len(small) == 500 and large[:500] == small
    own = [json.loads(line)["contents"] for line in LINES]
    assert [json.loads(line)["contents"] for line in small[:186]] == own
    statistics = Statistics(text.partition("\n")[2].split() for text in own)
    made = [text.split() for _, text in passages(statistics, 4000)]
    assert np.mean([*map(len, made)]) == pytest.approx(statistics.lengths.mean(), rel=0.05)
    words = Counter(word for text in made for word in text)
    new = set(words) - set(statistics.words)
    of_titles = OWN_SHARE * 2 / (OWN_WORDS + 2)
    share = sum(words[word] for word in new) / words.total()
    assert share == pytest.approx(statistics.new_share + of_titles, rel=0.1)
    assert len(new) > 1000
