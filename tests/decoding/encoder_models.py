"""Tiny models with tokenizers: Hugging Face's BERT, and ours."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import torch
from sentencepiece import SentencePieceTrainer

from attent.models import CausalLM, EncoderConfig, Seq2Seq, Seq2SeqConfig, TextEncoder, VisionTransformer, build
from attent.models.config import CausalConfig, VisionConfig, mirror_encoder
from attent.nn import LearnedConfig, RotaryConfig, StackConfig
from attent.text.tokenizer import Tokenizer, build_own_files

SENTENCES = ["The cat sat on the mat.", "A dog ran in the park.", "The bird sang in a tree, and the cat sat."] * 5
WORDS = "the a cat dog bird sat ran sang on in mat park tree and un ##ing ##happy . , !".split()
BERT = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=32, positions=LearnedConfig(max_length=32))


def bert_folder(folder: Path, kind: str, **settings: object) -> Path:
    """A BERT of Hugging Face with random weights; `kind` is the end of its class name."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"BertFor{kind}")
    config = transformers.BertConfig(**BERT, max_position_embeddings=32, **settings)  # type: ignore[arg-type]
    model = made(config).eval()
    for parameter in model.parameters():  # spread out, so that tokens are not equally likely
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def sentencepiece(kind: str = "bpe", controls: tuple[str, ...] = ("<mask>",)) -> Tokenizer:
    """A tokenizer with a mask, or with sentinels."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        control_symbols=list(controls),
        user_defined_symbols=["\x1a"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=4,
    )
    return Tokenizer.from_files(build_own_files(model.getvalue()))


def encoder(tokenizer: Tokenizer, *, masked: bool = True, labels: tuple[str, ...] = ()) -> TextEncoder:
    torch.manual_seed(0)
    model = build(EncoderConfig(vocab=tokenizer.source.size, stack=STACK, masked_lm=masked, labels=labels)).eval()
    if model.classifier is not None:
        torch.nn.init.normal_(model.classifier.weight)
    return model


def causal_lm(tokenizer: Tokenizer) -> CausalLM:
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=32, positions=RotaryConfig(), causal=True)
    return build(CausalConfig(vocab=tokenizer.source.size, stack=stack)).eval()


def span_model(tokenizer: Tokenizer) -> Seq2Seq:
    """A model that generates the first sentinel, ` cat`, the second sentinel, ` mat`, the end, whatever the source: a
    token determines the next one."""
    torch.manual_seed(0)
    vocabulary = tokenizer.source
    stack = StackConfig(layers=1, width=vocabulary.size, heads=1, ffn_width=8, positions=LearnedConfig(max_length=32))
    config = Seq2SeqConfig(vocab=vocabulary.size, encoder=stack, decoder=mirror_encoder(stack), tie_output=False)
    model = build(config).eval()
    token_ids = [
        vocabulary.start,
        vocabulary.sentinels[0],
        *vocabulary.encode(["cat"])[0],
        vocabulary.sentinels[1],
        *vocabulary.encode(["mat"])[0],
        vocabulary.end,
    ]
    assert len(set(token_ids)) == len(token_ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.zero_()
        model.target_embedding.weight.copy_(torch.eye(vocabulary.size))
        for last, following in pairwise(token_ids):
            model.output.weight[following, last] = 20.0
    return model


def vision_model() -> VisionTransformer:
    torch.manual_seed(0)
    model = build(VisionConfig(image_size=8, patch_size=4, stack=STACK, labels=("cat", "dog", "bird"))).eval()
    assert model.classifier is not None
    torch.nn.init.normal_(model.classifier.weight)
    return model
