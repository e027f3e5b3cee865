"""No command writes over what a run has recorded."""

import json

import pytest
from command_line import run  # noqa: F401


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A run of one step, and what its files hold."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    for name in ("config.yaml", "events.jsonl", "summary.json", "likelihood.db"):
        (folder / name).write_text("{}\n")
    (tmp_path / "link.html").symlink_to("runs/mine/metrics.jsonl")
    return {file: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("words", [("report", "mine"), ("trace", "mine", "1")])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "events.jsonl", "summary.json", "likelihood.db"]
)
def test_out_is_none_of_the_records(run, recorded, words, name):
    out = f"runs/mine/{name}"
    expected = f"unspiral: --out {out}: is what the command reads; give another file to write\n"
    assert run(*words, "--out", out) == (2, "", expected)
    assert {file: file.read_bytes() for file in recorded} == recorded


def test_nor_a_link_to_one_or_a_file_of_metrics_itself(run, recorded, tmp_path):
    (tmp_path / "theirs.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for given, out in (("mine", "link.html"), ("theirs.jsonl", "theirs.jsonl")):
        expected = f"unspiral: --out {out}: is what the command reads; give another file to write\n"
        assert run("report", given, "--out", out) == (2, "", expected)
    assert {file: file.read_bytes() for file in recorded} == recorded


def test_the_report_of_before_is_replaced(run, recorded):
    assert run("report", "mine")[0] == 0
    assert run("report", "mine", "--out", "runs/mine/report.html") == (0, "runs/mine/report.html\n", "")
