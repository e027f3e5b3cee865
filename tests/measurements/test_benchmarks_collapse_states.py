"""The page of the collapse study in the states that it can be in: the whole factorial, the claim's arms
alone, cells of two machines. All cells are made up, and every number was worked out by hand."""

from __future__ import annotations

import re
import sys

import pytest
from collapse_cells import made_up, write
from page_parts import section

from benchmarks.collapse.__main__ import main
from benchmarks.collapse.judged.collected import Result, collect, read_all, repeats_of
from benchmarks.collapse.judged.findings import in_short
from benchmarks.collapse.judged.page import FIRST, LAST, block
from benchmarks.collapse.judged.sameness import faults, kinds, machines, mixed
from benchmarks.collapse.planned.arms import ARMS, FACTORIAL, SEEDS
from benchmarks.collapse.running import starts
from benchmarks.collapse.running.grid import Job, warm_file

HERE, HOST = "A (family 1, model 2)", "B (family 3, model 4)"


def level(arm, seed):
    """Per arm and seed: differences .10 to .19, .30, -.05 and +.05, .02, and 0 to -.09."""
    k = seed - SEEDS[0]
    grpo = 0.2 + k / 100
    half = grpo + 0.3
    return {
        "grpo": grpo,
        "llds_0.5": grpo + 0.1 + k / 100,
        "half_grpo": half,
        "llds_0.2": grpo + (-1) ** k / 20,
        "half_llds_0.5": half + 0.02,
        "half_llds_0.2": half - k / 100,
    }[arm]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The factorial, all of one machine."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("whole") / "collapse"
    for arm in FACTORIAL:
        for seed in SEEDS:
            made = made_up(runs, arm, seed, level(arm, seed), warm_start=f"w{seed}", machine=HOST)
            assert collect(made, out) == "written"
    return out


def contrasts(text, family="PLAN.md"):
    """(arm, control) -> pairs, mean, interval, p, p by Holm."""
    part = text.split(f"### Contrasts of {family}")[1].split("###")[0]
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", part, re.M)
    return {(arm, control): rest.split(" | ") for arm, control, rest in rows if arm in ARMS}


def test_a_whole_factorial(whole):
    text = block(read_all(whole))
    assert "6 of 28 arms have all 10 seeds." in text and "it is shown, and not tested" not in text
    assert f"All cells are of one kind of machine (x86_64, {HOST}, torch 2.13.0)." in text
    assert "All arms of each seed share the warm start and the first batch." in text and "nan" not in text
    rows = contrasts(text)
    # Four differences of one sign in all ten seeds: p = 2 / 1,024, and by Holm six times that. One of ten
    # is 0: twice as much. Five seeds up and five down, by as much: the sum is 0.
    assert {pair: (row[0], row[1], row[3], row[4]) for pair, row in rows.items()} == {
        ("llds_0.5", "grpo"): ("10", "+0.145", "0.0020", "0.01"),
        ("half_grpo", "grpo"): ("10", "+0.300", "0.0020", "0.01"),
        ("llds_0.5", "half_grpo"): ("10", "-0.155", "0.0020", "0.01"),
        ("llds_0.2", "grpo"): ("10", "+0.000", "1.00", "1.00"),
        ("half_llds_0.5", "half_grpo"): ("10", "+0.020", "0.0020", "0.01"),
        ("half_llds_0.2", "half_grpo"): ("10", "-0.045", "0.0039", "0.01"),
    }
    assert "Holm's procedure over 6 contrasts" in text
    said = section(text, "The plan's outcome")
    assert said.endswith("Refuted: the interval of llds_0.5 minus half_grpo does not lie above 0.")
    short = in_short(read_all(whole))
    assert "Refuted: the interval of llds_0.5 minus half_grpo" in short and "Halve the learning rate" in short
    when, lam, first, better, both = section(text, "For a user").splitlines()[2:]
    assert "LLDS-A .5 raised exact match (`llds_0.5` minus `grpo`: +0.145 (+0.1" in when
    assert "10 pairs, p 0.01 by Holm)." in when and "Halve the learning rate" in first
    assert "For .2 no effect on exact match was shown" in lam and "p 1.00 by Holm" in lam
    assert "No, half the rate without LLDS" in better and "-0.155" in better
    assert "LLDS-A .5 still raised exact match" in both and "+0.020 (+0.020 to +0.020)" in both
    order = next(line for line in text.splitlines() if line.startswith("| more LLDS holds better"))
    assert "llds_0.5 - llds_0.2: +0.145" in order and order.endswith("| not shown: an interval covers 0 |")
    assert "not run yet: llds_r, token_gate" in text and contrasts(text, "PLAN_SECOND.md") == {}


