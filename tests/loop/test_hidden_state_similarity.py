"""Similarity of the hidden states of right and wrong answers: by hand, against a slow reference, and through
the learner's two layouts of a batch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from learner_world import VOCABULARY, make_config, make_policy, start_rank
from transformers import Qwen2ForCausalLM

from services.contracts import TokenBatch
from services.likelihood.exports.fixed_prompts import drawing, said_of_similarity
from trainer.loop.update.similarity import Alike, cosine, divergence, of_group, summary


def rows(*texts):
    """A batch of rows: `p` before a token is the prompt's or an observation, `a` an action's."""
    split = [text.split() for text in texts]
    return TokenBatch(
        [f"t{i}" for i in range(len(split))],
        np.cumsum([0, *map(len, split)]),
        np.array([int(word[1:]) for row in split for word in row], np.int32),
        np.array([0 if word[0] == "a" else -1 for row in split for word in row], np.int16),
    )


def turned(*degrees):
    """States in the plane, by angle; their lengths differ, and do not matter."""
    return np.array(
        [[n * math.cos(math.radians(d)), n * math.sin(math.radians(d))] for n, d in enumerate(degrees, 1)]
    )


def test_pairs_by_hand():
    batch = rows(
        "p1 p2 a3 a4 a5 p6 a7",  # right
        "p1 p2 a3 a8 a5 p9 p9 a7 a7",  # wrong: differs from the first at its second action token
        "p1 p2 a3 a4 a5 p6 a1",  # wrong: differs from the first at the last token
    )
    states = [
        turned(0, 0, 0, 10, 0, 20, 99),
        turned(0, 0, 0, 70, 99, 99, 110, 0, 99),
        turned(0, 0, 0, 10, 0, 20, 99),
    ]
    found = of_group(batch, states, [True, False, False])
    # First with second: action tokens after the fourth token (a8) are a5, a7 and a5, a7, a7, drawn from the
    # states at the places before them: 10 and 20 degrees against 70 and 110. One action token (a3) is shared.
    # First with third: three are shared, and nothing comes after the one that differs.
    expected = (math.cos(math.radians(60)) + math.cos(math.radians(90))) / 2
    assert found["right_wrong"] == Alike(2, 2.0, 1, pytest.approx(expected))
    assert found["wrong_wrong"] == Alike(1, 1.0, 1, pytest.approx(expected))
    assert "right_right" not in found
    short = of_group(batch, states, [True, False, False], window=1)["right_wrong"]
    assert short.cosine == pytest.approx(0.5)


def test_rows_of_which_one_begins_the_other_are_not_compared():
    batch = rows("p1 a2", "p1 a2 a3", "p1 a2")
    states = [np.ones((n, 2)) for n in (2, 3, 2)]
    found = of_group(batch, states, [True, False, True])
    assert found["right_wrong"] == Alike(2, 1.0, 0, None)
    assert found["right_right"] == Alike(1, 1.0, 0, None)
    assert divergence(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert divergence(np.array([4]), np.array([1, 2, 3])) == 0


def test_a_cosine_of_nothing_is_0_and_half_precision_is_summed_in_double():
    assert cosine(np.zeros((1, 3)), np.ones((1, 3))).tolist() == [0.0]
    big = np.full((1, 64), 6e4, np.float16)
    assert cosine(big, -big).tolist() == pytest.approx([-1.0])


def slow(model, ids, actions, right, window):
    """Plain loops over pairs and tokens, with a forward pass for each row; kind -> (shared, cosines)."""
    states = [
        model(torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0].tolist() for row in ids
    ]
    found = {}
    for i, j in itertools.combinations(range(len(ids)), 2):
        kind = {2: "right_right", 1: "right_wrong", 0: "wrong_wrong"}[right[i] + right[j]]
        apart = 0
        while apart < min(len(ids[i]), len(ids[j])) and ids[i][apart] == ids[j][apart]:
            apart += 1
        shared = sum(action >= 0 for action in actions[i][:apart])
        places = [[t for t in range(apart + 1, len(ids[r])) if actions[r][t] >= 0][:window] for r in (i, j)]
        values = []
        for s, t in zip(*places, strict=False):
            a, b = states[i][s - 1], states[j][t - 1]
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            values.append(dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b)))
        found.setdefault(kind, []).append((shared, sum(values) / len(values) if values else None))
    return found


def forked(seed):
    """Eight rows of one prompt: the first action token is the same in all, the second in the first five; what
    follows differs, in length too."""
    rng = np.random.default_rng(seed)
    ids, actions = [], []
    for row in range(8):
        tail = int(rng.integers(2, 8))
        ids.append([1, 2, 3, 4, 5 if row < 5 else 6, *rng.integers(7, VOCABULARY, tail).tolist()])
        actions.append([-1, -1, -1, 0, 0, *rng.choice([-1, 1], tail).tolist()])
    return ids, actions


@pytest.mark.parametrize("packing", ["padded", "packed"])
@torch.no_grad()
def test_the_learners_states_give_what_a_slow_reference_gives(tmp_path, packing):
    model_path = make_policy(tmp_path / "model")
    ids, actions = forked(3)
    batch = TokenBatch(
        [f"t{row}" for row in range(8)],
        np.cumsum([0, *map(len, ids)]),
        np.concatenate(ids).astype(np.int32),
        np.concatenate(actions).astype(np.int16),
    )
    right = [True, False, True, False, False, True, False, True]
    learner = {"zero_stage": 0, "packing": packing, "tokens_per_microbatch": 24}
    states = start_rank(make_config(model_path, learner=learner), model_path).hidden_states(batch)
    assert [state.shape for state in states] == [(len(row), 64) for row in ids]
    found = of_group(batch, states, right, window=4)
    plain = Qwen2ForCausalLM.from_pretrained(model_path).eval()
    reference = slow(plain, ids, actions, right, 4)
    assert set(found) == set(reference) == {"right_wrong", "right_right", "wrong_wrong"}
    assert 1 < found["right_wrong"].shared_tokens < 2
    for kind, pairs in reference.items():
        cosines = [value for _, value in pairs if value is not None]
        assert found[kind].pairs == len(pairs) and found[kind].compared == len(cosines) > 0
        assert found[kind].shared_tokens == pytest.approx(sum(shared for shared, _ in pairs) / len(pairs))
        assert found[kind].cosine == pytest.approx(sum(cosines) / len(cosines), abs=2e-6)


def test_groups_count_the_same_and_those_without_a_mixed_pair_do_not_count():
    mixed = {"right_wrong": Alike(7, 3.0, 6, 0.5), "wrong_wrong": Alike(15, 1.0, 15, 0.75)}
    other = {"right_wrong": Alike(12, 5.0, 12, 0.25), "right_right": Alike(1, 9.0, 0, None)}
    found = summary([mixed, {"wrong_wrong": Alike(28, 0.0, 28, -1.0)}, {}, other])
    assert (found["window"], found["groups"]) == (16, 2)
    assert found["right_wrong"] == {
        "groups": 2, "pairs": 19, "shared_tokens": 4.0, "compared": 18, "cosine": 0.375
    }  # fmt: skip
    assert found["wrong_wrong"]["cosine"] == 0.75 and found["right_right"]["cosine"] is None
    said = said_of_similarity(found)
    assert "mean cosine: right with wrong 0.375 (18 of 19 pairs), two wrong 0.750 (15 of 15 pairs);" in said
    assert said.endswith("a right and a wrong answer share 4.0 action tokens before that")
    assert said_of_similarity(summary([])) == said_of_similarity(None) == ""
    drawn = drawing("r", [{"step": 1, "groups": [], "similarity": found}])
    assert drawn.count("<rect") == 2 and "right with wrong" in drawn and "two right" not in drawn
    assert "0.375, 18 of 19 pairs, 4.0 action tokens shared" in drawn and drawn.count("<svg") == 2
    assert drawing("r", [{"step": 1, "groups": []}]).count("<svg") == 1
