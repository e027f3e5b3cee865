"""The page says of the large indexes what was measured."""

from __future__ import annotations

import json

import pytest

from tests.places import ROOT

RESULT = json.loads((ROOT / "benchmarks/results/bm25_21m.json").read_text())
PAGE = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("load", RESULT["load"], ids=lambda load: str(load["clients"]))
def test_the_page_has_the_measured_rate_of_each_number_of_clients(load):
    median = f"{load['p50_ms']:.1f}" if load["p50_ms"] < 10 else f"{load['p50_ms']:.0f}"
    assert not load["failures"]
    assert (
        f"| {load['clients']} | {load['rate']:.0f} | {median} ms | {load['p99_ms']:.0f} ms | "
        f"{load['cpu_ms_per_question']:.2f} ms |"
    ) in PAGE


def test_the_page_has_the_measured_cost_size_and_build():
    exact, index, build = RESULT["exact"], RESULT["index"], RESULT["build"]
    assert exact["same"] == {"impacts": exact["questions"], "blocks": exact["questions"]}
    assert (
        f"| 21,000,000 | ours, packed | {exact['impacts_cpu_ms']} | {exact['impacts_cpu_p50_ms']} | "
        f"{exact['impacts_cpu_p99_ms']:.2f} | {index['bytes'] / 1e6:,.0f} | {build['cpu_seconds']:,} | "
        f"{build['with_mapped_peak_mib']:,} |"
    ) in PAGE
    without = (index["bytes"] - index["impacts_bytes"]) / 1e6
    assert (
        f"| 21,000,000, in turns with it | ours, by block maxima | {exact['blocks_cpu_ms']} | "
        f"{exact['blocks_cpu_p50_ms']} | {exact['blocks_cpu_p99_ms']:.2f} | {without:,.0f} | | |"
    ) in PAGE


def test_the_page_has_the_measured_start_and_memory():
    cold, warm = RESULT["start"]
    memory = RESULT["memory"]
    assert (
        f"| {cold['ready_seconds']:.1f} s, first answer after {cold['first_answer_seconds']:.1f} s "
        f"(warm {warm['ready_seconds']:.1f} and {warm['first_answer_seconds']:.1f} s) |"
    ) in PAGE
    assert (
        f"| {memory['with_mapped_mib']:,} MiB after the load, in four processes: {memory['own_mib']} MiB "
        "their own"
    ) in PAGE


def test_the_table_of_growth_has_what_was_served_of_the_smallest_and_the_largest_index():
    small = json.loads((ROOT / "benchmarks/results/bm25_20k_served.json").read_text())
    assert small["exact"]["same"]["impacts"] == small["exact"]["questions"] == 200
    for found, begin in ((small, "| 20,196, busy | 2 | 17 |"), (RESULT, "| 21,000,000 | 2,033 |")):
        loads = [load for load in found["load"] if "offered" not in load]
        rates = ", ".join(f"{load['rate']:,.0f}" for load in loads)
        medians = f"{loads[0]['p50_ms']:.1f} and {loads[-1]['p50_ms']:.0f} ms"
        (row,) = (line for line in PAGE.splitlines() if line.startswith(begin) and line.endswith("ms |"))
        assert row.endswith(
            f"| {found['start'][0]['ready_seconds']:.1f} s | {found['memory']['with_mapped_mib']:,} MiB | "
            f"{rates} | {medians} |"
        )


def test_the_page_has_the_measured_load_at_random_times():
    some, many, free = RESULT["random_times"]["load"]
    assert f"never pause got {free['rate']:.0f} questions/s)" in PAGE
    assert (
        f"{some['offered']:.0f} questions/s had a median of {some['p50_ms']:.0f} ms and a p99 of "
        f"{some['p99_ms']:.0f} ms. Of {many['offered']:.0f} offered per second, {many['rate']:.0f} were "
        f"answered, with a median of {many['p50_ms']:.0f} ms and a p99 of {many['p99_ms']:,.0f} ms."
    ) in PAGE


