"""What is alike on the help pages of all commands, of every program of the house."""

from __future__ import annotations

import copy
from typing import Any

RUN = "A run's folder, its name in runs/, a file or checkpoint in it, or latest"
CHECKPOINT = "A checkpoint, a run (its folder, or its name in runs/: its newest checkpoint)"
INDEX = "Folder of an index, made by `unspiral index build`"
CORPUS = "Corpus file or folder, of any layout in docs/data.md"
"""How the help of an argument or option of that name begins, in every command."""
REPLACES = "Replace a file that is there."
"""What --overwrite does, in every command that writes a file which its user has named."""
OUT = "--out"
OUT_SHORT = "-o"
TYPES = {"<str>": "TEXT", "<list[str]>": "TEXT", "<path>": "PATH", "<int>": "INT", "<float>": "FLOAT"}
"""What Typer calls the types of values, and what a help page does: they stand in a narrow column."""


def in_a_sentence(text: str) -> str:
    """The beginning of a help text, behind other words."""
    return f"{text[:1].lower()}{text[1:]}"


def in_house_style(command: Any) -> Any:
    """The command of Typer, and all below it: arguments have capitals, --out is -o too, and a help page is as
    `as_shown` says."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
        elif OUT in parameter.opts and OUT_SHORT not in parameter.opts:
            parameter.opts.append(OUT_SHORT)
    shown_in_house_style(command)
    for below in getattr(command, "commands", {}).values():
        # In a group's list: Typer would break the lines where the source does, too.
        below.short_help = below.short_help or " ".join((below.help or "").split())
        in_house_style(below)
    return command


def shown_in_house_style(command: Any) -> None:
    """Its help page shows the parameters as `as_shown` says; the parser takes them as they are."""
    format_help, parsed = command.format_help, command.get_params

    def formatted(ctx: Any, formatter: Any) -> None:
        command.get_params = lambda ctx: [as_shown(p) if _is_known(p) else p for p in parsed(ctx)]
        try:
            format_help(ctx, formatter)
        finally:
            command.get_params = parsed

    command.format_help = formatted


def as_shown(parameter: Any) -> Any:
    """A copy for a help page of 80 columns: all names in one column that breaks between them; spellings of
    other programs, words to choose from and the default of a switch behind the text; no type behind a flag,
    which would look as if it took a value, nor behind an argument, whose name says it."""
    shown = copy.copy(parameter)
    limits = parameter._get_number_range_help_str()
    shown._get_number_range_help_str = lambda: None
    if parameter.param_type_name != "option":
        shown.display_type_rich = lambda ctx: f"[{limits}]" if limits else None
        return shown
    shown.display_type_rich = lambda ctx: _type_of(parameter, ctx, limits)
    house, *others = sorted(parameter.opts, key=lambda name: (not name.startswith("--"), "_" in name))
    short = [name for name in others if not name.startswith("--")]
    shown.opts = [", ".join([house, *short, *parameter.secondary_opts])]
    shown.secondary_opts = []
    long = [name for name in others if name.startswith("--")]
    behind = [f"Also {' and '.join(long)}."] if long else []
    if parameter.secondary_opts and isinstance(parameter.default, bool):
        shown.show_default = False
        behind.append(f"{'On' if parameter.default else 'Off'} by default.")
    if _is_choice(parameter):
        behind.append(f"One of {', '.join(map(str, parameter.type_descriptor.choices))}.")
    shown.help = " ".join([parameter.help or "", *behind])
    return shown


def _is_known(parameter: Any) -> bool:
    """Whether it has what `as_shown` changes. These are Typer's own names: with a version that calls them
    otherwise the page is as that version makes it."""
    return all(
        hasattr(parameter, name)
        for name in ("display_type_rich", "_get_number_range_help_str", "type_descriptor")
    )


def _is_choice(parameter: Any) -> bool:
    descriptor = parameter.type_descriptor
    return bool(descriptor is not None and descriptor.is_choice and len(descriptor.choices) > 1)


def _type_of(option: Any, ctx: Any, limits: str | None) -> str | None:
    """What stands behind a name: nothing behind a flag, otherwise the kind of the value and its limits."""
    if getattr(option, "is_flag", False):
        return None
    named = type(option).display_type_rich(option, ctx)
    if option.metavar is not None or named is None:
        return option.metavar
    kind = "TEXT" if _is_choice(option) else TYPES.get(named.replace(" range>", ">"), named.strip("<>"))
    return f"{kind} [{limits}]" if limits else kind
