"""Made corpora keep the statistics of their source."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from benchmarks.made_corpus import passages as maker
from benchmarks.made_corpus.passages import OWN_SHARE, OWN_WORDS, Statistics, passages, write
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


def test_a_made_corpus_goes_on_after_a_kill_in_more_processes_with_the_same_bytes(
    tmp_path, monkeypatch, capfd
):
    write(CORPUS, tmp_path / "whole", 25_000)
    make = maker._Maker.make

    def killed(maker, piece):
        if piece == 2:
            raise KeyboardInterrupt
        return make(maker, piece)

    for out in (tmp_path / "killed", tmp_path / "killed.gz"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(maker._Maker, "make", killed)
            write(CORPUS, out, 25_000)
        assert not out.exists()
        with (tmp_path / f"{out.name}.making").open("ab") as file:
            file.write(b"half a pie")
        capfd.readouterr()
        write(CORPUS, out, 25_000, processes=2)
        assert capfd.readouterr().out.startswith("going on after 10,186 passages\n")
    whole = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "killed").read_bytes() == whole
    assert gzip.decompress((tmp_path / "killed.gz").read_bytes()) == whole
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "killed", "killed.gz"}


def test_a_made_corpus_of_another_seed_does_not_go_on_from_this_one(tmp_path):
    write(CORPUS, tmp_path / "other", 500, seed=1)
    other = (tmp_path / "other").read_bytes()
    (tmp_path / "corpus.making").write_bytes(other)
    digest = hashlib.sha256(CORPUS.read_bytes()).hexdigest()
    state = {"source": digest, "passages": 500, "seed": 1, "pieces": 2, "bytes": len(other)}
    (tmp_path / "corpus.making.json").write_text(json.dumps(state))
    write(CORPUS, tmp_path / "corpus", 500)
    write(CORPUS, tmp_path / "fresh", 500)
    assert (tmp_path / "corpus").read_bytes() == (tmp_path / "fresh").read_bytes() != other
