"""`--json` of commands that end with a result: the same facts as their words, for programs."""

import json
import subprocess

import pytest
from command_line import COMMANDS, fresh_folder, run, runs  # noqa: F401

from trainer.commands.terminal import prints_aside
from trainer.commands.work import runs as commands

WITHOUT = {
    "config explain", "config show", "config schema", "init", "demo",  # text or files are what they are for
    "data convert", "data passages", "model fetch", "trace",
    "index build", "index add", "index delete", "index merge", "index convert",
    "index push",  # `index info --json` tells what was made
    "likelihood prune", "likelihood export", "eval page",
    "serve retriever", "serve likelihood", "serve agent", "serve control",
}  # fmt: skip


def test_every_command_with_a_result_has_json():
    found = {
        " ".join(path)
        for path, command in COMMANDS.items()
        if not any("--json" in one.opts for one in command.params)
    }
    assert found == WITHOUT


def test_index_search_tells_rank_score_and_contents(run, tmp_path):
    (tmp_path / "c.jsonl").write_text(
        '{"id": "7", "contents": "\\"Rome\\"\\nA town."}\n{"id": "8", "contents": "\\"Arl\\"\\nA river."}\n'
    )
    assert run("index", "build", "c.jsonl", "--out", "index")[0] == 0
    status, out, err = run("index", "search", "index", "rome", "--json")
    (hit,) = json.loads(out)
    assert (status, err, hit["rank"], hit["id"], hit["contents"]) == (0, "", 1, "7", '"Rome"\nA town.')
    assert hit["score"] > 0
    status, out, err = run("index", "search", "index", "zzz", "--json")
    assert (status, json.loads(out)) == (0, [])


def test_report_tells_its_file_and_the_steps_of_each_run(run, runs):
    (runs / "demo-0" / "metrics.jsonl").write_text("")
    status, out, err = run("report", "demo-1", "demo-0", "--json")
    told = json.loads(out)
    assert status == 0 and told["report"] == "runs/demo-1/report.html"
    assert told["steps"]["runs/demo-1"] > 10 and told["steps"]["runs/demo-0"] == 0
    assert "no step was recorded yet" in err


def test_export_tells_the_checkpoint_that_was_taken(run, runs, monkeypatch):
    monkeypatch.setattr(commands, "export_checkpoint", lambda found, out: None)
    status, out, _ = run("export", "demo-1", "model", "--json")
    assert status == 0
    assert json.loads(out) == {"checkpoint": "runs/demo-1/checkpoints/step_000090", "out": "model"}


@pytest.mark.parametrize("limit", [1, 5])
def test_diff_tells_a_prompt_a_line_with_both_sides(run, runs, limit):
    folder = runs / "demo-0" / "trajectories"
    folder.mkdir()
    about = {"golden_answers": ["b"], "data_source": "s", "worker": "w", "finish": "answer"}
    for step, reward in ((1, 0.0), (2, 1.0)):
        lines = [
            about
            | {
                "uid": f"{step}-{q}", "group": q, "question": q, "reward": reward if q == "who?" else 0.0,
                "segments": [{"by": "model", "kind": "answer", "text": "<answer> b </answer>"}],
            }
            for q in ("where?", "who?")
        ]  # fmt: skip
        (folder / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, err = run("trajectories", "diff", "demo-0", "1", "2", "--json", "--limit", str(limit))
    told = [json.loads(line) for line in out.splitlines()]
    assert (status, err, [one["question"] for one in told]) == (0, "", ["who?", "where?"][:limit])
    assert told[0]["change"] == 1.0 and told[0]["before"]["right"] == 0 and told[0]["after"]["right"] == 1
    assert told[0]["after"]["source"] == "step_000002"
    assert told[0]["after"]["trajectories"][0]["uid"] == "2-who?"


def test_what_a_part_of_the_users_prints_is_no_part_of_the_json(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "talkative.py").write_text(
        "print('loaded')\ndef metric(trajectories, rewards):\n    print('called')\n    return {'my/n': 1.0}\n"
    )
    (tmp_path / "c.yaml").write_text(
        "{model: {path: m}, data: {train: t}, retriever: {url: 'http://x'}, "
        "trainer: {metrics: ['talkative:metric']}}"
    )
    _, out, err = run("doctor", "--role", "retriever", "--config", "c.yaml", "--json")
    (row,) = [one for one in json.loads(out)["findings"] if one["what"] == "trainer.metrics"]
    assert (row["level"], row["seen"]) == ("good", "talkative:metric: my/n")
    assert err.splitlines() == ["loaded", "called"]


def test_what_a_program_prints_that_a_part_of_the_users_starts_is_no_part_of_the_result(capfd):
    with prints_aside(True):
        subprocess.run(["echo", "from a program"], check=True)
        print("from the part")
    print("the result")
    subprocess.run(["echo", "later"], check=True)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["later", "the result"]
    assert sorted(err.splitlines()) == ["from a program", "from the part"]
