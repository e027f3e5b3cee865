"""Files in which a plain `unspiral eval` keeps its answers, and how it asked."""

from __future__ import annotations

from pathlib import Path


def stem_of(answers: Path) -> str:
    """`llds` of `llds.answers.jsonl`; empty of `answers.jsonl`."""
    return answers.name.removesuffix(".jsonl").removesuffix("answers").rstrip(".")


def protocol_file(answers: Path) -> Path:
    """How it asked: `llds.protocol.json` beside `llds.answers.jsonl`, and `protocol.json` beside
    `answers.jsonl`."""
    return answers.with_name(f"{stem_of(answers)}.protocol.json".lstrip("."))