def test_the_page_has_the_measured_curve():
    sizes = json.loads((ROOT / "benchmarks/results/bm25_curve.json").read_text())["sizes"]
    assert [size["passages"] for size in sizes] == [1_000_000, 5_000_000, 21_000_000]
    for size, beside in zip(sizes, ("postings alone", *["in one run with it"] * 2), strict=True):
        assert size["same_as_adding_up"] == {"questions": 20, "same": 20}
        assert (
            f"| {size['passages']:,}, {beside} | ours, packed | {size['cpu_ms']:.3f} | "
            f"{size['cpu_p50_ms']:.3f} | {size['cpu_p99_ms']:.2f} | {size['bm25_bytes'] / 1e6:,.0f} without "
            "texts | | |"
        ) in PAGE
    five, all_of_them = (size["cpu_ms"] / sizes[0]["cpu_ms"] for size in sizes[1:])
    assert f"cost {five:.1f} times the processor time, 21 times the passages {all_of_them:.1f} times" in PAGE


def test_the_page_has_the_measured_merge():
    merge = RESULT["merge"]
    assert merge["same_as_segments"]["same"] == merge["same_as_segments"]["questions"] == 200
    assert (
        f"That merge took {merge['seconds']:,} s of the clock in both parts, at idle priority on a busy "
        f"machine (load 10 to 24), and {merge['cpu_seconds']} s of processor time; its peak was "
        f"{merge['peak_mib']:,} MiB with mapped pages. "
        f"It needed {merge['needed_bytes'] / 1e9:.1f} GB of disk beside the index"
    ) in PAGE
    assert f"the index opened with {merge['passages']:,} passages" in PAGE


def test_the_retrievers_own_page_says_the_same_of_it():
    page = (ROOT / "docs/retriever.md").read_text(encoding="utf-8")
    most = RESULT["load"][-1]
    assert (
        f"two cores answered {most['rate']:.0f} questions per second from {most['clients']} clients, with "
        f"{RESULT['memory']['with_mapped_mib']:,} MiB resident; one worker was ready "
        f"{RESULT['start'][0]['ready_seconds']:.0f} s after a cold start"
    ) in page
    assert f"{most['clients']} clients got {most['rate']:.0f} a second of 21 million" in page


def test_the_page_has_the_measured_dense_index():
    dense = json.loads((ROOT / "benchmarks/results/dense_1m.json").read_text())
    for found, load in zip(dense["recall"], dense["load"], strict=True):
        assert (
            f"| {load['nprobe']} | {found['recall']:.3f} | {found['cpu_ms']} | {load['rate']:.0f} | "
            f"{load['p50_ms']:.0f} ms | {load['p99_ms']:.0f} ms | {load['with_mapped_mib']:,} MiB |"
        ).replace("| 0.", "| .") in PAGE
    build = dense["build"]
    assert f"took {build['seconds']} s of the clock on the busy machine and {build['cpu_seconds']} s" in PAGE
    few, many = (f"{found['recall']:.3f}".removeprefix("0") for found in dense["graph_100k"]["recall"])
    assert f"had a recall@3 of {few} with 16 lists and {many} with 32, and took 33 s of" in PAGE


def told(number):
    return f"{number:.3f}".removeprefix("0")


def test_the_page_has_the_fast_scans_beside_the_type_before_them():
    dense = json.loads((ROOT / "benchmarks/results/dense_1m_types.json").read_text())
    for found, load in zip(dense["recall"], dense["load"], strict=True):
        assert (found["type"], found["nprobe"]) == (load["type"], load["nprobe"])
        assert (
            f"| `{load['type']}` | {load['nprobe']} | {told(found['recall'])} | {found['cpu_ms']} | "
            f"{load['rate']:.0f} | {load['p50_ms']:.0f} ms | {load['p99_ms']:.0f} ms |"
        ) in PAGE
    slow, fast = dense["load"][:2], dense["load"][2:]
    few, many = (f"{b['rate'] / a['rate']:.1f}" for a, b in zip(slow, fast, strict=True))
    assert f"fast scans answered {few} and {many} times as many questions per second" in PAGE


