"""What was meant by an option that is not there: an option of the command, or a key of the configuration."""

from __future__ import annotations

from typing import Any

from services.common.names import nearest
from trainer.config.aliases import keys_like
from trainer.config.schema import leaf_keys

SETTINGS = "KEY=VALUE"


def unknown_option(error: Any) -> str:
    """The line about it. error: `NoSuchOption` of Typer, whose own guess knows no key."""
    name = str(error.option_name)
    context = error.ctx
    parameters = context.command.params if context is not None else []
    options = [o for p in parameters if p.param_type_name == "option" for o in p.opts if o.startswith("--")]
    near = nearest(name, [*options, "--help"])
    keys = _keys_like(name) if any(SETTINGS in (p.metavar or "") for p in parameters) else []
    found = [*([near] if near else []), *(f"{key}=..." for key in keys)]
    line = f"No such option: {name}"
    if name[1:].isdecimal() and context is not None:
        return f"{line}; a word that begins with - stands behind --: `{context.command_path} -- {name}`"
    if found:
        return f"{line}; did you mean {' or '.join(found)}?"
    return f"{line}; `{context.command_path} --help` lists those that there are" if context else line


def _keys_like(name: str) -> list[str]:
    """Keys with a last part like it, or that other trainers call so."""
    bare = name.lstrip("-").replace("-", "_")
    keys = leaf_keys()
    return [bare] if bare in keys else keys_like(bare, keys)
