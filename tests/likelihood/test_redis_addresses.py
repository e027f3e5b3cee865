"""Addresses of a Redis store that a user wrote otherwise than they must be."""

import pytest
from redis_server import RedisServer, redis_server  # noqa: F401

from services.common.errors import EnvironmentLacks, UserError
from services.likelihood.store.opening import open_store

FORM = "expected redis://HOST:PORT/DB, DB a number"


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        ("redis://", "", "no host is there"),
        ("redis:///0", "/0", "no host is there"),
        ("redis://:secret@127.0.0.1:1/x", "127.0.0.1:1/x", "'x' is no number"),
        ("redis://127.0.0.1:1/0/1", "127.0.0.1:1/0/1", "'0/1' is no number"),
        ("redis://127.0.0.1:99999/0", "127.0.0.1:99999/0", "Port out of range 0-65535"),
        ("redis://127.0.0.1:1/0?x=1", "127.0.0.1:1/0?x=1", "got an unexpected keyword argument 'x'"),
    ],
)
def test_what_is_no_address_is_told_before_the_first_call(url, shown, why):
    with pytest.raises(UserError) as refused:
        open_store(url)
    assert str(refused.value) == f"store {shown!r}: {FORM} ({why})"


def test_options_of_the_library_are_taken(redis_server):
    open_store(f"{redis_server.url}?health_check_interval=3").close()


def test_a_server_that_asks_for_a_password_is_told_in_words(redis_server):
    store = open_store(redis_server.url)
    store._redis.config_set("requirepass", "hunter2")
    store.close()
    for given in ("", ":wrong@"):
        with pytest.raises(EnvironmentLacks) as refused:
            open_store(redis_server.url.replace("redis://", f"redis://{given}"))
        assert str(refused.value) == (
            f"likelihood store redis at 127.0.0.1:{redis_server.port}/0: it asks for a password, or for "
            "another one: redis://:PASSWORD@HOST:PORT/DB"
        )
    store = open_store(redis_server.url.replace("redis://", "redis://:hunter2@"))
    store._redis.config_set("requirepass", "")
    store.close()
