"""The objective as an nn.Module: every use of parameters is in `forward`, where wrappers (DDP, FSDP2) see it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.data.loader import PairBatch, TokenBatch
from attent.data.text_batches import LabeledBatch
from attent.models import shift_right
from attent.nn import Packing, Stack, kernels
from attent.nn.argument_checks import check_rate
from attent.storage.errors import AttentError
from attent.training.loss import linear_cross_entropy, rdrop_loss


def compile_forward(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for static shapes, combining small kernels: launching some 200 casts takes longer than running them."""
    compiled = torch.compile(forward, dynamic=False, options={"combo_kernels": True})

    def run(ids: Tensor, *inputs: Any) -> Tensor:
        kernels.can_use_kernels(ids)  # runs a kernel once, which must not be traced
        return compiled(ids, *inputs)

    return run


class Objective(nn.Module):
    """Base class; `compile` compiles `compute_states` for static shapes (packed batches have one), but not the loss."""

    supports_rdrop = False
    supports_cuda_graphs = True

    def __init__(self, model: Any, *, smoothing: float = 0.0, rdrop: float = 0.0, compile: bool = False) -> None:  # noqa: A002
        super().__init__()
        check_rate("smoothing", smoothing)
        if rdrop and not self.supports_rdrop:
            raise AttentError(f"`rdrop` must be 0 except for translation, but is {rdrop}; leave it out")
        if not 0 <= rdrop < float("inf"):
            raise AttentError(f"`rdrop` must be 0 or more (5 in its paper), but is {rdrop}")
        self.model, self.smoothing, self.rdrop = model, smoothing, rdrop
        self._forward_states: Callable[..., Tensor] = (
            compile_forward(self.compute_states) if compile else self.compute_states
        )

    def compute_states(self, *inputs: Any) -> Tensor:
        raise NotImplementedError

    def compute_token_loss(
        self, states: Tensor, ids: Tensor, mask: Tensor, doubled: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, plain cross-entropy) of the decoder's states; doubled, each row occurs twice, for R-Drop."""
        output = self.model.output
        states = output.prepare_states(states).flatten(0, 1)  # (B, T, E) -> (N, E)
        targets = (output.weight, output.bias, ids.flatten(), mask.flatten(), self.smoothing)
        if not doubled:
            return linear_cross_entropy(states, *targets)
        first, second = states.chunk(2)
        return rdrop_loss(first, second, *targets, self.rdrop)


class Seq2SeqObjective(Objective):
    """Label-smoothed cross-entropy of an encoder-decoder; with `rdrop` > 0, the R-Drop loss in training."""

    supports_rdrop = True

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Return sums over the target tokens: the loss, and the plain cross-entropy in nats, without a gradient."""
        source, target = batch.source, batch.target
        prepare_positions(self.model.encoder, source)
        prepare_positions(self.model.decoder, target)
        decoder_input = shift_right(target.ids, self.model.config.start_id, target.packing)
        inputs = (source.ids, decoder_input, source.lengths, target.lengths, batch.packing)
        # For R-Drop each row occurs twice, with different dropout. One pass over twice the rows uses a GPU better than
        # two passes, and wrappers see each parameter used once.
        doubled = self.rdrop > 0 and self.training
        states = self._forward_states(*(duplicate_rows(inputs) if doubled else inputs))
        return self.compute_token_loss(states, target.ids, target.token_mask(), doubled)

    def compute_states(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None,
        target_lengths: Tensor | None,
        packing: tuple[Packing, Packing] | None,
    ) -> Tensor:
        source_packing, target_packing = packing or (None, None)
        memory = self.model.encode(source, source_lengths, packing=source_packing)
        return self.model.decode(target, memory, target_lengths, packing=target_packing)


def prepare_positions(stack: Stack, text: TokenBatch) -> None:
    """Compute the position table for packed rows outside of the compiled region."""
    if text.packing is not None:
        stack.positions.precompute(text.ids.shape[1], stack.config.width, text.ids.device)


def duplicate_rows(inputs: Any) -> Any:
    match inputs:
        case Tensor():
            return torch.cat([inputs, inputs])
        case Packing():
            segments, positions, ends = map(duplicate_rows, (inputs.segments, inputs.positions, inputs.ends))
            return Packing(segments, positions, ends, inputs.max_length)
        case tuple():
            return tuple(map(duplicate_rows, inputs))
    return None


class SingleStackObjective(Objective):
    """Base class for models with one stack; subclasses define `compute_loss`."""

    def forward(self, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        text = batch.inputs
        prepare_positions(getattr(self.model, "decoder", None) or self.model.encoder, text)
        return self.compute_loss(self._forward_states(text.ids, text.lengths, text.packing), batch)

    def compute_states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        """(B, T) -> (B, T, E)"""
        return self.model(ids, lengths, packing=packing)

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def compute_output_loss(self, states: Tensor, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the output layer's logits; negative labels are ignored."""
        return linear_cross_entropy(
            states, output.weight, output.bias, labels.clamp(min=0), labels >= 0, self.smoothing
        )


class CausalLMObjective(SingleStackObjective):
    """Next-token prediction. Padding follows the text, where causal attention does not see it."""

    def compute_states(self, ids: Tensor, lengths: Tensor | None, packing: Packing | None) -> Tensor:
        return self.model.compute_states(ids, packing=packing)

    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        states = self.model.output.prepare_states(states).flatten(0, 1)  # (B, T, E) -> (N, E)
        return self.compute_output_loss(states, self.model.output, batch.labels.flatten())


class MaskedLMObjective(SingleStackObjective):
    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        head = self.model.masked_lm
        states = head.transform(gather_masked(states, batch))
        states = head.output.prepare_states(states).flatten(0, 1)  # (B, M, E) -> (N, E)
        return self.compute_output_loss(states, head.output, batch.labels.flatten())


def gather_masked(states: Tensor, batch: LabeledBatch) -> Tensor:
    """(B, T, E) -> (B, M, E)"""
    assert batch.label_positions is not None
    return states.gather(1, batch.label_positions[..., None].expand(-1, -1, states.shape[2]))


class TextClassificationObjective(SingleStackObjective):
    def compute_loss(self, states: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
        logits = self.model.classify(states, batch.inputs.packing).flatten(0, -2)  # (B, S, C) -> (N, C)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.labels.flatten()
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1, label_smoothing=self.smoothing)
            plain = F.cross_entropy(logits.detach(), labels, reduction="sum", ignore_index=-1)
        return loss, plain
