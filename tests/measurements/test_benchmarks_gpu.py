"""The GPU benchmarks on CPU: the rival is a fair one, and what they print is what was measured."""

import argparse
import json
import weakref

import numpy as np
import pytest
import torch

from benchmarks.gpu import learner as gpu_learner
from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu import rollout as gpu_rollout
from benchmarks.gpu import train as gpu_train
from benchmarks.gpu.shapes import qwen2_config
from services.common.errors import UserError
from trainer.config.schema import load_config
from trainer.learner.batches.micro_batches import make_microbatch
from trainer.learner.model.policy import PolicyModel

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_the_plain_way_computes_the_same_log_probs():
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(qwen2_config("tiny", vocab_size=256), attn_implementation="sdpa")
    batch = gpu_learner.made_up_batch(5, 120, 256)
    m = make_microbatch(batch, [0, 3, 4], torch.device("cpu"))
    policy = gpu_learner.PlainPolicy(hf, temperature=0.7, chunk_tokens=16)
    plain, fused = policy(m.input_ids, *m.at)[0], PolicyModel.forward(policy, m.input_ids, *m.at)[0]
    assert plain.shape == fused.shape == (int((m.action_ids >= 0).sum()),)
    assert torch.allclose(plain, fused, atol=1e-5)


def test_made_up_trajectories_look_like_those_of_search_agents():
    batch = gpu_learner.made_up_batch(64, 2048, 1000)
    lengths = np.diff(batch.offsets)
    assert lengths.max() <= 2048 and 800 < lengths.mean() < 1600
    assert 0.05 < (batch.action_ids >= 0).mean() < 0.4
    assert all(batch.action_ids[batch.row(b)][0] == -1 for b in range(64))


@pytest.mark.slow
def test_the_learner_benchmark_prints_ratios_of_one_run(capsys):
    parser = argparse.ArgumentParser()
    gpu_learner.arguments(parser)
    shape = ["--shape", "tiny", "--rows", "8", "--longest", "120", "--tokens", "512", "--repeats", "1"]
    out = gpu_learner.run(parser.parse_args([*shape, "--variants", "plain", "packed"]))
    assert out["packed"]["speedup"] == pytest.approx(out["plain"]["seconds"] / out["packed"]["seconds"])
    assert out["plain"]["microbatches"] == 2 and "llds_cost" in out["packed"]
    lines = gpu_learner.table(out).splitlines()
    assert lines[2].split()[0] == "plain" and lines[3].split()[0] == "packed" and len(lines) == 4
    late = gpu_learner.run(parser.parse_args([*shape, "--seconds", "0", "--variants", "packed"]))
    assert late["packed"] == {"skipped": "out of time"}


@pytest.mark.parametrize("kind", [RuntimeError, UserError])
def test_a_variant_that_fails_leaves_its_memory_to_the_next(monkeypatch, kind):
    parser = argparse.ArgumentParser()
    gpu_learner.arguments(parser)
    kept = []

    def failing(rank, *_, **__):
        kept.append(weakref.ref(next(rank.engine.policy.parameters())))
        raise kind("CUDA out of memory")

    monkeypatch.setattr(gpu_learner, "measure", failing)
    out = gpu_learner.run(
        parser.parse_args(["--shape", "tiny", "--rows", "2", "--longest", "100", "--variants", "packed"])
    )
    assert out["packed"] == {"failed": f"{kind.__name__}: CUDA out of memory"}
    assert kept[0]() is None


@pytest.mark.parametrize("name", [name for name in gpu_learner.VARIANTS if "compiled" not in name])
def test_each_variant_of_the_learner_can_be_measured(name):
    parser = argparse.ArgumentParser()
    gpu_learner.arguments(parser)
    shape = ["--shape", "tiny", "--rows", "2", "--longest", "100", "--repeats", "1"]
    out = gpu_learner.run(parser.parse_args([*shape, "--variants", name]))
    assert "failed" not in out[name] and out[name]["seconds"] > 0


def write_run(folder):
    (folder / "trajectories").mkdir(parents=True)
    summary = {"steps": 2, "em_before": 0.0, "em_after": 0.5, "performance": {"share/rollout": 0.4}}
    (folder / "summary.json").write_text(json.dumps(summary))
    steps = [{"step": s, "reward/mean": 0.1 * s} for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    score = {"before": 0.0, "after": 0.5}
    events = [
        {
            "event": "evaluation",
            "tag": tag,
            "overall": {"em": em, "n": 2},
            "sources": {"nq": {"em": em, "n": 2}},
        }
        for tag, em in score.items()
    ]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in [{"event": "worker_join"}, *events])
    )
    for tag, rewards in (("before", [0.0, 0.0]), ("after", [0.0, 1.0])):
        rows = [
            {
                "question": f"q{i}",
                "golden_answers": ["a"],
                "reward": r,
                "segments": [
                    {"by": "model", "text": f"<search> {tag} </search>"},
                    {"by": "environment", "text": "long documents"},
                ],
            }
            for i, r in enumerate(rewards)
        ]
        (folder / "trajectories" / f"eval_{tag}_greedy.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows)
        )


