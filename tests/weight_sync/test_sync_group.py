"""One group of a weight sync in this process: a sender and receivers in threads, over real gloo."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from services.contracts import WeightsReceiver
from services.rollout.pool.delivery import Delivery
from services.rollout.pool.roster import Roster
from services.settings import RolloutSettings, WeightSyncSettings
from services.weight_sync import (
    GroupBrokenError,
    GroupMismatchError,
    HalfWrittenError,
    WeightSyncError,
    choose_backend,
)
from services.weight_sync import group as group_module
from services.weight_sync.broadcast import BroadcastSource, WeightLender, WeightReceiver, listed, raise_failed
from services.weight_sync.group import Ticket, break_group, check_facts, host_store, offer_loan
from services.weight_sync.layout import ALIGNMENT, Layout

CPU = torch.device("cpu")
os.environ.setdefault(
    "RES_OPTIONS", "timeout:1 attempts:1"
)  # PyTorch looks up names when it connects; a test may be far from a server


class Model:
    """Tensors of several sizes; `load` writes into them, and may be told to fail."""

    def __init__(self, seed: int, dtype=torch.float32):
        random = torch.Generator().manual_seed(seed)
        shapes = {"embed": (300, 1000), "a": (7, 3), "b": (11,), "c": (1,), "d": (200, 500)}
        self.tensors = {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}
        self.fails_at, self.seconds, self.loaded = None, 0.0, []
        self.go_on = None
        """Where set, an event that a load waits for."""

    def items(self):
        return list(self.tensors.items())

    def load(self, items):
        for name, tensor in items:
            if name == self.fails_at:
                raise RuntimeError("out of memory")
            self.tensors[name].copy_(tensor)
            self.loaded.append(name)
        time.sleep(self.seconds)
        if self.go_on is not None:
            assert self.go_on.wait(120)

    def same(self, other):
        return all(torch.equal(t, other.tensors[n].to(t.dtype)) for n, t in self.tensors.items())


def settings(timeout=60.0, mib=1):
    return WeightSyncSettings(backend="gloo", timeout_seconds=timeout, bucket_mib=mib)


def source_of(model, **options):
    source = BroadcastSource(
        settings(**options), "gloo", CPU, str(model.items()[0][1].dtype).removeprefix("torch.")
    )

    def offer(version, *names):
        shapes = [(n, tuple(t.shape)) for n, t in model.items()]
        return source.offer(shapes, version, [WeightsReceiver(n) for n in names])

    return source, offer


def together(*calls, limit=120):
    """Run all at once; each one's error, or None."""
    errors = [None] * len(calls)

    def run(i):
        try:
            calls[i]()
        except Exception as e:
            errors[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(limit)
        assert not t.is_alive(), "a rank hangs"
    return errors


def taking(receiver, ticket, name, model, problem=None, part=0):
    ticket = Ticket.from_json(ticket.to_json())  # as it travels to vLLM's processes
    return lambda: receiver.receive(
        ticket,
        name,
        part,
        device=CPU,
        load=model.load,
        load_raw=model.load,
        own=listed(model.items()),
        problem=problem,
    )


def test_buckets_hold_every_tensor_once_aligned_and_a_large_one_alone():
    model = Model(0)
    layout = Layout(listed(model.items()), 10_000)
    assert [[p.name for p in b] for b in layout.buckets] == [["embed"], ["a", "b", "c"], ["d"]]
    assert all(p.offset % ALIGNMENT == 0 for b in layout.buckets for p in b)
    assert layout.nbytes == sum(t.numel() * 4 for _, t in model.items()) and layout.largest == 1_200_000
    buffers = [torch.empty(layout.largest, dtype=torch.uint8) for _ in range(2)]
    got = {}
    for pieces, bucket in zip(layout.buckets, layout.filled(iter(model.items()), buffers), strict=True):
        got |= {p.name: p.view(bucket).clone() for p in pieces}
    assert all(torch.equal(got[n], t) for n, t in model.items())
    for items, message in (
        (model.items()[:-1], r"go on with d \[200, 500\], and came with nothing more"),
        ([("embed", torch.empty(0)), *model.items()[1:]], r"came with embed \[0\]"),
        ([*model.items(), ("e", torch.empty(1))], "go on with e, which was not announced"),
    ):
        with pytest.raises(ValueError, match=message):
            list(layout.filled(iter(items), buffers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_is_used_again_while_its_members_stay_and_made_anew_when_they_change(dtype):
    sent = Model(1, dtype)
    source, offer = source_of(sent)
    workers = {name: (WeightReceiver(), Model(9, dtype)) for name in ("w0.1", "w1.1", "w2.1")}
    epochs, first = [], None
    for version, names in enumerate(
        [("w0.1", "w1.1"), ("w0.1", "w1.1"), ("w0.1", "w1.1", "w2.1"), ("w2.1",)], 1
    ):
        sent.tensors |= Model(version + 20, dtype).tensors
        update = offer(version, *names)
        ticket = update.payload
        epochs.append(ticket.epoch)
        assert update.nbytes == sum(t.numel() * t.element_size() for _, t in sent.items())
        first = first or ticket
        assert (ticket.weights is None) == (version == 2), "what comes is told once an epoch"
        calls = [taking(workers[n][0], ticket, n, workers[n][1]) for n in names]
        assert together(lambda: source.send(iter(sent.items())), *calls) == [None] * (1 + len(calls))
        for n in names:
            assert workers[n][1].same(sent)
    assert epochs[0] == epochs[1] and len(set(epochs)) == 3
    assert ticket.port == first.port, "one meeting place for all epochs of a learner"


def test_each_part_of_a_tensor_parallel_worker_is_a_rank():
    sent, parts = Model(1), {(name, part): Model(9) for name in ("w0.1", "w1.1") for part in (0, 1)}
    source = BroadcastSource(settings(), "gloo", CPU, "float32")
    shapes = [(n, tuple(t.shape)) for n, t in sent.items()]
    ticket = source.offer(shapes, 1, [WeightsReceiver("w0.1", 2), WeightsReceiver("w1.1", 2)]).payload
    assert ticket.ranks == {"w0.1": 1, "w1.1": 3}
    assert ticket.names == ["learner rank 0", *(f"worker {n} part {k}" for n, k in parts)]
    calls = [
        taking(WeightReceiver(), ticket, name, model, part=part) for (name, part), model in parts.items()
    ]
    assert together(lambda: source.send(iter(sent.items())), *calls) == [None] * 5
    assert all(model.same(sent) for model in parts.values())


def test_a_port_that_is_taken_is_never_asked_for():
    """A restart does not fail with "address in use": the ports of meeting places are the system's choice,
    also beside one another."""
    offers = [source_of(Model(1))[1](1, "w0.1").payload.port for _ in range(3)]
    sources = [source_of(Model(1)) for _ in range(3)]
    ports = [offer(1, "w0.1").payload.port for _, offer in sources]
    assert len(set(ports)) == 3 and 0 not in {*ports, *offers}


def test_a_rank_that_does_not_come_is_named_on_both_sides_within_the_timeout():
    sent = Model(1)
    source, offer = source_of(sent, timeout=4)
    ticket = offer(1, "w0.1", "w1.1").payload
    model, began = Model(2), time.monotonic()
    errors = together(
        lambda: source.send(iter(sent.items())), taking(WeightReceiver(), ticket, "w0.1", model)
    )
    assert time.monotonic() - began < 60 and not model.loaded
    for e in errors:
        assert type(e) is GroupBrokenError
        assert "weight_sync.timeout_seconds=4: worker w1.1 did not come" in str(e)


def test_a_worker_that_fails_to_load_ends_the_group_at_once_and_the_next_sync_works():
    sent = Model(1)
    source, offer = source_of(sent, timeout=90)
    good, bad, receivers = Model(2), Model(3), (WeightReceiver(), WeightReceiver())
    bad.fails_at, good.seconds = "embed", 0.5
    ticket, began = offer(1, "w0.1", "w1.1").payload, time.monotonic()
    errors = together(
        lambda: source.send(iter(sent.items())),
        taking(receivers[0], ticket, "w0.1", good),
        taking(receivers[1], ticket, "w1.1", bad),
    )
    assert time.monotonic() - began < 60
    assert type(errors[2]) is RuntimeError and "out of memory" in str(errors[2])
    told = [e for e in errors[:2] if e is not None]
    assert all(
        isinstance(e, GroupBrokenError) and "worker w1.1: RuntimeError: out of memory" in str(e) for e in told
    )
    ticket = offer(1, "w0.1").payload
    assert together(lambda: source.send(iter(sent.items())), taking(receivers[0], ticket, "w0.1", good)) == [
        None,
        None,
    ]
    assert good.same(sent)


@pytest.mark.slow
def test_a_rank_that_hangs_in_mid_broadcast_leaves_the_others_half_written_and_no_longer_than_the_timeout():
    sent = Model(1)
    source, offer = source_of(sent, timeout=6)
    hangs, model = Model(2), Model(3)
    hangs.go_on = threading.Event()
    for i in range(6):  # more buckets than the buffers that a sender may be ahead
        for m in (sent, hangs, model):
            m.tensors[f"more{i}"] = torch.full((300, 1000), float(m is sent))
    ticket, ended = offer(1, "w0.1", "w1.1").payload, []

    def let_go(call):
        """The rank that hangs goes on once both others have ended: they did not wait for it."""

        def run():
            try:
                call()
            finally:
                ended.append(call)
                if len(ended) == 2:
                    hangs.go_on.set()

        return run

    errors = together(
        let_go(lambda: source.send(iter(sent.items()))),
        let_go(taking(WeightReceiver(), ticket, "w0.1", model)),
        taking(WeightReceiver(), ticket, "w1.1", hangs),
    )
    assert type(errors[0]) is GroupBrokenError and isinstance(errors[1], HalfWrittenError)
    assert isinstance(errors[2], HalfWrittenError)


def test_whoever_learns_of_a_loss_ends_the_group_from_outside():
    sent = Model(1)
    source, offer = source_of(sent, timeout=90)
    ticket = offer(1, "w0.1", "w1.1").payload
    threading.Timer(0.5, break_group, (ticket, "worker w1.1: killed")).start()
    began = time.monotonic()
    errors = together(
        lambda: source.send(iter(sent.items())), taking(WeightReceiver(), ticket, "w0.1", Model(2))
    )
    assert time.monotonic() - began < 60
    assert [str(e) for e in errors] == ["worker w1.1: killed"] * 2
    break_group(replace(ticket, port=1, timeout_seconds=0.5), "nobody listens")


def test_other_variables_are_printed_on_both_sides_before_anything_is_sent(monkeypatch):
    sent, model, kept = Model(1), Model(2), Model(2)
    source, offer = source_of(sent, timeout=90)
    ticket = offer(1, "w0.1").payload
    real = group_module.facts_of

    def facts(backend, rank, *rest):
        said = real(backend, rank, *rest)
        return said | {"environment": said["environment"] | ({"NCCL_CUMEM_ENABLE": "0"} if rank else {})}

    monkeypatch.setattr(group_module, "facts_of", facts)
    errors = together(
        lambda: source.send(iter(sent.items())), taking(WeightReceiver(), ticket, "w0.1", model)
    )
    for e in errors:
        assert type(e) is GroupMismatchError and e.exit_code == 3
        assert str(e) == (
            "NCCL_CUMEM_ENABLE is '0' on worker w0.1 and not set on learner rank 0: "
            "set it to the same value for both"
        )
    assert model.same(kept)


def test_variables_that_only_log_may_differ(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert group_module.facts_of("gloo", 0, CPU, "", None)["environment"] == {"NCCL_P2P_DISABLE": "1"}


def test_weights_of_another_model_or_type_are_refused_by_all_ranks():
    sent, model = Model(1), Model(2, torch.bfloat16)
    source, offer = source_of(sent, timeout=90)
    ticket = offer(1, "w0.1").payload
    problem = "weights of version 1 are not this model's: missing x"
    errors = together(
        lambda: source.send(iter(sent.items())), taking(WeightReceiver(), ticket, "w0.1", model, problem)
    )
    assert [(type(e), str(e)) for e in errors] == [(WeightSyncError, f"worker w0.1: {problem}")] * 2
    ticket = offer(1, "w0.1").payload
    errors = together(
        lambda: source.send(iter(sent.items())), taking(WeightReceiver(), ticket, "w0.1", model)
    )
    assert all(
        "weights come as float32, the engine holds bfloat16: set rollout.dtype" in str(e) for e in errors
    )
    assert not model.loaded


def test_two_ranks_on_one_gpu_and_two_versions_of_nccl_are_refused():
    facts = {"environment": {}, "weights": "x", "problem": None, "device": "GPU-1", "nccl": "2.28.9"}
    with pytest.raises(
        GroupMismatchError,
        match=r"learner rank 0 and worker w0.1 are on the same GPU \(GPU-1\).*shared_memory",
    ):
        check_facts(["learner rank 0", "worker w0.1"], [facts, facts])
    with pytest.raises(
        GroupMismatchError, match=r"NCCL is 2\.27\.0 on worker w0.1 and 2\.28\.9 on learner rank 0"
    ):
        check_facts(["learner rank 0", "worker w0.1"], [facts, facts | {"device": "GPU-2", "nccl": "2.27.0"}])


@pytest.mark.parametrize("parts", [1, 2])
def test_a_joiner_takes_the_parameters_of_a_peer_part_by_part(parts):
    store = host_store(60.0)
    update = offer_loan(settings(), store, "gloo", "worker w0.1", WeightsReceiver("w1.1", parts), 7)
    assert update.version == 7 and update.payload.raw and store.port == update.payload.port
    peers, joiners = [Model(i) for i in range(parts)], [Model(i + 5) for i in range(parts)]
    lenders = [WeightLender() for _ in range(parts)]
    for part, lender in enumerate(lenders):
        lender.start(update.payload, part, device=CPU, parameters=peers[part].items)

    def take(part):
        own = listed(joiners[part].items())
        load = joiners[part].load
        return lambda: WeightReceiver().receive(
            update.payload, "w1.1", part, device=CPU, load=None, load_raw=load, own=own, problem=None
        )

    assert together(*map(take, range(parts))) == [None] * parts
    assert all(j.same(p) for j, p in zip(joiners, peers, strict=True))
    for lender in lenders:
        lender.stop()
        assert lender.outcome() == {}


def test_a_loan_ends_when_the_lender_takes_new_weights_itself():
    store = host_store(90.0)
    update = offer_loan(settings(timeout=90), store, "gloo", "worker w0.1", WeightsReceiver("w1.1"), 7)
    lender, joiner, began = WeightLender(), Model(2), time.monotonic()
    lender.start(update.payload, 0, device=CPU, parameters=Model(1).items)
    threading.Timer(0.7, lender.stop).start()
    time.sleep(1.0)  # the joiner comes late
    [error] = together(
        lambda: WeightReceiver().receive(
            update.payload,
            "w1.1",
            0,
            device=CPU,
            load=None,
            load_raw=joiner.load,
            own=listed(joiner.items()),
            problem=None,
        )
    )
    assert isinstance(error, GroupBrokenError) and "takes new weights itself" in str(error)
    assert time.monotonic() - began < 60 and store is not None
    with pytest.raises(GroupBrokenError):
        raise_failed([lender.outcome()])


def test_the_outcome_of_several_parts_is_the_worst_of_them():
    raise_failed([{}, {}])
    broken = {"error": "GroupBrokenError", "message": "gone"}
    with pytest.raises(GroupBrokenError) as e:
        raise_failed([broken, broken])
    assert type(e.value) is GroupBrokenError
    with pytest.raises(HalfWrittenError):
        raise_failed([broken, {}])
    with pytest.raises(RuntimeError, match="ValueError: no"):
        raise_failed([broken, {"error": "ValueError", "message": "no"}])


@pytest.mark.parametrize(
    ("backend", "learner_gpu", "gpus", "chosen"),
    [
        ("auto", True, [1, 1], "nccl"),
        ("auto", True, [1, 0.5], "shared_memory"),
        ("auto", True, [], "shared_memory"),
        ("auto", False, [1], "shared_memory"),
        ("auto", False, [0], "shared_memory"),
        ("gloo", True, [1], "gloo"),
        ("nccl", True, [0.5], "nccl"),
    ],
)
def test_auto_is_nccl_where_learner_and_every_worker_have_gpus_of_their_own(
    backend, learner_gpu, gpus, chosen
):
    receivers = [WeightsReceiver(f"w{i}.1", 1, g) for i, g in enumerate(gpus)]
    assert (
        choose_backend(WeightSyncSettings(backend=backend), learner_gpu=learner_gpu, receivers=receivers)
        == chosen
    )


def test_workers_that_joined_in_another_order_are_the_same_group():
    members = [SimpleNamespace(id=name, version=0, state="ready", gpus=0.0) for name in ("w1.1", "w0.1")]
    roster = Roster(RolloutSettings(), on_event=lambda event: None, on_change=lambda: None)
    roster.members = dict(enumerate(members))
    delivery = Delivery(WeightSyncSettings(), roster, parts=1)
    assert [r.id for r in asyncio.run(delivery.receivers(1))] == ["w0.1", "w1.1"]
