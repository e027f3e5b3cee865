"""The answer span by tokens: positions from decoding, against a reference on bytes."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from trainer.rewards import answer_mask

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

PIECES = [
    "<",
    "answer",
    ">",
    "</",
    "answer>",
    "><",
    " <",
    "</answer",
    ">.",
    "> ",
    "Par",
    "is",
    " Rome",
    "é",
    "北",
    "🙂",
    "<an",
    "swer",
    "\n",
]


def byte_level():
    """A byte-level BPE tokenizer whose vocabulary holds every byte and the pieces; merges do not matter,
    since nothing is encoded."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    to_visible = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = sorted(alphabet) + [to_visible.pre_tokenize_str(p)[0][0] for p in PIECES]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


TOKENIZER = byte_level()
VISIBLE = {c: b for b, c in bytes_to_unicode().items()}
BYTES = {i: bytes(VISIBLE[c] for c in name) for name, i in TOKENIZER.get_vocab().items() if name != "<|end|>"}
ID = {b: i for i, b in BYTES.items()}


def ids(*pieces):
    return [ID[p.encode() if isinstance(p, str) else p] for p in pieces]


def action(token_ids):
    text = TOKENIZER.decode(token_ids)
    return Action(token_ids, [0.0] * len(token_ids), 0, "answer" if "</answer>" in text else "invalid", text)


def trajectory(*token_lists, prompt=()):
    segments = [Observation(t, "") if i % 2 else action(t) for i, t in enumerate(token_lists)]
    return Trajectory("u", "g", Question("q", "?", ("x",), "s"), list(prompt), segments, "answer")


def test_the_mask_has_the_length_of_the_batch_and_marks_the_span_with_its_tags():
    prompt, first, observed = (
        ids("<", "answer", ">", "is", "</", "answer>"),
        ids(" Rome"),
        ids("<", "answer>", "Par", "</answer", ">."),
    )
    last = ids("Par", " <", "answer", ">", "Par", "is", "</", "answer", ">.", )  # fmt: skip
    t = trajectory(first, observed, last, prompt=prompt)
    mask = answer_mask(t, TOKENIZER)
    assert mask.dtype == bool
    assert len(mask) == len(TokenBatch.of([t]).token_ids)
    assert np.flatnonzero(mask).tolist() == list(range(13, 21))


def test_without_a_complete_answer_nothing_is_marked():
    for text in (["<", "answer>", "Par"], [" Rome"], ["Par", "</", "answer>"]):
        assert not answer_mask(
            trajectory(ids(*text), prompt=ids("<", "answer>", "is", "</answer", ">.")), TOKENIZER
        ).any()
    split = trajectory(ids("<", "answer>"), ids("Par"), ids("</", "answer>"))
    assert not answer_mask(split, TOKENIZER).any()


def test_the_last_of_several_answers_is_marked_where_it_stands():
    one = ids("<", "answer>", "Par", "</", "answer>")
    assert np.flatnonzero(answer_mask(trajectory(one, ids("is"), one + one), TOKENIZER)).tolist() == [
        11,
        12,
        13,
        14,
        15,
    ]
    assert np.flatnonzero(answer_mask(trajectory(one, ids("is"), ids("is")), TOKENIZER)).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_an_end_token_after_the_answer_is_outside_the_span():
    end = TOKENIZER.eos_token_id
    t = trajectory([*ids("<", "answer>", "Par", "</", "answer>"), end])
    assert answer_mask(t, TOKENIZER).tolist() == [True] * 5 + [False]


SMILE = "🙂".encode()
TOKEN = st.sampled_from([*PIECES, *(bytes([b]) for b in SMILE), b"\xff", b"\xc3"])


@settings(max_examples=300)
@given(
    st.lists(TOKEN, max_size=12),
    st.lists(TOKEN, max_size=8),
    st.lists(TOKEN, max_size=4),
    st.sampled_from(["innermost", "search_r1"]),
)
def test_the_mask_equals_a_reference_on_bytes(before, inside, after, reading):
    token_ids = ids(*before, "<", "answer", ">", *inside, "</answer", ">.", *after)
    whole = b"".join(BYTES[i] for i in token_ids)
    pattern = {"search_r1": rb"<answer>(.*?)</answer>", "innermost": rb"<answer>((?!<answer>).)*?</answer>"}[
        reading
    ]
    *_, match = re.finditer(pattern, whole, re.DOTALL)
    ends = np.cumsum([len(BYTES[i]) for i in token_ids])
    starts = ends - [len(BYTES[i]) for i in token_ids]
    expected = (ends > match.start()) & (starts < match.end())
    t = trajectory(token_ids)
    t.reading = reading
    assert answer_mask(t, TOKENIZER).tolist() == expected.tolist()


def test_a_tokenizer_of_words_whose_tags_are_special_tokens():
    vocabulary = {
        w: i for i, w in enumerate(["<pad>", "<answer>", "</answer>", "<think>", "</think>", "n1", "n2"])
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", additional_special_tokens=["<answer>", "</answer>"]
    )
    token_ids = [3, 5, 4, 1, 6, 2]
    t = Trajectory(
        "u",
        "g",
        Question("q", "?", ("n2",), "s"),
        [5],
        [Action(token_ids, [0.0] * 6, 0, "answer", words.decode(token_ids))],
        "answer",
    )
    assert answer_mask(t, words).tolist() == [False, False, False, False, True, True, True]