def test_the_report_of_a_run_has_scores_by_source_and_examples_without_documents(tmp_path):
    write_run(tmp_path / "train")
    out = gpu_train.report(tmp_path / "train") | {"seconds": 9.0, "warm_start_seconds": 3.0}
    assert [m["reward/mean"] for m in out["curve"]] == [0.1, 0.2]
    assert out["examples"][0]["question"] == "q1"  # what became right comes first
    assert out["examples"][0]["after"] == {"em": 1.0, "text": ["<search> after </search>", "[documents]"]}
    text = gpu_train.table(out)
    assert "EM nq                        0.000 ->  0.500  (n 2)" in text and "long documents" not in text


def test_an_earlier_run_is_not_met_after_the_warm_start(tmp_path):
    (tmp_path / "train").mkdir()
    parser = argparse.ArgumentParser()
    gpu_train.arguments(parser)
    args = parser.parse_args(["--model", "m", "--data", str(tmp_path)])
    args.out = tmp_path
    with pytest.raises(SystemExit, match="give another --out"):
        gpu_train.run(args)


def test_the_rollout_table_names_the_ratio():
    run = {"seconds": 1.0, "tokens": 100, "turns": 2.0}
    out = {
        "trajectories": 4,
        "start_seconds": 5.0,
        "asynchronous": [run | {"tokens_per_s": 300.0}],
        "barrier": [run | {"tokens_per_s": 200.0}],
        "ratio": 1.5,
    }
    assert gpu_rollout.table(out).splitlines()[-1] == "ratio 1.50"
    assert "ratio" not in gpu_rollout.table({k: v for k, v in out.items() if k not in ("barrier", "ratio")})


def peer_arguments(tmp_path, *more):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"n": {i}}}\n' for i in range(40)))
    parser = argparse.ArgumentParser()
    gpu_peer.arguments(parser)
    args = parser.parse_args(["--model", "m", "--data", str(tmp_path), *more])
    args.out = tmp_path
    return args


@pytest.mark.parametrize("vllm", ["yes", "no"])
def test_the_peer_is_given_the_work_that_ours_does(tmp_path, vllm):
    args = peer_arguments(tmp_path, "--vllm", vllm, "--prompts", "4", "--steps", "3", "--tokens", "100")
    questions = gpu_peer.same_questions(args)
    assert len(questions.read_text().splitlines()) == 12
    changes = gpu_peer.our_changes(args, questions)
    config = load_config(
        gpu_peer.ROOT / "examples/wiki_qa_gpu.yaml", [f"{k}={v}" for k, v in changes.items()]
    )
    assert config.rollout.max_turns == 0, "one generation, as TRL's"
    assert config.rollout.engine == ("vllm" if vllm == "yes" else "transformers")
    assert (
        not config.learner.gradient_checkpointing
        and config.learner.minibatches_per_batch * config.learner.epochs == 1
    )
    assert (
        config.probe.every > config.trainer.steps
        and not config.algorithm.kl
        and not config.algorithm.llds.lambda_
    )
    assert (config.rollout.max_response_tokens, config.rollout.max_model_tokens) == (
        100,
        gpu_peer.MAX_PROMPT_TOKENS + 100,
    )


def test_a_peer_that_earned_nothing_is_named():
    run = {"seconds_per_step": 2.0, "answer_tokens": 30.0, "reward": 0.0}
    both = {"ours": run, "trl": run | {"reward": 0.1, "seconds_per_step": 3.0, "command_seconds": 99.6}}
    lines = gpu_peer.table({"versions": {"trl": "1.16.0"}, **both}).splitlines()
    assert lines[1].endswith("reward 0.100, 100 s in all")
    assert [line.split(":")[0].strip() for line in lines if "no reward" in line] == ["ours"]
    assert lines[-1] == "  TRL's step / ours = 1.50"


def test_the_peers_both_see_one_gpu_and_a_batch_that_does_not_divide_is_refused(tmp_path, monkeypatch):
    for given, seen in ((None, "0"), ("2,3", "2"), ("GPU-a1", "GPU-a1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert gpu_peer.one_gpu()["CUDA_VISIBLE_DEVICES"] == seen
    for more, said in (
        (["--rows", "24"], "--rows 24 does not divide the 256"),
        ([], "has 40 questions"),
        (["--steps", "1"], "2 or more"),
    ):
        with pytest.raises(SystemExit, match=said):
            gpu_peer.run(peer_arguments(tmp_path, *more))