def test_the_claims_arms_alone(whole):
    text = block({arm: cells for arm, cells in read_all(whole).items() if arm in FACTORIAL[:3]})
    assert "3 of 28 arms have all 10 seeds." in text and "Holm's procedure over 3 contrasts" in text
    # Three contrasts, all with p = 2 / 1,024: three times that.
    assert {row[4] for row in contrasts(text).values()} == {"0.0059"} and len(contrasts(text)) == 3
    assert "Refuted:" in section(text, "The plan's outcome") and "nan" not in text
    _, _, when, lam, first, better, both = section(text, "For a user").splitlines()
    assert all("p 0.0059 by Holm" in line for line in (when, first, better))
    assert lam.endswith("Not known yet: llds_0.2 is not complete.")
    assert both.endswith("Not known yet: half_llds_0.5 is not complete.")
    assert "not run yet: llds_0.2" in text


def test_a_seed_whose_metric_is_missing_leaves_a_pair_out_and_the_page_counts_it(whole):
    results = read_all(whole)
    for row in results["grpo"][104].rows:
        row.pop("entropy", None)
    text = block({arm: results[arm] for arm in FACTORIAL[:3]})
    line = next(line for line in text.splitlines() if line.startswith("| llds_0.5 - grpo |"))
    assert line.count(", 9 pairs") == 1 and "nan" not in text


def test_the_processor_of_cells_without_a_note_can_be_given(tmp_path):
    for seed, machine in ((100, ""), (101, HERE)):
        made_up(tmp_path, "grpo", seed, 0.2, machine=machine)
    arguments = [
        "--folder",
        str(tmp_path),
        "--arms",
        "grpo",
        "--seeds",
        "100,101",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["collect", *arguments, "--processor", HOST]) == 0
    found = read_all(tmp_path / "out")["grpo"]
    assert [found[seed].header["versions"]["processor"] for seed in (100, 101)] == [HOST, HERE]


def host_copy(tmp_path, arm, seed, em, **others):
    return made_up(tmp_path / "host", arm, seed, em, machine=HOST, **others)


