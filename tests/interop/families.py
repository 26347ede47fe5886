"""The families under test: random toy models of `transformers`, random inputs, and the outputs of both sides.

`test_parity` compares all of them; the suites of the families use the same models for their special cases.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attent.interop import bart, bert, gpt2, llama, marian, t5, vision_encoder_decoder, vit, whisper
from attent.models import CausalLM, Seq2Seq, TextEncoder, VisionTransformer
from tests.interop.parity import exact, randomise

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

BERT_CLASSES = ["BertForMaskedLM", "BertForSequenceClassification", "BertModel", "no pooler", "BertForPreTraining"]
VIT_CLASSES = ["ViTForImageClassification", "ViTModel", "no pooler"]
ACTIVATIONS = ["gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"]
VIT_ACTIVATIONS = ACTIVATIONS[:5]
FEED_FORWARDS = ["relu", "gated-gelu", "gelu", "gated-silu", "gelu_new", "gated-relu", "gated-gelu_new", "silu"]
T5_OUTPUTS = [(True, True), (False, False), (True, False), (False, True)]  # tied, scaled: 1.0, 1.1 and the others


class TokenBatch(NamedTuple):
    """Ragged texts, padded on the right with real ids: attention to padding changes the outputs."""

    ids: Tensor
    lengths: Tensor
    segments: Tensor | None = None

    @property
    def real(self) -> Tensor:
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    @property
    def left_padded(self) -> tuple[Tensor, Tensor]:
        """The same texts with padding on the left, and their attention mask."""
        T = self.ids.shape[1]
        index = torch.arange(T) - (T - self.lengths)[:, None]
        return self.ids.gather(1, index % T), (index >= 0).long()


# --- encoder-decoder ------------------------------------------------------------------------------


class PairBatch(NamedTuple):
    """Ragged pairs, padded on the right with real ids: attention to padding changes the outputs."""

    source: Tensor
    target: Tensor  # the decoder's input
    labels: Tensor
    source_lengths: Tensor
    target_lengths: Tensor

    @property
    def source_mask(self) -> Tensor:
        return torch.arange(self.source.shape[1]) < self.source_lengths[:, None]

    @property
    def real(self) -> Tensor:
        return torch.arange(self.target.shape[1]) < self.target_lengths[:, None]


def make_marian_config(seed: int) -> Any:
    """Unequal sides, odd sizes, tied or not; padding, start and end are three tokens."""
    rng = random.Random(seed)
    heads = rng.choice([(1, 3), (2, 4), (3, 1), (4, 2)])
    share, vocab = rng.random() < 0.5, rng.choice([17, 31, 53])
    return transformers.MarianConfig(
        vocab_size=vocab,
        decoder_vocab_size=vocab if share else rng.choice([19, 29, 47]),
        d_model=rng.choice([1, 2, 3]) * 12 - rng.choice([0, 0, 9]) if heads in ((1, 3), (3, 1)) else 16,
        encoder_layers=rng.choice([1, 2, 3]),
        decoder_layers=rng.choice([1, 2, 3]),
        encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1],
        encoder_ffn_dim=rng.choice([5, 24, 40]),
        decoder_ffn_dim=rng.choice([7, 20, 36]),
        activation_function=rng.choice(["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "swish", "silu"]),
        dropout=rng.choice([0.0, 0.1, 0.3]),
        attention_dropout=rng.choice([0.0, 0.2]),
        activation_dropout=rng.choice([0.0, 0.4]),
        scale_embedding=rng.random() < 0.5,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=rng.random() < 0.6,
        max_position_embeddings=64,
        pad_token_id=16,
        decoder_start_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        attn_implementation=rng.choice(["eager", "sdpa"]),
    )


def make_marian(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """All parameters random: no zero bias or unit norm hides an error."""
    model = transformers.MarianMTModel(make_marian_config(seed)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), ("bias", model.final_logits_bias)]:
            if "embed_positions" in name:
                continue
            spread = weight.shape[-1] ** -0.5 if weight.dim() == 2 and name != "bias" else 0.3
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype) * spread
            weight.copy_(noise + ("norm.weight" in name))
    return model


def make_marian_batch(config: Any, seed: int) -> PairBatch:
    generator = torch.Generator().manual_seed(seed + 1000)

    def ids(high: int, length: int) -> Tensor:
        drawn = torch.randint(0, high - 1, (4, length), generator=generator)
        return drawn + (drawn >= config.pad_token_id).long()  # every id but the pad

    target = ids(config.decoder_vocab_size, 7)
    target[:, 0] = config.decoder_start_token_id
    return PairBatch(
        source=ids(config.vocab_size, 9),
        target=target,
        labels=ids(config.decoder_vocab_size, 7),
        source_lengths=torch.randint(1, 10, (4,), generator=generator),
        target_lengths=torch.randint(1, 8, (4,), generator=generator),
    )


def run_hf_seq2seq(model: Any, batch: PairBatch) -> Tensor:
    out: Tensor = model(
        input_ids=batch.source, attention_mask=batch.source_mask.long(), decoder_input_ids=batch.target
    ).logits
    return out


def run_seq2seq(model: Seq2Seq, batch: PairBatch) -> Tensor:
    out: Tensor = model(batch.source, batch.target, batch.source_lengths, batch.target_lengths)
    return out


def make_t5_config(seed: int) -> Any:
    """Heads that do not fill the width, unequal sides, few buckets or many."""
    rng = random.Random(seed)
    buckets = rng.choice([4, 8, 32])
    return transformers.T5Config(
        vocab_size=rng.choice([17, 31]),
        d_model=rng.choice([8, 12, 15]),
        d_kv=rng.choice([2, 4, 5]),
        d_ff=rng.choice([7, 24]),
        num_layers=rng.choice([1, 2, 3]),
        num_decoder_layers=rng.choice([1, 2, 3]),
        num_heads=rng.choice([1, 2, 3]),
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=buckets + rng.choice([1, 9, 96]),
        feed_forward_proj=FEED_FORWARDS[seed % len(FEED_FORWARDS)],
        layer_norm_epsilon=rng.choice([1e-6, 1e-3]),
        dropout_rate=rng.choice([0.0, 0.1]),
        tie_word_embeddings=T5_OUTPUTS[seed % 4][1],  # by which it decides whether to scale
        decoder_start_token_id=0,
        attn_implementation=rng.choice(["eager", "sdpa"]),
    )


def make_t5(seed: int) -> Any:
    model = transformers.T5ForConditionalGeneration(make_t5_config(seed)).double().eval()
    if not T5_OUTPUTS[seed % 4][0]:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")  # as after loading an untied output
    randomise(model, seed)
    return model


def make_t5_batch(config: Any, seed: int, rows: int = 4) -> PairBatch:
    """Long enough for distances that share a bucket."""
    generator = torch.Generator().manual_seed(seed + 1000)
    target = torch.randint(2, config.vocab_size, (rows, 12), generator=generator)
    target[:, 0] = config.decoder_start_token_id
    return PairBatch(
        source=torch.randint(2, config.vocab_size, (rows, 24), generator=generator),
        target=target,
        labels=target,
        source_lengths=torch.randint(1, 25, (rows,), generator=generator),
        target_lengths=torch.randint(1, 13, (rows,), generator=generator),
    )


BART_CLASSES = {
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    "mbart": (transformers.MBartConfig, transformers.MBartForConditionalGeneration),
    "m2m_100": (transformers.M2M100Config, transformers.M2M100ForConditionalGeneration),
}


def make_bart_config(family: str, seed: int) -> Any:
    """Unequal sides, odd sizes, tied or not; padding, start and end are three tokens."""
    rng = random.Random(seed)
    heads = rng.choice([(1, 3), (2, 4), (3, 1), (4, 2)])
    return BART_CLASSES[family][0](
        vocab_size=rng.choice([17, 31, 53]),
        d_model=rng.choice([12, 15, 24]) if heads in ((1, 3), (3, 1)) else 16,
        encoder_layers=rng.choice([1, 2, 3]),
        decoder_layers=rng.choice([1, 2, 3]),
        encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1],
        encoder_ffn_dim=rng.choice([5, 24, 40]),
        decoder_ffn_dim=rng.choice([7, 20, 36]),
        activation_function=rng.choice(["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "swish", "silu"]),
        dropout=rng.choice([0.0, 0.1, 0.3]),
        attention_dropout=rng.choice([0.0, 0.2]),
        activation_dropout=rng.choice([0.0, 0.4]),
        scale_embedding=rng.random() < 0.5,
        tie_word_embeddings=rng.random() < 0.6,
        max_position_embeddings=rng.choice([9, 14]),
        pad_token_id=1,
        decoder_start_token_id=3,
        attn_implementation=rng.choice(["eager", "sdpa"]),
    )


def make_bart(family: str, seed: int) -> Any:
    model = BART_CLASSES[family][1](make_bart_config(family, seed)).double().eval()
    randomise(model, seed)
    if family != "m2m_100":
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
    return model


def make_bart_batch(config: Any, seed: int) -> PairBatch:
    """Without the padding token, whose embedding gets no gradient in `transformers`."""
    generator = torch.Generator().manual_seed(seed + 1000)
    target = torch.randint(2, config.vocab_size, (4, 7), generator=generator)
    target[:, 0] = config.decoder_start_token_id
    return PairBatch(
        source=torch.randint(2, config.vocab_size, (4, 9), generator=generator),
        target=target,
        labels=target,
        source_lengths=torch.randint(1, 10, (4,), generator=generator),
        target_lengths=torch.randint(1, 8, (4,), generator=generator),
    )


class SpeechBatch(NamedTuple):
    """Log-mel frames of full windows, and ragged targets."""

    source: Tensor
    target: Tensor
    target_lengths: Tensor

    @property
    def real(self) -> Tensor:
        return torch.arange(self.target.shape[1]) < self.target_lengths[:, None]

    def float(self) -> SpeechBatch:
        return self._replace(source=self.source.float())


def make_whisper_config(seed: int, **changes: Any) -> Any:
    """Unequal sides, windows of a few frames, tied or not; text ends at token 20, and the start is 21."""
    rng = random.Random(seed)
    heads = rng.choice([(1, 3), (2, 4), (3, 1), (4, 2)])
    values = {
        "vocab_size": rng.choice([31, 53]),
        "num_mel_bins": rng.choice([3, 8]),
        "d_model": rng.choice([12, 24]),
        "encoder_layers": rng.choice([1, 2, 3]),
        "decoder_layers": rng.choice([1, 2, 3]),
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": rng.choice([5, 24, 40]),
        "decoder_ffn_dim": rng.choice([7, 20, 36]),
        "activation_function": rng.choice(["gelu", "gelu", "relu", "gelu_new", "silu"]),
        "dropout": rng.choice([0.0, 0.1]),
        "attention_dropout": rng.choice([0.0, 0.2]),
        "activation_dropout": rng.choice([0.0, 0.4]),
        "max_source_positions": rng.choice([1, 6, 11]),
        "max_target_positions": rng.choice([9, 14]),
        "scale_embedding": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.7,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 20),
        "decoder_start_token_id": 21,
        "begin_suppress_tokens": None,
        "attn_implementation": rng.choice(["eager", "sdpa"]),
    }
    return transformers.WhisperConfig(**values | changes)


def make_whisper(seed: int, **changes: Any) -> Any:
    model = transformers.WhisperForConditionalGeneration(make_whisper_config(seed, **changes)).double().eval()
    model.model.encoder.embed_positions.requires_grad_()  # frozen in transformers, learned in attent
    randomise(model, seed)
    return model


def make_speech_batch(config: Any, seed: int) -> SpeechBatch:
    """Without the padding token, whose embedding gets no gradient in `transformers`."""
    generator = torch.Generator().manual_seed(seed + 1000)
    shape = (4, 2 * config.max_source_positions, config.num_mel_bins)
    target = torch.randint(0, config.pad_token_id, (4, 8), generator=generator)
    target[:, 0] = config.decoder_start_token_id
    return SpeechBatch(
        source=torch.randn(shape, generator=generator, dtype=torch.float64),
        target=target,
        target_lengths=torch.randint(1, 9, (4,), generator=generator),
    )


def run_hf_whisper(model: Any, batch: SpeechBatch) -> dict[str, Tensor]:
    logits = model(input_features=batch.source.transpose(1, 2), decoder_input_ids=batch.target).logits
    return {"logits": logits[batch.real]}


def run_whisper(model: Seq2Seq, batch: SpeechBatch, names: Iterable[str] = ()) -> dict[str, Tensor]:
    return {"logits": model(batch.source, batch.target, None, batch.target_lengths)[batch.real]}


# --- decoder-only ---------------------------------------------------------------------------------


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 7.5},
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5},
    {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 10.0,
        "factor": 2.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 3.5,
        "original_max_position_embeddings": 7,
    },
]


def make_gpt2_config(seed: int, **changes: Any) -> Any:
    """All shapes of GPT-2, and each of its attention variants."""
    rng = random.Random(seed)
    values = {
        "vocab_size": rng.choice([17, 31, 53]),
        "n_positions": rng.choice([9, 12, 30]),
        "n_embd": rng.choice([12, 24]),
        "n_head": rng.choice([1, 2, 3, 4, 12]),
        "n_layer": rng.choice([1, 2, 3]),
        "n_inner": rng.choice([None, 7, 40]),
        "activation_function": rng.choice(["gelu_new", "gelu", "relu", "silu", "gelu_fast", "gelu_pytorch_tanh"]),
        "resid_pdrop": rng.choice([0.0, 0.1]),
        "embd_pdrop": rng.choice([0.0, 0.1, 0.3]),
        "attn_pdrop": rng.choice([0.0, 0.2]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        "scale_attn_weights": rng.random() < 0.6,
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.4,
        "tie_word_embeddings": rng.random() < 0.6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": rng.choice(["eager", "sdpa"]),
    }
    return transformers.GPT2Config(**values | changes)


def make_llama_config(seed: int, **changes: Any) -> Any:
    """Grouped heads down to one key head, other head widths, each kind of rotary scaling."""
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (6, 1)])
    bias = rng.random() < 0.3
    values = {
        "vocab_size": rng.choice([17, 31, 53]),
        "hidden_size": 24,
        "intermediate_size": rng.choice([7, 40]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([None, None, 2, 10]),
        "hidden_act": rng.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "max_position_embeddings": 256,
        "rope_parameters": dict(rng.choice(ROPES)),
        "attention_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": rng.choice([0.0, 0.1]),
        "tie_word_embeddings": rng.random() < 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": rng.choice(["eager", "sdpa"]),
    }
    return transformers.LlamaConfig(**values | changes)


def make_causal(config: Any, seed: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    randomise(model, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"ln_\w\.weight", name):  # GPT-2's norms, which do not say so in their names
                weight.add_(1)
    return model


def make_texts(config: Any, seed: int, rows: int = 4, length: int = 9) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    return TokenBatch(ids, torch.randint(1, length + 1, (rows,), generator=generator))


def run_hf_causal(model: Any, texts: TokenBatch) -> Tensor:
    with exact(model):
        out: Tensor = model(input_ids=texts.ids, attention_mask=texts.real.long()).logits[texts.real]
    return out


def run_causal(model: CausalLM, texts: TokenBatch) -> Tensor:
    out: Tensor = model(texts.ids, texts.lengths)[texts.real]
    return out


# --- encoder-only ---------------------------------------------------------------------------------


def make_bert_config(seed: int) -> Any:
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 3, 4])
    labels = rng.choice([2, 3, 5])
    return transformers.BertConfig(
        vocab_size=rng.choice([17, 31]),
        hidden_size=heads * rng.choice([3, 4, 5, 8]),
        num_hidden_layers=rng.choice([1, 2, 3]),
        num_attention_heads=heads,
        intermediate_size=rng.choice([7, 24, 40]),
        hidden_act=ACTIVATIONS[seed % len(ACTIVATIONS)],
        hidden_dropout_prob=rng.choice([0.0, 0.1]),
        attention_probs_dropout_prob=rng.choice([0.0, 0.2]),
        max_position_embeddings=rng.choice([9, 14]),
        type_vocab_size=rng.choice([1, 2, 3]),
        layer_norm_eps=rng.choice([1e-12, 1e-5]),
        id2label={i: f"label {i}" for i in range(labels)},
        attn_implementation=rng.choice(["eager", "sdpa"]),
    )


def make_bert(seed: int, cls: str | None = None) -> Any:
    cls = BERT_CLASSES[seed % len(BERT_CLASSES)] if cls is None else cls
    if cls == "no pooler":
        model = transformers.BertModel(make_bert_config(seed), add_pooling_layer=False)
    else:
        model = getattr(transformers, cls)(make_bert_config(seed))
    model = model.double().eval()
    randomise(model, seed)
    return model


def make_bert_batch(config: Any, seed: int) -> TokenBatch:
    """Without the padding token, whose embedding gets no gradient in `transformers`."""
    generator = torch.Generator().manual_seed(seed + 1000)
    return TokenBatch(
        ids=torch.randint(1, config.vocab_size, (4, 9), generator=generator),
        segments=torch.randint(0, config.type_vocab_size, (4, 9), generator=generator),
        lengths=torch.randint(1, 10, (4,), generator=generator),
    )


def run_hf_bert(model: Any, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the states of real tokens, and the output of each head."""
    out = model(
        input_ids=batch.ids,
        attention_mask=batch.real.long(),
        token_type_ids=batch.segments,
        output_hidden_states=True,
    )
    heads = {"states": out.hidden_states[-1][batch.real]}
    if getattr(out, "pooler_output", None) is not None:
        heads["pooled"] = out.pooler_output
    for name in ("logits", "prediction_logits"):
        if getattr(out, name, None) is not None:
            logits = getattr(out, name)
            heads |= {"classes": logits} if logits.dim() == 2 else {"words": logits[batch.real]}
    return heads


