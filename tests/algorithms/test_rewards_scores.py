"""Rewards: which text is scored, and what it is worth."""

import re
import string
import sys

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.common.errors import UserError
from services.contracts import Action, Observation, Question, Trajectory
from trainer.rewards import final_answer, make_reward, normalize, right_at, unscorable

PROMPT = (
    "you can directly provide the answer inside <answer> and </answer>. "
    "For example, <answer> Beijing </answer>. Question: where?\n"
)
NOTICE = (
    "\nMy previous action is invalid. I should put the query between <search> and </search>, "
    "the answer between <answer> and </answer>.\n"
)


def trajectory(*parts, golden=("Paris",)):
    """Actions at even places, observations at odd ones, as text."""
    segments = []
    for i, text in enumerate(parts):
        if i % 2:
            segments.append(Observation([], text))
            continue
        tag = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
        kind = tag[1] if tag else "invalid"
        searched = kind == "search" and i + 1 < len(parts)
        segments.append(
            Action([], [], 0, kind, text, tag[2] if searched else None, ["d"] if searched else None)
        )
    question = Question("q", "where?", tuple(golden), "nq", PROMPT)
    return Trajectory("u", "g", question, [], segments, "answer")


def obs(text):
    return f"\n\n<information>{text}</information>\n\n"


SEARCH = "<think>I look</think><search>where</search>"


@pytest.mark.parametrize(
    ("parts", "em", "f1", "subem"),
    [
        (["<answer>Paris</answer>"], 1, 1, 1),
        (["<answer>\n The PARIS! \n</answer>"], 1, 1, 1),
        (["<answer>Paris, France</answer>"], 0, 2 / 3, 1),
        (["<answer>London</answer>"], 0, 0, 0),
        (["<answer></answer>"], 0, 0, 0),
        ([""], 0, 0, 0),
        (["Paris"], 0, 0, 0),
        (["<answer>Paris"], 0, 0, 0),
        (["Paris</answer>"], 0, 0, 0),
        (["<answer>London</answer> no: <answer>Paris</answer>"], 1, 1, 1),
        (["<answer>Paris</answer> no: <answer>London</answer>"], 0, 0, 0),
        (["<answer>Paris</answer> or <answer>Lon"], 1, 1, 1),
        ([SEARCH, obs("Paris"), "<answer>Paris</answer>"], 1, 1, 1),
        (["<answer>London</answer>", NOTICE, "<answer>Paris</answer>"], 1, 1, 1),
        (["<answer>Paris</answer>", NOTICE, "I give up"], 1, 1, 1),
    ],
)
def test_the_last_complete_answer_is_scored(parts, em, f1, subem):
    t = trajectory(*parts)
    assert [make_reward(k)(t) for k in ("em", "f1", "subem")] == pytest.approx([em, f1, subem])


@pytest.mark.parametrize("kind", ["em", "f1", "subem", "format"])
@pytest.mark.parametrize(
    "written", ["", "Beijing", "I think it is Beijing.", "<answer>Beijing", "<think>Beijing</think>"]
)
def test_the_example_in_the_prompt_is_never_taken_for_an_answer(kind, written):
    """Search-R1 issue 79: the prompt itself holds two matches."""
    assert make_reward(kind)(trajectory(written, golden=["Beijing"])) == 0


@pytest.mark.parametrize("kind", ["em", "f1", "subem", "format"])
@pytest.mark.parametrize("after", ["", "I stop", "<search>more</search>"])
def test_an_answer_inside_a_document_earns_nothing(kind, after):
    """verl PR 6392: what a tool returned was scored."""
    assert make_reward(kind)(trajectory(SEARCH, obs("<answer>Paris</answer>"), after)) == 0


def test_an_answer_is_not_put_together_across_an_observation():
    assert final_answer(trajectory("it is <answer>Par", obs("x"), "is</answer>")) is None
    assert final_answer(trajectory("it is <answer>Par", NOTICE, "<answer>Rome</answer>")) == "Rome"


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("The  Beatles", "beatles"),
        ("A.B.C.", "abc"),
        ("an\tapple, a day", "apple day"),
        ("theatre of the absurd", "theatre of absurd"),
        ("U.S.A", "usa"),
        ("'The'", ""),
        ("Ångström—unit", "ångström—unit"),
        ("it's a-bomb", "its abomb"),
        ("", ""),
    ],
)
def test_normalisation(given, normal):
    assert normalize(given) == normal


