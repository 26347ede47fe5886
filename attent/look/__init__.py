"""Looking inside: what every head of a model did."""

from attent.look.record import Trace, record

__all__ = ["Trace", "record"]
