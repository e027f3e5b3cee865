"""Index a corpus into a folder, once: what the one-shot service `index` of docker-compose.yml runs before the retriever starts.

usage: build_index.py CORPUS OUT     CORPUS: a file, or lab:train_corpus:0, the demo's made-up encyclopaedia
An index of the same corpus that is there already is kept.
"""

import sys

from trainer.cli import main
from trainer.models import resolve_file

if __name__ == "__main__":
    main(["index", "build", "--corpus", resolve_file(sys.argv[1]), "--out", sys.argv[2]])
