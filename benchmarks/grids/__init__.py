"""The common part of the grids of runs: collapse, collapse_bench and barometer."""
