"""Steps that others post to the runs of a folder, told to open pages; the runs write their own files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.processes.beside import beside
from services.likelihood.service import LikelihoodService
from services.likelihood.store.of_folder import FolderStore

log = logging.getLogger(__name__)
EVERY_SECONDS = 2.0
STOP_SECONDS = 10.0


@contextmanager
def watched(
    store: FolderStore, service: LikelihoodService, every_seconds: float = EVERY_SECONDS
) -> Iterator[None]:
    """Inside, whoever listens hears of each run that came, went or was posted to, and reads it anew."""

    def watch(over: threading.Event) -> None:
        while not over.wait(every_seconds):
            try:
                changed = store.look()
            except Exception:  # of one look, such as a folder that is gone for a moment
                log.warning("%s: could not be looked at", store.folder, exc_info=True)
                continue
            for run in changed:
                service.publish(run, "about", {})

    with beside(watch, "likelihood-folder", STOP_SECONDS):
        yield
