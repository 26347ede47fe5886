"""A model without the heads that do little: which they are, by a measured ablation, and the model itself.

Heads are taken in the order of how many translations change when each is silent alone, in groups, as long as all that
are gone *together* stay within a bound on BLEU and on the loss: that is measured, not added up. A pruned model computes
what the silenced one does, with fewer weights; moving the weights is `attent.models.heads`' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from attent.inspection.ablate import Ablation
from attent.inspection.head_masking import ModelPart, find_part
from attent.models import Seq2Seq
from attent.models.pruning import remove_heads
from attent.nn import Attention

DEFAULT_MAX_BLEU_DROP = 0.2  # BLEU
# Nats of loss for each BLEU of the bound. BLEU is noisy, and of many trials some are lucky: by BLEU alone 15 heads of a
# Multi30k model could go on the validation pairs, and cost 1.4 BLEU on the test set; the loss had told (+0.055).
MAX_LOSS_PER_BLEU = 0.1


class PruneError(ValueError):
    """Heads that cannot be removed, in a sentence."""


def prune_heads(model: nn.Module, heads: Collection[ModelPart]) -> Seq2Seq:
    """A copy of the model without these heads, by the numbers that they have now."""
    if not isinstance(model, Seq2Seq):
        raise PruneError(f"the model must be an encoder-decoder, but is a {type(model).__name__}; give another")
    removed: dict[str, set[int]] = {}
    for part in heads:
        removed.setdefault(part.path, set()).add(get_prunable_head(model, part))
    return remove_heads(model, removed)


def get_prunable_head(model: Seq2Seq, part: ModelPart) -> int:
    attention = find_part(model, part)
    if part.head is None or not isinstance(attention, Attention):
        raise PruneError(f"{part}: only heads can be removed, such as decoder.blocks.0.cross_attn:2; name its heads")
    if attention.kv_heads != attention.heads:
        raise PruneError(
            f"{part}: cannot be removed, since {attention.heads} query heads share the keys and values of "
            f"{attention.kv_heads} (`kv_heads`); only models whose heads have their own can be pruned"
        )
    return part.head


@dataclass(frozen=True, kw_only=True)
class PruneTrial:
    """Some heads more, gone together with those that were chosen before."""

    num_removed: int  # of all that were gone
    added: tuple[str, ...]
    bleu: float
    loss: float
    accepted: bool  # within the bounds


@dataclass(frozen=True, kw_only=True)
class PruneSelection:
    """The heads to remove, and the trials that led to them."""

    heads: tuple[ModelPart, ...]
    bleu: float  # without them
    trials: tuple[PruneTrial, ...]


def rank_heads(ablation: Ablation, max_bleu_drop: float = math.inf) -> list[ModelPart]:
    """Heads that cost at most so much BLEU alone, those first whose silence changes the fewest translations.

    Loss alone would mislead: it may even fall where translations get worse, for a model that is too sure of itself.
    """
    heads = [effect for effect in ablation.get_effects("head") if ablation.bleu - effect.bleu <= max_bleu_drop]
    return [ModelPart.parse(one.part) for one in sorted(heads, key=lambda one: (one.num_changed, one.loss, one.part))]


def select_heads(
    ablation: Ablation,
    measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]],
    *,
    max_bleu_drop: float = DEFAULT_MAX_BLEU_DROP,
    progress: Callable[[PruneTrial], None] | None = None,
) -> PruneSelection:
    """Heads of `order` that can go together within so much BLEU of the whole model, and NATS times that of its loss.

    without  measures the BLEU and the loss of the model without some heads
    """
    if not ablation.get_effects("head"):
        raise PruneError("the ablation must be of heads to prune them, but has none; measure heads first")
    if not max_bleu_drop >= 0:
        raise PruneError(f"`within` must be 0 BLEU or more, but is {max_bleu_drop}")
    choosing = HeadSelector(measure_without, ablation, max_bleu_drop, progress)
    choosing.add_group(rank_heads(ablation, max_bleu_drop))
    return PruneSelection(heads=tuple(choosing.heads), bleu=choosing.bleu, trials=tuple(choosing.trials))


class HeadSelector:
    """All at once if that is good, else one half and then the other: few trials where most heads can go, or none."""

    def __init__(
        self,
        measure_without: Callable[[Sequence[ModelPart]], tuple[float, float]],
        ablation: Ablation,
        max_bleu_drop: float,
        progress: Callable[[PruneTrial], None] | None,
    ) -> None:
        self.measure_without, self.progress = measure_without, progress
        self.bleu, self.min_bleu, self.max_loss = (
            ablation.bleu,
            ablation.bleu - max_bleu_drop,
            ablation.loss + MAX_LOSS_PER_BLEU * max_bleu_drop,
        )
        self.heads: list[ModelPart] = []
        self.trials: list[PruneTrial] = []

    def add_group(self, group: Sequence[ModelPart], *, known_rejected: bool = False) -> bool:
        """Add as many heads of the group as can be; True: all of them."""
        if not group or (not known_rejected and self.try_group(group)):
            return True
        if len(group) > 1:
            half = (len(group) + 1) // 2
            first = self.add_group(group[:half])
            self.add_group(
                group[half:], known_rejected=first
            )  # all of the first with all of the second were just tried
        return False

    def try_group(self, group: Sequence[ModelPart]) -> bool:
        together = [*self.heads, *group]
        bleu, loss = self.measure_without(together)
        good = bleu >= self.min_bleu and loss <= self.max_loss
        trial = PruneTrial(num_removed=len(together), added=tuple(map(str, group)), bleu=bleu, loss=loss, accepted=good)
        self.trials.append(trial)
        if trial.accepted:
            self.heads, self.bleu = together, bleu
        if self.progress is not None:
            self.progress(trial)
        return trial.accepted
