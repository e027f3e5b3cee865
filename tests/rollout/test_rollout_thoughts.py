"""Thoughts of earlier turns: kept or dropped as the model family's chat template does."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from rollout_fakes import Hit, ScriptedEngine, request
from tool_families import (
    CALLS,
    CONTROLS,
    DROPS,
    DROPS_BARE,
    DROPS_OPENED,
    DROPS_SOME,
    QWEN,
    QWEN3_ADDED,
    QWEN_ADDED,
    chat_of,
    llama3,
    of_family,
    qwen,
    small_bpe,
)

from services.common.errors import UserError
from services.contracts import Question, TokenBatch
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.search_r1 import rendered
from services.rollout.worker.templates.thoughts import Dropping
from services.rollout.worker.templates.tool_calls import INVALID, TOOLS, WORDS
from services.settings import RolloutSettings
from trainer.commands.work.warm_start import run_warm_start
from trainer.session.preflight.prompts import check_prompts
from trainer.suite.protocol import protocol_of

SHOWN = 'Doc 1(Title: "Anna") Born in Oslo.'
QUESTION = "where was the mother of n1 born?"
MODELS = {
    "qwen2_5": ("hermes", lambda: qwen(QWEN_ADDED)),
    "qwen3": ("hermes", lambda: qwen(QWEN3_ADDED)),
    "qwen3_instruct_2507": ("hermes", lambda: qwen(QWEN3_ADDED)),
    "llama3_1": ("llama3", llama3),
    "llama3_2": ("llama3", llama3),
}
"""By the name of the makers' chat template: the family, and the tokenizer."""


def settings(family="hermes", **more):
    sizes = {"max_obs_tokens": 4000, "max_model_tokens": 30000, "max_response_tokens": 2000, "max_turns": 4}
    return RolloutSettings(template=family, **(sizes | more))


def script_of(family, opened=False):
    """Two searches, a turn without a call, and an answer, each with a thought; in Qwen3's spelling."""
    end = CONTROLS[family][-1] if family == "llama3" else ""
    begin = "" if opened else "<think>\n"
    return [
        f"{begin}first\n</think>\n\n{CALLS[family] % 'n1 mother'}{end}",
        f"{begin}second\n</think>\n\nI do not know.{CONTROLS[family][-1]}",
        f"{begin}third\n</think>\n\n{CALLS[family] % 'n2 born'}{end}",
        f"{begin}fourth\n</think>\n\n<answer> Oslo </answer>",
    ]


def run(tokenizer, script, family="hermes", **more):
    """The trajectory, and the ids that each call of the engine was given."""
    template = make_template(family, tokenizer, settings(family, **more))
    engine = ScriptedEngine(tokenizer, script, eos_id=tokenizer.eos_token_id)

    async def search(query):
        return [Hit("d0", '"Anna"\nBorn in Oslo.')]

    trajectory = asyncio.run(
        run_trajectory(
            request(text=QUESTION),
            engine=engine,
            template=template,
            search=search,
            settings=settings(family, **more),
        )
    )
    return trajectory, engine.prompts


def conversations(tokenizer, script, family="hermes"):
    """The text that the chat template gives the conversation before each turn."""
    messages = [{"role": "user", "content": f"{WORDS}{QUESTION}"}]
    for text, result in zip(script, [SHOWN, INVALID, SHOWN, ""], strict=True):
        yield rendered(tokenizer, messages, TOOLS)
        messages.append({"role": "assistant", "content": text.removesuffix(CONTROLS[family][-1])})
        messages.append({"role": "tool", "name": "search", "content": result})


@pytest.fixture(scope="module")
def bpe():
    return small_bpe()


