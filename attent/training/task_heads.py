"""Heads that a model to begin from does not have: which parameters they are, and how a person is told of them.

Everything else is that model's: see `texts.carried`. That they learn beside frozen weights, too, is `lora`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attent.models import Model

HEAD_NAMES = ("classifier", "pooler", "masked_lm")  # what reads the states of a stack


def find_new_heads(model: Model, loaded: Any) -> tuple[str, ...]:
    """The parameters of a model that are not taken from the one that it begins with. A head for other labels is new,
    whatever its shape is."""
    known = loaded.state_dict()
    labels_differ = getattr(loaded.config, "labels", ()) != getattr(model.config, "labels", ())
    of_heads = [name for name, _ in model.named_parameters() if name.partition(".")[0] in HEAD_NAMES]
    return tuple(name for name in of_heads if name not in known or (labels_differ and name.startswith("classifier.")))


def describe_new_heads(model: Model, names: Sequence[str], where: str) -> str | None:
    """A sentence about them, if there are any."""
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    if not parts:
        return None
    labels = getattr(model.config, "labels", ())
    words = {"classifier": f"for {len(labels)} labels", "pooler": "for whole texts", "masked_lm": "for masked words"}
    return f"a new head {', and one '.join(words[part] for part in parts)}; the rest is that of {where}"
