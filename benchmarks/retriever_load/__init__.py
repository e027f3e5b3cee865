"""What `benchmarks.retriever` measures with: larger corpora, load over HTTP, and the usual set-up."""
