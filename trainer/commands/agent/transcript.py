"""A trajectory on a terminal, as it is written: thoughts dim, the query and the answer marked, each search
with its documents."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from services.agent.answers import answer_pair, title_and_text
from services.common.counting import counted
from services.common.printing.harmless import harmless, in_one_line
from services.contracts import Trajectory
from services.rollout.worker.watching import Event, Observed, Restarted, Retrieved, Searching, Writing

STYLES = {"think": "dim", "search": "cyan", "answer": "bold green"}
_TAG = re.compile(r"<(/?)(think|search|answer)>")
_LONGEST_TAG = len("</answer>")
_WIDTH = 110
"""Characters of a document that are shown where the output is no terminal."""


class Transcript:
    """Prints the events of one trajectory after another."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin()

    def _begin(self) -> None:
        self._text = ""
        """Of the action in hand."""
        self._shown = 0
        """Characters of it that are printed."""
        self._inside: list[str] = []
        """Tags that are open where the printed text ends."""
        self._searched = False
        """Whether the last action was a search, whose documents are printed in place of the observation."""

    def tell(self, event: Event) -> None:
        """Print what an event adds."""
        if isinstance(event, Writing):
            self._text = event.text
            self._print_to(_before_a_tag(event.text))
        elif isinstance(event, Searching):
            self._end_action()
            self._searched = True
        elif isinstance(event, Retrieved):
            self._print_found(event)
        elif isinstance(event, Observed):
            self._end_action()
            if not self._searched:
                self._line(event.text.strip(), "yellow")
            self._begin()
        elif isinstance(event, Restarted):
            self._end_action()
            self._line("a log-prob was not finite: once more from the start", "yellow")
            self._begin()

    def end(self, trajectory: Trajectory) -> None:
        """Print how the trajectory ended."""
        self._text = trajectory.actions[-1].text
        self._end_action()
        pair = answer_pair(trajectory)
        many = counted(trajectory.searches, "search", "searches")
        written = counted(sum(len(a.token_ids) for a in trajectory.actions), "token", "tokens")
        about = f"{many}, {written}, {trajectory.seconds:.2f} s"
        if pair is None:
            why = "no turn is left" if trajectory.finish == "turns" else "no room is left for more tokens"
            self._line(f"no answer: {why} ({about})", "yellow")
        else:
            self._console.print(
                Text.assemble(
                    "answer: ", (harmless(pair.content.strip()), "bold green"), (f"  ({about})", "dim")
                ),
                soft_wrap=True,
            )
        self._begin()

    def logprobs(self, trajectory: Trajectory, texts: list[list[str]]) -> None:
        """Print each action's tokens with their log-probs in nats, and their mean. texts: of the tokens."""
        for number, (action, tokens) in enumerate(zip(trajectory.actions, texts, strict=True)):
            mean = sum(action.logprobs) / len(action.logprobs)
            self._line(f"action {number} ({action.kind}): mean log-prob {mean:.4f} nats per token", "bold")
            for token, logprob in zip(tokens, action.logprobs, strict=True):
                self._line(f"  {logprob:10.4f}  {harmless(token)!r}", "")

    def _end_action(self) -> None:
        self._print_to(len(self._text))
        if self._shown:
            self._console.print()
        self._text = ""
        self._shown = 0
        self._inside = []

    def _print_to(self, end: int) -> None:
        """Print the action's text up to a character, each part in the style of the tags that it stands in."""
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        at = 0
        for tag in _TAG.finditer(new):
            self._piece(new[at : tag.start()])
            if not tag[1]:
                self._inside.append(tag[2])
            self._piece(tag[0])
            if tag[1] and tag[2] in self._inside:
                del self._inside[self._inside.index(tag[2]) :]
            at = tag.end()
        self._piece(new[at:])

    def _piece(self, text: str) -> None:
        if text:
            style = STYLES[self._inside[-1]] if self._inside else ""
            self._console.print(Text(harmless(text), style), end="", soft_wrap=True)

    def _print_found(self, found: Retrieved) -> None:
        number = counted(len(found.hits), "document", "documents")
        self._line(f"  {number} in {found.seconds:.2f} s for {in_one_line(found.query, _WIDTH)!r}", "dim")
        width = self._console.width if self._console.is_terminal else _WIDTH
        for place, hit in enumerate(found.hits, 1):
            title, text = title_and_text(hit.contents)
            line = f"{place}. {title}: {text}" if title else f"{place}. {text}"
            self._line("  " + in_one_line(line, max(20, width - 2)), "magenta")

    def _line(self, text: str, style: str) -> None:
        self._console.print(Text(harmless(text), style), soft_wrap=True)


def _before_a_tag(text: str) -> int:
    """Characters of a text, still being written, that no tag whose end is missing stands in."""
    opened = text.rfind("<", max(0, len(text) - _LONGEST_TAG))
    return opened if opened >= 0 and ">" not in text[opened:] else len(text)