@pytest.mark.parametrize(
    ("answer", "golden", "f1"),
    [
        ("blue red", ["red blue"], 1.0),
        ("red red", ["red"], 2 / 3),
        ("new york city", ["York", "New York"], 0.8),
        ("no", ["no evidence"], 0.0),
        ("yes", ["Yes."], 1.0),
        ("no evidence", ["no"], 0.0),
    ],
)
def test_f1_is_the_best_over_golden_answers(answer, golden, f1):
    assert make_reward("f1")(trajectory(f"<answer>{answer}</answer>", golden=golden)) == pytest.approx(f1)


def test_a_golden_answer_of_which_nothing_is_left_is_not_in_every_answer():
    assert make_reward("subem")(trajectory("<answer>London</answer>", golden=["The"])) == 0


KINDS = ("em", "f1", "subem", "em_strict", "format")


@pytest.mark.parametrize("golden", ["A", "+", "%", "---", "The a"])
@pytest.mark.parametrize("answer", ["", " ", "the", "An", ".", "...", "a an"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_which_nothing_is_left_is_never_right(kind, answer, golden):
    worth = 0.1 if kind == "format" else 0.0
    assert make_reward(kind)(trajectory(f"<answer>{answer}</answer>", golden=[golden])) == worth


@pytest.mark.parametrize(
    ("golden", "answer"), [("A", "A"), ("A", " a "), ("+", "+"), ("%", "%"), ("---", "---"), ("The", "the")]
)
def test_a_golden_answer_of_which_nothing_is_left_is_right_as_it_is_written(golden, answer):
    t = trajectory(f"<answer>{answer}</answer>", golden=["x", golden])
    assert [make_reward(k)(t) for k in KINDS] == [1, 1, 1, 1, 0.8]


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_golden_answer_makes_nothing_right(blank):
    for answer in ("", "the", "Paris"):
        t = trajectory(f"<answer>{answer}</answer>", golden=[blank])
        assert [make_reward(k)(t) for k in KINDS] == [0, 0, 0, 0, 0.1]


def test_unscorable_golden_answers_are_those_of_which_nothing_is_left():
    assert [g for g in ("A", "+", "The", " the a ", "...", "") if not unscorable(g)] == []
    assert [g for g in ("A+", "B", "The Who", "15", "é", "°") if unscorable(g)] == ["A+"]


def test_search_r1s_own_score_stays_selectable():
    for answer in ("", "the", "A", "!"):
        assert make_reward("em_search_r1")(trajectory(f"<answer>{answer}</answer>", golden=["A"])) == 1
    assert make_reward("em_search_r1")(trajectory("<answer>Paris</answer>", golden=["A"])) == 0


@pytest.mark.parametrize(
    ("answer", "golden", "em", "strict"),
    [
        ("15", "1.5", 1, 0),
        ("5", "-5", 1, 0),
        ("C", "C++", 1, 0),
        ("C#", "C", 1, 0),
        ("50", "50%", 1, 0),
        ("$5", "5", 1, 0),
        ("A-", "A+", 0, 0),
        ("15", "1,5", 1, 0),
        ("12", "1/2", 1, 0),
        ("315", "3:15", 1, 0),
        ("105", "10\u2075", 0, 0),
        ("11/2", "1\u00bd", 0, 0),
        ("\u201cParis\u201d", '"Paris"', 0, 1),
        ("it\u2019s", "it's", 0, 1),
        ("cafe\u0301", "caf\u00e9", 0, 1),
        ("\uff11\uff15", "15", 0, 1),
        ("\u22125", "-5", 0, 1),
        ("1914\u20131918", "1914-1918", 0, 1),
        ("\u200bParis", "Paris", 0, 1),
        ("stra\u00dfe", "STRASSE", 0, 1),
        ("2,000", "2000", 1, 1),
        ("the U.S.A.", "USA", 1, 1),
        ("Washington, D.C.", "Washington DC", 1, 1),
        ("Spider-Man", "Spider Man", 0, 1),
        ("The Beatles!", "beatles", 1, 1),
        ("1.5.", "1.5", 1, 1),
        ("(-5)", "-5", 1, 1),
        ("A", "the A", 0, 1),
        ("Rome", "Paris", 0, 0),
    ],
)
def test_the_strict_score_keeps_numbers_and_signs_and_folds_unicode(answer, golden, em, strict):
    for one, other in ((answer, golden), (golden, answer)):
        t = trajectory(f"<answer>{one}</answer>", golden=[other])
        assert make_reward("em_strict")(t) == strict
        assert make_reward("em")(t) == em


THINK = "<think>so</think>"


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ([f"{THINK}<answer>Paris</answer>"], 1),
        ([SEARCH, obs("x"), f"{THINK}\n<answer> the paris </answer>"], 1),
        (["<answer>Paris</answer>"], 0.8),
        ([f"{THINK} well <answer>Paris</answer>"], 0.8),
        ([f"{THINK}{THINK}<answer>Paris</answer>"], 0.8),
        ([SEARCH, obs("x"), "<answer>Paris</answer>"], 0.8),
        (["<search>x</search>", obs("x"), f"{THINK}<answer>Paris</answer>"], 0.8),
        (["hm", NOTICE, f"{THINK}<answer>Paris</answer>"], 0.8),
        ([SEARCH, obs("It is PARIS, the city"), f"{THINK}<answer>Rome</answer>"], 0.3),
        ([SEARCH, obs("x"), SEARCH, obs("Paris"), f"{THINK}<answer>Rome</answer>"], 0.3),
        ([SEARCH, obs("nothing of use </think><answer>"), f"{THINK}<answer>Rome</answer>"], 0.2),
        ([f"{THINK}<answer>Rome</answer>"], 0.2),
        ([f"{THINK}<answer>Rome</answer>."], 0.2),
        (["<answer>Rome</answer>"], 0.1),
        ([SEARCH, obs("Paris"), "<answer>Rome</answer>"], 0.1),
        ([SEARCH, obs("Paris"), THINK], 0),
        ([SEARCH, obs("Paris"), SEARCH], 0),
        ([""], 0),
    ],
)
def test_format_reward(parts, value):
    assert make_reward("format")(trajectory(*parts)) == value


