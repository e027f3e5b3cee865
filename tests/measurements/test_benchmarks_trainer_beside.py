"""What a step waited for search is counted once, and costs it only the time in which nobody writes."""

from __future__ import annotations

import pytest

from benchmarks.gpu_searcher import make_searcher
from benchmarks.rollout.trainer_beside import waits
from services.contracts import Span
from tests.retriever.retriever_fixtures import CORPUS
from trainer.loop.run.spans import StepSpans, TrajectorySpans


def trajectory(uid: str, *parts: tuple[str, float, float]) -> TrajectorySpans:
    end = max(began + seconds for _, began, seconds in parts)
    spans = [Span("trajectory", parts[0][1], end - parts[0][1]), *(Span(*part) for part in parts)]
    return TrajectorySpans(uid=uid, worker="w", asked=0, received=end, spans=spans)


def step(*trajectories: TrajectorySpans) -> StepSpans:
    return StepSpans(
        step=1, attempt=0, began=0, ended=20, began_at=0, driver=[], trajectories=list(trajectories)
    )


def test_search_costs_a_step_only_what_no_other_trajectory_writes_through():
    found = waits(
        step(
            trajectory("a", ("generate", 0, 2), ("search", 2, 4), ("generate", 6, 2)),
            trajectory("b", ("generate", 0, 3), ("search", 3, 4), ("generate", 7, 1)),
        )
    )
    assert (found["trajectories"], found["searches"]) == (2, 2)
    assert found["search_p50_ms"] == pytest.approx(4000)
    assert found["of_trajectory"] == pytest.approx(8 / 16)
    assert found["some_wait"] == pytest.approx(5 / 20)  # from 2 to 7
    assert found["all_wait"] == pytest.approx(3 / 20)  # from 3 to 6
    assert found["all_wait_of_rollout"] == pytest.approx(3 / 8)


def test_a_step_without_a_search_waits_for_none():
    found = waits(step(trajectory("a", ("generate", 1, 2))))
    assert (found["searches"], found["of_trajectory"], found["some_wait"], found["all_wait"]) == (0, 0, 0, 0)


def test_the_searcher_asks_whole_questions(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    questions = ["Which river flows past Morwen?", "who wrote hamlet"]
    make_searcher("tiny", CORPUS, tmp_path, queries=questions)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokenizer("Question: who wrote hamlet <search>", return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(0)
    with torch.no_grad():
        asked = model.generate(
            **prompt, max_new_tokens=2, do_sample=True, num_return_sequences=16,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    texts = {tokenizer.decode(row[prompt["input_ids"].shape[1] :]) for row in asked}
    assert {text.removesuffix("</search>").strip() for text in texts} == set(questions)
    assert all(text.endswith("</search>") for text in texts)
    assert len(prompt["input_ids"][0]) > 3  # the question in the prompt is no such token
