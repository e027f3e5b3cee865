"""The common part of the grids of runs: collapse, collapse_bench, barometer and one_search."""
