"""The runs of a real model on GPUs: tables and curves from the files in benchmarks/results/wiki_qa_0.5b."""
