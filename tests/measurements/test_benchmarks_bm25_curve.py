"""The curve of BM25 by size: its postings are those of a build of as many passages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import bm25_curve
from retriever_service.indexing.build import build_index
from tests.retriever.retriever_fixtures import CORPUS


def test_the_first_passages_are_those_of_an_index_of_them(tmp_path, monkeypatch, capsys):
    lines = CORPUS.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "first.jsonl").write_text("".join(lines[:70]), "utf-8")
    build_index(CORPUS, tmp_path / "whole", postings="packed")
    build_index(tmp_path / "first.jsonl", tmp_path / "first", postings="packed")
    questions = [{"question": "the weaver born in Aldersea"}, {"question": "town"}]
    (tmp_path / "asked").write_text("".join(json.dumps(row) + "\n" for row in questions))
    words = [tmp_path / "whole", tmp_path / "asked", tmp_path / "work", 70, 5000]
    monkeypatch.setattr(sys, "argv", ["bm25_curve", *map(str, words)])
    bm25_curve.main()
    _, first, whole = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["passages"], whole["passages"]) == (70, len(lines))
    assert first["same_as_adding_up"] == whole["same_as_adding_up"] == {"questions": 2, "same": 2}
    assert files_of(tmp_path / "work") == files_of(tmp_path / "first")


def files_of(index: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (index / "bm25").iterdir()}
