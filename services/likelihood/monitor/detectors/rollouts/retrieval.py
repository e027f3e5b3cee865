"""`retrieval`: searches bring nothing, bring the same again, fail, or bring titles without a text."""

from __future__ import annotations

from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.base import Channel, FromBaseline, above

BLANK = "retrieval/blank"


class Retrieval(FromBaseline):
    rule = "retrieval"
    reads = ("retrieval/empty", "retrieval/repeated", "retrieval/errors", BLANK)
    advice = (
        "Look at the queries from step {since} on, and ask the retriever one of them by hand (unspiral index "
        "search): an index that is gone, a query that has lost its words, or a policy that repeats itself."
    )
    blank_advice = (
        "The index or the service hands titles alone: look at a search of step {since} or later (unspiral "
        "index search)."
    )

    def made_channels(self) -> list[Channel]:
        r = self.rules
        usual = "of the searches (mean of {window}; usually {usual:.0%}; alarm at {threshold:.0%})"
        blank = "no text besides a title in {value:.0%} of the documents (mean of {window}; "
        blank += "usually {usual:.0%}; alarm at {threshold:.0%})"
        limit = above(r.share_rise, r)
        return [
            Channel("retrieval/empty", "no document for {value:.0%} " + usual, r, limit),
            Channel("retrieval/repeated", "the same documents as before for {value:.0%} " + usual, r, limit),
            Channel("retrieval/errors", "an error for {value:.0%} " + usual, r, limit),
            Channel(BLANK, blank, r, limit),
        ]

    def describe(self, step: int) -> Alarm:
        """Documents without a text have another cause than searches that find nothing new."""
        alarm = super().describe(step)
        if alarm.metric == BLANK:
            alarm.advice = self.blank_advice.format(since=alarm.since)
        return alarm