def test_the_page_has_21_million_vectors_on_two_cores_and_whether_the_aim_is_met():
    dense = json.loads((ROOT / "benchmarks/results/dense_21m.json").read_text())
    build = dense["build"]
    assert build["vectors"] == 21_000_000 and build["dimension"] == 768
    for found, load in zip(dense["recall"], dense["load"], strict=True):
        assert (
            f"| {load['nprobe']} | {told(found['recall'])} | {found['cpu_ms']} | {load['rate']:.0f} | "
            f"{load['p50_ms']:.0f} ms | {load['p99_ms']:.0f} ms | {load['own_mib']:,} MiB | "
            f"{load['with_mapped_mib']:,} MiB |"
        ) in PAGE
    met = next(one for one in dense["load"] if one["nprobe"] == 192)
    kept = next(one for one in dense["recall"] if one["nprobe"] == 192)["recall"]
    new, more = dense["new_questions"]["load"][:2]
    assert kept >= 0.97 and max(met["p99_ms"], new["p99_ms"]) < 150 and new["with_mapped_mib"] < 16_000
    assert (
        f"{told(kept)} and {met['p99_ms']:.0f} ms with 192 lists of a fast scan, {new['p99_ms']:.0f} ms for "
        f"questions that are new; {met['own_mib'] / 1024:.1f} GiB of its own, up to "
        f"{new['with_mapped_mib'] / 1024:.1f} GiB with mapped pages"
    ) in PAGE
    assert (
        f"16 clients got {new['rate']:.0f} answers per second with 192 lists, the median after "
        f"{new['p50_ms']:.0f} ms and the p99 after {new['p99_ms']:.0f} ms; with 256 lists, in another run, "
        f"{more['rate']:.0f} per second and a p99 of {more['p99_ms']:.0f} ms"
    ) in PAGE
    assert f"took {build['seconds']} s of the clock and {build['cpu_seconds']:,} s of processor time" in PAGE
    at_once, in_turn = dense["candidates"]["at_once"], dense["candidates"]["in_turn"]
    assert f"took {at_once['ms']} ms so, and {in_turn['ms']} ms when each was waited for in turn" in PAGE


def test_the_page_has_the_measured_exact_search_and_whether_its_aim_is_met():
    found = json.loads((ROOT / "benchmarks/results/gpu/exact_21m_beside_cpu_jobs.json").read_text())
    for one in found["results"]:
        rate, recall = one["queries_per_second"], one["recall_at_3"]
        assert (one["vectors"], one["dimension"], one["batch"], recall) == (21_000_000, 768, 256, 1.0)
        assert f"| {one['dtype']} | {rate:,.0f} | {recall} | {int(one['load_seconds'] + 0.5)} |" in PAGE
    fastest = max(one["queries_per_second"] for one in found["results"])
    assert fastest >= 5_000
    assert f"| {fastest:,.0f}, recall 1.0 on 64 questions (float16, 32 GB) | met |" in PAGE


def test_the_page_has_the_measured_waits_of_training():
    beside = json.loads((ROOT / "benchmarks/results/trainer_beside_21m.json").read_text())
    for passages, step in [
        *(("21,000,000", step) for step in beside["steps"]),
        *(("20,196, later", step) for step in beside["steps_of_20196"]),
    ]:
        shares = (f"{100 * step[name]:.1f} %" for name in ("of_trajectory", "some_wait", "all_wait"))
        assert (
            f"| {passages} | {step['step']} | {step['step_seconds']:.1f} s | "
            f"{step['rollout_seconds']:.1f} s | "
            f"{step['searches']} | {step['search_p50_ms']:.0f} ms | {step['search_p99_ms']:.0f} ms | "
            f"{' | '.join(shares)} |"
        ) in PAGE


def test_the_page_has_the_dense_index_that_was_cut_short_of_21_million():
    dense = json.loads((ROOT / "benchmarks/results/dense_8650752.json").read_text())
    recall = {found["nprobe"]: found for found in dense["recall"]}
    for load in dense["load"]:
        found = recall[load["nprobe"]]
        assert (
            f"| {load['nprobe']} | {found['recall']:.3f} | {found['cpu_ms']} | {load['server_threads']} | "
            f"{load['rate']:.0f} | {load['p50_ms']:.0f} ms | {load['p99_ms']:.0f} ms | "
            f"{load['with_mapped_mib']:,} MiB |"
        ).replace("| 0.", "| .") in PAGE
    build = dense["build"]
    assert build["vectors"] < dense["asked"] == 21_000_000
    assert f"learned for {build['of_them_learning']} of {build['seconds']} s" in PAGE
    assert f"{build['vectors']:,} vectors were in lists" in PAGE
