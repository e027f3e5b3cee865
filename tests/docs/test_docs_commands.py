"""The commands of README and docs, read out of the pages.

A block ```sh is run here as it stands, block after block of a page in one folder, unless the line above it
says why not: `<!-- not run: REASON -->`. A command outside of such blocks is a fault, but for requests, which
test_docs_curl.py sends. What is not run is parsed: each command of ours must exist and take
its options and arguments, and its configuration keys must be keys of the configuration. Blocks for a GPU,
root or a cluster, and those that take minutes, are parsed alone.
"""

import json
import re

import pytest
import typer
from page_commands import PAGES, as_typed, blocks
from places import ROOT
from rollout_models import tiny_model
from test_examples import commands

from services.common.errors import UserError
from services.likelihood.exports.mirrors import TensorBoardMirror
from services.likelihood.records import StepRecord
from services.likelihood.store.opening import open_store
from trainer.commands.cli import app
from trainer.config.schema import Config, load_config, paths_of

REASONS = {
    "gpu": "needs a GPU",
    "root": "needs root, or Docker",
    "cluster": "needs a Ray or Kubernetes cluster",
    "network": "fetches packages or models",
    "minutes": "takes minutes",
    "server": "runs until it is stopped, or asks one that runs",
    "a trained run": "needs a run or results that took minutes; test_demo.py runs those of README and ask.md",
    "another trainer": "needs verl, TRL, OpenRLHF, SkyRL or slime",
}
BLOCKS = [block for page in PAGES for block in blocks(page)]


def test_each_block_that_is_not_run_has_a_reason_of_the_list():
    assert {b.why for b in BLOCKS} - {None} <= set(REASONS)
    total = sum(page.read_text(encoding="utf-8").count("\n```sh\n") for page in PAGES)
    assert total == len(BLOCKS) > 30
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not run:") for page in PAGES)
    assert marks == sum(b.why is not None for b in BLOCKS), "a mark stands right above its block"


COMMAND = (
    r"(?:[A-Z_]+=\S+ )*(?:unspiral|python3?|pip|uv|make|docker|kubectl|ray|pytest|git|deploy/\S+\.sh) .*$"
)
INDENTED = re.compile(rf"^(?: {{4,}}(?:\$ )?|\$ ){COMMAND}", re.M)
AT_THE_MARGIN = re.compile(rf"^{COMMAND}", re.M)
OTHER_FENCE = re.compile(r"^```(?:|bash|shell|console)\n(.*?)^```", re.M | re.S)


def escaped(text):
    """Commands outside of the blocks that are run or marked."""
    rest = re.sub(r"^```sh\n.*?^```", "", text, flags=re.M | re.S)
    return [*INDENTED.findall(rest), *AT_THE_MARGIN.findall("".join(OTHER_FENCE.findall(rest)))]


def test_no_command_stands_where_nothing_runs_it():
    text = "    unspiral runs\n\n```sh\nunspiral runs\n```\n\n    $ make demo\n\n    unspiral: no run\n"
    assert escaped(text) == ["    unspiral runs", "    $ make demo"]
    assert escaped("```\n$ make demo\nunspiral: no run\n```\n") == ["$ make demo"]
    assert escaped("```bash\npip install .\n```\n\nmake docs is a target\n") == ["pip install ."]
    found = {page.name: escaped(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def parsed(words):
    """Raises where click would not take these words: an argument that is missing counts too."""
    command = typer.main.get_command(app)
    context = command.make_context("unspiral", list(words[:1]), resilient_parsing=True)
    path, rest = list(words[:1]), list(words[1:])
    if words[0].startswith("--"):
        return
    command = command.commands[words[0]]
    while hasattr(command, "commands"):
        path.append(rest[0])
        command = command.commands[rest.pop(0)]
    if words[:2] == ["eval", "compare"]:
        return  # a command below a command: test_cli_grammar.py has it
    command.make_context(" ".join(path), rest, parent=context)


def keys_of(words):
    return [w.partition("=")[0] for w in words if re.match(r"^[a-z_]+(\.[a-z_]+)+=", w)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_of_ours_parse_and_their_keys_are_keys(page, tmp_path):
    known = set(paths_of(Config))
    for words in (w for b in blocks(page) for w in commands(f"```sh\n{b.text}```\n")):
        parsed([re.sub(r"^\[|\]$", "", w) for w in words if w not in ("<", ">")])
        assert [key for key in keys_of(words) if key not in known] == [], words
        config = words[words.index("--config") + 1] if "--config" in words else ""
        if config.startswith("examples/"):
            changes = [w for w in words if keys_of([w])]
            load_config(ROOT / config, changes)


def test_a_command_that_lacks_an_argument_and_a_key_that_is_none_are_noticed():
    with pytest.raises(Exception, match=r"(?i)missing"):
        parsed(["train"])
    assert keys_of(["train", "learner.lrr=1"]) == ["learner.lrr"] and "learner.lrr" not in paths_of(Config)
    with pytest.raises(UserError):
        load_config(ROOT / "examples" / "demo.yaml", ["learner.lrr=1"])


def recorded(folder):
    """A run of ours, a run of TRL's, event files of TensorBoard, and a likelihood store."""
    steps = [{"step": n, "reward/mean": 0.1 * n, "grad_norm": 1.0} for n in range(1, 6)]
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in steps))
    state = {
        "log_history": [{"step": m["step"], "reward": m["reward/mean"], "grad_norm": 1.0} for m in steps]
    }
    (folder / "trainer_state.json").write_text(json.dumps(state))
    mirror = TensorBoardMirror(folder / "tensorboard")
    store = open_store(str(folder / "likelihood.db"))
    for step in steps:
        metrics = {name: value for name, value in step.items() if name != "step"}
        mirror.step("my-run", step["step"], 1.0, metrics, None)
        store.put_step("mine", StepRecord(step=step["step"], metrics=metrics, trajectories=[]))
    store.close()
    mirror.close()


@pytest.fixture
def folder(tmp_path):
    """What a reader has who follows a page: a model, questions, a corpus, and recorded runs."""
    recorded(tmp_path)
    tiny_model(tmp_path / "models" / "mine")
    rows = [(f"q{i}", f"where is n{i} ?", [f"n{i + 1}"], "mine") for i in range(12)]
    for name, part in (("questions", rows[:8]), ("held_out", rows[8:])):
        names = ("id", "question", "golden_answers", "data_source")
        lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    passages = [{"id": str(i), "contents": f'"n{i}"\nn{i} is where n{i + 1} is'} for i in range(20)]
    for name, of in (("corpus", passages[:12]), ("new", passages[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in of))
    (tmp_path / "gone.txt").write_text("3\n")
    (tmp_path / "clocks.csv").write_text("Object No,Name,Description\n7,Clock 7,It stands where n1 is\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "clocks.md").write_text("# Clocks\n\nClock 7 stands where n1 is.\n")
    return tmp_path


MINE = """
run: {name: mine}
model: {path: models/mine}
data: {train: questions.jsonl}
retriever: {index: index/}
"""
RUN_HERE = [page for page in PAGES if any(b.why is None for b in blocks(page))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda p: p.name)
def test_blocks_without_a_mark_run_as_they_stand(page, folder):
    if "--out mine.yaml" not in page.read_text(encoding="utf-8"):
        (folder / "mine.yaml").write_text(MINE)
    for block in (b for b in blocks(page) if b.why is None):
        done = as_typed(block.text, folder)
        assert done.returncode == 0, f"{page.name}, line {block.line}: {done.stdout}{done.stderr}"
