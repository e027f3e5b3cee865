"""Index a corpus into a folder: the command of the one-shot service `index` in docker-compose.yml.

    build_index.py CORPUS OUT     CORPUS is a file, or lab:train_corpus:0, the demo's made-up encyclopaedia

It keeps an index of the same corpus. It replaces one of another corpus, or of another version of this
program, once the new one is complete.
"""

import sys
from pathlib import Path

from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import checksum
from retriever_service.index_folder.description import read_info
from trainer.commands.cli import main
from trainer.data.models import resolve_file
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files (lab:train_corpus:0)


def arguments(corpus: str, out: str) -> list[str]:
    """The command line of `unspiral index build`."""
    file = resolve_file(corpus)
    try:
        other = Path(file).is_file() and read_info(out).corpus_sha256 != checksum(file)
    except IndexInvalid as error:  # none is there, or the build says what is wrong with it
        other = error.other_format
    return ["index", "build", "--corpus", str(file), "--out", out, *(["--overwrite"] if other else [])]


if __name__ == "__main__":
    main(arguments(sys.argv[1], sys.argv[2]))
