"""From a scored step to what the microscope shows: which groups, which tokens, and how they sum up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.microscope.building import Lens, Slide, token_texts
from services.likelihood.microscope.choice import StepColumns, chosen_rows
from services.likelihood.microscope.heads import head_of
from services.likelihood.microscope.held import LldsGate
from services.likelihood.microscope.packing import packed, unpacked
from services.likelihood.microscope.probe_slide import ProbeSlide, group_of
from services.likelihood.microscope.weights import WEIGHTS, HeadColumns, heaviest, weights_of
from services.likelihood.monitor.detectors.table import READS
from trainer.algorithms import llds_loss
from trainer.loop.records.microscope import scoring_of

LENS = Lens(lambda ids: " ".join(f"w{i}" for i in ids), lambda t: scoring_of(t, "em"))


def step(groups=3, size=4, seed=0, **more) -> ScoredStep:
    """Groups of `size`; the second of each group is right, but in group 0, where nobody is."""
    rng = np.random.default_rng(seed)
    question = Question("q", "Who founded Arl?", ("Ines Tobar", "Tobar"), "towns")
    made = []
    for i in range(groups * size):
        search = Action([5, 6, 7], [-0.5] * 3, 3, "search", "<search> Arl </search>", "Arl", ["d1"])
        search.documents = ['"Arl"\nArl was founded by Ines Tobar.']
        right = i % size == 1 and i >= size
        text = f"<answer> {'the Tobar!' if right else 'Arl'} </answer>"
        answer = Action([8, 9, 10 + i % 3], [-0.25] * 3, 3, "answer", text)
        segments = [search, Observation([1, 2], "<information> .. </information>"), answer]
        made.append(Trajectory(f"u{i:02d}", f"g{i // size}", question, [1, 2, 3], segments, "answer"))
    tokens = TokenBatch.of(made)
    mask = tokens.action_ids >= 0
    tokens.logp_old = np.where(mask, -rng.exponential(0.3, mask.size), 0).astype(np.float32)
    new = np.where(mask, tokens.logp_old - rng.normal(0.02, 0.1, mask.size), 0).astype(np.float32)
    rewards = [float("<answer> the" in t.actions[1].text) for t in made]
    advantages = np.asarray([1.0 if r else -0.3 for r in rewards])
    right = [bool(r) for r in rewards]
    return ScoredStep(made, tokens, rewards, advantages, right, 0.3, np.minimum(new, 0), **more)


def records(scored, rows=None, gate=None, preserved=None):
    rows = list(range(len(scored.trajectories))) if rows is None else rows
    return Slide.of(scored, rows, preserved, gate).records(LENS)


def test_the_tokens_of_the_records_sum_to_the_displacement_of_the_curve():
    scored = step()
    kept = [unpacked(packed(t).body) for t in records(scored)]
    changes = [
        after - before
        for t in kept
        if t.advantage >= 0
        for w in t.written
        for before, after in zip(w.logp_before, w.logp_after, strict=True)
    ]
    assert np.mean(changes) == pytest.approx(scored.metrics()["displacement/mean"], abs=1e-5)
    heads = [head_of(t) for t in kept if t.right]
    fell = [h.change < 0 for h in heads]
    assert np.mean(fell) == pytest.approx(scored.metrics()["displacement/share_negative"])


def test_a_record_says_what_was_written_found_and_earned():
    scored = step()
    record = records(scored, rows=[5])[0]
    assert [s.by for s in record.segments] == ["model", "environment", "model"]
    assert "".join(record.written[1].tokens) == "w8 w9 w12"
    assert record.written[0].documents[0].model_dump() == {
        "id": "d1",
        "title": "Arl",
        "text": "Arl was founded by Ines Tobar.",
    }
    assert (record.right, record.reward, record.valid, record.policy_version) == (True, 1.0, True, 3)
    assert record.scoring.normalized == "tobar"
    assert [g.equal for g in record.scoring.golden] == [False, True]
    assert record.written[0].held is None and record.preserved is None, "LLDS is off"
    row = scored.tokens.row(5)
    old = scored.logp_old[row][scored.tokens.action_ids[row] == 1]
    assert record.written[1].logp_before == pytest.approx(old.tolist())


def test_a_trajectory_that_was_not_scored_again_has_no_log_probs_after():
    scored = step()
    scored.logp_new[scored.tokens.row(0)] = np.nan
    first, second = records(scored, rows=[0, 1], gate=LldsGate("action"), preserved=np.ones(12, bool))
    assert first.written[0].logp_after is None and first.written[0].held is None
    assert second.written[0].logp_after is not None and second.written[0].held is not None


@pytest.mark.parametrize("gate", ["action", "response", "token"])
@pytest.mark.parametrize("min_drop", [0.0, 0.05])
def test_held_tokens_are_those_on_which_the_gradient_of_llds_acts(gate, min_drop):
    scored = step(seed=3)
    tokens = scored.tokens
    preserved = scored.advantages >= 0
    kept = records(scored, gate=LldsGate(gate, min_drop), preserved=preserved)
    length = int(np.diff(tokens.offsets).max())
    shape = (len(tokens), length)
    old, actions = torch.zeros(shape, dtype=torch.float64), torch.full(shape, -1)
    new = torch.zeros(shape, dtype=torch.float64)
    for b in range(len(tokens)):
        row = tokens.row(b)
        old[b] = torch.as_tensor(tokens.logp_old[row].astype(float))
        new[b] = torch.as_tensor(scored.logp_new[row].astype(float))
        actions[b] = torch.as_tensor(tokens.action_ids[row].astype(int))
    new.requires_grad_()
    advantages = torch.as_tensor(scored.advantages)
    llds_loss(new, old, advantages, actions, gate=gate, min_drop=min_drop).loss_sum.backward()
    active = 0
    for b, record in enumerate(kept):
        for index, written in enumerate(record.written):
            acts = new.grad[b][actions[b] == index] != 0
            assert acts.nonzero().flatten().tolist() == written.held
            active += len(written.held)
    assert active > 0


def test_mixed_groups_come_first_and_those_of_alarms_before_them():
    scored = step(groups=5)
    of = [t.group for t in scored.trajectories]

    def groups(count, *rules):
        rows = chosen_rows(scored, count, rules)
        return list(dict.fromkeys(of[row] for row in rows)), len(rows)

    assert groups(4)[0] == ["g1", "g2", "g3", "g4"], "group 0 has wrong answers alone"
    falls = StepColumns(scored).change
    worst = min((1, 2, 3, 4), key=lambda g: falls[4 * g + 1])
    assert groups(1) == ([f"g{worst}"], 4)
    scored.trajectories[2].finish = "length"
    assert groups(1, "truncation") == (["g0"], 4)
    assert groups(0) == ([], 0) and groups(9)[1] == 20
    scored = step(groups=5)
    scored.logp_new[: scored.tokens.offsets[16]] = np.nan
    assert groups(1)[0] == ["g4"], "of mixed groups those that were scored again"


def test_a_steps_columns_are_those_of_its_heads():
    scored = step()
    scored.trajectories[3].actions[0].kind = "invalid"
    scored.trajectories[4].finish = "turns"
    scored.trajectories[5].actions[0].document_ids = []
    scored.trajectories[5].actions[0].documents = []
    heads = [head_of(t) for t in records(scored)]
    ours, theirs = StepColumns(scored), HeadColumns(heads)
    for rule in [*WEIGHTS, "likelihood"]:
        assert weights_of(ours, rule) == pytest.approx(weights_of(theirs, rule), abs=1e-6), rule
    assert set(WEIGHTS) <= set(READS)
    assert heaviest(heads, "validity").uid in ("u03", "u04")
    assert heaviest(heads, "retrieval").uid == "u05" and heaviest([], "length") is None


def words_and_bytes():
    """A byte-level tokenizer without merges: a character of several bytes is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain words", "Zürich 東京 🎉 end", "🎉", "", "a\u202eb\n<script>"])