@pytest.mark.parametrize(
    ("chat", "opened"),
    [(DROPS, False), (DROPS_OPENED, True), (DROPS_BARE, False)],
    ids=["plain", "opened", "bare"],
)
def test_a_family_that_drops_thoughts_is_shown_its_turns_without_them(bpe, chat, opened):
    tokenizer = of_family(bpe, "hermes", chat)
    script = script_of("hermes", opened)
    # The model's own tokens need not be those that the tokenizer would choose: here one per character.
    as_written = [[i for c in text for i in tokenizer.encode(c)] for text in script]
    as_written[1] = [*as_written[1][: -len("<|im_end|>")], tokenizer.eos_token_id]
    trajectory, prompts = run(tokenizer, as_written)
    assert [a.kind for a in trajectory.actions] == ["search", "invalid", "search", "answer"]
    assert [tokenizer.decode(ids) for ids in prompts] == list(conversations(tokenizer, script))
    call = [i for c in CALLS["hermes"] % "n1 mother" for i in tokenizer.encode(c)]
    assert _holds(prompts[1], call), "what is left of a turn keeps its tokens"
    assert "first" in trajectory.actions[0].text and trajectory.actions[0].token_ids == as_written[0]


@pytest.mark.slow
@pytest.mark.parametrize(("chat", "opened"), [(DROPS, False), (DROPS_OPENED, True)])
def test_on_qwens_words_turns_without_thoughts_have_the_chat_templates_tokens(chat, opened):
    tokenizer = of_family(qwen(QWEN3_ADDED), "hermes", chat)
    script = script_of("hermes", opened)
    _, prompts = run(tokenizer, script)
    wanted = conversations(tokenizer, script)
    assert prompts == [tokenizer.encode(text, add_special_tokens=False) for text in wanted]


def _holds(ids, part):
    return any(ids[n : n + len(part)] == part for n in range(len(ids)))


def test_the_end_of_a_long_thought_is_found_in_a_few_readings():
    """Of one letter per token; every reading takes the worker's event loop as long as the text."""
    read = []

    def decode(ids):
        read.append(len(ids))
        return "".join(map(chr, ids))

    written = list(map(ord, f"{'word ' * 4000}</think>\n\nOslo"))
    assert Dropping("", breaks=True).left(written, decode, list) == list(map(ord, "Oslo"))
    assert len(read) < 20


def test_a_trajectory_without_its_earlier_thoughts_is_never_trained_on(bpe):
    tokenizer = of_family(bpe, "hermes", DROPS)
    trajectory, _ = run(tokenizer, script_of("hermes"))
    assert not trajectory.one_sequence
    with pytest.raises(ValueError, match="contexts of their own"):
        TokenBatch.of([trajectory])
    at_once, _ = run(tokenizer, script_of("hermes")[3:])
    assert at_once.one_sequence and len(TokenBatch.of([at_once])) == 1
    kept, prompts = run(tokenizer, script_of("hermes"), thoughts="keep")
    assert kept.one_sequence and "first\n</think>" in tokenizer.decode(prompts[-1])
    assert all(after[: len(before)] == before for before, after in pairwise(prompts))


def test_training_refuses_such_a_family_in_one_line_and_evaluation_takes_it(bpe):
    tokenizer = of_family(bpe, "hermes", DROPS)
    asked = [Question("q", QUESTION, ("Oslo",), "nq")]
    check_prompts("data.eval", asked, tokenizer, settings())
    with pytest.raises(
        UserError, match=r"rollout\.template=hermes: .* accepted is rollout\.thoughts=keep"
    ) as e:
        check_prompts("data.train", asked, tokenizer, settings(), trained=True)
    assert "\n" not in str(e.value)
    check_prompts("data.train", asked, tokenizer, settings(thoughts="keep"), trained=True)
    check_prompts("data.train", asked, of_family(bpe, "hermes", QWEN), settings(), trained=True)


def test_a_warm_start_refuses_such_a_family_before_anything_slow(bpe, tmp_path, monkeypatch):
    import trainer.commands.work.warm_start as module
    from trainer.config.schema import Config

    questions = tmp_path / "q.jsonl"
    questions.write_text('{"id": "1", "question": "who?", "golden_answers": ["x"], "data_source": "nq"}\n')
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"train": str(questions)},
            "retriever": {"url": "http://127.0.0.1:9"},
            "rollout": {"template": "hermes"},
        }
    )
    monkeypatch.setattr(module.models, "resolve", lambda path: tmp_path)
    monkeypatch.setattr(module, "load_tokenizer", lambda path: of_family(bpe, "hermes", DROPS))
    monkeypatch.setattr(module, "connect_ray", lambda say: pytest.fail("Ray was started"))
    with pytest.raises(UserError, match="no one sequence to train on"):
        run_warm_start(config, tmp_path / "out", questions=1, epochs=1, batch=1, lr=1e-4)


