"""`python -m benchmarks.made_corpus`: see `passages`."""

from benchmarks.made_corpus.passages import main

if __name__ == "__main__":
    main()
