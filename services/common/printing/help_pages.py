"""What is alike on the help pages of all commands, of every program of the house."""

from __future__ import annotations

from typing import Any

OUT = "--out"
OUT_SHORT = "-o"


def in_house_style(command: Any) -> Any:
    """The command of Typer, and all below it: arguments have capitals, --out is -o too, and a flag stands in
    the help without a type."""
    all_of = command.get_params
    command.get_params = lambda ctx: flags_without_type(all_of(ctx))
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
        elif OUT in parameter.opts and OUT_SHORT not in parameter.opts:
            parameter.opts.append(OUT_SHORT)
    for below in getattr(command, "commands", {}).values():
        in_house_style(below)
    return command


def flags_without_type(parameters: list[Any]) -> list[Any]:
    """The parameters. Typer would print `<bool>` behind each flag, which looks as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda ctx: None
    return parameters
