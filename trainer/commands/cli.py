"""The command `unspiral` (also `python -m trainer`): the table of its commands, and their exit status.

Exit status: 0 done; 1 a fault of ours; 2 bad usage, configuration or data; 3 the environment lacks something;
4 stopped by the monitor; 129, 130 and 143 after a clean stop by SIGHUP, SIGINT and SIGTERM; 141 where nobody
reads the output on.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from services.common.errors import explains
from services.common.loading.extras import not_imported
from services.common.loading.lazy import LazyModule
from services.common.names import near_path
from services.common.printing.harmless import print_whatever_comes
from trainer.commands.lazy import Entry, lazy_app
from trainer.commands.version import version_lines
from trainer.name_clash import LACKS, clash_of
from trainer.session.output import complain

slips = LazyModule("trainer.commands.slips")  # it needs the configuration, which takes time
usage = LazyModule("trainer.commands.usage")
PANELS: dict[str, dict[str, Entry]] = {
    "First steps": {
        "doctor": Entry("Check this machine, and say what to do.", "trainer.commands.checks.doctor:doctor"),
        "demo": Entry(
            "Run the whole system on this machine, with no other input.", "trainer.commands.work.runs:demo"
        ),
        "init": Entry("Write a commented configuration that fits the machine.", "trainer.commands.init:init"),
        "config": Entry("Look at the configuration.", "trainer.commands.config:config_app"),
        "model": Entry("List and fetch known models.", "trainer.commands.models:model_app"),
    },
    "Data and search": {
        "data": Entry("Check and convert questions and corpora.", "trainer.data.cli:data_app"),
        "index": Entry("Build, inspect and search indexes.", "retriever_service.cli:index_app"),
    },
    "Train": {
        "warm-start": Entry(
            "Teach a model the search and answer tags.", "trainer.commands.work.runs:warm_start"
        ),
        "train": Entry(
            "Train a policy. The run's files go to run.dir/run.name.", "trainer.commands.work.runs:train"
        ),
        "status": Entry("Show what the running system is doing.", "services.control.cli:status"),
        "pause": Entry("Begin no further step; the step in hand ends.", "services.control.cli:pause"),
        "resume": Entry("Go on after a pause.", "services.control.cli:resume"),
        "workers": Entry("List, scale and drain the rollout workers.", "services.control.cli:workers_app"),
    },
    "Look at a run": {
        "runs": Entry("List the runs of a folder.", "trainer.commands.look.cli:runs"),
        "report": Entry(
            "Write one HTML page with the curves, phases and alarms of runs.",
            "services.likelihood.cli:report",
        ),
        "displacement": Entry(
            "Measure what one update does to answers to fixed prompts.",
            "trainer.commands.look.displacement:displacement",
        ),
        "monitor": Entry("Run the phase monitor over recorded runs.", "services.likelihood.cli:monitor_app"),
        "trajectories": Entry(
            "Look at the trajectories of a run.", "trainer.commands.look.cli:trajectories_app"
        ),
        "trace": Entry(
            "Write a step's timeline as a Perfetto trace file.", "trainer.commands.look.cli:trace"
        ),
        "likelihood": Entry("Prune and export a likelihood store.", "services.likelihood.cli:likelihood_app"),
    },
    "Score and use": {
        "eval": Entry(
            "Score held-out questions: exact match and F1.",
            "trainer.commands.work.runs:evaluate",
            commands={
                "compare": Entry("Compare evaluations.", "trainer.suite.cli:compare_command"),
                "page": Entry("Write a page of evaluations beside papers.", "trainer.suite.cli:page_command"),
            },
        ),
        "ask": Entry("Ask a trained agent, and watch it search.", "trainer.commands.agent.cli:ask"),
        "export": Entry(
            "Write a checkpoint as a plain Hugging Face folder.", "trainer.commands.work.runs:export"
        ),
        "serve": Entry(
            "Run one service alone.",
            commands={
                "retriever": Entry("Serve an index over HTTP.", "retriever_service.serve:serve_retriever"),
                "likelihood": Entry(
                    "Serve a likelihood store, and the live page.", "services.likelihood.cli:serve_likelihood"
                ),
                "agent": Entry(
                    "Serve a trained agent as an OpenAI-compatible chat endpoint.",
                    "trainer.commands.agent.cli:serve_agent",
                ),
                "control": Entry(
                    "Serve the control plane of a Ray cluster's run.", "services.control.cli:serve_control"
                ),
            },
        ),
    },
}
"""By heading, in the order of use: that of `unspiral --help`."""
COMMANDS = {
    name: replace(entry, panel=panel) for panel, entries in PANELS.items() for name, entry in entries.items()
}

app = lazy_app(
    COMMANDS, "Train search agents with GRPO + LLDS, and watch likelihood while it happens.", completion=True
)

PIPE_CLOSED = 141
"""What a shell makes of SIGPIPE, which Python turns into an error."""
MACHINE_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
)
"""Errors of the machine, not of the path that was given."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print versions and exit."),
    ] = False,
) -> None:
    """Train search agents with GRPO + LLDS, and watch likelihood while it happens."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command. A mistake of the user's becomes one line on stderr and its exit status."""
    print_whatever_comes()
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["help"]:  # unspiral help train
        argv = [*words[1:], "--help"]
    try:
        code = app(args=argv, standalone_mode=False, prog_name="unspiral")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SystemExit as ended:
        cause = ended.__context__  # Typer ends with 1 where nobody reads on, as behind `| head -1`
        if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
            sys.exit(PIPE_CLOSED)
        raise
    except Exception as error:
        if (told := line_of(error)) is None:
            raise  # a fault of ours: its traceback is wanted
        line, status = told
        if line:  # none where a command without arguments has printed its help
            complain(f"unspiral: {line}")
        sys.exit(status)
    sys.exit(code if isinstance(code, int) else 0)


def line_of(error: Exception) -> tuple[str, int] | None:
    """The line that explains an error, and the exit status; None for a fault of ours."""
    if type(error).__name__ == "NoSuchOption":
        return slips.unknown_option(error), 2
    if hasattr(error, "format_message"):  # Typer: bad usage
        return usage.usage_line(error), getattr(error, "exit_code", 2)
    if explains(error):
        return str(error), getattr(error, "exit_code", 1)
    if isinstance(error, ImportError) and (line := clash_of(error)):
        return line, LACKS
    if isinstance(error, ModuleNotFoundError):
        name = error.name or ""
        if name.split(".")[0] in ("trainer", "services", "retriever_service"):
            where = Path(__file__).parents[2]
            return (
                f"{name} is a part of Unspiral and is not in {where}: "
                "the code there is not whole, or was replaced in mid-run"
            ), 3
        return not_imported(error), 3
    if isinstance(error, OSError) and error.filename is not None:  # cannot be read, written or made
        hint = near_path(os.fsdecode(error.filename)) if error.errno == errno.ENOENT else ""
        return f"{error.filename}: {error.strerror}{hint}", 3 if error.errno in MACHINE_FULL else 2
    if isinstance(error, OSError) and error.errno in MACHINE_FULL:  # raised by a library, without a name
        return str(error.strerror or error), 3
    return None
