"""An example for the help page of each command. A test runs each through the parser."""

from __future__ import annotations

import typer

EXAMPLES = {
    "init": "unspiral init --model MODEL --data train.jsonl --corpus c.jsonl",
    "train": "unspiral train --config examples/demo.yaml run.name=first",
    "warm-start": "unspiral warm-start --config mine.yaml --out models/taught",
    "eval": "unspiral eval --config mine.yaml --checkpoint latest --limit 50",
    "eval compare": "unspiral eval compare plain.answers.jsonl llds.answers.jsonl",
    "eval page": "unspiral eval page results/plain results/llds -o both.html",
    "ask": "unspiral ask --checkpoint latest 'who wrote Hamlet?'",
    "demo": "unspiral demo --steps 4",
    "export": "unspiral export runs/demo-0 model/",
    "doctor": "unspiral doctor --config examples/demo.yaml",
    "runs": "unspiral runs",
    "report": "unspiral report runs/plain runs/llds --out both.html",
    "trajectories show": "unspiral trajectories show latest 12 --group 000012-0003",
    "trajectories find": "unspiral trajectories find latest Hamlet --wrong",
    "trajectories diff": "unspiral trajectories diff latest eval_before_greedy eval_after_greedy",
    "displacement": "unspiral displacement runs/plain --prompts 50 --samples 8",
    "trace": "unspiral trace latest 12 -o step12.json",
    "status": "unspiral status latest",
    "pause": "unspiral pause latest",
    "resume": "unspiral resume latest",
    "serve retriever": "unspiral serve retriever --index index/",
    "serve likelihood": "unspiral serve likelihood --store likelihood.db",
    "serve agent": "unspiral serve agent --checkpoint latest --port 8300",
    "serve control": "unspiral serve control --ray-address 127.0.0.1:6379",
    "index build": "unspiral index build --corpus corpus.jsonl --out index/",
    "index convert": "unspiral index convert dense/ --out small/ --type SQ8",
    "index add": "unspiral index add index/ --corpus more.jsonl",
    "index delete": "unspiral index delete index/ 4711",
    "index merge": "unspiral index merge index/",
    "index push": "unspiral index push dense/ --to qdrant+http://127.0.0.1:6333/wiki",
    "index info": "unspiral index info index/",
    "index search": "unspiral index search --index index/ 'who wrote Hamlet?'",
    "data validate": "unspiral data validate questions.jsonl",
    "data convert": "unspiral data convert questions.parquet questions.jsonl",
    "data passages": "unspiral data passages notes/ corpus.jsonl",
    "model fetch": "unspiral model fetch smollm2-135m",
    "model list": "unspiral model list",
    "likelihood prune": "unspiral likelihood prune latest --keep-steps 10",
    "likelihood export": "unspiral likelihood export latest tables/",
    "monitor replay": "unspiral monitor replay latest --json",
    "config show": "unspiral config show --config mine.yaml learner.lr=1e-5",
    "config explain": "unspiral config explain learner",
    "config schema": "unspiral config schema",
    "workers list": "unspiral workers list latest --json",
    "workers scale": "unspiral workers scale 4 latest",
    "workers drain": "unspiral workers drain w2.1 latest",
}


def example_of(command: str) -> str | None:
    """The last line of a command's help page; None for a command that has no example."""
    return f"Example: {EXAMPLES[command]}" if command in EXAMPLES else None


def give_examples(app: typer.Typer, prefix: str) -> None:
    """Put each command's example at the end of its help page. prefix: the name of the app, with a space
    behind."""
    for command in app.registered_commands:
        command.epilog = example_of(f"{prefix}{command.name}")
