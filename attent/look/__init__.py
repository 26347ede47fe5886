"""Looking inside: what every head of a model did."""

from attent.look.record import record
from attent.look.trace import Trace

__all__ = ["Trace", "record"]
