"""Files of records (questions, passages), told apart by what is in them and never by their names.

    path ──> files of a folder ──> unpacked (gzip, zstd, bzip2, xz) ──> UTF-8 ──> by layout ──> records

Errors are ValueError, one line that names the file; the rooms that read make their own kind of them.
"""

from services.common.records.columns import field_of, plain_name
from services.common.records.files import Layout, data_files, layout_of, no_utf8, open_unpacked
from services.common.records.reader import ACCEPTED, Record, read_records

__all__ = [
    "ACCEPTED",
    "Layout",
    "Record",
    "data_files",
    "field_of",
    "layout_of",
    "no_utf8",
    "open_unpacked",
    "plain_name",
    "read_records",
]
