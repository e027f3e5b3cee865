"""What the tags in a model's text do: the ones that are meant, and the ones that are only mentioned."""

from __future__ import annotations

import asyncio
import random
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_fakes import Hit, ScriptedEngine, byte_bpe, chat_bpe, request, words
from rollout_models import bigram_model

from services.contracts import Action, Question, Trajectory
from services.rollout.engines.base import Generation
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.tags import first_action, last_answer, outside_thoughts
from services.rollout.worker.templates import make_template
from services.settings import RolloutSettings
from trainer.rewards import answer_mask, final_answer, make_reward

LAB = words()
BPE = byte_bpe(["<think> I can use <search> </think> <search> x </search> <answer> Paris </answer> "] * 3)


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        (
            "I can use <search> to find it.</think><search>capital of France</search>",
            "search",
            "capital of France",
        ),
        ("<search> no, <search> n1 </search>", "search", " n1 "),
        ("<think>I will use <answer> tags</think><answer>Paris</answer>", "answer", "Paris"),
        ("<think>`<search>` and `</search>`</think> <answer>Paris</answer>", "answer", "Paris"),
        ("tags: <answer> and </answer>. Now:</think><search>x</search>", "search", "x"),
        ("<think>a</think><think>in <answer>b</answer></think><search>c</search>", "search", "c"),
        ("<think>so <think> twice </think><answer>Paris</answer>", "answer", "Paris"),
        # A think block inside a pair is no part of the answer or the query.
        ("<answer><think></think></answer>", "answer", " "),
        ("<answer><think>or <answer>Rome</answer></think>Paris</answer>", "answer", " Paris"),
        ("<search>capital<think>of what?</think>of France</search>", "search", "capital of France"),
        ("<answer><think>Paris</answer>", None, None),
        ("<search> <answer> a </answer> </search>", "answer", " a "),
        ("<answer> maybe <search> x </search>", "search", " x "),
        ("<think>a</think> <answer>Paris</answer></think>", "answer", "Paris"),
        # In a block that is never closed a pair counts where the text ends with it.
        ("<think>I know: <answer>Paris</answer> \n", "answer", "Paris"),
        ("<think>I put it between <answer> and </answer> soon", None, None),
        ("<think>a</think> b <think> <search>x</search> then", None, None),
        ("<search> x </answer>", None, None),
        ("</search> <search>", None, None),
        ("", None, None),
    ],
)
def test_the_innermost_pair_outside_of_thoughts_is_the_action(text, kind, content):
    pair = first_action(text)
    assert (pair and pair.kind, pair and pair.content) == (kind, content)
    if pair:
        shown = re.sub(r"<think>.*?</think>", " ", text[pair.start : pair.end])
        assert shown == f"<{kind}>{content}</{kind}>"


def test_search_r1s_reading_is_its_own_expression():
    text = "I can use <search> to find it.</think><search>capital of France</search>"
    assert first_action(text, "search_r1").content == " to find it.</think><search>capital of France"
    assert first_action("<think>`<answer>` and `</answer>`", "search_r1").content == "` and `"


PARTS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", " x", "y ", "\n", "<b>"]
TEXT = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@given(TEXT)
def test_search_r1s_reading_equals_upstreams_regular_expressions(text):
    ours = first_action(text, "search_r1")
    theirs = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    assert (ours and (ours.kind, ours.content)) == (theirs and (theirs[1], theirs[2]))
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    last = last_answer(text, "search_r1")
    assert (last and last.content) == (answers[-1] if answers else None)


@given(TEXT, st.booleans())
def test_thoughts_are_blanked_in_place_and_no_pair_reaches_into_one(text, thinking):
    shown, opened = outside_thoughts(text, thinking)
    assert len(shown) == len(text)
    assert all(a in (b, " ") for a, b in zip(shown, text, strict=True))
    pair = last_answer(text, thinking=thinking)
    if pair is not None:
        assert shown[pair.start : pair.end].split() == f"<answer>{pair.content}</answer>".split()
        assert "<answer>" not in pair.content
        assert shown[pair.start : pair.end].startswith("<answer>")
        assert opened is None or pair.end <= opened or not text[pair.end :].strip()


