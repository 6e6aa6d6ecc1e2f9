"""The one error that a user's input can cause, and the nearest right name for a wrong one."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """Bad input, said in one line that names the file, the key, the value and what would be right.

    The command line prints it and exits with 2; nothing already computed is lost.
    """


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that does not exist, with the nearest one that does.

    `kind` is the word for what was looked for, such as "method".
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} '{name}'; {hint}")
