"""docs/any_trainer.md: each snippet is run, by the trainer's own code where it is installed and otherwise by
its stand-in."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from places import ROOT

torch = pytest.importorskip("torch")

from tests.health import trainers  # noqa: E402
from tests.likelihood.likelihood_service import serving  # noqa: E402
from unspiral_health import LLDS  # noqa: E402
from unspiral_health.adapters import launch  # noqa: E402

PAGE = (ROOT / "docs" / "any_trainer.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def snippet(section):
    (found,) = re.findall(r"^```\w+\n(.*?)^```", SECTIONS[section], re.M | re.S)
    return found


def shell(section, monkeypatch):
    """The words of the snippet's command, its variables set."""
    text = snippet(section).replace("\\\n", " ")
    exported, command = text.strip().splitlines()
    for word in shlex.split(exported)[1:]:
        monkeypatch.setenv(*word.split("=", 1))
    return shlex.split(command)


def test_the_snippet_for_trl(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = []

    class GRPOTrainer:
        """With the methods that the callback wraps."""

        def __init__(self, model, reward_funcs, args, train_dataset, callbacks):
            made.append(self)
            self.callbacks = callbacks

        def _calculate_rewards(self): ...
        def _generate_and_score_completions(self): ...
        def _get_per_token_logps_and_entropies(self): ...
        def _compute_loss(self): ...

        def train(self):
            assert self._compute_loss.__wrapped__ is not None
            self.trained = True

    names = dict.fromkeys(("model", "reward_funcs", "args", "data"))
    pytest.importorskip("transformers")
    exec(snippet("TRL"), {"GRPOTrainer": GRPOTrainer, **names})
    assert made[0].trained and made[0].callbacks[0].llds.lam == 0.2


def test_the_snippet_for_verl(monkeypatch):
    words = shell("verl", monkeypatch)
    assert words[:4] == ["python", "-m", launch.__name__, "verl"]
    ran = []
    monkeypatch.setitem(launch.COMMANDS, "verl", lambda: ran.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", words[2:])
    launch.main()
    ((override,),) = ran
    key, name = override.split("=")
    assert key == "actor_rollout_ref.actor.policy_loss.loss_mode"
    # What every process of verl imports makes the loss that the override names.
    trainers.verl(monkeypatch, LLDS())
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    monkeypatch.delitem(sys.modules, launch.PLUGIN, raising=False)
    importlib.import_module(launch.PLUGIN)
    assert callable(core.get_policy_loss_fn(name))


def test_the_snippet_for_openrlhf(monkeypatch):
    words = shell("OpenRLHF", monkeypatch)
    ran = []
    monkeypatch.setitem(launch.COMMANDS, "openrlhf", lambda: ran.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", words[2:])
    launch.main()
    assert ran == [["--actor.model_name_or_path", "MODEL"]]


def test_the_snippet_for_skyrl(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trainers.skyrl(monkeypatch, LLDS())
    adapters = importlib.import_module("unspiral_health.adapters")
    monkeypatch.setattr(adapters, "skyrl", sys.modules["unspiral_health.adapters.skyrl"])
    added = []
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(policy_mini_batch_size=4, algorithm=SimpleNamespace()),
        generator=SimpleNamespace(n_samples_per_prompt=2),
    )
    exec(snippet("SkyRL"), {"cfg": cfg, "trainer": SimpleNamespace(add_callback=added.append)})
    assert callable(adapters.skyrl.PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type))
    assert added[0].run.name == "my-run"
    added[0].run.client.close(timeout=0.1)


def test_the_snippet_for_slime(monkeypatch):
    words = shell("slime", monkeypatch)
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert given["--loss-type"] == "custom_loss"
    for flag in ("--custom-loss-function-path", "--custom-megatron-init-path"):
        name, _, function = given[flag].rpartition(".")
        assert callable(getattr(importlib.import_module(name), function))


def test_the_loop_for_another_trainer_runs(tmp_path):
    with serving(tmp_path) as server:
        code = snippet("Another trainer").replace("http://127.0.0.1:8100", server.url)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    said, judged = done.stdout.splitlines()
    assert said.startswith("LLDS acts: 96 active tokens, 100.0% of the preserved; gate by action")
    assert judged == "unknown []"


def test_the_page_names_the_versions_that_the_tests_ask_for():
    for trainer, version in trainers.VERSIONS.items():
        (row,) = [line for line in PAGE.splitlines() if line.lower().startswith(f"| {trainer} |")]
        assert f"| {version} |" in row


def test_a_command_for_no_trainer_says_which_there_are(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "vrel"])
    with pytest.raises(Exception, match="accepted are verl, openrlhf; did you mean verl"):
        launch.main()