def template_of(tokenizer, name="lab", **changes):
    settings = RolloutSettings(
        template=name, max_obs_tokens=64, max_response_tokens=40, max_model_tokens=600, **changes
    )
    return make_template(name, tokenizer, settings), settings


async def run(script, tokenizer=LAB, question="what is n1 ?", **changes):
    template, settings = template_of(tokenizer, **changes)
    engine = ScriptedEngine(tokenizer, script, eos_id=tokenizer.eos_token_id)
    queries = []

    async def search(query):
        queries.append(query)
        return [Hit("d", '"n1"\nriver n2')]

    asked = request(text=question)
    done = await run_trajectory(asked, engine=engine, template=template, search=search, settings=settings)
    return done, engine, queries


async def test_generation_goes_on_past_a_tag_that_a_thought_mentions():
    script = [
        "<think> first <search> n9 </search>",
        "then <answer> n8 </answer>",
        "found </think> <search> n1 river </search>",
        "<answer> n2 </answer>",
    ]
    done, engine, queries = await run(script)
    first, second = done.actions
    assert queries == ["n1 river"] == [first.query]
    assert first.text == (
        "<think> first <search> n9 </search> then <answer> n8 </answer> found </think> <search> "
        "n1 river </search>"
    )
    assert (done.finish, second.kind, final_answer(done)) == ("answer", "answer", "n2")
    assert len(done.segments) == 3, "no observation follows a mention"
    # Token in, token out: what each call was given begins with all that the call before it was given and
    # wrote.
    tokens = done.arrays()[0].tolist()
    for shorter, longer in zip(engine.prompts, [*engine.prompts[1:], tokens], strict=True):
        assert longer[: len(shorter)] == shorter
    # One budget for the action, whatever the number of calls.
    assert engine.max_tokens == [40, 35, 31, 40]
    assert len(first.logprobs) == len(first.token_ids)


async def test_the_transformers_engine_goes_on_past_a_mention(tmp_path):
    """A policy that mentions a search in its thought: what it writes does not depend on where the engine
    stopped."""
    wanted = ["<think>", "<search>", "n9", "</search>", "</think>", "<answer>", "n2", "</answer>"]
    following = dict(pairwise(["?", *wanted]))
    bigram_model(tmp_path, {word: {after: 1.0} for word, after in following.items()})
    template, settings = template_of(LAB)
    engine = await TransformersEngine.start(str(tmp_path), settings, seed=0)
    done = await run_trajectory(request(), engine=engine, template=template, search=None, settings=settings)
    await engine.close()
    assert (done.actions[0].text.split(), done.finish) == (wanted, "answer")
    assert final_answer(done) == "n2" and abs(sum(done.actions[0].logprobs)) < 1e-3


async def test_a_thought_that_is_never_closed_ends_with_the_budget_and_does_nothing():
    done, engine, queries = await run(
        ["<think> <answer> n1 </answer>"] * 20 + ["<answer> n2 </answer>"], max_turns=1
    )
    assert engine.max_tokens[:3] == [40, 36, 32] and sum(engine.max_tokens[:10]) == 220
    assert len(done.actions[0].token_ids) == 40
    assert queries == []


async def test_a_model_that_ends_its_turn_with_an_answer_in_an_open_thought_has_answered():
    done, _, _ = await run(["<think> found <answer> n2 </answer>", "<eos>"])
    assert (done.finish, final_answer(done), make_reward("em")(done)) == ("answer", "n2", 0)
    mask = answer_mask(done, LAB)
    assert LAB.decode(done.arrays()[0][mask].tolist()) == "<answer> n2 </answer>"


async def test_each_part_of_an_action_has_a_seed_of_its_own():
    script = ["<think> <search> n9 </search>", "</think> <answer> n2 </answer>"]
    _, engine, _ = await run(script, deterministic=True)
    assert len(set(engine.seeds)) == 2
    _, again, _ = await run(script, deterministic=True)
    assert again.seeds == engine.seeds


async def test_a_prompt_may_have_opened_the_thought():
    script = ["first <answer> n8 </answer>", "then </think> <answer> n2 </answer>"]
    done, _, _ = await run(script, question="what is n1 ? <think>")
    assert len(done.actions) == 1 and done.actions[0].thinking
    assert (done.finish, final_answer(done)) == ("answer", "n2")
    # Never closed: a mention is no answer, for the loop and for the rewards alike.
    done, _, _ = await run(
        ["<answer> n8 </answer>", "n1 <eos>", "n1 <eos>"], question="n1 <think>", max_turns=1
    )
    assert [a.kind for a in done.actions] == ["invalid", "invalid"]
    assert final_answer(done) is None and not answer_mask(done, LAB).any()


