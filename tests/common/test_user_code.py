"""A user's own code that is not there or fails: the line names what the user wrote, never a line of ours."""

import asyncio
import re
import threading

import pytest

from retriever_service.search.users_index import UsersIndex
from services.common.errors import UserError
from services.common.loading.user_code import calling, load
from services.contracts import Question
from services.rollout.worker.templates import make_template, template_class
from services.rollout.worker.tools import Toolbox, load_tools
from services.settings import RolloutSettings
from trainer.learner.objective import token_loss
from trainer.loop.records.users_metrics import UsersMetrics, load_metrics
from trainer.rewards import make_reward


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module `NAME.py` where a user would: in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


LOADERS = {
    "reward": lambda path: make_reward(path),
    "template": lambda path: make_template(path, None, RolloutSettings()),
    "tool": lambda path: load_tools({"calc": path}),
    "metric": lambda path: load_metrics([path]),
}


@pytest.mark.parametrize("part", LOADERS)
def test_a_missing_name_is_answered_with_those_that_are_there(part, module):
    text = "from json import dumps\n\nLIMIT = 3\n\ndef brief(t):\n    return 1\n\nclass Long:\n    pass\n"
    module(f"own_{part}", text)
    with pytest.raises(UserError) as e:
        LOADERS[part](f"own_{part}:brif")
    end = f"cannot be imported: own_{part} has no `brif`; it has: brief, Long; did you mean brief?"
    assert str(e.value).endswith(end)


@pytest.mark.parametrize("part", LOADERS)
def test_an_error_in_a_users_module_names_the_users_line(part, module, tmp_path):
    module(f"broken_{part}", "import json\n\nLIMIT = json.loads('{')\n")
    with pytest.raises(UserError) as e:
        LOADERS[part](f"broken_{part}:brief")
    assert str(e.value).endswith(f"({tmp_path}/broken_{part}.py, line 3)")


KINDS = """
def none(): 1 / 0
def one(t): 1 / 0
def two(t, extra): 1 / 0
def any_of(*given, **named): 1 / 0
async def later(t, extra): 1 / 0
class Empty:
    def __init__(self, question): 1 / 0
class Brief:
    def __init__(self, tokenizer, settings): 1 / 0
class Deaf:
    def __init__(self, question): 1 / 0
    def __call__(self): 1 / 0
class Hears(Deaf):
    def __call__(self, content, more=()): 1 / 0
class Static(Deaf):
    @staticmethod
    def __call__(content): 1 / 0
class Callable:
    def __call__(self, t): 1 / 0
instance = Callable()
def loss(logp, old, advantages, *, clip_low, clip_high=1): 1 / 0
"""
TAKES = {
    "reward": {"one", "any_of", "instance"},
    "template": {"Brief", "two", "later", "any_of"},  # a factory's result is looked at when it is made
    "tool": {"two", "later", "any_of", "Hears", "Static"},
    "metric": {"two", "any_of"},
    "retriever": {"two", "any_of", "later"},
    "loss": {"loss", "any_of"},
}
SIGNED = LOADERS | {
    "template": template_class,
    "retriever": lambda path: UsersIndex(path, None),
    "loss": token_loss,
}


@pytest.mark.parametrize("part", TAKES)
def test_a_part_of_a_wrong_kind_or_signature_is_refused_without_a_call(part, module):
    module("own_kinds", KINDS)
    names = re.findall(r"^(?:async )?(?:def|class) (\w+)", KINDS, re.MULTILINE)
    taken = set()
    for name in [*names, "instance"]:
        try:
            SIGNED[part](f"own_kinds:{name}")
        except UserError as e:
            assert f"own_kinds:{name}" in str(e) and "expected a " in str(e) and "\n" not in str(e)
        else:
            taken.add(name)
    assert taken == TAKES[part]


def test_the_refusal_shows_what_was_found_and_what_is_wrong_with_it(module, tmp_path):
    module("own_arity", "def two(trajectory, extra):\n    return 1\nclass Brief:\n    pass\n")
    with pytest.raises(UserError) as e:
        make_reward("own_arity:two")
    assert str(e.value) == (
        "reward.kind 'own_arity:two': expected a function of one trajectory, found two(trajectory, extra): "
        f"missing a required argument: 'extra' ({tmp_path}/own_arity.py, line 1)"
    )
    with pytest.raises(UserError, match=r"expected a function of one trajectory, found the class Brief$"):
        make_reward("own_arity:Brief")


