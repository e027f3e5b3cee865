"""The barometer: runs of the laboratory, healthy and made sick on purpose, on which the monitor is judged."""
