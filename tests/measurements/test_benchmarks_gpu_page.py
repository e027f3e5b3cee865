"""The page of benchmarks says of the GPUs what the kept results hold, and `compare` reads all of these."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import compare
from benchmarks.gpu.learner import VARIANTS, made_up_batch
from benchmarks.gpu.shapes import SHAPES
from tests.places import ROOT
from trainer.loop.run.performance import PEAK_FLOPS

KEPT = sorted((ROOT / "benchmarks/results/gpu").glob("*.json"))
PAGE = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
SIZES = ("0.5b", "1.5b", "3b")
FASTEST = "compiled, no checkpointing, ZeRO 1"


def result(name):
    return json.loads((ROOT / f"benchmarks/results/gpu/{name}_beside_20_jobs.json").read_text())


def short(value, digits):
    return f"{value:.{digits}f}".removeprefix("0")


def counts(size):
    """Parameters of the body, and of the output layer, which the input embedding is too."""
    width, inner, layers, heads, kv_heads, vocabulary, _ = SHAPES[size]
    kv = width // heads * kv_heads
    layer = 2 * width * width + width + 2 * (width * kv + kv) + 3 * width * inner + 2 * width
    return layers * layer + width, vocabulary * width


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_compare_reads_each_kept_result(file):
    numbers = json.loads(file.read_text())
    found = compare.changes(numbers, numbers)
    if "exact" in file.stem:  # it measures a search
        return
    assert found and all(change.loss == 0 for change in found)
    assert numbers["devices"] and numbers["cores"] and numbers["load_at_end"] and numbers["versions"]["torch"]


def test_the_page_has_each_variant_of_the_learner_with_its_share_of_the_peak():
    batch = made_up_batch(32, 2048, 151936)
    tokens, actions = len(batch.token_ids), int((batch.action_ids >= 0).sum())
    assert f"{tokens:,} tokens, for the output layer's parameters per action token ({actions:,}) only" in PAGE
    for variant in list(VARIANTS)[:-1]:
        line = f"| {variant} "
        for size in SIZES:
            measured = result(f"learner_{size}").get(variant, {})
            if "seconds" not in measured:
                line += "| | | | "
                continue
            body, head = counts(size)
            rate = 6 * (body * tokens + head * actions) / measured["seconds"]
            line += (
                f"| {measured['tokens_per_s']:,.0f} | {measured['speedup']:.2f} | {measured['peak_gib']:.1f} "
                f"| {100 * rate / PEAK_FLOPS['H200']:.1f} % "
            )
        assert line + "|" in PAGE


def test_the_page_says_what_zero_1_saves_and_takes():
    ratios, more = [], []
    for size in SIZES:
        measured = result(f"learner_{size}")
        fast, other = measured[FASTEST], measured[FASTEST.removesuffix(", ZeRO 1")]
        ratios.append(short(fast["seconds"] / other["seconds"], 2))
        more.append((fast["peak_gib"] - other["peak_gib"]) * 2**30 / sum(counts(size)))
    assert "ZeRO 1 took {}, {} and {} of the time of ZeRO 2".format(*ratios) in PAGE
    assert [f"{each:.1f}" for each in more] == ["2.0"] * 3 and "2.0 bytes per parameter more" in PAGE


def test_the_page_has_the_line_through_the_three_sizes():
    tokens, actions = 40308, 6927
    at = []
    for size in SIZES:
        body, head = counts(size)
        at.append((6e-12 * (body * tokens + head * actions), result(f"learner_{size}")[FASTEST]["seconds"]))
    (small, first), (middle, second), (large, last) = at
    slope = (last - first) / (large - small)
    seconds = f"{short(first, 2)}, {short(second, 2)} and {short(last, 2)} s"
    assert f"({seconds} for {small:.0f}, {middle:.0f} and {large:.0f} TFLOP" in PAGE
    assert abs(second - first - slope * (middle - small)) < 0.01
    assert f"\n{short(first - small * slope, 2)} s that do not grow with the model" in PAGE
    assert f"{1e14 / slope / PEAK_FLOPS['H200']:.0f} % of the peak beyond them" in PAGE
    assert f"45 % is a step of {large * 1e12 / 0.45 / PEAK_FLOPS['H200']:.2f} s" in PAGE


@pytest.mark.parametrize("size", ["1.5b", "3b"])
def test_the_page_has_each_sync_beside_vllms_own(size):
    for row in result(f"sync_{size}")["results"]:
        ours, bare = (
            f"{short(row[k], 3)} s ({short(row[f'{k}_min'], 3)} to {short(row[f'{k}_max'], 3)})"
            for k in ("ours", "bare")
        )
        ratio = f"{short(row['ratio'], 2)} ({short(row['ratio_min'], 2)} to {short(row['ratio_max'], 2)})"
        assert f"| {size.upper()} | {row['zero']} | {ours} | {bare} | {ratio} | " in PAGE


def test_the_page_has_the_agreement_with_its_ratio():
    for row in result("agreement_0.5b")["results"]:
        if "check" in row:
            assert row["ok"]
            continue
        phase = "training" if row["phase"] == "training" else "lr 0"
        own = row["learner_float32"]
        assert (
            f"| {row['T']:g}, {phase}, {row['syncs']} | {short(row['mean'], 4)} | {short(own, 4)} | "
            f"{short(row['mean'] / own, 2)} | {short(row['random_ids'], 4)} | {short(row['moved'], 4)} |"
        ) in PAGE


def test_the_page_has_the_loss_beside_plain_syncs():
    first, same, killed = result("loss_1.5b")["results"]
    assert (first["how"], same["how"]) == ("none, first", "none, the same weights")
    for what, row in (
        ("a plain sync, before any loss", first),
        ("the worker that joined after the loss", killed),
        ("a plain sync of the same weights to that worker", same),
    ):
        assert f"| {what} | {short(row['mean'], 3)} nats | {short(row['max'], 3)} |" in PAGE
    assert f"left it as it was, to {short(killed['more'], 3)} nats" in PAGE


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "plain",
            {
                "ours": "asynchronous, 256 in flight",
                "vLLM's own front end": "vLLM's own front end, 256 in flight",
            },
        ),
        (
            "searches",
            {
                "ours, 256 at a time": "asynchronous, 256 in flight",
                "vLLM's own front end, 256": "vLLM's own front end, 256 in flight",
                "ids and numbers, each token sent, 256": "each token sent, 256 in flight",
                "turn barrier, 256": "barrier, 256 in flight",
                "ours, 512 at a time": "asynchronous, 512 in flight",
            },
        ),
    ],
)
def test_the_page_has_each_way_of_rolling_out(name, rows):
    measured = result(f"rollout_{name}")
    for said, way in rows.items():
        (row,) = measured[way]
        assert (
            f"| {said} | {row['tokens_per_s']:,.0f} | {row['us_per_token']:.1f} us | "
            f"{row['engine_us_per_token']:.0f} us | {100 * row['busy']:.0f} % |"
        ) in PAGE
        cores = row["engine_us_per_token"] * row["tokens_per_s"] / 1e6
        assert 0.895 < cores < 1.015 and 0.10 < row["busy"] < 0.265


def test_the_page_has_the_steps_in_turns():
    steps = result("turns_0.5b")["results"]
    seconds, rates = ([row[k] for row in steps] for k in ("seconds_per_step", "tokens_per_s"))
    assert f"{min(seconds)} to {max(seconds)} s, with {min(rates):,} to {max(rates):,} tokens/s" in PAGE


def idle(name):
    return json.loads((ROOT / f"benchmarks/results/gpu/rollout_{name}_idle.json").read_text())


ROWS = {
    "| `full` | ours |": ("plain_full", "asynchronous, 256 in flight"),
    "| `full` | vLLM's own front end |": ("plain_full", "vLLM's own front end, 256 in flight"),
    "| `full` | ids and numbers, each token sent |": ("plain_full", "each token sent, 256 in flight"),
    "| `full` | ours, 1,024 answers, 512 at a time |": ("plain_full", "asynchronous, 512 in flight"),
    "| `graphs` | ours |": ("plain_graphs", "asynchronous, 256 in flight"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_has_the_rollouts_of_a_host_without_other_work(row):
    file, name = ROWS[row]
    (one,) = idle(file)[name]
    assert (
        f"{row} {one['tokens_per_s']:,.0f} | {one['us_per_token']:.1f} us "
        f"| {one['engine_us_per_token']:.0f} us | {100 * one['busy']:.0f} % |"
    ) in PAGE


def test_the_page_has_the_parts_of_the_engines_process():
    plain, searches = (idle(f"{name}_graphs") for name in ("plain", "searches"))
    rest = {"other", "wait for the model", "model, one graph"}
    for part, us in plain["engine_us_by_part"].items():
        named = {
            "model, no graph": "model, launched without a graph",
            "tokens held back": "tokens held back (ours)",
        }
        beside = searches["engine_us_by_part"][part]
        if part not in rest:
            assert f"| {named.get(part, part)} | {short(us, 1)} us | {short(beside, 1)} us |" in PAGE
    other = [sum(d["engine_us_by_part"][part] for part in rest) for d in (plain, searches)]
    assert f"| other, and waits | {other[0]:.1f} us | {other[1]:.1f} us |" in PAGE
    for found in (plain, searches):
        (under,) = found["profiled"]
        assert f"{under['tokens_per_s']:,.0f}" in PAGE
        assert sum(found["engine_us_by_part"].values()) == pytest.approx(
            under["engine_us_per_token"], rel=1e-3
        )
    (one,) = searches["asynchronous, 256 in flight"]
    assert (
        f"{one['tokens_per_s']:,.0f} tokens/s, {one['us_per_token']:.0f} us per token in the worker's "
        f"process and {one['engine_us_per_token']:.0f} in the engine's, GPU busy {100 * one['busy']:.0f} %"
    ) in PAGE


@pytest.mark.parametrize(
    ("file", "title"), [("crowd_plain", "decoding alone"), ("crowd_searches", "with searches")]
)
def test_the_page_has_the_rounds_of_several_workers_on_one_card(file, title):
    found = json.loads((ROOT / f"benchmarks/results/gpu/{file}_idle.json").read_text())
    for workers, rounds in found["rounds"].items():

        def both(name, form, unit="", scale=1, rounds=rounds):
            return " and ".join(f"{scale * row[name]:{form}}{unit}" for row in rounds)

        assert (
            f"| {title}, {workers} | {both('tokens_per_s', ',.0f')} | {both('steady_tokens_per_s', ',.0f')} "
            f"| {both('us_per_token', '.1f')} us | {both('engine_us_per_token', '.0f')} us "
            f"| {both('busy', '.0f', ' %', 100)} | {rounds[0]['start_seconds']:.0f} s |"
        ) in PAGE
        if workers in found["ratio"]:
            gpu = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
            assert all(f"{found['ratio'][workers]:.2f}" in page for page in (PAGE, gpu))
