"""Looking inside: what every head of a model did."""

from attent.inspection.attention_trace import Trace
from attent.inspection.record import record

__all__ = ["Trace", "record"]
