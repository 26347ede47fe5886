"""What training makes small, as one module: a batch in, its loss out. All that touches parameters happens inside
`forward`, so that wrappers (DDP, FSDP2) see every use of them. Dividing by the number of tokens is the loop's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.data.loader import PairBatch, TokenBatch
from attent.data.text_batches import LabeledBatch
from attent.models import Seq2Seq, shift_right
from attent.nn import Packing, Stack, kernels
from attent.nn.argument_checks import check_rate
from attent.training.loss import linear_cross_entropy, rdrop_loss


def compile_states(states: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For the shapes that it meets. Small kernels that do not depend on one another become one: a step casts some 200
    matrices to bfloat16 and back, and a GPU takes longer to begin with one of them than to do it."""
    run = torch.compile(states, dynamic=False, options={"combo_kernels": True})

    def asked_first(ids: Tensor, *more: Any) -> Tensor:
        kernels.can_use_kernels(ids)  # tries one, which no compiler should see
        return run(ids, *more)

    return asked_first


class Seq2SeqObjective(nn.Module):
    """The label-smoothed cross-entropy of a model on a batch; with `rdrop` over 0, while training, R-Drop's loss.

    `compile` compiles the two stacks for the shapes that they meet (packed batches have one); the loss stays as it is.
    """

    def __init__(self, model: Seq2Seq, *, smoothing: float = 0.1, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if not 0 <= rdrop < float("inf"):
            raise ValueError(f"`rdrop` must be 0 or more (5 in its paper), but is {rdrop}")
        self.model, self.smoothing, self.rdrop = model, smoothing, rdrop
        self._run_states: Callable[..., Tensor] = self.compute_states
        if compile:
            self._run_states = compile_states(self.compute_states)

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Sums over the target's tokens: the loss, and the plain cross-entropy in nats, which has no gradient."""
        output, target = self.model.output, batch.target
        right, real = target.ids.flatten(), target.token_mask().flatten()
        doubled = self.rdrop > 0 and self.training
        states = output.scale_states(self._compute_decoder_states(batch, doubled)).flatten(0, 1)  # (B, T, E) -> (N, E)
        if not doubled:
            return linear_cross_entropy(states, output.weight, output.bias, right, real, self.smoothing)
        first, second = states.chunk(2)
        return rdrop_loss(first, second, output.weight, output.bias, right, real, self.smoothing, self.rdrop)

    def _compute_decoder_states(self, batch: PairBatch, doubled: bool) -> Tensor:
        """The decoder's states. Doubled, every row stands there twice and meets two draws of dropout: one pass of
        twice the rows keeps a GPU busier than two passes, and wrappers see one use of each parameter."""
        source, target = batch.source, batch.target
        prepare_positions(self.model.encoder, source)
        prepare_positions(self.model.decoder, target)
        decoder_reads = shift_right(target.ids, self.model.config.start_id, target.packing)
        given = (source.ids, decoder_reads, source.lengths, target.lengths, batch.packing)
        return self._run_states(*(duplicate_rows(given) if doubled else given))

    def compute_states(
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


def prepare_positions(stack: Stack, text: TokenBatch) -> None:
    """What packed rows will ask for, worked out where no compiler sees it."""
    if text.packing is not None:
        stack.positions.precompute(text.ids.shape[1], stack.config.width, text.ids.device)


ModelInputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[Packing, Packing] | None]


def duplicate_rows(inputs: ModelInputs) -> ModelInputs:
    """Every row again, behind all the others."""
    source, target, source_lengths, target_lengths, packing = inputs
    both = None if packing is None else (duplicate_packing(packing[0]), duplicate_packing(packing[1]))
    lengths = [
        None if of_side is None else torch.cat([of_side, of_side]) for of_side in (source_lengths, target_lengths)
    ]
    return torch.cat([source, source]), torch.cat([target, target]), lengths[0], lengths[1], both


def duplicate_packing(packing: Packing) -> Packing:
    segments, positions, ends = (torch.cat([x, x]) for x in (packing.segments, packing.positions, packing.ends))
    return Packing(segments, positions, ends, packing.max_length)


# ---- models of one stack ---------------------------------------------------------------------------------------------


class SingleStackObjective(nn.Module):
    """What is told of `Rows` by a model of one stack; what it is, those say who inherit (`told`)."""

    def __init__(self, model: Any, *, smoothing: float = 0.0, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if rdrop:
            raise ValueError(f"`rdrop` must be 0 but for translations, and is {rdrop}; leave it out")
        self.model, self.smoothing = model, smoothing
        self._run_states: Callable[..., Tensor] = self.compute_states
        if compile:
            self._run_states = compile_states(self.compute_states)

    def forward(self, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        """Sums over what is to be told: the loss, and the plain cross-entropy in nats, which has no gradient."""
        text = batch.inputs
        prepare_positions(getattr(self.model, "decoder", None) or self.model.encoder, text)
        return self.compute_loss(self._run_states(text.ids, text.lengths, text.packing), batch)

    def compute_states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        """(B, T) -> (B, T, E)"""
        states: Tensor = self.model(ids, lengths, packing=packing)
        return states

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class CausalLMObjective(SingleStackObjective):
    """Of a language model: behind each token, the next. Filler stands behind all text, where no token looks."""

    def compute_states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        states: Tensor = self.model.compute_states(ids, packing=packing)
        return states

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        output, wanted = self.model.output, batch.labels.flatten()
        ready = output.scale_states(states).flatten(0, 1)  # (B, T, E) -> (N, E)
        return linear_cross_entropy(ready, output.weight, output.bias, wanted.clamp(min=0), wanted >= 0, self.smoothing)


class MaskedLMObjective(SingleStackObjective):
    """Of an encoder: at the places that were chosen, which word stood there."""

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        head, wanted = self.model.masked_lm, batch.labels.flatten()
        ready = head.output.scale_states(head.transform(gather_masked(states, batch))).flatten(
            0, 1
        )  # (B, M, E) -> (N, E)
        output = head.output
        return linear_cross_entropy(ready, output.weight, output.bias, wanted.clamp(min=0), wanted >= 0, self.smoothing)


def gather_masked(states: Tensor, batch: LabeledBatch) -> Tensor:
    """(B, T, E) -> (B, M, E)"""
    assert batch.label_positions is not None
    return states.gather(1, batch.label_positions[..., None].expand(-1, -1, states.shape[2]))


class TextClassificationObjective(SingleStackObjective):
    """Of an encoder: which label each text has."""

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        logits = self.model.classify(states, batch.inputs.packing).flatten(0, -2)  # (B, S, C) -> (N, C)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = batch.labels.flatten()
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=-1, label_smoothing=self.smoothing)
            plain = F.cross_entropy(logits.detach(), wanted, reduction="sum", ignore_index=-1)
        return loss, plain
