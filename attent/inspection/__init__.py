"""See what every attention head of a model does: record, render, measure, mask, ablate, prune."""

from attent.inspection.attention_trace import Trace, record

__all__ = ["Trace", "record"]
