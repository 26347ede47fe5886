"""Task heads (classifier, pooler, masked LM) that a pretrained model lacks and that are trained from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attent.models import Model

HEAD_NAMES = ("classifier", "pooler", "masked_lm")


def find_new_head_parameters(model: Model, pretrained: Any) -> tuple[str, ...]:
    """Return the head parameters that `pretrained` lacks. A classifier for other labels is always new."""
    known = pretrained.state_dict()
    labels_differ = getattr(pretrained.config, "labels", ()) != getattr(model.config, "labels", ())
    names = [name for name, _ in model.named_parameters() if name.partition(".")[0] in HEAD_NAMES]
    return tuple(name for name in names if name not in known or (labels_differ and name.startswith("classifier.")))


def describe_new_heads(model: Model, names: Sequence[str], origin: str) -> str | None:
    heads = dict.fromkeys(name.partition(".")[0] for name in names)
    if not heads:
        return None
    labels = getattr(model.config, "labels", ())
    purposes = {
        "classifier": f"for {len(labels)} labels",
        "pooler": "that pools texts",
        "masked_lm": "for masked words",
    }
    return f"a new head {', and one '.join(purposes[head] for head in heads)}; all other weights are from {origin}"
