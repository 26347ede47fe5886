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

from attent.look.ablate import Ablation
from attent.look.silence import Part, found
from attent.models import Seq2Seq
from attent.models.heads import without
from attent.nn import Attention

WITHIN = 0.2  # BLEU
# Nats of loss for each BLEU of the bound. BLEU is noisy, and of many trials some are lucky: by BLEU alone 15 heads of a
# Multi30k model could go on the validation pairs, and cost 1.4 BLEU on the test set; the loss had told (+0.055).
NATS = 0.1


class PruneError(ValueError):
    """Heads that cannot be removed, in a sentence."""


def prune(model: nn.Module, heads: Collection[Part]) -> Seq2Seq:
    """A copy of the model without these heads, by the numbers that they have now."""
    if not isinstance(model, Seq2Seq):
        raise PruneError(f"the model must be an encoder-decoder, but is a {type(model).__name__}; give another")
    removed: dict[str, set[int]] = {}
    for part in heads:
        removed.setdefault(part.path, set()).add(checked(model, part))
    return without(model, removed)


def checked(model: Seq2Seq, part: Part) -> int:
    attention = found(model, part)
    if part.head is None or not isinstance(attention, Attention):
        raise PruneError(f"{part}: only heads can be removed, such as decoder.blocks.0.cross:2; name its heads")
    if attention.kv_heads != attention.heads:
        raise PruneError(
            f"{part}: cannot be removed, since {attention.heads} query heads share the keys and values of "
            f"{attention.kv_heads} (`kv_heads`); only models whose heads have their own can be pruned"
        )
    return part.head


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Some heads more, gone together with those that were chosen before."""

    count: int  # of all that were gone
    added: tuple[str, ...]
    bleu: float
    loss: float
    good: bool  # within the bounds


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The heads to remove, and the trials that led to them."""

    heads: tuple[Part, ...]
    bleu: float  # without them
    trials: tuple[Trial, ...]


def order(ablation: Ablation, within: float = math.inf) -> list[Part]:
    """Heads that cost at most so much BLEU alone, those first whose silence changes the fewest translations.

    Loss alone would mislead: it may even fall where translations get worse, for a model that is too sure of itself.
    """
    heads = [effect for effect in ablation.of("head") if ablation.bleu - effect.bleu <= within]
    return [Part.parse(one.part) for one in sorted(heads, key=lambda one: (one.changed, one.loss, one.part))]


def choose(
    ablation: Ablation,
    without: Callable[[Sequence[Part]], tuple[float, float]],
    *,
    within: float = WITHIN,
    progress: Callable[[Trial], None] | None = None,
) -> Chosen:
    """Heads of `order` that can go together within so much BLEU of the whole model, and NATS times that of its loss.

    without  measures the BLEU and the loss of the model without some heads
    """
    if not ablation.of("head"):
        raise PruneError("the ablation must be of heads to prune them, but has none; measure heads first")
    if not within >= 0:
        raise PruneError(f"`within` must be 0 BLEU or more, but is {within}")
    choosing = Choosing(without, ablation, within, progress)
    choosing.take(order(ablation, within))
    return Chosen(heads=tuple(choosing.heads), bleu=choosing.bleu, trials=tuple(choosing.trials))


class Choosing:
    """All at once if that is good, else one half and then the other: few trials where most heads can go, or none."""

    def __init__(
        self,
        without: Callable[[Sequence[Part]], tuple[float, float]],
        ablation: Ablation,
        within: float,
        progress: Callable[[Trial], None] | None,
    ) -> None:
        self.without, self.progress = without, progress
        self.bleu, self.least, self.most = ablation.bleu, ablation.bleu - within, ablation.loss + NATS * within
        self.heads: list[Part] = []
        self.trials: list[Trial] = []

    def take(self, group: Sequence[Part], *, known_bad: bool = False) -> bool:
        """Add as many heads of the group as can be; True: all of them."""
        if not group or (not known_bad and self.good(group)):
            return True
        if len(group) > 1:
            half = (len(group) + 1) // 2
            first = self.take(group[:half])
            self.take(group[half:], known_bad=first)  # all of the first with all of the second were just tried
        return False

    def good(self, group: Sequence[Part]) -> bool:
        together = [*self.heads, *group]
        bleu, loss = self.without(together)
        good = bleu >= self.least and loss <= self.most
        trial = Trial(count=len(together), added=tuple(map(str, group)), bleu=bleu, loss=loss, good=good)
        self.trials.append(trial)
        if trial.good:
            self.heads, self.bleu = together, bleu
        if self.progress is not None:
            self.progress(trial)
        return trial.good
