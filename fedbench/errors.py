"""The one error that a user's input can cause, and the nearest right name for a wrong one."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType


class InputError(Exception):
    """Bad input, said in one line that names the file, the key, the value and what would be right.

    The command line prints it and exits with 2; nothing already computed is lost.
    """


@contextmanager
def within(place: str) -> Iterator[None]:
    """Let the messages of bad input begin with where it stands."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def unknown(
    kind: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> InputError:
    """Return the error for a name that does not exist, with the nearest one that does.

    `kind` is the word for what was looked for, such as "method"; `elsewhere` are names that exist, but not here, and
    where they do ("in training").
    """
    names = sorted(set(known))
    near = next((one for there in (names, elsewhere) for one in get_close_matches(name, there, n=1)), None)
    if near is None:
        hint = f"known: {', '.join(names)}" if names else "there are none"
    elif near in names:
        hint = f"did you mean '{near}'?"
    else:
        hint = f"it stands {elsewhere[near]}" if near == name else f"did you mean '{near}' {elsewhere[near]}?"
    return InputError(f"unknown {kind} '{name}'; {hint}")