def test_token_strings_join_to_the_text_whatever_spells_a_character(text):
    tokenizer = words_and_bytes()
    ids = tokenizer.encode(text).ids
    texts = token_texts(ids, tokenizer.decode)
    assert len(texts) == len(ids) and "".join(texts) == text
    torn = tokenizer.encode("東").ids[:2]
    assert len(token_texts(torn, tokenizer.decode)) == 2


def test_token_strings_of_a_tokenizer_that_joins_words_keep_the_spaces():
    def decode(ids):
        return " ".join(f"w{i}" for i in ids)

    assert token_texts([1, 2, 3], decode) == ["w1", " w2", " w3"]


def test_a_frozen_trajectory_is_recorded_as_a_later_step_scores_it():
    scored = step()
    tokens = scored.tokens.take([5, 6, 9])
    tokens.step = np.asarray([2, 2, 3])
    later = tokens.logp_old - np.where(tokens.action_ids >= 0, 0.25, 0).astype(np.float32)
    line = {
        "uid": "u09",
        "question": "Who founded Arl?",
        "data_source": "towns",
        "golden_answers": ["Ines Tobar"],
        "segments": [
            {"by": "model", "kind": "search", "text": "w5 w6 w7"},
            {"by": "environment", "text": "<information> .. </information>"},
            {"by": "model", "kind": "answer", "text": "w8 w9 w10"},
        ],
    }
    asked = []
    slide = ProbeSlide.of(
        tokens, later, [0, 2], lambda uid, step: asked.append((uid, step)) or (line if uid == "u09" else {})
    )
    first, last = [unpacked(packed(t).body) for t in slide.records(LENS)]
    assert asked == [("u05", 2), ("u09", 3)]
    assert (last.uid, last.question, last.prompt, last.probe) == ("u09", "Who founded Arl?", "w1 w2 w3", True)
    assert [(s.by, getattr(s, "kind", None)) for s in last.segments] == [
        *(("model", "search"), ("environment", None), ("model", "answer"))
    ]
    assert last.segments[1].text == "<information> .. </information>" and last.segments[1].tokens == 2
    assert last.written[1].tokens == ["w8", " w9", " w10"] and last.scoring.golden[0].text == "Ines Tobar"
    fell = np.subtract(last.written[1].logp_after, last.written[1].logp_before)
    assert fell == pytest.approx([-0.25] * 3, abs=1e-4)
    assert first.question is None and first.segments[1].text == "w1 w2" and first.written[0].kind is None
    assert packed(first).prompt == first.group and packed(last).prompt == "Who founded Arl?"
    assert group_of("000002-0003-01") == "000002-0003"
    blown = ProbeSlide.of(tokens, later * np.nan, [1], lambda uid, step: {}).records(LENS)
    assert packed(blown[0]).probe and blown[0].written[0].logp_after is None, "no number, no record of one"
