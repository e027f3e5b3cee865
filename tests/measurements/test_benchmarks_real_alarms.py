"""docs/monitor_evidence.md on the runs of the real model: their table, and the sentences beside it."""

import re

import pytest
from places import ROOT

from benchmarks.real_model.alarms import FIRST, LAST, alarmed, block
from benchmarks.real_model.training import RESULTS

PAGE = (ROOT / "docs" / "monitor_evidence.md").read_text(encoding="utf-8")
SAID = " ".join(PAGE.split())


def test_the_page_shows_every_committed_run():
    shown = PAGE.partition(FIRST)[2].partition(LAST)[0].strip()
    assert shown == block(), "run: python -m benchmarks.real_model.alarms docs/monitor_evidence.md"
    found = {one.name: one for one in alarmed()}
    assert sorted(found) == sorted(path.name.removesuffix(".jsonl.gz") for path in RESULTS.glob("*.gz"))
    assert shown.count("| 0.5B, ") == len(found) == 15
    late = found["grpo_lr1e-5_s100_again"]
    assert (late.likelihood, late.fell, late.lead) == ((18,), 10, -8)
    assert "seed 100 (again) | 18 | 10 | -8: late | 0.00 |" in shown
    stands = found["grpo_lr5e-6_s101"]
    assert (stands.likelihood, stands.fell, stands.lead) == ((28,), 25, -3)
    assert stands.kept == pytest.approx(0.88, abs=0.005)
    assert min(one.lead for one in found.values() if one.lead is not None) == -8
    assert "with it, or up to 8 steps after it" in SAID


def test_the_false_alarms_of_collapse_bench_are_on_the_monitors_page_too():
    bench = (ROOT / "docs" / "collapse_bench.md").read_text(encoding="utf-8")
    alarms, steps, rate, rules = re.search(
        r"False alarms: (\d+) in ([\d,]+) steps of sound runs and before an injected fault, "
        r"(.*?) per 1,000: (.*?)\. Rules",
        bench,
    ).groups()
    assert (
        f"{alarms} false alarms in {steps} steps of sound runs and before an injected fault, {rate}" in SAID
    )
    assert rules == f"`silent_llds` {alarms}" and f"All {alarms} are `silent_llds`" in SAID
    made = PAGE.partition("<!-- barometer: begin -->")[2].partition("<!-- barometer: end -->")[0]
    held_out, _, looked_at = made.partition("**Looked at**")
    assert f"have {_false_alarms(looked_at)} in the runs that were looked at" in SAID
    assert f"and {_false_alarms(held_out)} in those held out" in SAID
    for kind in ("paid_for_form", "lucky_garbage"):
        (row,) = [line for line in held_out.splitlines() if line.startswith(f"| `{kind}` |")]
        named = row.split(" | ")[4].partition(" (")[0]
        assert f"`{kind}` in {named}" in SAID, "what the rule made from the other runs does on new ones"


def _false_alarms(table: str) -> str:
    (row,) = [line for line in table.splitlines() if line.startswith("| **all** |")]
    _, _, steps, alarms, span, _ = (cell.strip() for cell in row.strip("|").split(" | "))
    return f"{alarms} in {steps} ({span.partition('(')[2]}"
