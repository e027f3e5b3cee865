"""What each part of the Redis store asks of the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Keys = Callable[..., str]


class RedisPart(ABC):
    """Of a store that RedisStore puts together."""

    _redis: Any

    @abstractmethod
    def _talking(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _known(self, run: str) -> dict[bytes, bytes]: ...

    @abstractmethod
    def _touch(self, pipe: Any, run: str) -> None: ...

    @abstractmethod
    def _transaction(self, write: Callable[[Any], Any], *watched: str) -> Any: ...

    @staticmethod
    @abstractmethod
    def _keys(run: str) -> Keys: ...
