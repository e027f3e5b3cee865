"""The engines against transformers: log-probs, stops, new weights, failures. Real vLLM on CPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import pytest_asyncio
import rollout_lockstep_child as child
import torch
from places import PYTHONPATH, ROOT
from rollout_fakes import request
from rollout_models import reference_logprobs, tiny_model
from safetensors.torch import save_file

from services.common.errors import UnspiralError
from services.rollout.engines.base import GenerateCall
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.errors import WorkerLostError, WorkerUnavailableError
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.templates import make_template
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm]

STOP = ("</search>", "</answer>")
SETTINGS = RolloutSettings(max_model_tokens=512, kv_cache_gib=0.1)
ROWS = [[1, *range(5, 60)], [1, 7, 9], [1, *range(60, 20, -1)] * 3]


def difference(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True))


def weights(model, folder: Path, names=None) -> Path:
    folder.mkdir()
    tensors = {k: v.detach().contiguous() for k, v in model.named_parameters() if names is None or k in names}
    save_file(tensors, folder / "a.safetensors")
    return folder


def call(engine, ids, *, n=30, temperature=1.0, seed=3, stop=STOP, name="r"):
    return engine.generate(GenerateCall(name, ids, n, temperature, seed, stop))


@pytest.fixture(scope="module")
def environment():
    from services.rollout.engines.vllm_engine import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    return SimpleNamespace(
        path=str(folder), model=tiny_model(folder, tied=True), tmp=tmp_path_factory.mktemp("weights")
    )


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    return SimpleNamespace(
        path=str(folder), model=tiny_model(folder, tied=False, seed=1), tmp=tmp_path_factory.mktemp("weights")
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asynchronous(environment, tied):
    from services.rollout.engines.vllm_engine import VllmEngine

    engine = await VllmEngine.start(tied.path, SETTINGS, seed=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lockstep(environment, untied, without_llvmlite):
    worker = await child.new_worker(untied.path)
    yield worker
    await worker.close()


async def agrees(engine, model, temperature) -> float:
    return difference(await engine.logprobs(ROWS, temperature), reference_logprobs(model, ROWS, temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_vllm_scores_as_transformers_does(asynchronous, tied, temperature):
    assert await agrees(asynchronous, tied.model, temperature) < 1e-4


async def test_sampled_logprobs_are_those_of_the_scaled_logits(asynchronous, tied):
    prompt = [1, 5, 6]
    for temperature in (1.0, 0.6, 1.7):
        made = await call(asynchronous, prompt, temperature=temperature, stop=())
        expected = reference_logprobs(tied.model, [prompt + made.token_ids], temperature)[0][3:]
        assert difference([made.logprobs], [expected]) < 1e-4
        assert made.policy_version == 0


async def test_a_stop_string_ends_the_text_and_stays_in_it(asynchronous):
    ends = {
        (g.finish, g.token_ids[-1] in (7, 11))
        for g in await asyncio.gather(*(call(asynchronous, [1, i], seed=i) for i in range(4, 40)))
    }
    assert ends <= {("stop", True), ("length", False), ("eos", False)} and ("stop", True) in ends


async def test_generation_goes_on_past_tags_in_a_thought_with_the_ids_and_logprobs_of_one_sequence(
    asynchronous, tied
):
    """A prompt that opens a thought, and a random policy: vLLM stops at tags in it, and the loop goes on from
    there."""
    settings = SETTINGS.model_copy(
        update={"template": "lab", "max_turns": 0, "max_response_tokens": 120, "deterministic": True}
    )
    template = make_template("lab", load_tokenizer(tied.path), settings)
    asked = [request(f"u{i}", text="what is n1 ? <think>", seed=i) for i in range(12)]
    runs = [
        run_trajectory(a, engine=asynchronous, template=template, search=None, settings=settings)
        for a in asked
    ]
    done = await asyncio.gather(*runs)
    mentioned = 0
    for t in done:
        (action,) = t.actions
        thought = action.text.partition("</think>")[0].rstrip()
        mentioned += any(thought.find(tag) not in (-1, len(thought) - len(tag)) for tag in STOP)
        row, _, sampled = t.arrays()
        (expected,) = reference_logprobs(tied.model, [row.tolist()])
        start = len(t.prompt_ids)
        assert difference([sampled[start:].tolist()], [expected[start:]]) < 1e-3
        assert len(action.token_ids) <= 120
    assert mentioned >= 2


async def test_tokens_wait_in_the_engines_process_until_an_action_ends(asynchronous, monkeypatch):
    """With a seed per request the ids and log-probs are those of tokens that are sent one by one."""
    from services.rollout.engines import vllm_engine

    processor, sent = asynchronous._llm.output_processor, []
    process = processor.process_outputs
    monkeypatch.setattr(
        processor, "process_outputs", lambda out, *a, **k: sent.extend(out) or process(out, *a, **k)
    )

    async def made():
        sent.clear()
        calls = (call(asynchronous, [1, i], n=60, seed=i, name=f"held-{i}") for i in range(4, 14))
        return await asyncio.gather(*calls), len(sent)

    held, few = await made()
    monkeypatch.setattr(vllm_engine, "IDS_ONLY", {"unspiral_ids_only": True})
    single, many = await made()
    assert [(g.token_ids, g.finish, g.text) for g in held] == [
        (g.token_ids, g.finish, g.text) for g in single
    ]
    assert difference([g.logprobs for g in held], [g.logprobs for g in single]) < 1e-4
    tokens = sum(len(g.token_ids) for g in held)
    assert many >= tokens > 100
    # One for each request, and one for each token that may end a tag.
    assert few < tokens / 2


async def test_greedy_takes_the_likeliest_token(asynchronous, tied):
    made = await call(asynchronous, [1, 5], n=6, temperature=0, stop=())
    ids = [1, 5]
    for token in made.token_ids:
        assert int(tied.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


async def test_new_weights_are_served_and_nothing_cached_from_the_old(asynchronous, tied):
    """Tied embeddings. The prompt is longer than a cache block, and was cached under the old weights."""
    prompt = ROWS[2]
    await call(asynchronous, prompt, n=4, stop=())
    for version, seed in ((1, 5), (2, 6)):
        model = tiny_model(tied.tmp / f"m{seed}", seed=seed)
        await asynchronous.load_weights(weights(model, tied.tmp / f"w{seed}"), version)
        made = await call(asynchronous, prompt, n=8, stop=())
        assert made.policy_version == version
        assert (
            difference(
                [made.logprobs], [reference_logprobs(model, [prompt + made.token_ids])[0][len(prompt) :]]
            )
            < 1e-4
        )
        assert await agrees(asynchronous, model, 1.0) < 1e-4


async def test_without_the_cache_reset_old_keys_and_values_would_be_used(asynchronous, tied):
    """The control of the test above: new weights, cache kept, and the log-probs are wrong."""
    prompt, model = ROWS[2], tiny_model(tied.tmp / "m8", seed=8)
    await call(asynchronous, prompt, n=4, stop=())
    await asynchronous._llm.collective_rpc(
        "unspiral_load_weights", args=(str(weights(model, tied.tmp / "w8")),)
    )
    made = await call(asynchronous, prompt, n=8, stop=())
    assert (
        difference([made.logprobs], [reference_logprobs(model, [prompt + made.token_ids])[0][len(prompt) :]])
        > 1e-2
    )
    await asynchronous.load_weights(tied.tmp / "w8", 3)
    assert await agrees(asynchronous, model, 1.0) < 1e-4


async def started(engine, n: int, temperature=2.0):
    """Long requests that are running now: many, since each may meet the end token at any moment, and when the
    first has, all have begun."""
    tasks = [
        asyncio.create_task(call(engine, [1, i], n=n, stop=(), temperature=temperature, seed=None))
        for i in range(4, 44)
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    return {i: task for i, task in zip(range(4, 44), tasks, strict=True) if not task.done()}


async def test_weights_may_change_while_requests_run(asynchronous, tied):
    """Tokens up to the change are the old policy's, all later ones the new one's; the action counts as the
    old version's."""
    old, new = tiny_model(tied.tmp / "m8b", seed=8), tiny_model(tied.tmp / "m9", seed=9)
    folder = weights(new, tied.tmp / "w9")
    running = await started(asynchronous, 400)
    await asynchronous.load_weights(folder, 4)
    changed = 0
    for first, task in running.items():
        made = await task
        ids = [1, first, *made.token_ids]
        by_old, by_new = (reference_logprobs(m, [ids], 2.0)[0][2:] for m in (old, new))
        is_old = [abs(p - o) < 1e-4 for p, o in zip(made.logprobs, by_old, strict=True)]
        is_new = [abs(p - n) < 1e-4 for p, n in zip(made.logprobs, by_new, strict=True)]
        change = is_old.index(False) if False in is_old else len(is_old)
        assert all(is_new[change:]), "after the change the sequence is the new policy's, cached keys included"
        assert made.policy_version == (3 if change else 4)
        changed += 0 < change < len(is_old)
    assert changed > 0


