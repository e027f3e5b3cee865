"""`unspiral config`: look at the configuration."""

from __future__ import annotations

import json

import typer

from trainer.commands.options import ConfigFile, Overrides
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


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema, with the meaning of each key."""
    typer.echo(json.dumps(Config.model_json_schema(by_alias=True), indent=1))
