"""`python -m trainer` and the command `unspiral`."""

import sys

try:
    from trainer.commands.cli import main
except KeyboardInterrupt:  # Ctrl-C while the program still loads
    sys.exit(130)

if __name__ == "__main__":
    main()