async def test_half_a_model_is_refused_and_the_engine_serves_again_after_a_whole_one(asynchronous, tied):
    model = tiny_model(tied.tmp / "m10", seed=10)
    half = weights(model, tied.tmp / "half", names={"model.norm.weight", "model.embed_tokens.weight"})
    running = await started(asynchronous, 400)
    with pytest.raises(UnspiralError, match=r"version 5 were not loaded whole.*parameters were not loaded"):
        await asynchronous.load_weights(half, 5)
    ended = await asyncio.gather(*running.values(), return_exceptions=True)
    assert any(isinstance(e, WorkerUnavailableError) for e in ended)
    with pytest.raises(WorkerUnavailableError, match="no whole version"):
        await call(asynchronous, [1, 5])
    await asynchronous.load_weights(weights(model, tied.tmp / "w10"), 6)
    assert await agrees(asynchronous, model, 1.0) < 1e-4


async def test_a_dead_engine_process_is_an_error_at_once(asynchronous):
    """Last of this engine. The process ends by itself too when its owner is killed (test_rollout_pool)."""
    pids = asynchronous.pids()
    assert pids and all(map(psutil.pid_exists, pids))
    running = await started(asynchronous, 400)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.gather(*running.values(), return_exceptions=True), 30)
    assert any(isinstance(e, WorkerLostError) for e in ended)
    with pytest.raises(WorkerLostError):
        asynchronous.check()
    await asynchronous.close()
    await asynchronous.close()
    assert not psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=60)[1]


