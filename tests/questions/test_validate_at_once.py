"""`data validate --index PACKAGE.MODULE:NAME` asks a function as many questions at a time as it is told."""

from __future__ import annotations

import json

from command_line import fresh_folder, run  # noqa: F401

# A call returns only once the others have begun.
SEARCH = """
import threading
begun = threading.Barrier(4)

def search(query, topk):
    if query.startswith("which"):  # not the one that is asked when the function is opened
        begun.wait(60)
    return [("Ada wrote it.", 1.0)]
"""


def test_a_function_is_called_so_many_times_at_once(run, tmp_path):
    (tmp_path / "own_search_at_once.py").write_text(SEARCH)
    rows = [
        {"id": str(n), "question": f"which author wrote {n}?", "golden_answers": ["Ada"]} for n in range(8)
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("data", "validate", "q.jsonl", "--index", "own_search_at_once:search", "--json")
    status, out, err = run(*asked, "--concurrency", "4")
    assert (status, err) == (0, "")
    assert json.loads(out)["index"]["by_source"] == {"q": {"asked": 8, "found": 8, "verdicts": 0}}
