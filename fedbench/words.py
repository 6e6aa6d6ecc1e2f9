"""Plain values and counts as words."""

import json


def counted(number: int, thing: str) -> str:
    """Return "1 cell" or "2 cells"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def text(value: object) -> str:
    """Return a plain value as a suite would have it."""
    return value if isinstance(value, str) and value else json.dumps(value)
