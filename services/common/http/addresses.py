"""Addresses of services, told from files, folders and databases, which the same settings take."""

from __future__ import annotations


def is_http(place: str) -> bool:
    """Whether the place is the address of a running service."""
    return place.startswith(("http://", "https://"))
