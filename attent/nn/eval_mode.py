"""Evaluation mode as a context that restores the mode of each module, also shared between threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class SharedContext:
    """A context that threads share: the first one enters it, the last one leaves it."""

    def __init__(self, make_context: Callable[[], AbstractContextManager[object]]) -> None:
        self.make_context = make_context
        self.lock = threading.Lock()
        self.num_users = 0
        self.stack = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.num_users == 0:
                self.stack.enter_context(self.make_context())
            self.num_users += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.num_users -= 1
            if self.num_users == 0:
                self.stack.close()
