"""The tables of the GPU runs in docs/study.md: `python -m benchmarks.real_model`."""

from benchmarks.real_model.training import HALF_RATE, by_kind, half_rate, pair, pairs, table

if __name__ == "__main__":
    print("\n\n".join((table(), pair(), pairs(), table(HALF_RATE), half_rate(), by_kind())))
