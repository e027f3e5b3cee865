"""A template of the user's own: where a call raises, the error names key, method and line, and what it
returns is what the loop takes, so that a mistake is one line wherever it is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, wraps
from numbers import Integral
from typing import Any, get_args

from services.common.errors import UserError
from services.common.loading.user_code import calling
from services.common.loading.what_it_has import defined_at
from services.common.printing.harmless import in_one_line
from services.common.printing.kinds import returned_kind
from services.contracts import ActionKind, Observation, Question
from services.rollout.worker.templates.base import ParsedAction

SHOWN = 60
"""Characters of a text that an error shows."""


class UsersTemplate:
    """Stands for a user's template, and has all that it has. where: of the errors; vocabulary: ids from this
    number on are no tokens, if it is known; tools: names that an action may call."""

    def __init__(self, where: str, template: Any, vocabulary: int | None, tools: Collection[str]) -> None:
        self._template = template
        ids = _Ids(vocabulary)
        checks: dict[str, Callable[[Any], Any]] = {
            "prompt_ids": ids.of_prompt,
            "shown_later": ids.of,
            "decode": _text,
            "parse": partial(_action, tools),
            "observation_ids": ids.of_observation,
            "result_ids": ids.of_observation,
            "notice": ids.of_observation,
            "following": ids.of_observation,
            "ends": _as_it_is,
            "written": _as_it_is,
        }
        for name, check in checks.items():
            method = getattr(template, name, None)
            if callable(method):
                setattr(self, name, _told(f"{where}: {name}", method, check))
            elif hasattr(template, name):
                raise UserError(f"{where}: {name}: expected a method, found {returned_kind(method)}")

    def __getattr__(self, name: str) -> Any:
        if name == "_template":  # a copy asks for it before it is there
            raise AttributeError(name)
        return getattr(self._template, name)


def _told(where: str, method: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """The method, whose errors name it, and the question, text or empty list that it was given."""

    @wraps(method)
    def called(*given: Any) -> Any:
        of = _of(where, given[0]) if given else ""
        with calling(f"{where}{of}", passes=(UserError,)):
            returned = method(*given)
        try:
            return check(returned)
        except _OtherForm as other:
            raise UserError(f"{where}{of}: returned {other}{defined_at(method)}") from None

    return called


def _of(where: str, given: Any) -> str:
    """What a method was called with, as far as it helps to find a mistake."""
    if isinstance(given, Question):
        return f" of question {given.id}"
    if isinstance(given, str):
        return f" of {in_one_line(given, SHOWN)!r}"
    return " with no passages" if where.endswith(": observation_ids") and not given else ""


class _OtherForm(Exception):
    """What was returned, and what is expected."""


class _Ids:
    """Checks of token ids."""

    def __init__(self, vocabulary: int | None) -> None:
        self._vocabulary = vocabulary
        self._expected = "a list of token ids" + (f", 0 to {vocabulary - 1}" if vocabulary else "")

    def of(self, returned: Any) -> list[int]:
        if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
            chat = "; in chat form, self.encode(*in_chat(self.tokenizer, turns)) makes one"
            makes = chat if isinstance(returned, Mapping) else ""
            raise _OtherForm(f"{returned_kind(returned)}; expected {self._expected}{makes}")
        ids = []
        for at, one in enumerate(returned):
            if isinstance(one, bool) or not isinstance(one, Integral):
                raise _OtherForm(f"a list whose item {at} is {returned_kind(one)}; expected {self._expected}")
            ids.append(int(one))
            if ids[-1] < 0 or (self._vocabulary and ids[-1] >= self._vocabulary):
                raise _OtherForm(f"the id {ids[-1]}; expected {self._expected}")
        return ids

    def of_prompt(self, returned: Any) -> list[int]:
        if not (ids := self.of(returned)):
            raise _OtherForm(f"an empty list; expected {self._expected}")
        return ids

    def of_observation(self, returned: Any) -> Observation:
        if not isinstance(returned, Observation):
            raise _OtherForm(f"{returned_kind(returned)}; expected an Observation(token_ids, text)")
        if not isinstance(returned.text, str):
            raise _OtherForm(f"an Observation whose text is {returned_kind(returned.text)}")
        return Observation(self.of(returned.token_ids), returned.text)


def _text(returned: Any) -> str:
    if not isinstance(returned, str):
        raise _OtherForm(f"{returned_kind(returned)}; expected a text")
    return returned


def _action(tools: Collection[str], returned: Any) -> ParsedAction:
    if not isinstance(returned, ParsedAction):
        raise _OtherForm(f"{returned_kind(returned)}; expected a ParsedAction(kind, content)")
    if returned.kind not in get_args(ActionKind):
        raise _OtherForm(f"an action of kind {returned.kind!r}; expected {', '.join(get_args(ActionKind))}")
    if not isinstance(returned.content, str):
        raise _OtherForm(f"an action whose content is {returned_kind(returned.content)}; expected a text")
    if returned.kind == "tool" and returned.tool not in tools:
        raise _OtherForm(
            f"a call of the tool {returned.tool!r}; rollout.tools has {', '.join(tools) or 'none'}"
        )
    return returned


def _as_it_is(returned: Any) -> Any:
    return returned


def vocabulary_of(tokenizer: Any) -> int | None:
    """The number of ids, holes between them included; None of a tokenizer that does not say."""
    known = getattr(tokenizer, "get_vocab", None)
    return max(known().values(), default=-1) + 1 if callable(known) else None
