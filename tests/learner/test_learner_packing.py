"""Rows to optimiser steps, ranks and micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import make_batch

from services.contracts import TokenBatch
from trainer.learner.batches.micro_batches import deal, make_microbatch, minibatches


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 200),
    packed=st.booleans(),
)
def test_every_row_is_dealt_once_within_the_token_budget_and_ranks_stay_in_step(
    lengths, ranks, budget, packed
):
    lengths = np.asarray(lengths)
    dealt = deal(list(range(len(lengths))), lengths, ranks, budget, packed=packed)
    assert sorted(b for packs in dealt for rows in packs for b in rows) == list(range(len(lengths)))
    assert len({len(packs) for packs in dealt}) == 1 and len(dealt) == ranks
    for rows in (rows for packs in dealt for rows in packs):
        tokens = (
            sum(lengths[b] for b in rows) if packed else len(rows) * max([0, *(lengths[b] for b in rows)])
        )
        assert len(rows) <= 1 or tokens <= budget


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 50), parts=st.integers(1, 12))
def test_minibatches_keep_the_order_and_differ_by_one_row_at_most(rows, parts):
    cut = minibatches(list(range(rows)), parts)
    assert [b for part in cut for b in part] == list(range(rows))
    assert len(cut) == min(rows, parts)
    assert max(map(len, cut), default=0) - min(map(len, cut), default=0) <= 1


def test_ranks_get_nearly_equal_numbers_of_tokens():
    lengths = np.random.default_rng(0).integers(10, 200, 64)
    tokens = [
        sum(int(lengths[b]) for rows in packs for b in rows)
        for packs in deal(list(range(64)), lengths, 4, 10**6)
    ]
    assert max(tokens) / min(tokens) < 1.05


def test_a_microbatch_holds_the_rows_unchanged_and_gives_them_back():
    batch = make_batch(6, seed=3)
    batch.answer_mask = batch.action_ids == 1
    m = make_microbatch(batch, [4, 0, 5], torch.device("cpu"))
    for i, b in enumerate([4, 0, 5]):
        place, n = batch.row(b), m.lengths[i]
        assert m.input_ids[i, :n].tolist() == batch.token_ids[place].tolist()
        assert m.action_ids[i, :n].tolist() == batch.action_ids[place].tolist()
        assert m.answer_mask[i, :n].tolist() == batch.answer_mask[place].tolist()
        assert (m.action_ids[i, n:] == -1).all() and not m.answer_mask[i, n:].any()
        assert m.advantages[i] == batch.advantages[b]
    expected = np.concatenate([batch.logp_sampler[batch.row(b)] for b in [4, 0, 5]])
    assert (m.unpad(m.logp_sampler) == expected).all()
    assert len(m.at[0]) == sum(int((batch.action_ids[batch.row(b)] >= 0).sum()) for b in [4, 0, 5])


def test_an_empty_microbatch_has_no_action():
    m = make_microbatch(make_batch(2), [], torch.device("cpu"))
    assert m.input_ids.shape == (1, 2) and len(m.at[0]) == 0 and len(m.unpad(torch.ones(1, 2))) == 0


def test_an_action_without_a_prompt_is_refused_by_name():
    batch = TokenBatch(
        ["lonely"], np.array([0, 3]), np.array([1, 2, 3], np.int32), np.array([0, 0, -1], np.int16)
    )
    with pytest.raises(ValueError, match="trajectory lonely: its first token is an action"):
        make_microbatch(batch, [0], torch.device("cpu"))


def test_packed_rows_fill_the_budget_that_padding_would_waste():
    lengths = np.random.default_rng(0).integers(10, 400, 128)
    counts = {p: len(deal(list(range(128)), lengths, 1, 1024, packed=p)[0]) for p in (False, True)}
    assert counts[True] == -(-int(lengths.sum()) // 1024)  # as few as there can be
    assert counts[False] > counts[True]


def test_packed_rows_lie_end_to_end_with_positions_from_zero():
    batch = make_batch(6, seed=3)
    m = make_microbatch(batch, [4, 0, 5], torch.device("cpu"), packed=True)
    p, used = m.packed, sum(m.lengths)
    assert p.input_ids.shape == p.position_ids.shape == (1, 256)
    assert p.input_ids[0, :used].tolist() == [
        int(t) for b in [4, 0, 5] for t in batch.token_ids[batch.row(b)]
    ]
    assert p.position_ids[0].tolist() == [t for n in [*m.lengths, 256 - used] for t in range(n)]
    assert p.segments.bounds.tolist() == [0, *np.cumsum(m.lengths).tolist(), 256]
    assert p.segments.longest == 256  # a power of two, the filling included
    assert (p.input_ids[p.at] == m.input_ids[m.at]).all() and (p.at[0] == 0).all()


def test_an_empty_packed_microbatch_has_no_action():
    m = make_microbatch(make_batch(2), [], torch.device("cpu"), packed=True)
    assert (
        m.packed.input_ids.shape == (1, 256)
        and len(m.packed.at[0]) == 0
        and m.packed.segments.bounds.tolist() == [0, 2, 256]
    )
