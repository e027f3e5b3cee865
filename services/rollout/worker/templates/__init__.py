"""Templates by name: `search_r1`, `hermes`, `llama3`, `lab`, or an import path `package.module:Name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, get_args

from services.common.errors import UserError
from services.common.loading.user_code import Call, calling, check_takes, find, with_colon
from services.common.names import near_name
from services.common.printing.kinds import returned_kind
from services.contracts import Reading
from services.rollout.worker.templates.base import ParsedAction, TagTemplate, Template, reading_of
from services.rollout.worker.templates.users import UsersTemplate, vocabulary_of

if TYPE_CHECKING:
    from services.settings import RolloutSettings

__all__ = ["ParsedAction", "TagTemplate", "Template", "make_template", "reading_of", "template_class"]

_KNOWN = {
    "search_r1": "services.rollout.worker.templates.search_r1:SearchR1Template",
    "hermes": "services.rollout.worker.templates.tool_calls:HermesTemplate",
    "llama3": "services.rollout.worker.templates.tool_calls:Llama3Template",
    "lab": "services.rollout.worker.templates.lab:LabTemplate",
}
_MEMBERS = ("stop", "min_observation_tokens", "prompt_ids", "decode", "parse", "observation_ids", "notice")


def template_class(name: str) -> Callable[[Any, RolloutSettings], Template]:
    """The class of a known template, or the one at an import path, which is looked for where Python looks,
    and in the current folder. Raises UserError."""
    path = _KNOWN.get(name, name)
    if ":" not in path:
        raise UserError(
            f"rollout.template={name}: expected {', '.join(_KNOWN)}, or an import path package.module:Name"
            f"{near_name(name, _KNOWN) or with_colon(name)}"
        )
    with calling(f"rollout.template={name}: cannot be imported"):
        factory = find(path)
    if not callable(factory):
        raise UserError(f"rollout.template={name}: expected a class, found {type(factory).__name__}")
    expected = "a class that is made from a tokenizer and the settings"
    check_takes(f"rollout.template={name}", expected, factory, Call(2, function=False))
    return cast("Callable[[Any, RolloutSettings], Template]", factory)


def make_template(name: str, tokenizer: Any, settings: RolloutSettings) -> Template:
    """The template of `template_class`, made of `(tokenizer, settings)`. Raises UserError."""
    factory = template_class(name)
    where = f"rollout.template={name}"
    for member in ("stop", "tags"):  # `("</search>")` without its comma would be one string a letter
        if isinstance(getattr(factory, member, None), str):
            raise UserError(f"{where}: {member}: expected a tuple of texts, found text: put a comma after it")
    # A UserError names what the template itself does not accept.
    made = f"{where}: cannot be made from a tokenizer and the settings"
    with calling(made, passes=(UserError,)):
        template = factory(tokenizer, settings)
    needed: tuple[str, ...] = _MEMBERS
    if getattr(type(template), "observation_ids", None) is TagTemplate.observation_ids:
        needed += ("documents",)  # which it calls at the first search
    if settings.tools:
        needed += ("result_ids",)
    missing = [m for m in needed if not hasattr(template, m)]
    if missing:
        unmade = isinstance(template, TagTemplate) and "min_observation_tokens" in missing
        raise UserError(
            f"{where}: lacks {', '.join(missing)}; "
            + (
                "its __init__ must call super().__init__(tokenizer, settings)"
                if unmade
                else "see services.rollout.worker.templates.base.Template"
            )
        )
    if name not in _KNOWN:
        _check_values(where, template)
        template = cast("Template", UsersTemplate(where, template, vocabulary_of(tokenizer), settings.tools))
    if settings.max_obs_tokens < template.min_observation_tokens:
        raise UserError(
            f"rollout.max_obs_tokens={settings.max_obs_tokens}: the tags of an observation alone take "
            f"{template.min_observation_tokens} tokens"
        )
    return template


def _check_values(where: str, template: Template) -> None:
    """Raises UserError where a value of a user's template is of another kind than the loop takes."""
    stop: Any = template.stop
    if not isinstance(stop, tuple | list) or not stop or not all(isinstance(s, str) and s for s in stop):
        raise UserError(f"{where}: stop: expected a tuple of texts that end an action, found {stop!r}")
    least: Any = template.min_observation_tokens
    if isinstance(least, bool) or not isinstance(least, int):
        raise UserError(
            f"{where}: min_observation_tokens: expected a number of tokens, found {returned_kind(least)}"
        )
    reading: Any = reading_of(template)
    if reading not in get_args(Reading):
        raise UserError(f"{where}: reading: expected {' or '.join(get_args(Reading))}, found {reading!r}")
