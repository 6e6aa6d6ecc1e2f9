"""SIGINT and SIGTERM: what is being written is finished first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Somebody wants this process to end; no `Exception`, so that nobody takes it for a fault of a cell."""

    def __init__(self, number: int) -> None:
        """Take the signal's number."""
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.exit_code = 128 + number


_holding = 0
_waiting: list[int] = []


@contextmanager
def raised() -> Iterator[None]:
    """Let both signals raise `Interrupted` in the main thread, unless whoever started this process ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Let a signal wait until the end of this block."""
    global _holding
    _holding += 1
    try:
        yield
    finally:
        _holding -= 1
        if _waiting and not _holding:
            number = _waiting[0]
            _waiting.clear()
            raise Interrupted(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _holding:
        raise Interrupted(number)
    _waiting.append(number)
