"""Files and folders that a user names. What is wrong with one becomes a line that names it."""

from services.common.users_files.read import given_as, load_json, load_object, load_yaml, reading, why_unread
from services.common.users_files.written import (
    make_folder,
    one_out,
    refuse_no_file,
    refuse_to_lose,
    refuse_to_replace,
    writing,
)
from services.common.users_files.yaml_text import line_of, parse_yaml

__all__ = [
    "given_as",
    "line_of",
    "load_json",
    "load_object",
    "load_yaml",
    "make_folder",
    "one_out",
    "parse_yaml",
    "reading",
    "refuse_no_file",
    "refuse_to_lose",
    "refuse_to_replace",
    "why_unread",
    "writing",
]
