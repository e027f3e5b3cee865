"""Actors that go wrong. Alone in a file, so that Ray's workers need not import torch to start them."""

from trainer.learner import RankActor


class FailingActor(RankActor):
    """Rank 1 does not come up."""

    def __init__(self, config, *, rank, **options):
        if rank == 1:
            raise OSError("no such device")