def run_bert(model: TextEncoder, batch: TokenBatch, names: Iterable[str]) -> dict[str, Tensor]:
    states = model(batch.ids, batch.lengths, batch.segments)
    heads = {
        "states": lambda: states[batch.real],
        "pooled": lambda: model.pool(states),
        "classes": lambda: model.classify(states),
        "words": lambda: model.masked_logits(states)[batch.real],
    }
    return {name: heads[name]() for name in names}


def make_vit_config(seed: int) -> Any:
    rng = random.Random(seed)
    heads, patch, labels = rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 4]), rng.choice([2, 4, 7])
    return transformers.ViTConfig(
        hidden_size=heads * rng.choice([3, 4, 8]),
        num_hidden_layers=rng.choice([1, 2, 3]),
        num_attention_heads=heads,
        intermediate_size=rng.choice([7, 24, 40]),
        hidden_act=VIT_ACTIVATIONS[seed % len(VIT_ACTIVATIONS)],
        hidden_dropout_prob=rng.choice([0.0, 0.1]),
        attention_probs_dropout_prob=rng.choice([0.0, 0.2]),
        layer_norm_eps=rng.choice([1e-12, 1e-5]),
        image_size=patch * rng.choice([1, 2, 3]),
        patch_size=patch,
        num_channels=rng.choice([1, 3]),
        id2label={i: f"label {i}" for i in range(labels)},
        attn_implementation=rng.choice(["eager", "sdpa"]),
    )


