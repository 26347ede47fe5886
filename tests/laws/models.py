"""Toy encoder-decoders of different configurations, with ragged random text, audio frames or images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import (
    AudioConfig,
    ConvDecoderConfig,
    ConvEncoderConfig,
    ImageConfig,
    LearnedConfig,
    LSTMDecoderConfig,
    LSTMEncoderConfig,
    StackConfig,
)
from tests.laws.family import T5_TOY
from tests.laws.helpers import (
    CROSS_DECODERS,
    ENCODERS,
    POSITIONS,
    TOY,
    WIDTH,
    pad_with_noise,
    parametrize_all,
    precise,
    randomize,
)

VOCAB, TARGET_VOCAB = 19, 17
LONG, SHORT = (6, 2, 4, 1), (3, 5, 1, 4)  # sentence lengths of both sides


def build_configs() -> dict[str, Seq2SeqConfig]:
    """Pair each encoder with a different decoder; vary shared embeddings and the output layer."""
    decoders = list(CROSS_DECODERS.items())
    configs = {}
    for i, (name, encoder) in enumerate(ENCODERS.items()):
        decoder_name, decoder = decoders[(i * 5 + 2) % len(decoders)]
        configs[f"{name}-{decoder_name}"] = Seq2SeqConfig(
            vocab=VOCAB,
            target_vocab=VOCAB if i % 2 else TARGET_VOCAB,
            encoder=encoder,
            decoder=decoder,
            share_embeddings=i % 2 == 1,
            tie_output=i % 3 != 0,
            output_bias=i % 4 == 0,
            scale_embeddings=i % 5 != 0,
            output_transform=i % 7 == 3,
        )
    return configs


def make_lstm(**decoder: object) -> Seq2SeqConfig:
    encoder = LSTMEncoderConfig(layers=2, width=WIDTH)
    return Seq2SeqConfig(vocab=VOCAB, encoder=encoder, decoder=LSTMDecoderConfig(layers=2, width=WIDTH, **decoder))


LSTMS = {
    "lstm-additive": make_lstm(),
    "lstm-dot": replace(make_lstm(attention="dot"), tie_output=False),
    "lstm-dot-not-fed": make_lstm(attention="dot", input_feeding=False),
    "lstm-no-attention": make_lstm(attention="none", input_feeding=False),
}
CONVS = {
    "conv": Seq2SeqConfig(
        vocab=VOCAB,
        encoder=ConvEncoderConfig(layers=2, width=WIDTH, kernel=3, max_length=40),
        decoder=ConvDecoderConfig(layers=3, width=WIDTH, kernel=4, max_length=40),
    )
}


def make_audio(encoder: StackConfig, decoder: StackConfig, **changes: object) -> Seq2SeqConfig:
    frontend = AudioConfig(mel_bins=5)
    return Seq2SeqConfig(
        vocab=VOCAB, frontend=frontend, encoder=encoder, decoder=decoder, share_embeddings=False, **changes
    )


PRE = replace(TOY, norm_order="pre")
AUDIO = {  # as trained from scratch; as Whisper is; stacks of different width
    "audio": make_audio(PRE, mirror_encoder(PRE), ctc=True),
    "audio-learned": make_audio(
        replace(PRE, positions=POSITIONS["learned"], activation="gelu"),
        mirror_encoder(replace(PRE, positions=POSITIONS["learned"], activation="gelu")),
        scale_embeddings=False,
    ),
    "audio-projected": make_audio(TOY, replace(mirror_encoder(TOY), width=24), tie_output=False),
}
PICTURE = StackConfig(
    layers=2,
    width=24,
    heads=3,
    ffn_width=40,
    activation="gelu",
    positions=LearnedConfig(max_length=5),
    norm_order="pre",
    norm_eps=1e-12,
    dropout=0.0,
)
VIT_GPT2 = Seq2SeqConfig(
    vocab=VOCAB,
    frontend=ImageConfig(image_size=6, patch_size=3),
    encoder=PICTURE,
    decoder=mirror_encoder(replace(PRE, positions=POSITIONS["learned"], activation="gelu_tanh", scale_by_layer=True)),
    share_embeddings=False,
    scale_embeddings=False,
)
VIT_BERT = replace(
    VIT_GPT2,
    decoder=mirror_encoder(replace(TOY, positions=POSITIONS["learned"], activation="gelu", embedding_norm=True)),
    output_bias=True,
    output_transform=True,
)
IMAGES = {"vit-gpt2": VIT_GPT2, "vit-bert": VIT_BERT}
TRANSFORMERS = build_configs() | T5_TOY  # the state of an LSTM would cross the sentences of a packed row
SEQ2SEQS = TRANSFORMERS | LSTMS | CONVS | AUDIO | IMAGES
every_seq2seq = parametrize_all("config", SEQ2SEQS)


def make_seq2seq(config: Seq2SeqConfig, device: torch.device) -> Seq2Seq:
    return randomize(Seq2Seq(config).to(device, precise(device)))


@dataclass(frozen=True)
class Pairs:
    """Sources (token ids, audio frames or images) and target sentences of token ids, separate or padded with noise."""

    sources: list[Tensor]
    targets: list[Tensor]

    def batch(self, extra: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Arguments of `Seq2Seq`: source, target, source lengths (None for images), target lengths."""
        is_image = self.sources[0].dim() == 3
        source, source_lengths = (torch.stack(self.sources), None) if is_image else pad_with_noise(self.sources, extra)
        target, target_lengths = pad_with_noise(self.targets, extra)
        return source, target, source_lengths, target_lengths


def pairs(
    device: torch.device,
    source: tuple[int, ...] = LONG,
    target: tuple[int, ...] = SHORT,
    *,
    config: Seq2SeqConfig | None = None,
) -> Pairs:
    def ids(n: int) -> Tensor:
        return torch.randint(0, TARGET_VOCAB, (n,)).to(device)

    def frames(n: int) -> Tensor:
        return torch.randn(n, config.frontend.mel_bins).to(device, precise(device))

    def pixels(n: int) -> Tensor:
        return torch.randn(config.frontend.channels, 6, 6).to(device, precise(device))

    kinds = {AudioConfig: frames, ImageConfig: pixels}
    make_source = ids if config is None else kinds.get(type(config.frontend), ids)
    return Pairs([make_source(n) for n in source], [ids(n) for n in target])