async def test_lockstep_serves_new_weights_untied(lockstep, untied):
    engine, model = lockstep._engine, tiny_model(untied.tmp / "m2", tied=False, seed=2)
    assert await agrees(engine, untied.model, 1.0) < 1e-4
    original = weights(untied.model, untied.tmp / "original")
    await engine.load_weights(weights(model, untied.tmp / "w2"), 1)
    assert await agrees(engine, model, 1.0) < 1e-4
    assert await agrees(engine, model, 0.6) < 1e-4
    with pytest.raises(UnspiralError, match=r"lm_head\.weight"):
        names = {n for n, _ in model.named_parameters()} - {"lm_head.weight"}
        await engine.load_weights(weights(model, untied.tmp / "half", names), 2)
    with pytest.raises(WorkerUnavailableError, match="no whole version"):
        await call(engine, [1, 5])
    await engine.load_weights(original, 3)
    assert await agrees(engine, untied.model, 1.0) < 1e-4


async def test_lockstep_runs_a_batch_to_the_same_bits_in_fresh_engines_and_after_other_work(
    lockstep, untied, tmp_path
):
    """An engine in a fresh process, this one, and this one again after other requests have filled its
    cache."""
    root, out = Path(child.__file__).parent, tmp_path / "out.json"
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, str(root / "rollout_lockstep_child.py"), untied.path, str(out)]
    subprocess.run(command, check=True, timeout=250, env=environment, capture_output=True)
    outputs = [json.loads(out.read_text()), await child.rollouts(lockstep, child.batch())]
    for order in (lambda x: x, lambda x: x[::-1]):
        await call(lockstep._engine, ROWS[2], n=20, stop=(), name="other")
        outputs.append(await child.rollouts(lockstep, child.batch(order)))
    assert len(outputs[0]) == 24 and len({json.dumps(t[0]) for t in outputs[0].values()}) == 24
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("kind", ["tied", "untied"])
async def test_the_transformers_twin_keeps_to_the_same_protocol(kind, tied, untied, tmp_path):
    case = {"tied": tied, "untied": untied}[kind]
    engine = await TransformersEngine.start(case.path, SETTINGS, seed=0)
    assert await agrees(engine, case.model, 0.6) < 1e-4
    prompts = [[1, 5, 6], [1, *range(20, 40)], [1, 8]]
    calls = [GenerateCall(str(i), p, 12, 0.8, i, ()) for i, p in enumerate(prompts)]
    made = await engine.generate_batch(calls)
    for prompt, g in zip(prompts, made, strict=True):
        expected = reference_logprobs(case.model, [prompt + g.token_ids], 0.8)[0][len(prompt) :]
        assert difference([g.logprobs], [expected]) < 1e-4
    assert made == await engine.generate_batch(calls)
    ends = await asyncio.gather(*(call(engine, [1, i], seed=i) for i in range(4, 30)))
    assert all((g.finish == "stop") == (g.token_ids[-1] in (7, 11)) for g in ends) and any(
        g.finish == "stop" for g in ends
    )
    model = tiny_model(tmp_path / "m", tied=kind == "tied", seed=4)
    await engine.load_weights(weights(model, tmp_path / "w"), 1)
    assert await agrees(engine, model, 1.0) < 1e-4
    assert (await call(engine, [1, 5])).policy_version == 1
    with pytest.raises(UnspiralError, match="were not loaded"):
        await engine.load_weights(weights(model, tmp_path / "half", {"model.norm.weight"}), 2)
    with pytest.raises(WorkerUnavailableError, match="no whole version"):
        await call(engine, [1, 5])
    await engine.close()


