"""What the folders of BERT and ViT have in common: which class of `transformers` wrote one, what its labels are called,
and what a stack must be for them. Names and settings of each are in `bert` and `vit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attent.interop import conversion, hf_folder
from attent.nn import StackConfig
from attent.storage.errors import FolderError

FIELD_TO_KEY = {  # our field -> their key
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
}


def check_architecture(root: Path, known: Sequence[str], family: str) -> None:
    """Refuses a folder of a class that computes something else: what it is for is not told by its tensors."""
    where = root / hf_folder.CONFIG_FILE
    found = hf_folder.read_json(where).get("architectures")
    if found is not None and found not in ([name] for name in known):
        raise FolderError(
            f"{where}: `architectures` must be one of {', '.join(known)} for a {family} model that attent can compute, "
            f"but is {hf_folder.quote_value(found)}; take one of those"
        )


# --- labels ---------------------------------------------------------------------------------------

SINGLE_LABEL = "single_label_classification"


def read_labels(root: Path, count: int) -> tuple[str, ...]:
    """What each row of the classifier stands for. `transformers` writes nothing where it has no names for two."""
    where = root / hf_folder.CONFIG_FILE
    data = hf_folder.read_json(where)
    problem, names = data.get("problem_type"), data.get("id2label")
    if problem not in (None, SINGLE_LABEL):
        raise FolderError(
            f"{where}: `problem_type` must be {SINGLE_LABEL} for a head that attent can compute, which chooses one of its "
            f"labels, but is {hf_folder.quote_value(problem)}"
        )
    if count == 1:
        raise FolderError(
            f"{where}: there must be two labels or more for a head that attent can compute, which chooses one of them, "
            f"but there is one: a model that gives a number, such as a reranker, is not supported"
        )
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or not all(isinstance(name, str | int) for name in names.values()):
        raise FolderError(f"{where}: `id2label` must give each number of a label its name; correct it")
    if sorted(names) != sorted(str(i) for i in range(count)):
        raise FolderError(
            f"{where}: `id2label` must name {count} labels, from 0 to {count - 1}, as the classifier has them, but "
            f"names {len(names)}: {hf_folder.quote_value(list(names))}; take {hf_folder.CONFIG_FILE} and the weights from one model"
        )
    return disambiguate_labels([str(names[str(i)]) for i in range(count)])


def disambiguate_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Names that all differ: ImageNet, for one, has two classes that are called crane."""
    return tuple(f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names))


def build_label_keys(labels: Sequence[str]) -> dict[str, Any]:
    """What a config.json says of labels."""
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


# --- out ------------------------------------------------------------------------------------------

EXPRESSED_FIELDS = {  # the fields of a stack that their configs tell
    "layers",
    "width",
    "heads",
    "ffn_width",
    "activation",
    "positions",
    "norm_eps",
    "dropout",
    "attention_dropout",
}


def check_stack(stack: StackConfig, family: str, family_values: Mapping[str, tuple[object, ...]]) -> None:
    """Refuses a stack that they have no words for; `own` is what the family at hand wants besides."""
    head_width = stack.width // stack.heads
    wanted: dict[str, tuple[object, ...]] = {
        "kv_heads": (None, stack.heads),
        "head_width": (None, head_width),
        "remaining_heads": (None,),
        "gated": (False,),
        "causal": (False,),
        "cross_attention": (False,),
        "window": (None, (None, None)),
        "norm": ("layer",),
        "bias": (True,),
        "scale": (None, head_width**-0.5),
        "scale_by_layer": (False,),
        "embedding_dropout": (None, stack.dropout),
        "output_dropout": (0.0,),
        "activation_dropout": (0.0,),
    }
    conversion.check_stack(
        stack, family, side="stack", expressed_fields=EXPRESSED_FIELDS, required_values={**wanted, **family_values}
    )
