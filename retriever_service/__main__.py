"""`python -m retriever_service`: the retriever without the trainer's command line."""

from __future__ import annotations

import signal
import sys

if sys.argv[1:2] == ["serve"]:  # before anything that takes time: the signal waits for the `hold` of `serve`
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import typer

from retriever_service.cli import index_app
from retriever_service.serve import serve_retriever
from services.common.errors import UnspiralError
from services.common.printing.harmless import print_whatever_comes
from services.common.printing.help_pages import in_house_style

app = typer.Typer(help="A retrieval service that speaks Search-R1's interface.", no_args_is_help=True)
app.add_typer(index_app, name="index")
app.command("serve")(serve_retriever)


def main() -> None:
    print_whatever_comes()
    try:
        in_house_style(typer.main.get_command(app))()
    except UnspiralError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
