"""Parts of `python -m benchmarks.gpu_sync`."""
