"""From a sampled batch to new weights on the workers: batches, the learner's update, probes, sync."""
