"""What the check of the Compose stack leaves behind: nothing, and what it cannot put back it names."""

from __future__ import annotations

import os
import subprocess

import pytest
from places import ROOT

UP = 'printf "A=1\\n" > "$0/stack.env"'
"""What the check does first: settings of its own, with which the stack comes up."""


@pytest.fixture
def engine(tmp_path):
    """tests/compose/engine.sh beside a `docker` that writes down what it is asked, and fails to take a stack
    down where `broken`."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        "#!/bin/sh\n"
        f'echo "$COMPOSE_PROJECT_NAME $COMPOSE_ENV_FILES $*" >> {tmp_path}/asked\n'
        'case "$*" in *down*) [ -z "$BROKEN" ] || { echo "network internal is in use" >&2; exit 1; };;\n'
        "esac\n"
    )
    docker.chmod(0o755)
    work = tmp_path / "work"

    def run(*command, broken=""):
        done = subprocess.run(
            [ROOT / "tests/compose/engine.sh", work, *command],
            env=os.environ | {"PATH": f"{docker.parent}:{os.environ['PATH']}", "BROKEN": broken},
            capture_output=True,
            text=True,
            timeout=30,
        )
        asked = [line for line in (tmp_path / "asked").read_text().splitlines() if " down " in line]
        return done.returncode, asked, done.stderr

    run.work = work
    return run


@pytest.mark.parametrize("status", [0, 7])
def test_a_stack_is_taken_down_with_the_settings_that_it_came_up_with(engine, status):
    code, asked, said = engine("sh", "-c", f"{UP}; exit {status}", engine.work)
    line = f"unspiral-check {engine.work}/stack.env compose --profile * down --remove-orphans --timeout 2"
    assert (code, asked) == (status, [line])
    assert "LEFT BEHIND" not in said


@pytest.mark.parametrize(("status", "code"), [(0, 1), (7, 7)])
def test_a_stack_that_cannot_be_taken_down_is_named_and_is_no_success(engine, status, code):
    seen, _, said = engine("sh", "-c", f"{UP}; exit {status}", engine.work, broken="1")
    assert seen == code
    assert (
        "LEFT BEHIND: the stack of project unspiral-check: network internal is in use"
        in said.splitlines()[-1]
    )


def test_without_settings_no_stack_was_started(engine):
    code, asked, said = engine("true")
    assert (code, asked) == (0, []) and "LEFT BEHIND" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_not_worked_in(engine):
    engine.work.mkdir()
    os.chown(engine.work, 12345, 12345)
    done = subprocess.run(
        [ROOT / "tests/compose/engine.sh", engine.work, "true"], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (77, f"engine: {engine.work} belongs to another user\n")
