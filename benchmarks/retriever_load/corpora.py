"""Large corpora for measurements: real passages, repeated and perturbed.

    python -m benchmarks.retriever_load.corpora SOURCE OUT PASSAGES [SEED]

Copy 0 is the source itself. In a further copy a third of the words of each passage are replaced by words
drawn from the whole source (so word frequencies stay as they are), and titles get a number.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def perturbed(source: Path, out: Path, passages: int, seed: int = 0) -> None:
    """Write `passages` passages to `out`."""
    rows = [json.loads(line) for line in source.read_text("utf-8").splitlines()]
    texts = [row["contents"].partition("\n") for row in rows]
    words = [text.split() for _, _, text in texts]
    pool = [word for text in words for word in text]
    draw = random.Random(seed)
    with out.open("w", encoding="utf-8") as file:
        for i in range(passages):
            copy, row = divmod(i, len(rows))
            contents = rows[row]["contents"]
            if copy:
                title = texts[row][0].strip('"')
                body = [
                    pool[int(draw.random() * len(pool))] if draw.random() < 0.33 else word
                    for word in words[row]
                ]
                contents = f'"{title} {copy}"\n{" ".join(body)}'
            file.write(json.dumps({"id": str(i), "contents": contents}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    perturbed(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *map(int, sys.argv[4:]))
