"""The command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.commands.cli import main


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `unspiral ARGUMENTS...`: exit status, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return call
