"""The one error of this room."""


class DataError(ValueError):
    """A question file, or a cursor's saved state, that cannot be used. One line: the file, the line or row,
    what was expected."""

    exit_code = 2
