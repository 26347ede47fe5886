"""SIGINT and SIGTERM during training: the first one requests a stop after saving a checkpoint."""

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class StopRequested(Exception):
    """A stop was requested during work that is repeated when the run is resumed."""


class StopSignals:
    """A context manager that turns signals into a stop request once `can_save` is set; before that they end the run.

    A second SIGINT raises KeyboardInterrupt or, with `force_exit`, ends the process at once.
    """

    def __init__(self, *, force_exit: bool = False) -> None:
        self.force_exit, self.can_save, self.received = force_exit, False, 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # as Python requires
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return EXIT_TERMINATED if self.received == signal.SIGTERM else EXIT_INTERRUPTED

    def should_stop(self) -> bool:
        return bool(self.received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.can_save:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)
        if self.received and number == signal.SIGINT:
            if not self.force_exit:
                raise KeyboardInterrupt
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress display hides
            os._exit(EXIT_INTERRUPTED)
        self.received = self.received or number
