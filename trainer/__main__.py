"""`python -m trainer` and the command `unspiral`. Ctrl-C while the program still loads ends it in silence,
too."""

import sys


def main() -> None:
    try:
        from trainer.commands.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
