"""Trajectories on a terminal: tags marked, documents folded to a line, and each token coloured by what the
update did to it."""

from __future__ import annotations

import difflib
import re

from rich.console import Console
from rich.text import Text

from services.common.counting import counted
from services.common.printing.harmless import harmless, in_one_line
from services.likelihood.microscope.record import Document, SampledTrajectory, Written
from trainer.commands.look.stored import Run, StoredTrajectory, change_of, changes_of

FELL = ((-0.5, "bold white on red"), (-0.1, "bold red"), (-0.01, "red"))
"""Styles of a token by the least change of its log-prob, in nats."""
ROSE = "blue"
MOST_FALLEN = 5
"""Tokens that are named as those that fell most, of an action."""
_OBSERVED = 200
"""Characters of an observation without documents that are shown."""
_TAG = re.compile(r"(</?(?:think|search|answer|information)>)")
_WORD = re.compile(r"\s+|[^\s]+")


def head_line(run: Run, t: StoredTrajectory, tokens: SampledTrajectory | None = None) -> Text:
    """One trajectory on one line."""
    right = run.is_right(t)
    reward = "-" if t.reward is None else f"{t.reward:.3g}"
    change = change_of(tokens) if tokens is not None else None
    line = Text.assemble(
        (f"{harmless(t.uid)}  ", "bold"),
        (f"{'right' if right else 'wrong'} {reward}", "green" if right else "red"),
        f"  {t.finish}, {counted(t.searches, 'search', 'searches')}",
        "  invalid" if t.invalid else "",
        "" if change is None else f"  {change:+.4f} nats per token",
        "  ",
        in_one_line(t.question, 60),
        (f" -> {in_one_line(t.answer, 30)}" if t.answer else " -> no answer", "bold"),
    )
    return line


def show(console: Console, run: Run, t: StoredTrajectory, tokens: SampledTrajectory | None) -> None:
    """A whole trajectory. tokens: the same token by token, where the store has it."""
    console.print(head_line(run, t, tokens), soft_wrap=True)
    _print(console, f"question: {t.question}", "bold")
    golden = ", ".join(t.golden_answers) or "none is known"
    _print(console, f"golden answers: {golden}   ({t.data_source}, worker {t.worker})", "dim")
    if tokens is not None and tokens.scoring is not None and tokens.scoring.normalized is not None:
        equal = [g.normalized or g.text for g in tokens.scoring.golden if g.equal]
        verdict = f"equals {equal[0]!r}" if equal else "equals none of them"
        _print(console, f"scored answer: {tokens.scoring.normalized!r}, which {verdict}", "dim")
    if tokens is not None:
        _print(console, f"advantage {tokens.advantage:+.4g}", "dim")
    written = [s for s in tokens.segments if isinstance(s, Written)] if tokens is not None else []
    action = 0
    for s in t.segments:
        if s.by != "model":
            if not (action and action <= len(written) and written[action - 1].documents):
                _print(console, in_one_line(s.text, _OBSERVED), "magenta")
            continue
        if action < len(written) and "".join(written[action].tokens).strip() == s.text.strip():
            _show_tokens(console, written[action])
        else:
            _show_text(console, s.text)
            if s.documents:
                _print(console, f"  documents: {', '.join(s.documents)}", "magenta")
        action += 1
    console.print()


def _show_text(console: Console, text: str) -> None:
    shown = Text()
    for i, part in enumerate(_TAG.split(text)):
        shown.append(harmless(part), "cyan" if i % 2 else "")
    console.print(shown, soft_wrap=True)


def _show_tokens(console: Console, action: Written) -> None:
    changes = changes_of(action)
    held = set(action.held or ())
    shown = Text()
    for i, token in enumerate(action.tokens):
        style = style_of(changes[i]) if changes else ""
        shown.append(harmless(token), f"{style} underline" if i in held else style)
    console.print(shown, soft_wrap=True)
    if changes:
        order = sorted(range(len(changes)), key=lambda i: changes[i])
        fell = [i for i in order[:MOST_FALLEN] if changes[i] < 0]
        named = ", ".join(f"{harmless(action.tokens[i])!r} {changes[i]:+.4f}" for i in fell) or "none"
        share = sum(c < 0 for c in changes) / len(changes)
        kept = f"; LLDS pulls up {len(held)}" if action.held is not None else ""
        _print(console, f"  fell most: {named}; {share:.0%} of {len(changes)} tokens fell{kept}", "dim")
    for place, document in enumerate(action.documents or (), 1):
        _print(console, f"  {place}. {_document(document)}", "magenta")


def style_of(change: float) -> str:
    """The style of a token whose log-prob changed by so many nats."""
    return next((style for least, style in FELL if change <= least), ROSE if change >= 0.01 else "")


def _document(document: Document) -> str:
    return in_one_line(f"{document.id} {document.title or ''}: {document.text or 'no text is kept'}", 160)


def word_diff(before: str, after: str) -> Text:
    """Two texts in one: words that went struck out in red, new ones in green. Without colours they stand in
    [-brackets-] and {+braces+}, too."""
    a = _WORD.findall(before)
    b = _WORD.findall(after)
    out = Text()
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            out.append(harmless("".join(a[i:j])))
            continue
        if i < j:
            out.append(f"[-{harmless(''.join(a[i:j]))}-]", "red strike")
        if k < m:
            out.append(f"{{+{harmless(''.join(b[k:m]))}+}}", "green")
    return out


def _print(console: Console, text: str, style: str) -> None:
    console.print(Text(harmless(text), style), soft_wrap=True)
