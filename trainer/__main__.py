"""`python -m trainer` and the command `unspiral`."""

import signal
import sys

from trainer.name_clash import LACKS, clash_of

if sys.argv[1:3] == ["serve", "retriever"]:  # as in retriever_service/__main__.py
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

try:
    from trainer.commands.cli import main as run
except KeyboardInterrupt:  # Ctrl-C while the program still loads
    sys.exit(130)
except ImportError as error:
    if (line := clash_of(error)) is None:
        raise
    sys.stderr.write(f"unspiral: {line}\n")
    sys.exit(LACKS)


def main() -> None:
    """The command line. Ctrl-C that no command has handled ends it silently, with 130."""
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
