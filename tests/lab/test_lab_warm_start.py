"""The laboratory's text, tokens and warm-started policy: sampler, template and warm start must mean the same
by them."""

import random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer

from retriever_service.client import Hit
from services.contracts import Question
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.lab_text import observation, question_prompt
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings
from trainer.data.models import resolve
from trainer.lab.demonstrations import Library, demonstration, drill
from trainer.lab.tokenizer import build_tokenizer, vocabulary
from trainer.lab.warm_start import WarmStart, warm_started_model
from trainer.lab.world import NAMES, make_world

TINY = WarmStart(steps=2, batch=2, worlds=1, hidden=32, layers=1, heads=2, feed_forward=32, warmup_steps=1)
SENTENCE = (
    "<think> first born </think> <search> n36 n199 born </search> <information> <doc> n36 n199 </information>"
)


@pytest.fixture(scope="module")
def library():
    return Library(make_world(0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A policy of two steps, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSPIRAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield warm_started_model(TINY)


@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, load_tokenizer])
def test_the_tokenizer_comes_back_as_it_was_saved_beside_the_model(trained, load):
    made, loaded = build_tokenizer(), load(trained)
    ids = made.encode(SENTENCE, add_special_tokens=False)
    assert (
        loaded.encode(SENTENCE, add_special_tokens=False)
        == ids
        == [vocabulary().index(w) for w in SENTENCE.split()]
    )
    assert loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == SENTENCE
    assert loaded.get_vocab() == made.get_vocab()
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert loaded.encode("nonesuch", add_special_tokens=False) == [vocabulary().index("<unk>")]


def test_tokens_decoded_one_by_one_are_joined_by_spaces(trained):
    tokenizer = load_tokenizer(trained)
    stream = DecodeStream(skip_special_tokens=False)
    ids = tokenizer.encode(SENTENCE, add_special_tokens=False)
    assert "".join(stream.step(tokenizer._tokenizer, i) or "" for i in ids) == SENTENCE


def test_the_model_has_exactly_the_rows_of_the_vocabulary(trained):
    model, tokens = AutoModelForCausalLM.from_pretrained(trained), vocabulary()
    assert len(set(tokens)) == len(tokens) == len(load_tokenizer(trained)) == model.config.vocab_size
    assert (
        model.get_output_embeddings().weight.shape
        == model.get_input_embeddings().weight.shape
        == (len(tokens), 32)
    )
    assert model.config.model_type == "qwen3"
    assert resolve(trained) == trained


def test_every_word_of_a_world_and_of_its_demonstrations_is_a_token(library):
    known, rng = set(vocabulary()), random.Random(0)
    for kind in ("right", "guess", "poor", "stop"):
        for question in library.world.questions[:100]:
            assert {
                w for text, _ in demonstration(question, library, kind, rng) for w in text.split()
            } <= known
    assert {w for _ in range(50) for text, _ in drill(library, rng) for w in text.split()} <= known
    assert set(NAMES) <= known


def test_what_the_warm_start_reads_is_what_the_template_renders(library):
    tokenizer = build_tokenizer()
    template = make_template("lab", tokenizer, RolloutSettings(template="lab", max_obs_tokens=40))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    for subject, facts in library.world.facts.items():
        for relation in facts:
            found = library.search(f"{subject} {relation}")
            hits = [Hit(str(i), contents, 1.0) for i, contents in enumerate(found)]
            rendered = template.observation_ids(hits, 40)
            assert list(rendered.token_ids) == ids(observation(found))
            assert len(rendered.token_ids) <= 40
    nothing = library.search("nothing")
    assert nothing == [] and list(template.observation_ids([], 40).token_ids) == ids(observation([]))
    question = library.world.questions[0]
    assert template.prompt_ids(Question(question.id, question.text, (question.answer,), "lab")) == ids(
        question_prompt(question.text)
    )


def test_a_right_demonstration_ends_in_the_answer_and_learns_actions_alone(library):
    for question in library.world.questions[:100]:
        pieces = demonstration(question, library, "right", random.Random(0))
        assert pieces[-1][0].endswith(f"<answer> {question.answer} </answer>")
        assert [learnt for _, learnt in pieces] == [False, *[True, False] * len(question.hops), True]
        assert all(text.startswith("<think>") == learnt for text, learnt in pieces)


def test_a_warm_start_is_cached_until_a_fresh_one_is_asked_for(trained, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(trained.parent.parent))
    steps = []

    def progress(done, total, loss):
        steps.append((done, total))

    before, made = load_file(trained / "model.safetensors"), (trained / "model.safetensors").stat().st_ino
    assert warm_started_model(TINY, progress=progress) == trained
    assert steps == [] and (trained / "model.safetensors").stat().st_ino == made
    torch.manual_seed(123)  # what the caller did with torch's generator must not matter
    state = torch.get_rng_state()
    assert warm_started_model(TINY, fresh=True, progress=progress) == trained
    assert steps == [(1, 2), (2, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    after = load_file(trained / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert (trained / "model.safetensors").stat().st_ino != made
    assert [p.name for p in trained.parent.iterdir()] == [trained.name]


def test_other_settings_are_another_model():
    keys = {WarmStart().key(), WarmStart(seed=1).key(), WarmStart(steps=181).key(), TINY.key()}
    assert len(keys) == 4 and WarmStart(seed=0).key() in keys
