"""Mistakes in the words of a command, which Typer finds: one line with the command's own names, what is
accepted, and an example where something is missing."""

from __future__ import annotations

import os
from typing import Any

from services.common.names import accepted, nearest
from services.common.printing.help_pages import in_a_sentence
from services.common.printing.messages import said
from trainer.commands.examples import example_of
from trainer.config.expected import expected

NUMBERS = {int: "a whole number", float: "a number"}


def usage_line(error: Any) -> str:
    """The line about an error of Typer's, but that of an unknown option (see `slips`)."""
    kind = type(error).__name__
    context = getattr(error, "ctx", None)
    if context is None:
        return said(error.format_message())
    path = context.command_path.partition(" ")[2]
    example = f" {found}" if (found := example_of(path)) else ""
    if kind == "MissingParameter":
        told = said(error.format_message())
        if error.param is not None and "--config" in error.param.opts and (file := _yaml_in(context)):
            return f"{told.rstrip('.')}; did you mean --config {file}?"
        return told + example
    if kind == "BadParameter" and error.param is not None:
        return _bad_value(error)
    if kind == "BadOptionUsage" and "requires an argument" in error.message:
        return f"{error.option_name}: its value is missing; expected {_help_of(error)}{example}"
    if error.message.startswith("No such command"):
        return _no_command(error, context)
    if error.message.startswith("Got unexpected extra"):
        usage = " ".join(" ".join(context.command.collect_usage_pieces(context)).split())
        words = error.message.partition("(")[2].rpartition("(")[2].rstrip(")")
        return f"{path}: too many words ({words}); expected `{context.command_path} {usage}`.{example}"
    return said(error.format_message())


def _yaml_in(context: Any) -> str | None:
    """A file of YAML among the words that stand alone, which is meant as the configuration."""
    several = [value for value in context.params.values() if isinstance(value, list | tuple)]
    words = [word for value in several for word in value if isinstance(word, str)]
    return next((w for w in words if w.endswith((".yaml", ".yml")) and os.path.isfile(w)), None)


def _bad_value(error: Any) -> str:
    """`--topk 0: expected at least 1`, of the value that Typer has refused."""
    option, descriptor = error.param, error.param.type_descriptor
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    first: dict[str, Any] = next(iter(problems), {})
    given = str(first.get("input", ""))
    name = option.opts[0] if option.param_type_name == "option" else option.metavar or option.name.upper()
    place = f"{name} {given}".rstrip() if given else f"{name} ''"
    for variable in [option.envvar] if isinstance(option.envvar, str) else option.envvar or []:
        if os.environ.get(variable) == given:
            place = f"{name} (from {variable}={given})"
    if descriptor.choices:
        return f"{place}: {accepted(given, list(map(str, descriptor.choices)))}"
    if not first:
        return f"{place}: {said(error.message)}"
    what = expected(first)
    if descriptor.annotation in NUMBERS and option.min is not None and not what.startswith("expected at"):
        what += f", at least {option.min:g}" + (
            f" and at most {option.max:g}" if option.max is not None else ""
        )
    return f"{place}: {what}"


def _help_of(error: Any) -> str:
    """What the help says of an option, to its first full stop."""
    options = [one for one in error.ctx.command.params if error.option_name in one.opts]
    text = (options[0].help or "").partition(". ")[0].rstrip(".") if options else "a value"
    return f"{in_a_sentence(text)}."


def _no_command(error: Any, context: Any) -> str:
    """The command that was meant, or all of a short list."""
    name = error.message.split("'")[1]
    known = list(context.command.commands)
    near = nearest(name, known)
    hint = f"did you mean {context.command_path} {near}?" if near else ""
    lists = f"`{context.command_path} --help` lists those that there are"
    return f"{name}: no such command; {hint or lists}"
