"""Addresses as they may be shown: in logs, on pages, in the files of a run."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?<=://)[^/?#]*@")
_SECRET_PARAMETER = re.compile(r"(?i)([?&][^=&#]*(?:password|passwd|token|secret|api_?key)[^=&#]*=)[^&#]*")


def address_without_secrets(address: str, user: str = "***@") -> str:
    """With user and password replaced by `user`, and secret parameters masked. What is no address is given
    back as it is."""
    return _SECRET_PARAMETER.sub(r"\1***", _USER_INFO.sub(user, address)) if "://" in address else address