def test_a_call_that_fails_names_no_line_of_ours(module):
    module("own_arity_within", "def none():\n    return 1\ndef outer(t):\n    return none(t)\n")
    with pytest.raises(UserError) as e:
        make_reward("own_arity_within:outer")(type("T", (), {"uid": "g-00"}))
    said = "on trajectory g-00: TypeError: none() takes 0 positional arguments but 1 was given ("
    assert said in str(e.value) and str(e.value).endswith("own_arity_within.py, line 4)")


def test_an_error_below_our_own_code_names_the_users_line(module, tmp_path):
    module("own_deep", "from trainer.rewards import em\n\ndef deep(t):\n    return em(t)\n")
    with pytest.raises(UserError) as e:
        make_reward("own_deep:deep")(type("T", (), {"uid": "g-00"}))
    assert str(e.value).endswith(f"({tmp_path}/own_deep.py, line 4)")


def test_a_name_of_a_name_says_which_part_is_missing(module):
    module("own_parts", "class Box:\n    def open(self):\n        return 1\n")
    with pytest.raises(UserError, match=r"own_parts\.Box has no `close`; it has: open$"):
        load("x", "own_parts:Box.close", "a function")


@pytest.mark.parametrize("package", ["trainer", "services", "retriever_service"])
def test_a_users_module_in_a_package_of_ours_is_told_that_the_name_is_taken(package):
    with pytest.raises(UserError) as e:
        make_reward(f"{package}.no_such_module:brief")
    assert str(e.value).endswith(
        f"No module named '{package}.no_such_module'; `{package}` is a package of Unspiral's: give yours "
        "another name"
    )


def test_a_module_that_a_package_lacks_is_answered_with_those_that_it_has(tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    for name in ("__init__", "reward", "tool"):
        (tmp_path / "own_package" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as e:
        make_reward("own_package.rewrd:brief")
    assert str(e.value).endswith(
        f"cannot be imported: No module named 'own_package.rewrd' in {tmp_path}/own_package; it has: reward, "
        "tool; did you mean own_package.reward?"
    )
    with pytest.raises(UserError) as e:
        make_reward("own_package.reward.deep:brief")
    file = f"{tmp_path}/own_package/reward.py"
    assert str(e.value).endswith(
        f"No module named 'own_package.reward.deep': own_package.reward is one file, {file}"
    )


def test_a_module_that_a_users_module_lacks_keeps_the_users_line(module):
    module("own_lacking", "import no_such_library\n")
    with pytest.raises(UserError) as e:
        make_reward("own_lacking:brief")
    said = "cannot be imported: ModuleNotFoundError: No module named 'no_such_library' ("
    assert said in str(e.value) and str(e.value).endswith("own_lacking.py, line 1)")


ENDING = """
import sys
def reward(t): sys.exit(3)
def tool(content, question): sys.exit()
class Env:
    def __init__(self, question): sys.exit("no")
    def __call__(self, content): return content
def metric(trajectories, rewards): sys.exit(3)
def search(query, topk): sys.exit(3)
"""


def test_no_part_ends_the_program(module):
    module("own_ending", ENDING)
    question = Question("q1", "where?", ("n1",), "made")
    said = []
    metrics = UsersMetrics(load_metrics(["own_ending:metric"]), said.append)
    assert metrics.of([], [], {}) == {}
    calls = [
        lambda: make_reward("own_ending:reward")(type("T", (), {"uid": "g-00"})),
        lambda: UsersIndex("own_ending:search", None).search(["Rome?"], 1),
        *(
            lambda name=name: asyncio.run(
                Toolbox(load_tools({"t": f"own_ending:{name}"}), question, 60).call("t", "x")
            )
            for name in ("tool", "Env")
        ),
    ]
    for call in calls:
        with pytest.raises(UserError) as e:
            call()
        said.append(str(e.value))
    ends = ["3", "3", "3", "", "'no'"]
    places = [
        "trainer.metrics: own_ending:metric: left out",
        "reward.kind 'own_ending:reward': on traj",
        "index own_ending:search",
        "rollout.tools.t: on question q1",
        "rollout.tools.t: made of question q1",
    ]
    assert len(said) == 5
    for line, end, place in zip(said, ends, places, strict=True):
        assert line.startswith(place) and f"it ends the program, by SystemExit({end}) (" in line
        assert "own_ending.py, line" in line


def test_a_signal_stays_a_signal_and_an_interrupt_of_a_thread_is_the_users(module):
    with pytest.raises(KeyboardInterrupt), calling("here"):
        raise KeyboardInterrupt
    raised = []

    def work():
        try:
            with calling("here"):
                raise KeyboardInterrupt
        except UserError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert raised and raised[0].startswith("here: KeyboardInterrupt (")
