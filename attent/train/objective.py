"""What training makes small, as one module: a batch in, its loss out. All that touches parameters happens inside
`forward`, so that wrappers (DDP, FSDP2) see every use of them. Dividing by the number of tokens is the loop's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.data.batches import Batch, Text
from attent.data.rows import Rows
from attent.models import Seq2Seq, shift_right
from attent.nn import Packing, Stack, kernels
from attent.nn.checks import check_rate
from attent.train.loss import projected_loss, rdrop_loss


def compiled(states: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For the shapes that it meets. Small kernels that do not depend on one another become one: a step casts some 200
    matrices to bfloat16 and back, and a GPU takes longer to begin with one of them than to do it."""
    run = torch.compile(states, dynamic=False, options={"combo_kernels": True})

    def asked_first(ids: Tensor, *more: Any) -> Tensor:
        kernels.usable(ids)  # tries one, which no compiler should see
        return run(ids, *more)

    return asked_first


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
            self._states = compiled(self.states)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sums over the target's tokens: the loss, and the plain cross-entropy in nats, which has no gradient."""
        output, target = self.model.output, batch.target
        right, real = target.ids.flatten(), target.real().flatten()
        doubled = self.rdrop > 0 and self.training
        states = output.scaled(self._pass(batch, doubled)).flatten(0, 1)  # (B, T, E) -> (N, E)
        if not doubled:
            return projected_loss(states, output.weight, output.bias, right, real, self.smoothing)
        first, second = states.chunk(2)
        return rdrop_loss(first, second, output.weight, output.bias, right, real, self.smoothing, self.rdrop)

    def _pass(self, batch: Batch, doubled: bool) -> Tensor:
        """The decoder's states. Doubled, every row stands there twice and meets two draws of dropout: one pass of
        twice the rows keeps a GPU busier than two passes, and wrappers see one use of each parameter."""
        source, target = batch.source, batch.target
        prepare(self.model.encoder, source)
        prepare(self.model.decoder, target)
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


def prepare(stack: Stack, text: Text) -> None:
    """What packed rows will ask for, worked out where no compiler sees it."""
    if text.packing is not None:
        stack.positions.prepare(text.ids.shape[1], stack.config.width, text.ids.device)


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


# ---- models of one stack ---------------------------------------------------------------------------------------------


class OneStack(nn.Module):
    """What is told of `Rows` by a model of one stack; what it is, those say who inherit (`told`)."""

    def __init__(self, model: Any, *, smoothing: float = 0.0, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if rdrop:
            raise ValueError(f"`rdrop` must be 0 but for translations, and is {rdrop}; leave it out")
        self.model, self.smoothing = model, smoothing
        self._states: Callable[..., Tensor] = self.states
        if compile:
            self._states = compiled(self.states)

    def forward(self, batch: Rows) -> tuple[Tensor, Tensor]:
        """Sums over what is to be told: the loss, and the plain cross-entropy in nats, which has no gradient."""
        text = batch.text
        prepare(getattr(self.model, "decoder", None) or self.model.encoder, text)
        return self.told(self._states(text.ids, text.lengths, text.packing), batch)

    def states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        """(B, T) -> (B, T, E)"""
        states: Tensor = self.model(ids, lengths, packing=packing)
        return states

    def told(self, states: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class NextWords(OneStack):
    """Of a language model: behind each token, the next. Filler stands behind all text, where no token looks."""

    def states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        states: Tensor = self.model.states(ids, packing=packing)
        return states

    def told(self, states: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
        output, wanted = self.model.output, batch.wanted.flatten()
        ready = output.scaled(states).flatten(0, 1)  # (B, T, E) -> (N, E)
        return projected_loss(ready, output.weight, output.bias, wanted.clamp(min=0), wanted >= 0, self.smoothing)


class MaskedWords(OneStack):
    """Of an encoder: at the places that were chosen, which word stood there."""

    def told(self, states: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
        head, wanted = self.model.masked, batch.wanted.flatten()
        ready = head.output.scaled(head.ready(at_places(states, batch))).flatten(0, 1)  # (B, M, E) -> (N, E)
        output = head.output
        return projected_loss(ready, output.weight, output.bias, wanted.clamp(min=0), wanted >= 0, self.smoothing)


def at_places(states: Tensor, batch: Rows) -> Tensor:
    """(B, T, E) -> (B, M, E)"""
    assert batch.places is not None
    return states.gather(1, batch.places[..., None].expand(-1, -1, states.shape[2]))


class TextLabels(OneStack):
    """Of an encoder: which label each text has."""

    def told(self, states: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
        logits = self.model.classify(states, batch.text.packing).flatten(0, -2)  # (B, S, C) -> (N, C)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = batch.wanted.flatten()
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=-1, label_smoothing=self.smoothing)
            plain = F.cross_entropy(logits.detach(), wanted, reduction="sum", ignore_index=-1)
        return loss, plain
