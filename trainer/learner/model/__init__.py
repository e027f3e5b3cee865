"""The policy as a torch module: its files, its attention, its adapters and its memory."""
