"""Metrics of a step's text, searches and preserved set, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rollout_fakes import byte_bpe, words

from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.metrics.step_metrics import largest_drop, search_errors
from services.likelihood.metrics.text_metrics import control_mask, non_words, text_metrics

QUESTION = Question("q", "Which river?", ("Po",), "test")


def batch_of(*actions, prompt=(1,)):
    """One trajectory per list of actions, with an observation of one token between them."""
    trajectories = []
    for b, ids in enumerate(actions):
        segments = []
        for one in ids:
            segments += [Action(list(one), [-0.5] * len(one), 0, "search", "t"), Observation([2], "o")]
        trajectories.append(Trajectory(f"t{b}", "g", QUESTION, list(prompt), segments[:-1], "answer"))
    return TokenBatch.of(trajectories)


def marked(tokenizer, *texts):
    """The tokens of each text that the mask marks, decoded."""

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    batch = batch_of(ids)
    mask = control_mask(batch, decode)
    assert not mask[batch.action_ids < 0].any()
    return [decode([i]).strip() for i in batch.token_ids[mask].tolist()]


def test_a_tag_is_found_whether_it_is_one_token_or_several():
    text = "<think> first born </think> <search> n1 river </search>"
    assert marked(words(), text) == ["<think>", "</think>", "<search>", "</search>"]
    split = byte_bpe(["a"])  # a token per byte
    assert "".join(marked(split, "x <search>Po</search> < / y")) == "<search></search>"


def test_other_tags_and_tags_across_two_actions_are_none():
    pytest.importorskip("tokenizers")
    split = byte_bpe(["a"])
    assert marked(split, "<information>", "a <b> 1 < 2", "<sea", "rch>") == []
    assert "".join(marked(split, "<answer>", "é</answer>")) == "<answer></answer>"


def test_the_log_prob_of_tags_leaves_out_trajectories_without_a_reward():
    tokenizer = words()
    ids = tokenizer.encode("<search> n1 </search>", add_special_tokens=False)
    batch = batch_of([ids], [ids])
    logp = np.where(batch.token_ids == ids[1], -9.0, -1.0)
    logp[batch.row(1)] = -5.0
    control = np.isin(batch.token_ids, [ids[0], ids[2]])
    trajectories = [
        Trajectory(f"t{b}", "g", QUESTION, [1], [Action(ids, [-0.5] * 3, 0, "search", "t")], "answer")
        for b in range(2)
    ]
    scored = ScoredStep(
        trajectories, replace(batch, logp_old=logp), [1.0, None], np.array([0.5, 0.0]), control=control
    )
    assert scored.metrics()["logp/control"] == -1.0
    unknown = replace(scored, rewards=[None, None], advantages=np.zeros(2))
    assert "logp/control" not in unknown.metrics()
    assert "logp/control" not in replace(scored, control=None).metrics()


def test_words_that_nobody_gave_the_policy():
    given = ["Which river?", "The Po (652 km) is Italy's longest."]
    assert non_words(["<think>The river PO</think> <answer> Po! </answer>"], given) == 0.0
    assert non_words(["the zzxq river blub, 17 + 4"], given) == pytest.approx(2 / 4)
    assert non_words(["長江"], ["黄江"]) == pytest.approx(1 / 2)  # a word per character
    assert non_words(["<think></think> 12 ..."], given) is None
    assert non_words(["Po"], []) is None


def searched(documents, failures=0, text="<search> river </search>", observed="Po"):
    first = Action([1], [-0.5], 0, "search", text, "river", documents, search_failures=failures)
    last = Action([1], [-0.5], 0, "answer", "<answer> zzxq </answer>")
    return Trajectory("t", "g", QUESTION, [1], [first, Observation([2], observed), last], "answer")


def test_words_are_compared_within_the_step_and_not_without_any_document():
    assert text_metrics([searched(["d"])]) == {"text/non_words": pytest.approx(1 / 2)}
    assert text_metrics([searched(["d"]), searched([], observed="zzxq")]) == {"text/non_words": 0.0}
    assert text_metrics([searched([])]) == {}


def test_a_search_that_needed_another_try_is_an_error():
    done = [searched(["d"]), searched([], failures=3), searched(["d"], failures=1), searched(["d"])]
    assert search_errors(done) == {"retrieval/errors": 0.5}
    alone = Trajectory("t", "g", QUESTION, [1], [Action([1], [-0.5], 0, "answer", "a")], "answer")
    assert search_errors([alone]) == {}


def preserved(groups, rewards, right, held, tokens, logp_new=None):
    """The step's metrics of LLDS's set: trajectories of one action with so many tokens."""
    trajectories = [
        Trajectory(f"t{b}", g, QUESTION, [1], [Action([3] * n, [-0.5] * n, 0, "answer", "a")], "answer")
        for b, (g, n) in enumerate(zip(groups, tokens, strict=True))
    ]
    batch = TokenBatch.of(trajectories)
    step = ScoredStep(
        trajectories,
        replace(batch, logp_old=np.full(len(batch.token_ids), -1.0)),
        rewards,
        np.zeros(len(rewards)),
        right=right,
        preserved=np.array(held),
        logp_new=logp_new,
    )
    return step.metrics()


def test_tokens_that_are_preserved_though_their_group_earned_nothing():
    m = preserved(
        groups=["a", "a", "b", "b", "c", "c", "d", "d"],
        rewards=[0.0, 0.0, 1.0, 1.0, 0.3, 0.0, None, None],  # all wrong, all right, F1 that differs, unknown
        right=[False, False, True, True, False, False, None, None],
        held=[True, True, True, True, True, False, False, False],
        tokens=[1, 2, 3, 4, 5, 6, 7, 8],
    )
    assert m["llds/preserved_unrewarded"] == pytest.approx(3 / 15)
    nothing = preserved(["a"], [0.0], [False], [False], [2])
    assert "llds/preserved_unrewarded" not in nothing and "llds/largest_drop" not in nothing


def test_the_largest_drop_is_of_one_token_of_the_set():
    batch = batch_of([[5, 6]], [[7, 8]], [[9, 9]])
    old = np.full(len(batch.token_ids), -1.0)
    new = old.copy()
    new[batch.row(0)] = [0.0, -1.25, -0.5]  # the prompt, then two tokens
    new[batch.row(1)] = [0.0, -4.0, -4.0]
    new[batch.row(2)] = np.nan  # not scored again
    assert largest_drop(batch, old, new, np.array([True, False, True])) == 0.25
    assert largest_drop(batch, old, old, np.array([True, False, True])) == 0.0
    assert largest_drop(batch, old, new, np.array([False, False, True])) is None
