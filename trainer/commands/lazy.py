"""Commands that are imported when they are called.

`unspiral --help` then lists all of them in a fraction of a second, and a plain install, without torch and
Ray, shows every help page and runs the commands that need neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from services.common.loading.lazy import LazyModule
from services.common.printing.help_pages import in_house_style, shown_in_house_style
from trainer.commands.examples import example_of, give_examples

HELP = {"help_option_names": ["--help", "-h"]}
RUN = "RUN"
STORE = "--store"


@dataclass(frozen=True)
class Entry:
    """A command, or a group of commands, that is not imported yet."""

    help: str
    """Its help text, as the list of commands shows it."""
    target: str = ""
    """`package.module:name` of its function, or of the Typer app of a group. `load` raises
    ModuleNotFoundError where the module needs a package that is not installed."""
    commands: Mapping[str, Entry] = field(default_factory=dict)
    """Commands of a group that has no module of its own; with a target, commands below a command, whose names
    are never its first argument."""
    panel: str | None = None
    """The heading under which the list of commands has it."""

    def load(self, path: str) -> Any:
        """The command of Typer, ready to run. path: all names, such as `serve retriever`."""
        if self.target:
            module, _, name = self.target.partition(":")
            found = getattr(LazyModule(module), name)
        else:
            found = lazy_app(self.commands, self.help, path)
        if isinstance(found, typer.Typer):
            give_examples(found, f"{path} ")
            group = typer.main.get_group(found)
            group.name = path
            return _told_of(_with_runs(in_house_style(group)))
        single = typer.Typer(add_completion=False)
        single.command(path.rpartition(" ")[2], epilog=example_of(path))(found)
        command = _told_of(_with_runs(in_house_style(typer.main.get_command(single))))
        return _with_names(command, list(self.commands)) if self.commands else command


def _told_of(command: Any) -> Any:
    """The command, and all below it: a mistake that Typer's parser finds knows its command."""
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> list[str]:
        try:
            found: list[str] = parse(ctx, args)
            return found
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    command.parse_args = parse_args
    for below in getattr(command, "commands", {}).values():
        _told_of(below)
    return command


def _with_runs(command: Any) -> Any:
    """The command, and all below it: a RUN, and a store, which a run names, are completed by a shell."""
    for parameter in command.params:
        if (parameter.metavar == RUN or STORE in parameter.opts) and parameter._custom_shell_complete is None:
            parameter._custom_shell_complete = completed_runs
    for below in getattr(command, "commands", {}).values():
        _with_runs(below)
    return command


def _with_names(command: Any, names: Sequence[str]) -> Any:
    """The command: as its first word a shell completes the names of those below it, too."""
    argument = next(one for one in command.params if one.param_type_name == "argument")
    others = argument._custom_shell_complete

    def complete(ctx: Any, parameter: Any, incomplete: str) -> list[Any]:
        found: list[Any] = others(ctx, parameter, incomplete) if others else []
        sources = (ctx.get_parameter_source(one.name) for one in command.params)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            return found
        kind = type(found[0]) if found else str
        return [*(kind(name) for name in names if name.startswith(incomplete)), *found]

    argument._custom_shell_complete = complete
    return command


def completed_runs(ctx: Any, parameter: Any, incomplete: str) -> list[str]:
    """Of `completion`, which is imported when a shell asks: the configuration takes time."""
    return LazyModule("trainer.commands.completion").runs(incomplete)


class LazyCommands(Mapping[str, Any]):
    """The commands of a group by name. Each is imported when it is taken out."""

    def __init__(self, entries: Mapping[str, Entry], path: str) -> None:
        self.entries = entries
        self.path = path

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].load(f"{self.path} {name}".strip())

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def below(self, name: str) -> LazyCommands:
        """The commands below a command, such as `eval compare` below `eval`."""
        entry = self.entries[name]
        return LazyCommands(entry.commands if entry.target else {}, f"{self.path} {name}".strip())


class LazyGroup(TyperGroup):
    """A group that imports the command that is run, and none for its list of commands."""

    commands: LazyCommands  # type: ignore[assignment]  # a mapping to which Typer adds nothing

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Name and help alone: this is what the list of commands asks for."""
        entry = self.commands.entries.get(cmd_name)
        return TyperCommand(cmd_name, help=entry.help, rich_help_panel=entry.panel) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is about to run."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, command, rest
        below = self.commands.below(name)
        if rest and rest[0] in below:
            return f"{name} {rest[0]}", below[rest[0]], rest[1:]
        return name, self.commands[name], rest


def lazy_app(
    entries: Mapping[str, Entry], help: str, path: str = "", *, completion: bool = False
) -> typer.Typer:
    """A Typer app of these entries. completion: with the options that complete its words in a shell."""
    lazy = LazyCommands(entries, path)

    class Group(LazyGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands = lazy
            shown_in_house_style(self)

    return typer.Typer(
        cls=Group, no_args_is_help=True, add_completion=completion, help=help, context_settings=HELP
    )