def make_vit(seed: int) -> Any:
    cls = VIT_CLASSES[seed % len(VIT_CLASSES)]
    if cls == "no pooler":
        model = transformers.ViTModel(make_vit_config(seed), add_pooling_layer=False)
    else:
        model = getattr(transformers, cls)(make_vit_config(seed))
    model = model.double().eval()
    randomise(model, seed)
    return model


def make_pixels(config: Any, seed: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000)
    size = (rows, config.num_channels, config.image_size, config.image_size)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def run_hf_vit(model: Any, pixels: Tensor) -> dict[str, Tensor]:
    if hasattr(model, "classifier"):
        return {"states": model.vit(pixels).last_hidden_state, "classes": model(pixels).logits}
    out = model(pixels)
    return {"states": out.last_hidden_state} | ({} if out.pooler_output is None else {"pooled": out.pooler_output})


def run_vit(model: VisionTransformer, pixels: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    states = model.compute_states(pixels)
    heads = {"states": lambda: states, "pooled": lambda: model.pool(states), "classes": lambda: model(pixels)}
    return {name: heads[name]() for name in names}


# --- images to text -------------------------------------------------------------------------------


class CaptionBatch(NamedTuple):
    """Images, and ragged texts padded on the right with real ids."""

    pixels: Tensor
    target: Tensor  # the decoder's input
    target_lengths: Tensor

    @property
    def real(self) -> Tensor:
        return torch.arange(self.target.shape[1]) < self.target_lengths[:, None]


def make_vit_bert(seed: int, **changes: Any) -> Any:
    """Every other one with stacks of one width, which need no projection."""
    vision, text = make_vit_config(seed), make_bert_config(seed + 5)
    if seed % 2:
        text.update({"hidden_size": vision.hidden_size, "num_attention_heads": vision.num_attention_heads})
    else:
        text.update({"hidden_size": 4 * text.hidden_size})  # at a width of 3, norms amplify the rounding of float32
    model = make_vision_encoder_decoder(seed, vision, text, **changes)
    # Its gradient is the sum of those of the positions, into which attent adds it: see test_vision_encoder_decoder.
    model.decoder.bert.embeddings.token_type_embeddings.weight.requires_grad_(False)
    return model


def make_vit_gpt2(seed: int, **changes: Any) -> Any:
    vision, text = make_vit_config(seed), make_gpt2_config(seed + 5)
    if seed % 2:
        text.update({"n_embd": vision.hidden_size, "n_head": vision.num_attention_heads})
    return make_vision_encoder_decoder(seed, vision, text, **changes)


def make_vision_encoder_decoder(seed: int, vision: Any, text: Any, **changes: Any) -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    tokens = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config.update(tokens | changes)
    for side, part in ((config.encoder, vision), (config.decoder, text)):
        side._attn_implementation = part._attn_implementation
    model = transformers.VisionEncoderDecoderModel(config).double().eval()
    randomise(model, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"ln_\w+\.weight", name):
                weight.add_(1)
    return model


def make_captions(config: Any, seed: int, rows: int = 3) -> CaptionBatch:
    """Without the padding token, whose embedding gets no gradient in `transformers`."""
    generator = torch.Generator().manual_seed(seed + 2000)
    target = torch.randint(1, config.decoder.vocab_size, (rows, 9), generator=generator)
    return CaptionBatch(
        make_pixels(config.encoder, seed, rows), target, torch.randint(1, 10, (rows,), generator=generator)
    )


def run_hf_captioner(model: Any, batch: CaptionBatch) -> dict[str, Tensor]:
    pixels, mask = batch.pixels.to(model.dtype), batch.real.long()
    logits = model(pixel_values=pixels, decoder_input_ids=batch.target, decoder_attention_mask=mask).logits
    return {"logits": logits[batch.real]}


def run_captioner(model: Seq2Seq, batch: CaptionBatch, names: Iterable[str]) -> dict[str, Tensor]:
    pixels = batch.pixels.to(model.output.weight.dtype)
    return {"logits": model(pixels, batch.target, target_lengths=batch.target_lengths)[batch.real]}


# --- all ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    name: str
    module: Any  # of attent.interop
    make_model: Callable[[int], Any]  # seed -> their model in float64
    make_inputs: Callable[[Any, int], Any]  # their config, seed
    run_theirs: Callable[[Any, Any], dict[str, Tensor]]
    run_ours: Callable[[Any, Any, Iterable[str]], dict[str, Tensor]]
    may_be_missing: tuple[str, ...] = ()  # prefixes of tensors that a folder of ours may lack


def make_causal_family(name: str, module: Any, make_config: Callable[[int], Any]) -> Family:
    return Family(
        name,
        module,
        lambda seed: make_causal(make_config(seed), seed),
        make_texts,
        lambda model, texts: {"logits": run_hf_causal(model, texts)},
        lambda model, texts, names: {"logits": run_causal(model, texts)},
    )


def make_seq2seq_family(
    name: str, module: Any, make_model: Any, make_inputs: Any, may_be_missing: tuple[str, ...] = ()
) -> Family:
    return Family(
        name,
        module,
        make_model,
        make_inputs,
        lambda model, batch: {"logits": run_hf_seq2seq(model, batch)[batch.real]},
        lambda model, batch, names: {"logits": run_seq2seq(model, batch)[batch.real]},
        may_be_missing,
    )


FAMILIES = [
    make_seq2seq_family("marian", marian, make_marian, make_marian_batch),
    *(  # where embeddings are not tied, the shared one is not used
        make_seq2seq_family(name, bart, partial(make_bart, name), make_bart_batch, ("model.shared",))
        for name in BART_CLASSES
    ),
    make_seq2seq_family("t5", t5, make_t5, make_t5_batch),
    make_causal_family("gpt2", gpt2, make_gpt2_config),
    make_causal_family("llama", llama, make_llama_config),
    Family("bert", bert, make_bert, make_bert_batch, run_hf_bert, run_bert, ("pooler", "cls.seq", "bert.pooler")),
    Family("vit", vit, make_vit, make_pixels, run_hf_vit, run_vit, ("pooler",)),
    *(
        Family(
            name,
            vision_encoder_decoder,
            make_model,
            make_captions,
            run_hf_captioner,
            run_captioner,
            ("encoder.pooler",),
        )
        for name, make_model in (("vit-bert", make_vit_bert), ("vit-gpt2", make_vit_gpt2))
    ),
    Family("whisper", whisper, make_whisper, make_speech_batch, run_hf_whisper, run_whisper),
]
