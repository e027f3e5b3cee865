"""A retriever over a corpus, in a process of its own, until its standard input ends.

    python -m benchmarks.gpu.retriever corpus.jsonl

Prints its address once it is ready. `served` starts one from another process, and imports nothing of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(corpus: Path) -> Iterator[str]:
    """The address of a retriever over the corpus."""
    command = [sys.executable, "-m", "benchmarks.gpu.retriever", str(corpus.resolve())]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
        if url is None:
            raise SystemExit(f"the retriever ended with status {process.wait(30)}")
        yield url
    finally:
        process.stdin.close()
        process.wait(30)


def main() -> None:
    from retriever_service.http.launch import serve_in_thread
    from retriever_service.indexing.build import build_index
    from retriever_service.settings import ServerSettings

    with tempfile.TemporaryDirectory() as folder:
        build_index(Path(sys.argv[1]), Path(folder) / "index")
        with serve_in_thread(ServerSettings(index=str(Path(folder) / "index"), port=0)) as server:
            print(server.url, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
