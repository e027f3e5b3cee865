"""A store is given by its run, alone or behind --store, in every command that takes one."""

import pytest
from command_line import fresh_folder, run, runs  # noqa: F401

from services.likelihood.records import StepRecord
from services.likelihood.store.sqlite.store import SQLiteStore

PRUNE = ("likelihood", "prune", "--keep-steps", "1")


@pytest.fixture
def stores(runs):
    """The newest run has a store with one step."""
    with_one_step(runs / "demo-1" / "likelihood.db", "demo-1")
    return runs


def with_one_step(file, name):
    store = SQLiteStore(file)
    store.put_step(name, StepRecord(step=0, metrics={"reward/mean": 0.5}))
    store.close()


@pytest.mark.parametrize(
    "given",
    [
        "demo-1",
        "runs/demo-1",
        "latest",
        "runs/demo-1/likelihood.db",
        "demo-1/likelihood.db",
        "demo-1/metrics.jsonl",
    ],
)
def test_a_store_has_the_same_names_in_every_command(run, stores, monkeypatch, given):
    served = []

    class Launch:
        ServeSettings = dict

        def serve_forever(settings, announce):
            served.append(settings["store"])
            return 0

    monkeypatch.setattr("services.likelihood.cli.import_module", lambda name: Launch)
    for way in ([given], ["--store", given]):
        status, out, err = run(*PRUNE, *way)
        assert (status, out) == (0, "0 runs and 0 trajectories forgotten\n"), err
        status, out, err = run("likelihood", "export", *way, "-o", "tables")
        assert (status, out.splitlines()[0]) == (0, "tables/demo-1-steps.parquet"), err
        assert run("serve", "likelihood", *way)[0] == 0
    status, out, _ = run("likelihood", "export", given, "others")
    assert (status, out.splitlines()[0]) == (0, "others/demo-1-steps.parquet")
    assert (
        served == [f"runs/{given.removeprefix('runs/')}"] * 2
        if given.endswith(".db")
        else served == ["runs/demo-1/likelihood.db"] * 2
    )


def test_one_word_is_the_place_to_write_to_unless_it_names_a_store(run, stores):
    status, _, err = run("likelihood", "export", "demo-1")
    assert (status, err) == (
        2,
        "unspiral: likelihood export: it is not said where to write; give --out PATH, or PATH at the end\n",
    )
    with_one_step(stores.parent / "likelihood.db", "mine")
    status, out, _ = run("likelihood", "export", "tables")
    assert (status, out.splitlines()[0]) == (0, "tables/mine-steps.parquet")
    status, out, _ = run("likelihood", "export", "demo-1", "--store", "latest")  # as it always was
    assert (status, out.splitlines()[0]) == (0, "demo-1/demo-1-steps.parquet")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            (*PRUNE, "dmo-1"),
            "likelihood store dmo-1: no such file; expected a store's file or address, a run, or latest; by "
            "default likelihood.db in the current folder; did you mean runs/demo-1?",
        ),
        (
            ("likelihood", "export", "tables"),
            "likelihood store likelihood.db: no such file; expected a store's file or address, a run, or "
            "latest; by default likelihood.db in the current folder; `unspiral runs` lists those that are "
            "there",
        ),
        (
            (*PRUNE, "demo-1", "--store", "latest"),
            "likelihood prune: demo-1 and --store both name a store; give one of them",
        ),
        (
            (*PRUNE, "demo-0"),
            "--store demo-0: no likelihood.db in runs/demo-0; a run with a store.url keeps it there",
        ),
    ],
)
def test_a_store_that_is_none_is_told_with_what_is_expected(run, stores, argv, says):
    status, _, err = run(*argv)
    assert status == 2 and err == f"unspiral: {says}\n"


def test_a_store_given_alone_comes_before_that_of_the_environment(run, stores, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_STORE", "runs/demo-0/likelihood.db")
    assert run(*PRUNE)[0] == 2
    assert run(*PRUNE, "demo-1")[0] == 0