async def test_search_r1s_reading_stays_selectable():
    script = ["<think> <search> n9 </search>", "<answer> first <answer> n2 </answer>"]
    done, engine, queries = await run(script, reading="search_r1")
    assert queries == ["n9"] and len(engine.prompts) == 2
    assert final_answer(done) == "first <answer> n2"
    done, _, queries = await run([script[0], "</think> <answer> n2 </answer>"])
    assert queries == [] and final_answer(done) == "n2"


@given(TEXT)
def test_loop_reward_and_mask_agree_on_the_answer(text):
    """Whatever a model writes in one go: an action that answers has an answer that scores, and its tokens are
    the mask's."""
    ids = BPE.encode(text or "x", add_special_tokens=False)
    template, settings = template_of(BPE, "search_r1", max_turns=0)
    engine = ScriptedEngine(BPE, [ids, *[[BPE.eos_token_id]] * 2], eos_id=BPE.eos_token_id)
    done = asyncio.run(
        run_trajectory(request(), engine=engine, template=template, search=None, settings=settings)
    )
    answer, mask = final_answer(done), answer_mask(done, BPE)
    assert (done.finish == "answer") == (answer is not None) == bool(mask.any())
    if answer is not None:
        marked, _ = outside_thoughts(BPE.decode(done.arrays()[0][mask].tolist()))
        marked = re.sub(r"<(/?)answer>", r" <\1answer> ", marked).split()
        assert " ".join(["<answer>", *answer.split(), "</answer>"]) in " ".join(marked)
        assert answer == template.parse(done.actions[0].text).content
        assert np.all(np.diff(np.flatnonzero(mask)) == 1)


WITH_TOOL = st.lists(st.sampled_from([*PARTS, "<calc>", "</calc>"]), max_size=14).map("".join)


@given(WITH_TOOL, st.sampled_from(["innermost", "search_r1"]))
@example("<think><answer><calc>1</calc>Paris</answer>", "innermost")  # the loop sees a tool's pair first
def test_loop_and_reward_agree_beside_a_tool(text, reading):
    ids = [*BPE.encode(text or "x", add_special_tokens=False), BPE.eos_token_id]
    more = {"max_turns": 0, "reading": reading, "tools": {"calc": "a:b"}}
    template, settings = template_of(BPE, "search_r1", **more)
    engine = ScriptedEngine(BPE, [ids], eos_id=BPE.eos_token_id)
    done = asyncio.run(
        run_trajectory(request(), engine=engine, template=template, search=None, settings=settings)
    )
    answer = final_answer(done)
    assert (done.finish == "answer") == (answer is not None) == bool(answer_mask(done, BPE).any())
    assert answer is None or answer == template.parse(done.actions[0].text).content


async def test_a_call_of_a_tool_is_as_well_formed_as_a_search():
    """And only mentioned in a thought it is none: what the loop carries out is what `format` reads."""
    template, settings = template_of(BPE, "search_r1", tools={"calc": "a:b"})

    async def reward(*script):
        engine = ScriptedEngine(BPE, script, eos_id=BPE.eos_token_id)
        tools = {"calc": lambda content, question: f"{content} is 4"}
        done = await run_trajectory(
            request(), engine=engine, template=template, search=None, settings=settings, tools=tools
        )
        assert [a.tool for a in done.actions] == ["calc", None] and final_answer(done) == "n1"
        return make_reward("format")(done)

    last = "<think> so </think><answer> n1 </answer>"
    assert await reward("<think> I use <calc> now </think>\n<calc> 2 + 2 </calc>", last) == 1
    assert await reward("<calc> 2 + 2 </calc>", last) == 0.8
    assert await reward("<think> a </think> so <calc> 2 + 2 </calc>", last) == 0.8


