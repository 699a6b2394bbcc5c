"""Log lines about strangers, which strangers must not be able to multiply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Throttled"]


class Throttled:
    """Lets one line per subject and `seconds` through, and says how many it held back."""

    def __init__(
        self, logger: logging.Logger, *, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}

    def warning(self, subject: str, message: str, *values: object) -> None:
        """Log `message`; `subject` is one of a few fixed words of ours, never a peer's text."""
        now = self._clock()
        last, held_back = self._last.get(subject, (-self._seconds, 0))
        if now - last < self._seconds:
            self._last[subject] = (last, held_back + 1)
            return
        self._last[subject] = (now, 0)
        self._logger.warning(
            message + (f" (and {held_back} more since the last such line)" if held_back else ""), *values
        )
