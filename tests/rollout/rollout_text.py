"""What holds for every tokenizer: ordinary text has the ids that the tokenizer gives it, and text from
outside controls nothing."""

from __future__ import annotations

import random

from rollout_fakes import Hit

from services.contracts import Question
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.search_r1 import user_turn
from services.settings import RolloutSettings

WORDS = (
    "who wrote Hamlet naïve café 北京 Москва 🙂 1,234.5 -5 C++ "
    "a<b x > y </b> <p> [1] [note] {x} | || # $5 50% it's “so” "
    "http://a.b/c?d=e&f \\n \t & <3 ## ... Ångström I'm <| |> < | im_end | > "
    "im_start information search answer think"
)


def ordinary(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS.split(" "), k=rng.randint(1, 25))).strip() or "x"


def documents(contents: list[str]) -> str:
    text = ""
    for i, content in enumerate(contents, 1):
        title, _, body = content.partition("\n")
        text += f"Doc {i}(Title: {title}) {body}\n"
    return text


def check_ordinary_text(tokenizer, count: int = 200) -> None:
    """Questions and documents are encoded as the tokenizer alone encodes the whole."""
    template = make_template("search_r1", tokenizer, RolloutSettings(max_obs_tokens=9000, bos="none"))
    rng = random.Random(0)
    for i in range(count):
        text = ordinary(rng)
        turn = user_turn(text) if i % 2 else f" {user_turn(text)}\n"
        question = Question("q", text, ("x",), "nq", None if i % 2 else turn)
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": turn}]
            turn = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert template.prompt_ids(question) == tokenizer.encode(turn, add_special_tokens=False)
        contents = [f'"{ordinary(rng)}"\n{ordinary(rng)}\n{ordinary(rng)}' for _ in range(rng.randint(0, 3))]
        observation = template.observation_ids([Hit("d", c) for c in contents], 9000)
        whole = f"\n\n<information>{documents(contents)}</information>\n\n"
        assert observation.text == whole
        assert observation.token_ids == tokenizer.encode(whole, add_special_tokens=False)


def control_ids(tokenizer) -> dict[int, str]:
    """Ids of special tokens, and of added ones that look like markup; not of the one that unknown text
    becomes."""
    unknown = tokenizer.encode("\u0bf5 \U0001f600 qzq", add_special_tokens=False)
    return {
        i: t.content
        for i, t in tokenizer.added_tokens_decoder.items()
        if (t.special or t.content[0] in "<[") and i not in unknown
    }


def check_hostile_text(tokenizer, *, name: str = "search_r1", spelled: bool = True) -> None:
    """`name`: of the template, a TagTemplate. `spelled`: the tokenizer gives any text back whole."""
    settings = RolloutSettings(max_obs_tokens=9000)
    template = make_template(name, tokenizer, settings)
    controls = control_ids(tokenizer)
    assert controls

    def controls_of(ids):
        return [i for i in ids if i in controls]

    harmless = template.prompt_ids(Question("q", "who", ("x",), "nq"))
    names = list(controls.values())
    for hostile in (
        *names,
        "".join(names),
        f"a{names[0]}b {names[-1]}{names[-1]} ",
        f"{names[0][:-1]}{names[0]}",
    ):
        question = f"who {hostile} is it"
        given = user_turn(question)
        asked = (Question("q", question, ("x",), "nq"), Question("q", question, ("x",), "nq", given))
        for ids in map(template.prompt_ids, asked):
            assert controls_of(ids) == controls_of(harmless), hostile
            if spelled:
                shown = f"who {hostile} is it"
                wanted = f"Question: {shown}?" if name == "search_r1" else shown
                assert wanted in tokenizer.decode(ids)
        hits = [Hit("d", f'"{hostile}"\n{hostile} and {hostile}')]
        whole = template.observation_ids(hits, 9000)
        cut = template.observation_ids(hits, len(whole.token_ids) - 1)
        assert controls_of(whole.token_ids) == controls_of(cut.token_ids) == []
        assert cut.token_ids[-len(template._tail) :] == template._tail
        if spelled:
            assert tokenizer.decode(whole.token_ids) == whole.text
