"""Where a run keeps its likelihood records, looked at before anything slow starts."""

from __future__ import annotations

import time

from services.common.errors import EnvironmentLacks
from services.likelihood.store.opening import is_redis, open_store
from trainer.config.schema import Config
from trainer.session.preflight.retrievers import LISTEN_SECONDS, TRY_SECONDS


def check_store(config: Config) -> None:
    """Raises EnvironmentLacks where no Redis answers at `store.url`, UserError where that is no address of
    one. A server that is being started beside the run, or reads its data, is waited for.

    A likelihood service that is away is not asked for: the run's records wait for it."""
    url = config.store.url
    if url is None or not is_redis(url):
        return
    until = time.monotonic() + LISTEN_SECONDS
    while True:
        try:
            open_store(url).close()
            return
        except EnvironmentLacks as e:
            if isinstance(e.__cause__, ImportError):
                raise
            if time.monotonic() + TRY_SECONDS > until:
                raise EnvironmentLacks(
                    f"store.url: {e}, tried for {LISTEN_SECONDS:g} s; expected a running Redis there; or "
                    "leave store.url out, and the run keeps its records in its own folder"
                ) from e
        time.sleep(TRY_SECONDS)