def test_a_result_says_that_earlier_thoughts_were_dropped(bpe):
    def facts(chat, **more):
        return protocol_of(
            settings(**more),
            of_family(bpe, "hermes", chat),
            Question("q", QUESTION, ("Oslo",), "nq"),
            given_prompts=0,
            retriever={},
            retrieves=False,
            untagged=False,
            seed=0,
            versions={},
        )

    assert facts(DROPS)["thoughts_of_earlier_turns"] == "dropped"
    assert "thoughts_of_earlier_turns" not in facts(DROPS, thoughts="keep")
    assert "thoughts_of_earlier_turns" not in facts(QWEN)


def test_a_chat_template_that_drops_some_thoughts_and_leaves_others_is_refused(bpe):
    tokenizer = of_family(bpe, "hermes", DROPS_SOME)
    with pytest.raises(UserError, match=r"drops some thoughts .* accepted is rollout\.thoughts=keep") as e:
        make_template("hermes", tokenizer, settings())
    assert "\n" not in str(e.value)
    make_template("hermes", tokenizer, settings(thoughts="keep"))


def test_a_thought_that_is_never_closed_stays_as_text(bpe):
    tokenizer = of_family(bpe, "hermes", DROPS_OPENED)
    script = [
        "I wonder<|im_end|>",
        f"so\n</think>\n\n{CALLS['hermes'] % 'a'}",
        "x</think><answer> Oslo </answer>",
    ]
    trajectory, prompts = run(tokenizer, script)
    assert [a.kind for a in trajectory.actions] == ["invalid", "search", "answer"]
    shown = tokenizer.decode(prompts[2])
    assert "assistant\nI wonder<|im_end|>" in shown and "so" not in shown.partition("I wonder")[2][:200]
    assert shown.endswith("<|im_start|>assistant\n<think>\n") and shown.count("<think>") == 1


def test_dropped_thoughts_leave_room_for_more_turns(bpe):
    tokenizer = of_family(bpe, "hermes", DROPS)
    long = "<think>\n" + "very long " * 200 + "\n</think>\n\n"
    script = [long + CALLS["hermes"] % "a", long + CALLS["hermes"] % "b", long + "<answer> Oslo </answer>"]
    first = len(run(tokenizer, script)[1][0])
    room = first + 2 * len(tokenizer.encode(long))
    assert run(tokenizer, script, max_model_tokens=room)[0].finish == "answer"
    assert run(tokenizer, script, max_model_tokens=room, thoughts="keep")[0].finish == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_makers_chat_templates_keep_thoughts_and_tokens(name):
    """Their words, their chat templates; a conversation of four turns has the text and the tokens that the
    chat template gives it, and each turn begins with the tokens of the one before."""
    family, make = MODELS[name]
    tokenizer = of_family(make(), family, chat_of(name))
    script = script_of(family)
    trajectory, prompts = run(tokenizer, script, family)
    assert [a.kind for a in trajectory.actions] == ["search", "invalid", "search", "answer"]
    assert trajectory.one_sequence
    written = [a.token_ids for a in trajectory.actions]
    for before, action, after in zip(prompts, written, prompts[1:], strict=False):
        assert after[: len(before) + len(action)] == before + action
    wanted = list(conversations(tokenizer, script, family))
    assert [tokenizer.decode(ids) for ids in prompts] == wanted
    assert prompts == [tokenizer.encode(text, add_special_tokens=False) for text in wanted]
    asked = [Question("q", QUESTION, ("Oslo",), "nq")]
    check_prompts("data.train", asked, tokenizer, settings(family), trained=True)


@pytest.mark.slow
def test_the_makers_words_are_those_of_the_published_models():
    ids = qwen(QWEN_ADDED).encode("<|im_start|>user\nHow are you?<|im_end|>\n")
    assert ids == [151644, 872, 198, 4340, 525, 498, 30, 151645, 198]
    assert llama3().encode("<|begin_of_text|>Hello world<|eot_id|>") == [128000, 9906, 1917, 128009]
