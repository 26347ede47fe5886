"""Select and remove dispensable heads, based on an ablation.

Heads are tried in groups, ordered by the number of translations that change when each is masked alone, as long as the
drop in BLEU and loss of all removed heads *together*, which is measured, stays within a bound. A pruned model computes
the same as one with masked heads, with fewer weights (`attent.models` moves them).
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from attent.inspection.ablate import Ablation
from attent.inspection.head_masking import ModelPart, find_part
from attent.models import Seq2Seq
from attent.models.pruning import remove_heads
from attent.nn import Attention
from attent.storage.errors import AttentError

DEFAULT_MAX_BLEU_DROP = 0.2  # BLEU
# Nats of loss per BLEU of the bound. BLEU is noisy, and some of many trials are lucky: by BLEU alone, 15 heads of a
# Multi30k model were dispensable on the validation set but cost 1.4 BLEU on the test set; the loss showed it (+0.055).
MAX_LOSS_PER_BLEU = 0.1


def prune_heads(model: nn.Module, heads: Collection[ModelPart]) -> Seq2Seq:
    if not isinstance(model, Seq2Seq):
        raise AttentError(f"the model must be an encoder-decoder, but is a {type(model).__name__}; give another")
    removed: dict[str, set[int]] = {}
    for part in heads:
        removed.setdefault(part.path, set()).add(get_prunable_head(model, part))
    return remove_heads(model, removed)


def get_prunable_head(model: Seq2Seq, part: ModelPart) -> int:
    attention = find_part(model, part)
    if part.head is None or not isinstance(attention, Attention):
        raise AttentError(f"{part}: must be a head, such as decoder.blocks.0.cross_attn:2")
    if attention.kv_heads != attention.heads:
        raise AttentError(
            f"{part}: models with grouped-query attention cannot be pruned, but this one has {attention.heads} heads "
            f"and {attention.kv_heads} KV heads"
        )
    return part.head


def rank_heads(ablation: Ablation, max_bleu_drop: float = math.inf) -> list[ModelPart]:
    """Return the heads that cost at most `max_bleu_drop` alone, those first that change the fewest translations.

    The loss alone would mislead: for overconfident models it can fall while translations get worse.
    """
    heads = [effect for effect in ablation.get_effects("head") if ablation.bleu - effect.bleu <= max_bleu_drop]
    ranked = sorted(heads, key=lambda effect: (effect.num_changed, effect.loss, effect.part))
    return [ModelPart.parse(effect.part) for effect in ranked]


@dataclass
class PruneSelection:
    """The heads to remove. Groups of heads are bisected: few trials if most heads, or hardly any, can be removed."""

    measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]]
    bleu: float  # without `heads`
    loss: float
    min_bleu: float
    max_loss: float
    progress: Callable[[int, float, float, bool], None] | None = None
    heads: list[ModelPart] = field(default_factory=list)

    def add_group(self, group: Sequence[ModelPart], *, known_rejected: bool = False) -> bool:
        """Remove as many heads of the group as possible; return whether all were removed."""
        if not group or (not known_rejected and self.try_group(group)):
            return True
        if len(group) > 1:
            half = (len(group) + 1) // 2
            first = self.add_group(group[:half])
            self.add_group(group[half:], known_rejected=first)  # both halves together were just rejected
        return False

    def try_group(self, group: Sequence[ModelPart]) -> bool:
        heads = [*self.heads, *group]
        bleu, loss = self.measure_without(heads)
        accepted = bleu >= self.min_bleu and loss <= self.max_loss
        if accepted:
            self.heads, self.bleu, self.loss = heads, bleu, loss
        if self.progress is not None:
            self.progress(len(heads), bleu, loss, accepted)
        return accepted


def select_heads(
    ablation: Ablation,
    measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]],
    *,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    progress: Callable[[int, float, float, bool], None] | None = None,
) -> PruneSelection:
    """Select heads to remove within `max_bleu_drop` of the baseline BLEU and MAX_LOSS_PER_BLEU times that of its loss.

    measure_without  returns BLEU and loss of the model without some heads
    progress         called after each trial: number of heads, BLEU and loss without them, accepted or not
    """
    if not ablation.get_effects("head"):
        raise AttentError("the ablation must have heads to prune, but has none; ablate heads first")
    if not max_bleu_drop >= 0:
        raise AttentError(f"`max_bleu_drop` must be 0 BLEU or more, but is {max_bleu_drop}")
    min_bleu, max_loss = ablation.bleu - max_bleu_drop, ablation.loss + MAX_LOSS_PER_BLEU * max_bleu_drop
    selection = PruneSelection(measure_without, ablation.bleu, ablation.loss, min_bleu, max_loss, progress)
    selection.add_group(rank_heads(ablation, max_bleu_drop))
    return selection
