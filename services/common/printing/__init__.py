"""What every command prints: the console, and commands as they can be typed here."""
