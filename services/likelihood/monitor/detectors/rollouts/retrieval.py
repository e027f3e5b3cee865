"""`retrieval`: searches bring nothing, bring the same again, or fail."""

from __future__ import annotations

from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above


class Retrieval(FromBaseline):
    rule = "retrieval"
    reads = ("retrieval/empty", "retrieval/repeated", "retrieval/errors")
    advice = (
        "Look at the queries from step {since} on, and ask the retriever one of them by hand (unspiral index "
        "search): an index that is gone, a query that has lost its words, or a policy that repeats itself."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        usual = "of the searches (mean of {window}; usually {usual:.0%}; alarm at {threshold:.0%})"
        limit = above(r.share_rise, r)
        return [
            Channel("retrieval/empty", "no document for {value:.0%} " + usual, r, limit),
            Channel("retrieval/repeated", "the same documents as before for {value:.0%} " + usual, r, limit),
            Channel("retrieval/errors", "an error for {value:.0%} " + usual, r, limit),
        ]
