"""Actors that go wrong. Alone in a file, so that Ray's workers need not import torch to start them."""

import time

from trainer.learner import RankActor


class FailingActor(RankActor):
    """Rank 1 does not come up."""

    def __init__(self, config, *, rank, **options):
        if rank == 1:
            raise OSError("no such device")


class SilentActor(RankActor):
    """Rank 1 never joins."""

    def __init__(self, config, *, rank, **options):
        self.number = rank

    def call(self, method, *args, **options):
        if self.number == 1 and method == "setup":
            time.sleep(600)
        return {"host_store": 1}.get(method, {"pid": 0, "host": "elsewhere", "device": "cpu"})
