"""What training makes small, as one module: a batch in, its loss out. All that touches parameters happens inside
`forward`, so that wrappers (DDP, FSDP2) see every use of them. Dividing by the number of tokens is the loop's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attent.data.batches import Batch
from attent.models import Seq2Seq, shift_right
from attent.nn import Packing
from attent.nn.checks import check_rate
from attent.train.loss import projected_loss, rdrop_loss


class Objective(nn.Module):
    """The label-smoothed cross-entropy of a model on a batch; with `rdrop` over 0, while training, R-Drop's loss.

    `compile` compiles the two stacks for the shapes that they meet (packed batches have one); the loss stays as it is.
    """

    def __init__(self, model: Seq2Seq, *, smoothing: float = 0.1, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if not 0 <= rdrop < float("inf"):
            raise ValueError(f"`rdrop` must be 0 or more (5 in its paper), but is {rdrop}")
        self.model, self.smoothing, self.rdrop = model, smoothing, rdrop
        self._states: Callable[..., Tensor] = self.states
        if compile:
            self._states = torch.compile(self.states, dynamic=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sums over the target's tokens: the loss, and the plain cross-entropy in nats, which has no gradient."""
        output, target = self.model.output, batch.target
        right, real = target.ids.flatten(), target.real().flatten()
        doubled = self.rdrop > 0 and self.training
        states = self._pass(batch, doubled).flatten(0, 1)  # (B, T, E) -> (N, E)
        if not doubled:
            return projected_loss(states, output.weight, output.bias, right, real, self.smoothing)
        first, second = states.chunk(2)
        return rdrop_loss(first, second, output.weight, output.bias, right, real, self.smoothing, self.rdrop)

    def _pass(self, batch: Batch, doubled: bool) -> Tensor:
        """The decoder's states. Doubled, every row stands there twice and meets two draws of dropout: one pass of
        twice the rows keeps a GPU busier than two passes, and wrappers see one use of each parameter."""
        source, target = batch.source, batch.target
        decoder_reads = shift_right(target.ids, self.model.config.start, target.packing)
        given = (source.ids, decoder_reads, source.lengths, target.lengths, batch.packing)
        return self._states(*(twice(given) if doubled else given))

    def states(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None,
        target_lengths: Tensor | None,
        packing: tuple[Packing, Packing] | None,
    ) -> Tensor:
        """Both stacks: (B, Ts), (B, Tt) -> (B, Tt, E), which the output layer turns into logits."""
        of_source, of_target = packing or (None, None)
        memory = self.model.encode(source, source_lengths, packing=of_source)
        return self.model.decode(target, memory, target_lengths, packing=of_target)


Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[Packing, Packing] | None]


def twice(given: Given) -> Given:
    """Every row again, behind all the others."""
    source, target, source_lengths, target_lengths, packing = given
    both = None if packing is None else (again(packing[0]), again(packing[1]))
    lengths = [
        None if of_side is None else torch.cat([of_side, of_side]) for of_side in (source_lengths, target_lengths)
    ]
    return torch.cat([source, source]), torch.cat([target, target]), lengths[0], lengths[1], both


def again(packing: Packing) -> Packing:
    segments, positions, ends = (torch.cat([x, x]) for x in (packing.segments, packing.positions, packing.ends))
    return Packing(segments, positions, ends, packing.longest)
