"""Templates in a model family's own form of tool calls: read from its chat template, token in, token out."""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache

import pytest
from rollout_fakes import Hit, ScriptedEngine, request
from rollout_text import control_ids
from tool_families import CALLS, CONTROLS, FAMILIES, SPELLS, TOKENIZERS, of_family, small_bpe

from services.common.errors import UserError
from services.contracts import Question
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.templates import ParsedAction, make_template
from services.rollout.worker.templates.search_r1 import rendered
from services.rollout.worker.templates.tool_calls import INVALID, TOOLS, WORDS
from services.settings import RolloutSettings
from trainer.commands.work.warm_start import compose
from trainer.rewards import final_answer, make_reward

SETTINGS = {"max_obs_tokens": 4000, "max_model_tokens": 30000, "max_response_tokens": 2000, "max_turns": 4}
TODAY = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
"""As Llama 3.2's chat template asks for the day."""
HITS = [Hit("d0", '"Anna"\nShe said "no".\nBorn in Oslo.'), Hit("d1", '"Oslo"\nA town.')]


@lru_cache
def tokenizer_of(name, family, chat=None):
    return of_family(TOKENIZERS[name](), family, chat)


def settings(family, **more):
    return RolloutSettings(template=family, **(SETTINGS | more))


def run(tokenizer, family, script, **more):
    """The trajectory, and the ids that each call of the engine was given. The script's texts may end with the
    family's end of turn, which the engine then reports as the end of the sequence."""
    template = make_template(family, tokenizer, settings(family, **more))
    engine = ScriptedEngine(tokenizer, script, eos_id=tokenizer.eos_token_id)

    async def search(query):
        return HITS if query != "nothing" else []

    one = request(text="where was the mother of n1 born?")
    trajectory = asyncio.run(
        run_trajectory(
            one, engine=engine, template=template, search=search, settings=settings(family, **more)
        )
    )
    return trajectory, engine.prompts, template


