"""Encoder-decoder models: the Transformer of figure 1 (the paper's, Marian, T5), and LSTMs and convolutions."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.models.config import DecoderStackConfig, EncoderStackConfig, Seq2SeqConfig
from attent.models.output import OutputProjection
from attent.models.weights import SavableModel
from attent.nn import Cache, ConvEncoderConfig, ConvStack, Memory, Packing, Stack
from attent.nn.argument_checks import check_lengths
from attent.nn.frontends import FrontEnd, TokenEmbedding, build_frontend, check_id_shape
from attent.nn.recurrent import LSTMDecoder, LSTMDecoderConfig, LSTMEncoder, LSTMEncoderConfig
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer


class Seq2Seq(SavableModel):
    """Source and target token ids -> logits over the next target token.

    Rows are padded on the right (lengths), or hold several sentences each (a packing of either side). With another
    front-end in place of the token embedding (`config.frontend`), the source is log-mel frames (B, T, M) or normalized
    pixels (B, C, S, S).
    """

    source_embedding: FrontEnd

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        width, scaled = config.decoder.width, config.scale_embeddings
        make_embedding = partial(
            TokenEmbedding,
            width=width,
            scaled=scaled,
            unit_variance=config.scale_output and config.tie_output,
        )
        if config.frontend is None:
            self.source_embedding = make_embedding(config.vocab)
        else:
            self.source_embedding = build_frontend(config.frontend, config.encoder.width, scaled=scaled)
        shared = self.source_embedding if config.share_embeddings else None
        self.target_embedding = shared if isinstance(shared, TokenEmbedding) else make_embedding(config.output_vocab)
        self.encoder = build_encoder(config.encoder)
        self.decoder = build_decoder(config.decoder)
        # Between stacks of different width:
        self.memory_projection = nn.Linear(config.encoder.width, width) if config.encoder.width != width else None
        # Logits for the CTC loss (Graves et al. 2006); its blank is the start token, which no target contains.
        self.ctc_output = nn.Linear(width, config.output_vocab) if config.ctc else None
        tied_to = self.target_embedding if config.tie_output else None
        self.output = OutputProjection(
            config.output_vocab,
            width,
            tied_to=tied_to,
            bias=config.output_bias,
            scaled=config.scale_output,
            transform=config.stacks[1] if config.output_transform else None,
        )

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        assert isinstance(self.encoder, Stack)
        assert isinstance(self.decoder, Stack)
        return self.encoder, self.decoder

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        packing: tuple[Packing, Packing] | None = None,
    ) -> Tensor:
        """(B, Ts), (B, Tt) -> (B, Tt, V). `target` is the decoder's input, shifted right already.

        Returns logits: losses and searches compute the softmax's logarithm in one stable step.
        """
        self.check_inputs(source, target, source_lengths, target_lengths)
        source_packing, target_packing = packing or (None, None)
        memory = self.encode(source, source_lengths, packing=source_packing)
        states = self.decode(target, memory, target_lengths, packing=target_packing)
        return self.output(states)

    def encode(self, source: Tensor, lengths: Tensor | None = None, *, packing: Packing | None = None) -> Memory:
        """Run the front-end and the encoder."""
        x, lengths = self.source_embedding.embed_source(source, lengths)
        states = self.encoder(x, lengths, packing=packing)
        if self.memory_projection is not None:
            states = self.memory_projection(states)
        return Memory(states, lengths, packing)

    def decode(
        self, target: Tensor, memory: Memory, lengths: Tensor | None = None, *, packing: Packing | None = None
    ) -> Tensor:
        """Run the decoder: (B, Tt) -> states (B, Tt, E), the input of `output`."""
        return self.decoder(self.target_embedding(target), lengths, packing=packing, memory=memory)

    @torch.no_grad()
    def init_decoder_state(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int, beams: int = 1
    ) -> Cache:
        """Encode the source and return a cache for `capacity` target tokens of each of its beams (in eval mode)."""
        return self.decoder.new_cache(capacity, memory=self.encode(source, lengths), beams=beams)

    @torch.no_grad()
    def step(self, target: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Decode the next target tokens, (B, T), after those in the cache -> logits (B, T, V).

        `lengths` counts the real tokens of each row where these differ, as forced prefixes do. In a cache of beams, T
        is their number, one token each. The cache is updated in place, so this has no gradient: train with `forward`.
        """
        return self.output(self.decoder(self.target_embedding(target), lengths, cache=cache))

    def check_inputs(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None, target_lengths: Tensor | None
    ) -> None:
        """Report mistakes by the names of `forward`'s arguments."""
        self.source_embedding.check_source(source)
        check_id_shape(target, "target")
        if source.shape[0] != target.shape[0]:
            rows = f"{source.shape[0]} and {target.shape[0]}"
            raise AttentError(f"source and target must have the same number of rows, but have {rows}")
        if source_lengths is not None and source.dim() == 4:  # (B, C, S, S)
            raise AttentError("`source_lengths` must be None for images, which have no padding; leave it out")
        for name, batch, lengths in (("source", source, source_lengths), ("target", target, target_lengths)):
            if lengths is not None:
                check_lengths(lengths, batch.shape[0], batch.shape[1], batch.device, f"{name}_lengths")


def build_encoder(config: EncoderStackConfig) -> Stack | LSTMEncoder | ConvStack:
    if isinstance(config, ConvEncoderConfig):
        return ConvStack(config)
    return LSTMEncoder(config) if isinstance(config, LSTMEncoderConfig) else Stack(config)


def build_decoder(config: DecoderStackConfig) -> Stack | LSTMDecoder | ConvStack:
    if isinstance(config, ConvEncoderConfig):
        return ConvStack(config)
    return LSTMDecoder(config) if isinstance(config, LSTMDecoderConfig) else Stack(config)


def shift_right(target: Tensor, start: int, packing: Packing | None = None) -> Tensor:
    """Return the decoder's input for `target` (B, T): shifted by one behind the start token of each sentence."""
    check_id_shape(target, "target")
    shifted = F.pad(target, (1, 0), value=start)[:, :-1]
    return shifted if packing is None else shifted.masked_fill(packing.positions == 0, start)


def find_suppressed_tokens(config: Seq2SeqConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens that never occur in a target: start, padding, unknown, and ids without a piece."""
    banned = {config.start_id}
    if tokenizer is not None:
        target = tokenizer.target
        banned |= {target.pad, target.unknown, *range(target.size, config.output_vocab)}
    return sorted(banned - {config.end_id})
