"""Actors that go wrong. Alone in a file, so that Ray's workers need not import pytest to start them."""

from trainer.learner.rank_handle import RankActor


class ElsewhereActor(RankActor):
    """Rank 1 is on a host that lacks the model's folder."""

    def __init__(self, config, *, rank, model_path, **options):
        super().__init__(
            config, rank=rank, model_path=model_path if rank == 0 else "/nowhere/model", **options
        )


class FailingActor(RankActor):
    """Rank 1 does not come up."""

    def __init__(self, config, *, rank, **options):
        if rank == 1:
            raise OSError("no such device")
