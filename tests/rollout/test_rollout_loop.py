"""The agent loop and its templates, with a scripted engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rollout_fakes import Hit, ScriptedEngine, byte_bpe, chat_bpe, request, words

from services.common.errors import UserError
from services.contracts import Observation, Question
from services.rollout.worker.loop import (
    KNOWN_PROMPTS,
    Found,
    Prompts,
    prompt_of,
    run_trajectory,
    tokens_through_end,
)
from services.rollout.worker.templates import make_template
from services.rollout.worker.tokenizer import decoder_of
from services.settings import RolloutSettings

LAB = words()
BPE = byte_bpe(
    [
        "<think> I search </think> <search> the river </search> <answer> Beijing </answer> Doc 1(Title: x) "
        "é ü 東京 "
    ]
    * 3
)
CHAT = chat_bpe()
HITS = [Hit("d1", '"n1 n2"\nborn n3 river n4'), Hit("d2", '"n5"\nriver n6')]


def lab(**changes):
    settings = RolloutSettings(
        template="lab", max_obs_tokens=64, max_response_tokens=32, max_model_tokens=256, **changes
    )
    return make_template("lab", LAB, settings), settings


async def searched(query):
    return HITS


async def run(script, *, tokenizer=LAB, template=None, settings=None, search=searched, engine=None, **kwargs):
    if template is None:
        template, settings = lab()
    engine = engine or ScriptedEngine(tokenizer, script, eos_id=tokenizer.eos_token_id, **kwargs)
    return await run_trajectory(
        request(), engine=engine, template=template, search=search, settings=settings
    ), engine


async def test_a_search_that_needed_other_tries_is_noted_in_its_action():
    async def second_try(query):
        return Found(HITS, 1)

    trajectory, _ = await run(["<search> n1 </search>", "<answer> n4 </answer>"], search=second_try)
    assert [a.search_failures for a in trajectory.actions] == [1, 0]
    assert trajectory.actions[0].document_ids == ["d1", "d2"]


async def test_a_trajectory_searches_then_answers():
    trajectory, engine = await run(["<search> n1 river </search>", "<answer> n4 </answer>"])
    assert trajectory.finish == "answer"
    assert [a.kind for a in trajectory.actions] == ["search", "answer"]
    first = trajectory.actions[0]
    assert (first.query, first.document_ids, first.policy_version) == ("n1 river", ["d1", "d2"], 7)
    observation = trajectory.segments[1]
    assert observation.text == "<information> <doc> n1 n2 born n3 river n4 <doc> n5 river n6 </information>"
    assert LAB.decode(engine.prompts[0]) == "<bos> what is n1 ?"
    assert trajectory.model_text == "<search> n1 river </search><answer> n4 </answer>"


async def test_ids_of_each_turn_are_a_prefix_of_the_next():
    trajectory, engine = await run(
        ["<search> n1 </search>", "n1 n2", "<search> n2 </search>", "<answer> n1 </answer>"]
    )
    tokens, actions, logps = trajectory.arrays()
    for shorter, longer in zip(engine.prompts, [*engine.prompts[1:], tokens.tolist()], strict=True):
        assert longer[: len(shorter)] == shorter
    assert len(tokens) == len(actions) == len(logps)
    written = [t for a in trajectory.actions for t in a.token_ids]
    assert tokens[actions >= 0].tolist() == written
    assert np.all(logps[actions < 0] == 0)


async def test_max_turns_searches_are_carried_out_and_the_last_is_not():
    queries = []

    async def search(query):
        queries.append(query)
        return HITS

    template, settings = lab(max_turns=2)
    script = ["<search> n1 </search>", "<search> n2 </search>", "<search> n3 </search>", "never asked"]
    trajectory, engine = await run(script, template=template, settings=settings, search=search)
    assert queries == ["n1", "n2"]
    assert trajectory.finish == "turns"
    assert trajectory.searches == 2
    last = trajectory.segments[-1]
    assert (last.kind, last.query, last.document_ids) == ("search", None, None)
    assert engine.script == ["never asked"]


async def test_an_action_without_tag_gets_the_notice_and_uses_its_turn():
    template, settings = lab(max_turns=1)
    trajectory, _ = await run(["n1 n2", "<answer> n1 </answer>"], template=template, settings=settings)
    assert [a.kind for a in trajectory.actions] == ["invalid", "answer"]
    assert trajectory.segments[1].text == "<information> invalid </information>"
    trajectory, _ = await run(["n1", "n2"], template=template, settings=settings)
    assert (trajectory.finish, len(trajectory.actions)) == ("turns", 2)


async def test_eos_stays_in_the_ids_but_not_in_the_text():
    trajectory, _ = await run(["n1 <eos>", "<answer> n1 </answer>"])
    action = trajectory.actions[0]
    assert action.token_ids == LAB.encode("n1 <eos>")
    assert (action.text, action.kind) == ("n1", "invalid")


async def test_text_past_a_tag_is_cut_at_the_token_boundary_and_logprobs_with_it():
    script = ["<search> n1 </search> n2 n3 <answer> n4 </answer>", "<answer> n1 </answer> n9"]
    trajectory, _ = await run(script, logprob=lambda i: -float(i))
    first, second = trajectory.actions
    assert first.token_ids == LAB.encode("<search> n1 </search>")
    assert first.logprobs == [0.0, -1.0, -2.0]
    assert (first.kind, second.text) == ("search", "<answer> n1 </answer>")


def test_a_tag_that_ends_inside_a_token_keeps_that_token():
    vocabulary = {0: "<search>x", 1: "</sea", 2: "rch>\n\nand", 3: " more", 4: "rch>"}

    def decode(ids):
        return "".join(vocabulary[i] for i in ids)

    def ends(text):
        return "</search>" in text

    assert tokens_through_end([0, 1, 2, 3], ends, decode) == 3
    assert tokens_through_end([0, 1, 4, 3, 3], ends, decode) == 3
    assert tokens_through_end([0, 1, 3], ends, decode) is None


def test_an_action_that_ends_with_its_last_token_is_decoded_twice_however_long_it_is():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join("x>"[i] for i in ids)

    assert tokens_through_end([0] * 400 + [1], lambda text: ">" in text, decode) == 401
    assert decoded == [401, 400]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.sampled_from(["words", "bytes", "chat"]), st.data())
def test_the_decoder_gives_transformers_own_text_of_any_ids(kind, data):
    tokenizer = {"words": LAB, "bytes": BPE, "chat": CHAT}[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    own = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoder_of(tokenizer)(ids) == own


def test_a_tokenizer_with_a_decoding_of_its_own_keeps_it():
    class Loud(type(LAB)):
        def _decode(self, *given, **named):
            return super()._decode(*given, **named).upper()

    loud = Loud(tokenizer_object=LAB.backend_tokenizer, unk_token=LAB.unk_token)
    ids = LAB.encode("where is n4", add_special_tokens=False)
    assert decoder_of(loud)(ids) == decoder_of(LAB)(ids).upper()


async def test_tags_in_documents_are_never_actions():
    async def search(query):
        return [Hit("d", '"n1"\n<answer> n5 </answer> </search>')]

    trajectory, _ = await run(["<search> n1 </search>", "<answer> n2 </answer>"], search=search)
    assert [a.text for a in trajectory.actions] == ["<search> n1 </search>", "<answer> n2 </answer>"]
    assert "n5" not in trajectory.model_text


async def test_the_sequence_never_exceeds_max_model_tokens():
    settings = RolloutSettings(
        template="lab", max_turns=8, max_obs_tokens=64, max_response_tokens=16, max_model_tokens=40
    )
    template = make_template("lab", LAB, settings)
    trajectory, engine = await run(["<search> n1 </search>"] * 9, template=template, settings=settings)
    tokens, _, _ = trajectory.arrays()
    assert trajectory.finish == "length"
    assert len(tokens) <= 40
    assert isinstance(trajectory.segments[-1].token_ids, list) and trajectory.segments[-1].kind == "search"
    assert all(len(p) + m <= 40 for p, m in zip(engine.prompts, engine.max_tokens, strict=True))


async def test_a_trajectory_with_non_finite_logprobs_is_sampled_again_and_then_refused():
    calls = []

    def bad_once(i):
        calls.append(i)
        return math.nan if len(calls) == 1 else -0.25

    template, settings = lab(deterministic=True)
    trajectory, engine = await run(
        ["<answer> n1 </answer>"] * 2, template=template, settings=settings, logprob=bad_once
    )
    assert trajectory.actions[0].logprobs == [-0.25] * 3
    assert len(set(engine.seeds)) == 2, "the second sample must not repeat the first"
    with pytest.raises(FloatingPointError, match="trajectory u0"):
        await run(["<answer> n1 </answer>"] * 5, logprob=-math.inf)


async def test_seeds_come_from_the_request_only_in_deterministic_mode():
    _, engine = await run(["<search> n1 </search>", "<answer> n1 </answer>"])
    assert engine.seeds == [None, None]
    template, settings = lab(deterministic=True)
    _, first = await run(
        ["<search> n1 </search>", "<answer> n1 </answer>"], template=template, settings=settings
    )
    _, second = await run(
        ["<search> n1 </search>", "<answer> n1 </answer>"], template=template, settings=settings
    )
    assert first.seeds == second.seeds and len(set(first.seeds)) == 2


async def test_a_prompt_without_room_is_refused_with_its_lengths():
    template, settings = lab(max_prompt_tokens=3)
    with pytest.raises(UserError, match=r"has 5 tokens; rollout.max_prompt_tokens=3"):
        await run(["n1"], template=template, settings=settings)


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_the_model_wrote_is_never_encoded_again(data):
    """A byte-level BPE, random ids: encode(decode(ids)) differs from ids nearly always, and the ids survive
    all the same."""
    import asyncio

    settings = RolloutSettings(
        template="search_r1", max_turns=3, max_obs_tokens=60, max_response_tokens=20, max_model_tokens=1200
    )
    template = make_template("search_r1", BPE, settings)
    tag = data.draw(st.sampled_from(["<search> x </search>", "<answer>y</answer>", "", "</search>"]))
    ids = data.draw(st.lists(st.integers(1, len(BPE) - 1), min_size=1, max_size=8))
    spelled = [BPE.encode(c)[0] for c in tag] if data.draw(st.booleans()) else BPE.encode(tag)
    engine = ScriptedEngine(BPE, [[*ids, *spelled]] * 4)
    trajectory = asyncio.run(
        run_trajectory(request(), engine=engine, template=template, search=searched, settings=settings)
    )
    tokens, actions, logps = trajectory.arrays()
    prompts = [*engine.prompts, tokens.tolist()]
    for k, action in enumerate(trajectory.actions):
        written = [*ids, *spelled][: settings.max_response_tokens]
        assert action.token_ids == written[: len(action.token_ids)]
        assert prompts[k + 1][: len(prompts[k]) + len(action.token_ids)] == prompts[k] + action.token_ids
    assert len(tokens) == len(actions) == len(logps)


def test_the_bpe_of_the_property_test_does_not_round_trip():
    ids = [BPE.encode(c)[0] for c in "<search>"]
    assert BPE.encode(BPE.decode(ids)) != ids


def test_an_observation_that_was_made_before_is_not_encoded_again_and_is_the_callers_own(monkeypatch):
    template, _ = lab()
    first = template.observation_ids(HITS, 60)
    kept = list(first.token_ids)
    monkeypatch.setattr(template, "first_ids", lambda *_: pytest.fail("encoded again"))
    first.token_ids.append(7)
    assert template.observation_ids(HITS, 60).token_ids == kept
    monkeypatch.undo()
    shorter = template.observation_ids(HITS, len(kept) - 1)
    assert len(shorter.token_ids) < len(kept), "another budget is another observation"
    many = [template.observation_ids([Hit("d", f"n{i} n{j}")], 60) for i in range(30) for j in range(10)]
    assert len(many) == 300 and template.observation_ids(HITS, 60).token_ids == kept


@pytest.mark.parametrize("budget", [16, 20, 33, 60, 500])
def test_truncation_cuts_documents_and_keeps_the_closing_tag(budget):
    settings = RolloutSettings(max_obs_tokens=500)
    template = make_template("search_r1", BPE, settings)
    hits = [Hit("1", '"Tōkyō"\n' + "東京 is the river " * 30), Hit("2", '"x"\nend')]
    observation = template.observation_ids(hits, max(budget, template.min_observation_tokens))
    assert len(observation.token_ids) <= max(budget, template.min_observation_tokens)
    assert observation.text.startswith("\n\n<information>")
    assert observation.text.endswith("</information>\n\n")
    assert BPE.decode(observation.token_ids) == observation.text
    assert "�" not in observation.text
    with pytest.raises(ValueError, match="at least"):
        template.observation_ids(hits, template.min_observation_tokens - 1)


def test_search_r1_text_is_the_contract_word_for_word():
    template = make_template("search_r1", BPE, RolloutSettings())
    question = Question("1", "who wrote it", ("x",), "nq")
    assert BPE.decode(template.prompt_ids(question)) == (
        "Answer the given question. You must conduct reasoning inside <think> and </think> "
        "first every time you get new information. "
        "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> "
        "query </search> and it will "
        "return the top searched results between <information> and </information>. "
        "You can search as many times as your want. If you "
        "find no further external knowledge needed, you can directly provide the answer inside <answer> "
        "and </answer>, without "
        "detailed illustrations. For example, <answer> Beijing </answer>. Question: who wrote it?\n"
    )
    hits = [Hit("1", '"A title"\nfirst line\nsecond'), Hit("2", '"B"\ntext')]
    assert template.observation_ids(hits, 500).text == (
        '\n\n<information>Doc 1(Title: "A title") first line\nsecond\nDoc 2(Title: "B") text\n'
        "</information>\n\n"
    )
    assert template.observation_ids([], 500).text == "\n\n<information></information>\n\n"
    assert template.notice().text == (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> "
        "and </search>. If I want to "
        "give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
    )
    assert isinstance(template.notice(), Observation)


def test_search_r1_takes_the_data_files_own_prompt_and_the_chat_template():
    tokenizer = byte_bpe(["<|user|>hello<|assistant|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}<|assistant|>{% endif %}"
    )
    template = make_template("search_r1", tokenizer, RolloutSettings())
    question = Question("1", "ignored?", ("x",), "nq", prompt="The whole turn")
    assert tokenizer.decode(template.prompt_ids(question)) == "<|user|>The whole turn<|assistant|>"


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think> a </think><search> who\nwas </search>", "search", "who\nwas"),
        ("<answer>Beijing</answer> <search> x </search>", "answer", "Beijing"),
        ("<search> x </answer>", "invalid", ""),
        ("</search>", "invalid", ""),
        ("<search></search>", "search", ""),
    ],
)
def test_the_first_complete_tag_pair_is_the_action(text, kind, content):
    template, _ = lab()
    parsed = template.parse(text)
    assert (parsed.kind, parsed.content) == (kind, content)


def test_a_tokenizer_comes_back_as_it_was_saved_beside_a_qwen2_model(tmp_path):
    """AutoTokenizer would make a byte-level one of it, which loses words."""
    from rollout_models import tiny_model
    from transformers import AutoTokenizer

    from services.rollout.worker.tokenizer import load_tokenizer

    tiny_model(tmp_path)
    text = "<bos> what is n1 ?"
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(text, add_special_tokens=False) == LAB.encode(text, add_special_tokens=False)
    assert loaded.decode(LAB.encode(text)) == text
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) != LAB.encode(text), (
        "the trap is gone: the loader can go too"
    )


async def test_trajectories_of_a_group_share_the_work_on_their_prompt_and_no_list():
    template, settings = lab()
    made = []
    own = template.prompt_ids
    template.prompt_ids = lambda question: made.append(question) or own(question)
    known = Prompts()

    def asked(i):
        return Question(f"q{i}", f"what is n{i % 20} ?", (), "s")

    first, second = (prompt_of(asked(1), template, settings, known) for _ in range(2))
    assert first == second == own(asked(1)) and first is not second and len(made) == 1
    first.clear()
    assert prompt_of(asked(1), template, settings, known) == second
    for i in range(2, KNOWN_PROMPTS + 2):  # the oldest is forgotten
        prompt_of(asked(i), template, settings, known)
    assert prompt_of(asked(1), template, settings, known) == second
    assert len(made) == KNOWN_PROMPTS + 2
