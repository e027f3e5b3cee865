"""The findings of `unspiral data validate` for programs: what its lines say, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.checks.overlap import Against, Twin
from trainer.data.corpora.passages import CorpusReport
from trainer.data.questions import Report

if TYPE_CHECKING:
    from trainer.data.checks.coverage import Coverage


def of_questions(path: Path, report: Report) -> dict[str, Any]:
    """Counts, and a line for each row that is told of."""
    return {
        "file": str(path),
        "kind": "questions",
        "questions": report.good,
        "malformed": len(report.problems),
        "sources": dict(report.sources),
        "read_from": [
            {"question": question, "answers": answers, "rows": count}
            for (question, answers), count in report.read_from.most_common()
        ],
        "reasons": dict(report.reasons.most_common()),
        "problems": report.problems,
        "emptied": report.emptied,
        "no_value": report.no_value,
        "repeated": report.repeated,
        "contradicting": report.contradicting,
        "several_answers": report.several,
        "same_ids": report.same_ids,
        "odd": report.odd,
    }


def of_corpus(path: Path, report: CorpusReport) -> dict[str, Any]:
    """Counts, and the first lines of each kind."""
    return {"file": str(path), "kind": "corpus", **asdict(report)}


def of_twins(against: Path, read: Against, found: Sequence[Twin]) -> dict[str, Any]:
    """The questions that stand in the other file too, or nearly."""
    return {
        "file": str(against),
        "rows": read.rows,
        "not_compared": [str(row) for row in read.unread],
        "same": [_told(twin) for twin in found if twin.similarity == 1],
        "near": [
            _told(twin)
            | {
                "other": twin.other.text,
                "similarity": twin.similarity,
                "answers_agree": twin.answers_agree,
            }
            for twin in found
            if twin.similarity < 1
        ],
    }


def _told(twin: Twin) -> dict[str, Any]:
    return {"question": twin.question.text, "place": twin.place, "other_place": twin.other_place}


def of_coverage(index: str, found: Coverage) -> dict[str, Any]:
    """The questions whose answer stands in the best passages of an index, and all that do not."""
    return {
        "folder": index,
        "topk": found.topk,
        "by_source": {name: asdict(one) for name, one in found.by_source.items()},
        "by_hops": {name: asdict(one) for name, one in found.by_hops.items()},
        "places": {str(place): count for place, count in sorted(found.places.items())},
        "misses": [
            {"id": miss.question.id, "question": miss.question.text, "best": miss.best}
            for miss in found.misses
        ],
    }
