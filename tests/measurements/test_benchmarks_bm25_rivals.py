"""All engines in one run: a row for each that ends, and a line for each that does not."""

from __future__ import annotations

import json
import sys

from benchmarks import bm25_rivals
from tests.places import ROOT
from tests.retriever.retriever_fixtures import CORPUS

ALL_FIVE = ("rivals_200k_all", "rivals_1m_all")


def test_engines_are_measured_in_one_run_and_one_that_is_absent_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "asked").write_text(json.dumps({"question": "the town of Morwen"}) + "\n")
    words = [CORPUS, tmp_path / "asked", tmp_path / "work", "--engines", "packed", "tantivy"]
    words += ["--rivals", "false", "--out", tmp_path / "result.json"]
    monkeypatch.setattr(sys, "argv", ["bm25_rivals", *map(str, words)])
    bm25_rivals.main()
    lines = capsys.readouterr().out.splitlines()
    said = {(line := json.loads(text))["what"]: line for text in lines if text.startswith("{")}
    assert said["left out"]["engine"] == "tantivy" and said["engine"]["questions"] == 1
    assert lines[-1].startswith("| 186 | ours, packed | ") and lines[-2].startswith("{")
    (kept,) = json.loads((tmp_path / "result.json").read_text())["engines"]
    assert kept["row"] == lines[-1] and not (tmp_path / "work").exists()


def test_the_rows_are_those_of_the_page():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    names = ("sizes", "rivals_100k", "rivals_500k", "rivals_1m", "rivals_1m_bm25s", *ALL_FIVE)
    results = (ROOT / f"benchmarks/results/bm25_{name}.json" for name in names)
    engines = [found for path in results for found in json.loads(path.read_text())["engines"]]
    assert len(engines) > 12
    for found in engines:
        row = bm25_rivals.row_of(found, found["passages"])
        assert row == found["row"]
        of = f"| {found['passages']:,}"
        assert any(
            row.replace(f"{of} |", f"{of}{name} |") in page
            for name in ("", ", in one run", ", with bm25s", ", all five")
        )


def test_all_five_engines_ran_in_one_command_and_their_ratios_are_on_the_page():
    page = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
    for name in ALL_FIVE:
        kept = json.loads((ROOT / f"benchmarks/results/bm25_{name}.json").read_text())
        by_name = {engine["engine"]: engine for engine in kept["engines"]}
        assert set(by_name) == set(bm25_rivals.NAMES)

        def share(other, by_name=by_name):
            return f"{by_name['packed']['cpu_ms'] / by_name[other]['cpu_ms']:.2f}".lstrip("0")

        assert (
            f"at {by_name['packed']['passages']:,} {share('bm25s')} of bm25s, {share('lucene')} of Lucene "
            f"and {share('tantivy')} of tantivy" in page
        )


def test_the_ratios_to_bm25s_at_a_million_are_those_of_its_run():
    page = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
    kept = json.loads((ROOT / "benchmarks/results/bm25_rivals_1m_bm25s.json").read_text())
    by_name = {engine["engine"]: engine for engine in kept["engines"]}
    shares = {
        key: " and ".join(
            f"{by_name[ours][key] / by_name['bm25s'][key]:.2f}".lstrip("0")
            for ours in ("packed", "bm25s-format")
        )
        for key in ("cpu_ms", "build_cpu_seconds", "build_peak_mib")
    }
    assert (
        f"ours took {shares['cpu_ms']} of the processor time of bm25s per question, and its build "
        f"{shares['build_cpu_seconds']}, with {shares['build_peak_mib']} of its peak memory" in page
    )
