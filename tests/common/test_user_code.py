"""A user's own code that is not there or fails: the line names what the user wrote, never a line of ours."""

import pytest

from services.common.errors import UserError
from services.common.loading.user_code import load
from services.rollout.worker.templates import make_template
from services.rollout.worker.tools import load_tools
from services.settings import RolloutSettings
from trainer.loop.records.users_metrics import load_metrics
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


def test_a_call_that_a_function_does_not_take_names_no_line_of_ours(module):
    module("own_arity", "def none():\n    return 1\n")
    reward = make_reward("own_arity:none")
    with pytest.raises(UserError) as e:
        reward(type("T", (), {"uid": "g-00"}))
    assert str(e.value).endswith(
        "on trajectory g-00: TypeError: none() takes 0 positional arguments but 1 was given"
    )


def test_an_error_below_our_own_code_names_the_users_line(module, tmp_path):
    module("own_deep", "from trainer.rewards import em\n\ndef deep(t):\n    return em(t)\n")
    with pytest.raises(UserError) as e:
        make_reward("own_deep:deep")(type("T", (), {"uid": "g-00"}))
    assert str(e.value).endswith(f"({tmp_path}/own_deep.py, line 4)")


def test_a_name_of_a_name_says_which_part_is_missing(module):
    module("own_parts", "class Box:\n    def open(self):\n        return 1\n")
    with pytest.raises(UserError, match=r"own_parts\.Box has no `close`; it has: open$"):
        load("x", "own_parts:Box.close", "a function")