@pytest.mark.parametrize("inside", ["", " ", "<think></think>", "<think>Paris</think>", "<think>\n</think> "])
async def test_an_answer_that_holds_a_thought_alone_is_an_empty_answer(inside):
    """For the loop, the rewards and the mask alike: it has answered, with nothing."""
    done, engine, _ = await run([f"<answer>{inside}</answer>"], tokenizer=BPE, name="search_r1")
    assert (done.finish, len(engine.prompts), final_answer(done)) == ("answer", 1, "")
    assert {make_reward(kind)(done) for kind in ("em", "f1", "subem", "em_strict")} == {0}
    assert make_reward("format")(done) == 0.1
    mask = answer_mask(done, BPE)
    assert BPE.decode(done.arrays()[0][mask].tolist()).strip() == f"<answer>{inside}</answer>"


@pytest.mark.parametrize(
    ("text", "em", "formatted"),
    [
        ("<think>I will use <answer> tags</think><answer>Paris</answer>", 1, 1),
        ("<think>`<answer>` and `</answer>`</think><answer>Paris</answer>", 1, 1),
        ("<think>`<answer>` and `</answer>` hold it", 0, 0),
        ("tags: <answer> and </answer></think><answer>Paris</answer>", 1, 0.8),
        ("<think>so</think><answer>no: <answer>Paris</answer>", 1, 0.8),
    ],
)
def test_rewards_read_the_tags_as_the_loop_does(text, em, formatted):
    action = Action([], [], 0, "answer", text)
    t = Trajectory("u", "g", Question("q", "?", ("Paris",), "nq"), [], [action], "answer")
    assert (make_reward("em")(t), make_reward("format")(t)) == (em, formatted)
    t.reading = "search_r1"
    assert make_reward("em_search_r1")(t) == make_reward("em")(t)


PIECES = [
    *("<think>", "</think>", "</think>", "<answer>", "</answer>", " x", "é", "🙂", "<<search>", "</answer"),
    *(
        "<answer>y</answer>",
        "<search> q </search>",
        "<answer><think>a</think>b</answer>",
        "<answer></answer>",
    ),
]


class StoppingEngine(ScriptedEngine):
    """Writes one long list of ids, and stops at each stop string as an engine does."""

    async def generate(self, call):
        self.prompts.append(list(call.token_ids))
        ids, finish = [], "length"
        while len(ids) < call.max_tokens and finish == "length":
            ids.append(self.script.pop(0) if self.script else self.eos_id)
            if ids[-1] == self.eos_id:
                finish = "eos"
            elif any(s in self.tokenizer.decode(ids) for s in call.stop):
                finish = "stop"
        return Generation(ids, [-0.5] * len(ids), self.tokenizer.decode(ids), finish, 7)


@pytest.mark.parametrize("reading", ["innermost", "search_r1"])
@pytest.mark.parametrize("tokenizer", [BPE, chat_bpe()], ids=["bpe", "chat"])
async def test_loop_reward_and_mask_agree_over_many_actions_and_hostile_documents(tokenizer, reading):
    rng = random.Random(0)
    answered = 0

    async def search(query):
        return [Hit("d", "".join(rng.choices(PIECES, k=6)))]

    for _ in range(150):
        template, settings = template_of(tokenizer, "search_r1", max_turns=2, reading=reading)
        script = []
        for piece in rng.choices(PIECES, k=rng.randint(0, 9)):
            apart = piece if rng.random() < 0.5 else [piece]  # by characters, as no tokenizer would encode it
            script += [i for part in apart for i in tokenizer.encode(part, add_special_tokens=False)]
        engine = StoppingEngine(tokenizer, script, eos_id=tokenizer.eos_token_id)
        asked = request(prompt=rng.choice(["who", "who <think>", None]))
        done = await run_trajectory(asked, engine=engine, template=template, search=search, settings=settings)
        tokens, actions, _ = done.arrays()
        for shorter, longer in zip(engine.prompts, [*engine.prompts[1:], tokens.tolist()], strict=True):
            assert longer[: len(shorter)] == shorter
        answer, mask = final_answer(done), answer_mask(done, tokenizer)
        assert (answer is not None) == bool(mask.any()) and not (mask & (actions < 0)).any()
        if done.finish == "answer":
            last = done.actions[-1]
            assert template.parse("<think>" * last.thinking + last.text).content == answer
            assert "<answer>" in tokenizer.decode(tokens[mask].tolist())
            answered += 1
        elif reading == "innermost":
            assert answer is None
    assert answered > 20
