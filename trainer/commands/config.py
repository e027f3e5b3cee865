"""`unspiral config`: look at the configuration."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from trainer.commands import completion
from trainer.commands.options import ConfigFile, Overrides
from trainer.config.explain import explain
from trainer.config.remarks import remarks
from trainer.config.schema import Config, dump_config, load_config

config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration."""
    settings = load_config(config, overrides or [])
    typer.echo(dump_config(settings), nl=False)
    for remark in remarks(settings):
        typer.echo(remark, err=True)


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str | None,
        typer.Argument(
            autocompletion=completion.keys,
            help="A section or key, such as learner.lr.",
        ),
    ] = None,
) -> None:
    """Print what the keys of a section mean, with their defaults; without one, the sections."""
    typer.echo(explain(key))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema, with the meaning of each key."""
    typer.echo(json.dumps(Config.model_json_schema(by_alias=True), indent=1))
