"""Task heads (classifier, pooler, masked LM) that a pretrained model lacks and that are trained from scratch."""

from typing import Any

from attent.models import Model

HEAD_NAMES = ("classifier", "pooler", "masked_lm")


def find_new_head_parameters(model: Model, pretrained: Any) -> tuple[str, ...]:
    """Return the head parameters that `pretrained` lacks. A classifier for other labels is always new."""
    known = pretrained.state_dict()
    labels_differ = getattr(pretrained.config, "labels", ()) != getattr(model.config, "labels", ())
    names = [name for name, _ in model.named_parameters() if name.partition(".")[0] in HEAD_NAMES]
    return tuple(name for name in names if name not in known or (labels_differ and name.startswith("classifier.")))
