"""`python -m trainer` and the command `unspiral`."""

import signal
import sys

from trainer.name_clash import LACKS, clash_of

if sys.argv[1:3] == ["serve", "retriever"]:  # as in retriever_service/__main__.py
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

try:
    from services.common.processes.leaving import bounded_end
    from trainer.commands.cli import main as run
    from trainer.session.output import complain
except KeyboardInterrupt:  # Ctrl-C while the program still loads
    sys.exit(130)
except ImportError as error:
    if (line := clash_of(error)) is None:
        raise
    sys.stderr.write(f"unspiral: {line}\n")
    sys.exit(LACKS)


def main() -> None:
    """The command line. Ctrl-C that no command has handled ends it silently, with 130. Threads of a user's
    own that hang do not keep the process."""
    status = 1  # of a fault of ours, whose traceback Python prints
    try:
        run()
    except KeyboardInterrupt:
        status = 130
        sys.exit(status)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        bounded_end(status, lambda line: complain(f"unspiral: {line}"))


if __name__ == "__main__":
    main()
