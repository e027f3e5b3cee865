"""What a turn of a rollout costs beside the model, and how fast weights come to the workers."""