def test_the_tag_around_the_documents_is_not_a_document():
    t = trajectory(SEARCH, obs("x"), f"{THINK}<answer>Rome</answer>", golden=["information"])
    assert make_reward("format")(t) == 0.2


# What Search-R1 does on the whole text (its own words, from the contract), written anew as a reference.


def upstream_normal(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(w for w in re.sub(r"\b(a|an|the)\b", " ", text).split())


def upstream_answer(text):
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if len(found) > 1 else None


def upstream_formed(response):
    tags = ("think", "search", "information", "answer")
    if any(response.count(f"<{t}>") != response.count(f"</{t}>") for t in tags):
        return False
    return bool(
        re.fullmatch(
            r"\s*(<think>[^<]*</think>\s*<search>[^<]*</search>\s*<information>[^<]*</information>\s*)*"
            r"<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*",
            response,
        )
    )


def upstream_score(response, golden, formatted):
    golden = [upstream_normal(g) for g in golden]
    answer = upstream_answer(PROMPT + response)
    right = answer is not None and upstream_normal(answer) in golden
    if not formatted:
        return float(right)
    formed = upstream_formed(response)
    if right:
        return 1.0 if formed else 0.8
    if not formed:
        return 0.1
    blocks = re.findall(r"<information>(.*?)</information>", response, re.DOTALL)
    return 0.3 if any(g in upstream_normal(b) for b in blocks for g in golden if g) else 0.2


WORDS = st.sampled_from(
    ["the", "Paris", "paris!", "A", "an", "Rome", "\n", " ", "’", "é", "2,000", "2000", "...", "yes"]
)
PHRASE = st.lists(WORDS, max_size=4).map(" ".join)
SHAPES = [
    "<think>{}</think><search>{}</search>",
    "<think>{}</think> <answer>{}</answer>",
    "{}<search>{}</search>",
    "{}<answer>{}</answer>",
    "<think>{}</think>{}",
    "{}</answer>{}",
    "<think>{}<answer>{}</answer>",
]
ACTION = st.builds(lambda shape, a, b: shape.format(a, b), st.sampled_from(SHAPES), PHRASE, PHRASE)


@given(st.lists(st.tuples(ACTION, PHRASE), min_size=1, max_size=4), st.lists(PHRASE, min_size=1, max_size=3))
def test_rewards_agree_with_upstream_where_the_model_answered_and_no_document_holds_a_tag(rounds, golden):
    parts = []
    for i, (text, document) in enumerate(rounds):
        last = i == len(rounds) - 1
        parts += [text] if last else [text, obs(document) if "<search>" in text else NOTICE]
    assume(re.search(r"<answer>.*?</answer>", rounds[-1][0], re.DOTALL))
    t = trajectory(*parts, golden=golden)
    response = "".join(parts)
    assert make_reward("em_search_r1")(t) == upstream_score(response, golden, formatted=False)
    if upstream_normal(upstream_answer(PROMPT + response)):
        assert make_reward("em")(t) == upstream_score(response, golden, formatted=False)
        assert make_reward("format")(t) == upstream_score(response, golden, formatted=True)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "exact",
            "accepted are em, f1, subem, format, em_strict, em_search_r1, or an import path "
            "package.module:function",
        ),
        ("", "accepted are"),
        (":f", "accepted are"),
        ("no_such_module_here:f", "no_such_module_here"),
        ("json:no_such_function", "no_such_function"),
        ("json:__version__", "expected a function of one trajectory, found str"),
        ("broken_reward:f", "invalid syntax"),
        ("raising_reward:f", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_reward_kind_is_one_line(kind, says, tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("def f(:\n")
    (tmp_path / "raising_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as e:
        make_reward(kind)
    assert e.value.exit_code == 2
    assert str(e.value).startswith(f"reward.kind {kind!r}: ")
    assert says in str(e.value)
    assert "\n" not in str(e.value)
    if says == "invalid syntax":
        assert f"({tmp_path}/broken_reward.py, line 1)" in str(e.value), "with its folder"


def test_a_function_of_the_user_is_found_in_the_current_folder_and_may_give_nothing(tmp_path, monkeypatch):
    (tmp_path / "my_reward_module.py").write_text(
        "def unsure(trajectory):\n    return None if trajectory.uid == 'u' else 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert make_reward("my_reward_module:unsure")(trajectory("x")) is None


def test_a_function_of_the_user_that_fails_names_itself_its_line_and_the_trajectory(tmp_path, monkeypatch):
    (tmp_path / "failing_reward_module.py").write_text(
        "def f(t):\n    return t.no_such\n\ndef g(t):\n    return 'good'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError,
        match=(
            r"'failing_reward_module:f': on trajectory u: AttributeError: "
            r".*failing_reward_module\.py, line 2\)$"
        ),
    ):
        make_reward("failing_reward_module:f")(trajectory("x"))
    with pytest.raises(UserError, match="on trajectory u: TypeError: returned the text 'good'; expected a"):
        make_reward("failing_reward_module:g")(trajectory("x"))


@pytest.mark.parametrize(
    ("returned", "worth"),
    [
        ("True", 1.0),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.int64(2)", 2.0),
        ("numpy.bool_(False)", 0.0),
        ("None", None),
        ("float('-inf')", -float("inf")),
        ("'1.0'", "returned the text '1.0'; expected a number or None"),
        ("b'1'", "returned the text"),
        ("'nan'", "returned the text"),
        ("[1.0]", "TypeError"),
        ("(1.0, 'why')", "TypeError"),
        ("{'score': 1}", "TypeError"),
        ("1j", "TypeError"),
        ("10 ** 400", "OverflowError"),
    ],
)
def test_what_a_function_of_the_user_returns_is_a_number_or_none(tmp_path, monkeypatch, returned, worth):
    name = f"returning_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(f"import numpy\n\ndef f(t):\n    return {returned}\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = make_reward(f"{name}:f")
    if not isinstance(worth, str):
        assert reward(trajectory("x")) == worth
        return
    with pytest.raises(UserError) as e:
        reward(trajectory("x"))
    assert worth in str(e.value) and "on trajectory u" in str(e.value) and "\n" not in str(e.value)


def test_a_module_that_ends_the_program_is_refused_and_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "ending_reward_module.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"it ends the program, by SystemExit\(0\) \(.*/ending_reward_module.py, line 2\)$"
    with pytest.raises(UserError, match=said):
        make_reward("ending_reward_module:f")


@pytest.mark.parametrize(
    ("said", "least"),
    [
        ("numpy.float32(0.5)", 0.5),
        ("numpy.int64(2)", 2.0),
        ("0", 0.0),
        ("True", None),
        ("'1'", None),
        ("float('nan')", None),
    ],
)
def test_what_a_function_calls_right_is_a_finite_number(said, least):
    def reward(t):
        return 1.0

    reward.right_at = eval(said, {"numpy": numpy})
    if least is not None:
        assert right_at(reward, None) == least
        return
    with pytest.raises(UserError, match="attribute right_at of the reward function"):
        right_at(reward, None)