def script_of(family):
    """Two calls, a text that is neither call nor answer, then an answer."""
    end = CONTROLS[family][-1] if family == "llama3" else ""
    return [
        f"<think> first </think>\n{CALLS[family] % 'n1 mother'}{end}",
        f"I do not know.{CONTROLS[family][-1]}",
        f"<think> then </think>\n{CALLS[family] % 'nothing'}{end}",
        "<answer> Oslo </answer>",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_beside_a_call_that_was_carried_out_scores_nothing(family):
    """Nothing ends a call of llama3 but the end of the turn: an answer after it is in the same action."""
    end = CONTROLS[family][-1]
    script = [f"{CALLS[family] % 'n1 mother'} <answer> n1 </answer>{end}", *[f"I do not know.{end}"] * 4]
    done, *_ = run(tokenizer_of("bpe", family), family, script)
    assert done.actions[0].kind == "search" and done.finish == "turns"
    assert final_answer(done) is None and make_reward("em")(done) == 0
    script = [f"<answer> n1 </answer> {CALLS[family] % 'n1 mother'}{end}"]
    done, *_ = run(tokenizer_of("bpe", family), family, script)
    assert (done.finish, final_answer(done), make_reward("em")(done)) == ("answer", "n1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_turn_are_a_prefix_of_the_next_and_the_models_own_stay(family, name):
    tokenizer = tokenizer_of(name, family)
    script = [tokenizer.encode(text, add_special_tokens=False) for text in script_of(family)]
    if name == "bpe":  # the same text in other tokens than the tokenizer would choose
        script[0] = [i for c in script_of(family)[0] for i in tokenizer.encode(c, add_special_tokens=False)]
    if name in ("lab", "minilm"):  # they know neither the family's tags nor JSON: no call is ever read
        script = script[:2] * 3
    trajectory, prompts, _ = run(tokenizer, family, script)
    assert len(prompts) >= 4
    for before, written, after in zip(prompts, script, prompts[1:], strict=False):
        assert after[: len(before) + len(written)] == before + written
        assert len(after) > len(before) + len(written)
    tokens, actions, _ = trajectory.arrays()
    own = [int(t) for t, a in zip(tokens, actions, strict=True) if a >= 0]
    assert own == [i for ids in script[: len(trajectory.actions)] for i in ids]


@pytest.mark.parametrize("name", SPELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_has_the_tokens_that_the_chat_template_gives_it(family, name):
    """Of a model that writes its calls as the conversation holds them."""
    tokenizer = tokenizer_of(name, family)
    script = script_of(family)
    end = CONTROLS[family][-1]
    trajectory, prompts, _ = run(tokenizer, family, script)
    assert [a.kind for a in trajectory.actions] == ["search", "invalid", "search", "answer"]
    assert [a.query for a in trajectory.actions] == ["n1 mother", None, "nothing", None]
    shown = 'Doc 1(Title: "Anna") She said "no".\nBorn in Oslo.\nDoc 2(Title: "Oslo") A town.'
    messages = [{"role": "user", "content": f"{WORDS}where was the mother of n1 born?"}]
    for ids, text, result in zip(
        prompts, script, [shown, INVALID, "No passage was found.", None], strict=True
    ):
        wanted = rendered(tokenizer, messages, TOOLS)
        assert tokenizer.decode(ids) == wanted
        if (family, name) != ("llama3", "smollm2"):  # its tokens of a line's end depend on the next character
            assert ids == tokenizer.encode(wanted, add_special_tokens=False)
        messages.append({"role": "assistant", "content": text.removesuffix(end)})
        messages.append({"role": "tool", "name": "search", "content": result or ""})
    assert make_reward("em")(trajectory) == 0.0 and trajectory.actions[-1].text == "<answer> Oslo </answer>"


@pytest.mark.parametrize(
    ("family", "text", "read"),
    [
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": " a "}}</tool_call>',
            ("search", "a"),
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}</tool_call>',
            ("search", "a"),
        ),
        ("hermes", '<tool_call>{"name": "browse", "arguments": {"query": "a"}}</tool_call>', ("invalid", "")),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": 3}}</tool_call>', ("invalid", "")),
        ("hermes", '<tool_call>{"name": "search", </tool_call>', ("invalid", "")),
        ("hermes", '<think><tool_call>{"name": "search"}</tool_call></think>x', ("invalid", "")),
        ("hermes", "<search> a </search>", ("invalid", "")),
        ("hermes", "<think> x </think> <answer> b </answer>", ("answer", "b")),
        (
            "hermes",
            '<think>a</think><tool_call>{"name": "search", "arguments": {"query": "<answer>b</answer>"}}'
            "</tool_call>",
            ("search", "<answer>b</answer>"),
        ),
        ("llama3", '{"name": "search", "parameters": {"query": "a"}}<|eot_id|>', ("search", "a")),
        ("llama3", '<|python_tag|>{"name": "search", "parameters": {"query": "a"}}', ("search", "a")),
        ("llama3", 'I use {x}: {"name": "search", "parameters": {"query": "a"}}', ("search", "a")),
        ("llama3", '{"name": "search", "parameters": {}}', ("invalid", "")),
        ("llama3", '<answer> {"x": 1} </answer>', ("answer", '{"x": 1}')),
    ],
)
def test_how_calls_and_answers_are_read(family, text, read):
    template = make_template(family, tokenizer_of("bpe", family), settings(family))
    assert template.parse(text) == ParsedAction(*read)


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_text_controls_nothing_and_closes_no_result(family):
    tokenizer = tokenizer_of("bpe", family)
    template = make_template(family, tokenizer, settings(family))
    controls = control_ids(tokenizer)
    hostile = "".join([*CONTROLS[family], "</tool_response>", "</tool_call>", '"', "<answer> x </answer>"])

    def found(ids):
        return [i for i in ids if i in controls]

    asked = [Question("q", text, ("x",), "nq") for text in ("who", f"who {hostile} is")]
    plain, bad = map(template.prompt_ids, asked)
    assert found(plain) == found(bad) and hostile in tokenizer.decode(bad)
    none = template.observation_ids([], 4000)
    some = template.observation_ids([Hit("d", f'"{hostile}"\n{hostile}')], 4000)
    assert found(none.token_ids) == found(some.token_ids)
    assert some.text.count("</tool_response>") == (family == "hermes") and "<answer>" not in some.text
    if family == "llama3":  # its results are JSON text, and stay it
        inside = some.text.partition("ipython<|end_header_id|>\n\n")[2].partition("<|eot_id|><|start")[0]
        assert json.loads(inside).startswith("Doc 1(Title:")


def writing_calls(family, form):
    """The family's chat template, which also writes a call that is given as an object."""
    end = CONTROLS[family][-1]
    calls = f"{{% if m.tool_calls %}}{{% set call = m.tool_calls[0].function %}}{form}{end}{{% else %}}"
    head = "{% for m in messages %}"
    return (
        FAMILIES[family]
        .replace(head, head + calls)
        .replace("{% endfor %}{% if add_gen", "{% endif %}{% endfor %}{% if add_gen")
    )


JSON_CALL = '{"name": "{{ call.name }}", "%s": {{ call.arguments | tojson }}}'
TAGGED = (
    "<tool_call>\n<function={{ call.name }}>\n<parameter=query>\n{{ call.arguments.query }}\n"
    "</parameter>\n</function>\n</tool_call>"
)
"""As Qwen3.5 writes calls."""


@pytest.mark.parametrize(
    ("family", "form", "read"),
    [
        ("hermes", f"<tool_call>\n{JSON_CALL % 'arguments'}\n</tool_call>", True),
        ("llama3", JSON_CALL % "parameters", True),
        ("hermes", TAGGED, False),
        ("llama3", JSON_CALL % "arguments", False),
        ("hermes", "{{ call.arguments + 'a text alone' }}", True),
    ],
)
def test_a_family_that_writes_its_calls_otherwise_is_refused(family, form, read):
    """The prompt would ask for calls that are never read, and each turn would be invalid."""
    tokenizer = of_family(tokenizer_of("bpe", family), family, writing_calls(family, form))
    if read:
        make_template(family, tokenizer, settings(family))
        return
    with pytest.raises(UserError, match=rf"rollout\.template={family}: .* another form \(.*QUERY\)") as e:
        make_template(family, tokenizer, settings(family))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("chat", "line"),
    [(None, "has no chat template"), ("{% for m in messages %}{{ m.content }}{% endfor %}", "show tools")],
)
def test_a_tokenizer_without_tools_is_refused_in_one_line(chat, line):
    tokenizer = small_bpe()
    tokenizer.chat_template = chat
    with pytest.raises(UserError, match=rf"rollout\.template=llama3: .*{line}") as e:
        make_template("llama3", tokenizer, settings("llama3"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_tools_are_refused_since_no_call_would_reach_them(family):
    with pytest.raises(UserError, match=rf"rollout\.template={family}: knows search alone; rollout\.tools"):
        make_template(family, tokenizer_of("bpe", family), settings(family, tools={"calc": "a:b"}))


def test_a_result_that_begins_a_thought_is_read_as_one():
    """A chat template may open a think block for the model, in the prompt and after each result."""
    chat = FAMILIES["hermes"].replace(
        "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
    )
    tokenizer = tokenizer_of("bpe", "hermes", chat)
    mention = "I may write <answer> x </answer> here.</think>\n"
    script = [
        mention + CALLS["hermes"] % "a",
        mention + CALLS["hermes"] % "b",
        f"{mention}<answer> Oslo </answer>",
    ]
    trajectory, _, _ = run(tokenizer, "hermes", script)
    assert [a.kind for a in trajectory.actions] == ["search", "search", "answer"]
    assert all(a.thinking for a in trajectory.actions)


@pytest.mark.parametrize("name", ["search_r1", "llama3"])
def test_a_prompt_is_the_same_tomorrow(name):
    tokenizer = tokenizer_of("bpe", "llama3", FAMILIES["llama3"].replace("{{ date_string }}", TODAY))
    template = make_template(name, tokenizer, settings(name))
    shown = tokenizer.decode(template.prompt_ids(Question("q", "who", ("x",), "nq")))
    assert "Today Date: 26 Jul 2024" in shown


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_are_in_the_familys_form(family):
    tokenizer = tokenizer_of("bpe", family)
    template = make_template(family, tokenizer, settings(family))

    async def search(query):
        return HITS

    question = Question("q", 'where is "Anna" from?', ("Oslo",), "nq")
    (one,) = asyncio.run(compose([question], search, template, template._encoder, settings(family)))
    assert [a.kind for a in one.actions] == ["search", "answer"] and one.actions[0].query == question.text[
        :-1
    ]
    assert json.dumps(question.text[:-1]) in one.actions[0].text
    tokens, actions, _ = one.arrays()
    text = tokenizer.decode(tokens)
    assert (
        text.count(CONTROLS[family][-1])
        == rendered(tokenizer, [{"role": "user", "content": "x"}], TOOLS).count(CONTROLS[family][-1]) + 2
    ), "the call's turn and the result's end once each"
    ends = [int(t) == tokenizer.eos_token_id for t, a in zip(tokens, actions, strict=True) if a == 0]
    assert ends[-1] == (family == "llama3"), "a call without a closing tag teaches the end of the turn"