async def test_a_call_that_waits_behind_new_weights_knows_how_their_loading_ended(tied, tmp_path):
    """Sampling and loading take turns in a thread: the next turn may begin before the event loop hears of the
    last one."""
    engine = await TransformersEngine.start(tied.path, SETTINGS, seed=0)
    model = tiny_model(tmp_path / "m", tied=True, seed=4)
    whole, half = weights(model, tmp_path / "whole"), weights(model, tmp_path / "half", {"model.norm.weight"})

    async def behind(path, version):
        tasks = [
            engine.load_weights(path, version),
            engine.generate_batch([GenerateCall("a", [1, 5], 4, 1.0, 0, ())]),
        ]
        both = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        time.sleep(0.3)  # the loop is busy
        return await both

    loaded, (sampled,) = await behind(whole, 1)
    assert loaded is None and sampled.policy_version == 1
    failed, refused = await behind(half, 2)
    assert "were not loaded" in str(failed) and isinstance(refused, WorkerUnavailableError)
    assert "no whole version" in str(refused)
    await engine.close()


async def test_logprobs_are_taken_by_token_id_not_by_rank(environment):
    """A position whose first entry is another token than the sampled one."""
    from vllm.logprobs import Logprob

    from services.rollout.engines.vllm_engine import _generation

    position = {4: Logprob(-0.1, 1), 9: Logprob(-2.5, 7)}
    completion = SimpleNamespace(
        token_ids=[9],
        logprobs=[position],
        finish_reason="length",
        stop_reason=None,
        text="",
        weight_versions=None,
    )
    assert _generation("r", SimpleNamespace(outputs=[completion]), 0).logprobs == [-2.5]


async def test_a_vllm_without_the_patched_name_fails_loudly(environment, monkeypatch):
    from vllm.model_executor.layers import utils

    from services.rollout.engines import vllm_worker_extension as extension

    extension.keep_cpu_weights_loadable()
    assert utils.dispatch_cpu_unquantized_gemm is extension.plain_linear
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer: None)
    with pytest.raises(RuntimeError, match="not in this version of vLLM"):
        extension.keep_cpu_weights_loadable()
    monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
    with pytest.raises(RuntimeError, match="not in this version of vLLM"):
        extension.keep_cpu_weights_loadable()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("full", {"enforce_eager": False}),
        (
            "graphs",
            {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
        ),
        ("off", {"enforce_eager": True}),
    ],
)
async def test_on_a_gpu_vllm_is_prepared_and_sleeps_as_configured(vllm_on_a_gpu, how, expected):
    from vllm.config import CompilationConfig

    from services.rollout.engines.vllm_engine import _arguments

    given = _arguments(RolloutSettings(compile=how, share_gpus=True), "m", 0)
    assert {k: v for k, v in given.items() if k in ("enforce_eager", "compilation_config")} == expected
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == (512, 8192), "by itself: 128, 2048"
    assert given["enable_sleep_mode"] is True
    assert given["distributed_executor_backend"] == "uni"
    # Left alone, vLLM has Ray start the parts, on GPUs that the worker has taken already.
    assert (
        _arguments(RolloutSettings(compile=how, tensor_parallel=2), "m", 0)["distributed_executor_backend"]
        == "mp"
    )
    assert "kv_cache_memory_bytes" not in given  # vLLM measures what is free
    fixed = _arguments(RolloutSettings(compile=how, share_gpus=True, kv_cache_gib=6), "m", 0)
    assert fixed["kv_cache_memory_bytes"] == 6 * 2**30
    CompilationConfig(**expected.get("compilation_config", {}))  # vLLM knows these words


async def test_what_the_docs_would_have_one_set_for_vllm_reaches_the_workers_and_is_known_to_it():
    from vllm import envs

    from services.rollout.engines.vllm_engine import ENVIRONMENT
    from services.rollout.pool.placement import PASSED_ON

    docs = (ROOT / "docs").glob("*.md")
    told = {name for file in docs for name in re.findall(r"\bVLLM_\w+", file.read_text(encoding="utf-8"))}
    passed = {name for name in (*PASSED_ON, *ENVIRONMENT) if name.startswith("VLLM_")}
    assert told and told <= passed <= envs.environment_variables.keys()
