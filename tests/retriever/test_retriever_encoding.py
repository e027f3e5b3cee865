"""A corpus encoded in several processes: the same bits as by one, kills included, and how fast it goes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from places import ROOT

from retriever_service.dense import encoding
from retriever_service.dense.encoder import Encoder, EncoderSettings
from retriever_service.index_folder.description import verify
from retriever_service.indexing import pace
from retriever_service.indexing.build import build_index
from retriever_service.indexing.sinks import VectorSink
from services.common.errors import EnvironmentLacks
from tests.retriever.retriever_fixtures import CORPUS
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

pytest.importorskip("sentence_transformers")
PASSAGES = 186
PART = 20


@pytest.fixture(scope="module")
def options(tiny_encoder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "PART", PART)
        patched.setattr(VectorSink, "chunk_passages", PART)
        yield {"backend": "hybrid", "model": tiny_encoder, "family": "e5"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, options):
    """The files of an index that one process has made."""
    out = tmp_path_factory.mktemp("alone") / "index"
    build_index(CORPUS, out, **options, encoders=1)
    return verify(out).files


PROGRAM = """
import os, signal, sys
from retriever_service.dense import encoding
from retriever_service.indexing.build import build_index
from retriever_service.indexing.sinks import VectorSink
encoding.PART = VectorSink.chunk_passages = 20
def dies(stage, share, text):
    if stage == "scan" and text.startswith("80 passages"):
        import psutil
        print(*[child.pid for child in psutil.Process().children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
build_index(sys.argv[1], sys.argv[2], backend="hybrid", model=sys.argv[3], family="e5", encoders=2,
            progress=dies)
"""


@pytest.mark.slow
def test_a_build_in_processes_that_is_killed_goes_on_to_the_bytes_of_one_process(tmp_path, options, alone):
    out = tmp_path / "index"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, CORPUS, out, options["model"]], cwd=ROOT, timeout=180,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = []
    for pid in done.stdout.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            children.append(psutil.Process(int(pid)))
    assert psutil.wait_procs(children, 60)[1] == []  # none outlives the build
    assert not out.exists()
    told = []
    build_index(CORPUS, out, **options, encoders=1, progress=lambda stage, share, text: told.append(text))
    assert "going on after 80 passages" in told
    assert verify(out).files == alone


@pytest.mark.slow
def test_an_encoder_that_is_killed_is_one_line_and_the_build_goes_on(tmp_path, options, alone):
    def encoders() -> list[psutil.Process]:
        found = []
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # other tests' children end too
                if one not in before and "spawn_main" in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def kills(stage: str, share: float, text: str) -> None:
        if stage == "scan" and text.startswith("40 passages"):
            encoders()[0].kill()

    before = psutil.Process().children()
    with pytest.raises(EnvironmentLacks, match=r"encoder on cpu: its process ended .*-9.*the same command"):
        build_index(CORPUS, tmp_path / "index", **options, encoders=2, progress=kills)
    assert encoders() == []
    told = []
    build_index(
        CORPUS, tmp_path / "index", **options, encoders=2,
        progress=lambda stage, share, text: told.append(text),
    )  # fmt: skip
    assert "going on after 40 passages" in told
    assert verify(tmp_path / "index").files == alone


def test_what_fails_in_an_encoder_is_one_line(tmp_path, tiny_encoder):
    encoder = Encoder(EncoderSettings(tiny_encoder, "e5"))
    encoder.settings = EncoderSettings(str(tmp_path / "gone"), "e5")  # the folder of the model went away
    pool = encoding.EncoderPool(encoder, 1)
    try:
        with pytest.raises(
            EnvironmentLacks, match=r"encoder on cpu: UserError: encoder .*gone: no such folder"
        ):
            pool.passages(["a river"])
    finally:
        pool.close()


def test_the_bits_of_passages_do_not_depend_on_the_threads(tiny_encoder):
    import torch

    texts = [f"passage {'word ' * (number % 40)}{number}" for number in range(21)]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            encoder = Encoder(EncoderSettings(tiny_encoder, "e5"))
            found.append((encoder.passages(texts).tobytes(), encoder.passages(texts[:1]).tobytes()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("all_of_them", "processes", "each"), [(6, 1, 6), (6, 4, 1), (6, 3, 2), (1, 2, 1)])
def test_processes_share_the_threads_that_the_build_may_use(all_of_them, processes, each, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: all_of_them)
    assert encoding._threads(processes) == each


def test_the_progress_has_tokens_per_second_and_the_time_left(tmp_path, options, monkeypatch):
    monkeypatch.setattr(pace, "_LEAST_SECONDS", 0.0)
    told = []
    build_index(
        CORPUS, tmp_path / "index", **options, progress=lambda stage, share, text: told.append((stage, text))
    )
    first, *_, last = [text for stage, text in told if stage == "scan"]
    passages, speed, left = first.split(", ")
    assert passages == "20 passages" and left.endswith(" s left")
    number, unit = speed.split()
    assert unit == "tokens/s" and int(number.replace(",", "")) > 0
    assert last.startswith("186 passages, ") and "left" not in last


def test_tokens_are_counted_without_padding(tiny_encoder):
    encoder = Encoder(EncoderSettings(tiny_encoder, "auto"))
    encoder.passages(["river", "river town river"])
    assert encoder.tokens == 3 + 5  # with the two signs at the ends of each text
    encoder.queries(["river"])
    assert encoder.tokens == 11


@pytest.mark.parametrize(
    ("passed", "done", "end", "text"),
    [
        (1.0, 10, 100, ""),
        (10.0, 10, 100, "2 min left"),
        (10.0, 20, 100, "40 s left"),
        (60.0, 10, 10_000, "16.6 h left"),
        (60.0, 100, 100, ""),
    ],
)
def test_the_time_left_is_of_this_run_alone(monkeypatch, passed, done, end, text):
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    one = pace.Pace(1_000)
    now[0] += passed
    assert one.left(1_000 + done, 1_000 + end) == text


def test_processes_in_the_middle_of_a_part_do_not_hold_up_the_end(tiny_encoder, monkeypatch):
    """Ctrl-C: the parent leaves its wait for vectors, and its children don't hear the signal."""
    pool = encoding.EncoderPool(Encoder(EncoderSettings(tiny_encoder, "e5")), 3)
    stopped = []

    def interrupted(device, process, pipe):
        stopped.extend(at_work for _, at_work, _ in pool._at_work)
        for at_work in stopped:
            psutil.Process(at_work.pid).suspend()
        raise KeyboardInterrupt

    monkeypatch.setattr(encoding, "_received", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.passages(["a passage"] * 6000)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 25  # ten seconds each, were they waited for
    assert [process.exitcode for process in stopped] == [-signal.SIGKILL] * 3
