"""Tests share a process: one leaves nothing there that the next would trip over."""

import importlib
import os
import signal
import sys

from process_state import as_it_was

from trainer.learner.objective import token_loss

LOSS = "def loss(logp, old, advantages, *, clip_low, clip_high):\n    return {} * logp\n"


def test_a_test_leaves_its_process_as_it_was(tmp_path):
    kept = tmp_path / "kept_part.py"
    kept.write_text("x = 1\n")
    sys.path.append(str(tmp_path))
    importlib.import_module("kept_part")
    path, here, handler = [*sys.path], os.getcwd(), signal.getsignal(signal.SIGTERM)
    with as_it_was(tmp_path):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.chdir(tmp_path)
        (tmp_path / "new_part.py").write_text("x = 1\n")
        importlib.invalidate_caches()
        sys.path.insert(0, "elsewhere")
        assert importlib.import_module("new_part").x == 1
    assert (sys.path, os.getcwd(), signal.getsignal(signal.SIGTERM)) == (path, here, handler)
    assert "new_part" not in sys.modules and "kept_part" in sys.modules


def test_a_loss_of_another_test_under_the_same_name_is_another_loss(tmp_path, monkeypatch):
    said = []
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "same_name.py").write_text(LOSS.format(n))
        with as_it_was(tmp_path), monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            said.append(token_loss("same_name:loss")(1.0, 0.0, 0.0, clip_low=0.2, clip_high=0.2))
    assert said == [1.0, 2.0]
