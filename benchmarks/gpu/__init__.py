"""`python -m benchmarks.gpu`: the parts of training measured on one GPU."""