def test_a_cell_of_another_machine_is_kept_out_of_the_study_and_shown_beside_it(tmp_path, capsys):
    out = tmp_path / "results" / "collapse"
    for arm in FACTORIAL[:2]:
        here = made_up(tmp_path / "here", arm, 100, 0.25, warm_start="w", machine=HERE)
        assert collect(here, out) == "written"
    before = (out / "grpo" / "100.jsonl.gz").read_bytes()
    host_copy(tmp_path, "grpo", 100, 0.35, extra={"entropy": 0.126}, warm_start="w")
    host_copy(tmp_path, "llds_0.5", 100, 0.25, warm_start="w")
    arms = ["--folder", str(tmp_path / "host"), "--arms", "grpo", "llds_0.5", "--seeds", "100,101"]
    assert main(["collect", *arms, "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "grpo-100: other bits" in said and "llds_0.5-100: same bits" in said
    assert f"--out {repeats_of(out)} puts these beside them" in said
    assert (out / "grpo" / "100.jsonl.gz").read_bytes() == before
    assert main(["collect", *arms, "--out", str(repeats_of(out))]) == 0
    page = tmp_path / "page.md"
    page.write_text(f"{FIRST}\n{LAST}\n")
    assert main(["tables", "--results", str(out), "--page", str(page)]) == 0
    grpo, llds, _, spread = section(page.read_text(), "The same cell twice").splitlines()[2:]
    # The rewards are the same in all steps: the difference is in the entropy and the scores alone.
    host = f"x86_64, {HOST}, torch 2.13.0"
    assert grpo == f"| `grpo` 100 | yes | no | none | 0.250 | 0.350 | +0.100 | {host} |"
    assert llds == f"| `llds_0.5` 100 | yes | yes | none | 0.250 | 0.250 | +0.000 | {host} |"
    assert spread.startswith("Over these 2 cells the other run differs by +0.050 in the mean (95 % BCa +0.")
    assert spread.endswith("; standard deviation 0.071).")  # .1 / sqrt(2)


def test_the_step_from_which_a_repeated_cell_differs_is_named(tmp_path):
    first, again = (
        read_all(collected(tmp_path / name, made_up(tmp_path / name, "grpo", 100, 0.2, first_reward=reward)))
        for name, reward in (("a", 0.5), ("b", 0.4))
    )
    assert "| `grpo` 100 | - | no | 1 | 0.200 | 0.200 | +0.000 |" in block(first, again)
    assert "| `grpo` 100 | - | - | - | - | 0.200 | - |" in block({}, again)


def collected(folder, cell):
    collect(cell, folder / "out")
    return folder / "out"


def test_a_study_of_two_machines_says_so_wherever_it_concludes(whole, tmp_path):
    for seed in SEEDS:
        here = made_up(tmp_path, "grpo", seed, level("grpo", seed), warm_start=f"w{seed}", machine=HERE)
        collect(here, tmp_path / "out")
    results = read_all(whole) | read_all(tmp_path / "out")
    assert {name: sum(arms.values()) for name, arms in kinds(results).items()} == {
        f"x86_64, {HERE}, torch 2.13.0": 10,
        f"x86_64, {HOST}, torch 2.13.0": 50,
    }
    text = block(results)
    assert (
        "Against PLAN.md, cells are of 2 kinds of machine" in text
        and f"{HERE}, torch 2.13.0: `grpo` (10)" in text
    )
    assert section(text, "The plan's outcome").endswith("these cells are of 2 kinds of machine.")
    when, _, _, better, both = section(text, "For a user").splitlines()[2:]
    assert "2 kinds of machine" in when and "kinds of machine" not in better + both
    assert contrasts(text)["llds_0.5", "grpo"][4] == "0.01"


def test_warm_starts_of_another_machine_leave_the_claim_undecided(whole, tmp_path):
    for seed in SEEDS:
        other = "other" if seed in (103, 107) else f"w{seed}"
        made = made_up(tmp_path, "grpo", seed, level("grpo", seed), warm_start=other, machine=HOST)
        collect(made, tmp_path / "out")
    results = read_all(whole) | read_all(tmp_path / "out")
    text = block(results)
    assert "The warm starts of seeds 103, 107 differ. Nothing is concluded" in text
    assert section(text, "The plan's outcome").startswith(
        "Undecided: the warm starts of seeds 103, 107 differ."
    )
    when, _, _, better, _ = section(text, "For a user").splitlines()[2:]
    assert when.endswith("Not known yet: the warm starts of seeds 103, 107 differ.")
    assert "half the rate without LLDS had the higher exact match" in better
    # A checksum that was not kept is unknown, and no fault.
    results["grpo"][103].header["warm_start"] = results["grpo"][107].header["warm_start"] = ""
    assert faults(results) == []


UNNAMED = "many cores, processor's name not noted"


def of_machine(arm, processor, seed=100, **packages):
    """A cell with a header alone."""
    versions = {"machine": "x86_64"} | ({"processor": processor} if processor else {}) | packages
    return {arm: {seed: Result({"versions": versions, "warm_start": "w"}, [], {}, {})}}


def test_an_unnamed_processor_is_neither_the_same_nor_another_one():
    both = of_machine("grpo", UNNAMED) | of_machine("half_grpo", HERE)
    assert mixed(both, ("grpo",)) == ""
    assert mixed(both, ARMS) == (
        " Whether these cells are of one kind of machine, as PLAN.md asks, was not noted."
    )
    said = machines(both)
    assert said.startswith("PLAN.md asks for one kind of machine; the cells' notes do not say whether theirs")
    assert f"x86_64, {UNNAMED}: `grpo` (1); x86_64, {HERE}: `half_grpo` (1)." in said
    three = both | of_machine("llds_0.5", HOST)
    assert mixed(three, ("grpo", "llds_0.5")).endswith("was not noted.")
    assert mixed(three, ("half_grpo", "llds_0.5")).endswith("are of 2 kinds of machine.")
    assert mixed(three, ARMS).endswith("are of several kinds of machine.")
    older = of_machine("grpo", UNNAMED, torch="2.12") | of_machine("half_grpo", HERE, torch="2.13", numpy="2")
    assert mixed(older, ARMS).endswith("are of 2 kinds of machine.")
    assert mixed(of_machine("grpo", "") | of_machine("half_grpo", HERE), ARMS).endswith("was not noted.")


def test_starts_are_compared_with_those_of_the_committed_cells(whole, tmp_path, capsys, monkeypatch):
    """The warm starts lie in the cache, as after the command's own training."""
    for seed, sha in ((100, "w100"), (101, "other"), (103, "w103"), (300, "w300")):
        write(warm_file(tmp_path, seed), {"sha256": sha, "path": "x"})
    monkeypatch.setattr(starts, "warm_job", lambda folder, seed: None)
    arguments = ["starts", "--folder", str(tmp_path), "--results", str(whole), "--seeds"]
    assert main([*arguments, "100,101,103,300"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("processor: ")
    assert f"seeds 100, 103: the warm starts of {whole}; cells of this machine can stand beside" in said
    assert f"seed 300: no warm start is known in {whole}\n" in said
    assert f"seed 101: other warm starts than in {whole}: nothing is concluded from cells of both" in said
    assert main([*arguments, "100,103,300"]) == 0
    assert "other warm starts" not in capsys.readouterr().out


def test_warm_starts_that_are_missing_are_trained_first(whole, tmp_path, monkeypatch):
    script = (
        "import json, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "file.parent.mkdir(exist_ok=True)\n"
        "file.write_text(json.dumps({'sha256': sys.argv[2], 'path': 'x'}))\n"
    )

    def job(folder, seed):
        command = [sys.executable, "-c", script, str(warm_file(folder, seed)), f"w{seed}"]
        return Job(f"warm start {seed}", command, folder / f"{seed}.log")

    monkeypatch.setattr(starts, "warm_job", job)
    arguments = ["starts", "--folder", str(tmp_path), "--results", str(whole), "--seeds", "100,109"]
    assert main([*arguments, "--parallel", "2"]) == 0
