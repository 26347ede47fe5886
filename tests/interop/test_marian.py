"""Marian: logits, gradients and greedy search match `transformers`; round trips and file variants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import attent
from attent.interop import conversion, load, marian
from attent.models import Seq2Seq, Seq2SeqConfig, build
from attent.models.config import mirror_encoder
from attent.nn import SinusoidalConfig, StackConfig, make_sinusoids
from tests.greedy import greedy_search
from tests.interop.families import (
    PairBatch,
    make_marian,
    make_marian_batch,
    make_marian_config,
    run_hf_seq2seq,
    run_seq2seq,
    transformers,
)
from tests.interop.folders import change_json, change_tensors
from tests.interop.parity import same_bits, until, worst

CASES = [pytest.param(case, marks=pytest.mark.slow) if case % 2 else case for case in range(36)]
FEW = range(0, 36, 6)

OPUS_MT_2020 = {  # the keys of the first published opus-mt models, at toy size
    "_num_labels": 3,
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"],
    "attention_dropout": 0.0,
    "bad_words_ids": [[40]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "classifier_dropout": 0.0,
    "d_model": 16,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 24,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 40,
    "decoder_vocab_size": 41,
    "dropout": 0.1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 0,
    "extra_pos_embeddings": 41,
    "force_bos_token_to_be_generated": False,
    "forced_eos_token_id": 0,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_length": 512,
    "max_position_embeddings": 512,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 4,
    "num_hidden_layers": 2,
    "output_past": True,
    "pad_token_id": 40,
    "scale_embedding": True,
    "static_position_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.22.0.dev0",
    "use_cache": True,
    "vocab_size": 41,
}


# Comparison with transformers.


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_match_transformers(case: int, tmp_path: Path) -> None:
    theirs, batch = make_marian(case), make_marian_batch(make_marian_config(case), case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    theirs.final_logits_bias.requires_grad_()  # a buffer in transformers, a parameter in attent

    expected, got = run_hf_seq2seq(theirs, batch), run_seq2seq(ours, batch)
    assert worst(got[batch.real], expected[batch.real]) < 1e-10
    compute_loss(expected, batch).backward()
    compute_loss(got, batch).backward()
    wrong = {name: error for name, error in gradient_errors(ours, theirs).items() if not error < 1e-9}
    assert not wrong


def compute_loss(logits: Tensor, batch: PairBatch) -> Tensor:
    return F.cross_entropy(logits[batch.real], batch.labels[batch.real])


def gradient_errors(ours: Seq2Seq, theirs: Any) -> dict[str, float]:
    """Return the error of each gradient; `transformers` gives the padding row none, so batches must not contain it."""
    expected = dict(theirs.named_parameters(remove_duplicate=False)) | {marian.LOGITS_BIAS: theirs.final_logits_bias}
    got = dict(ours.named_parameters(remove_duplicate=False))
    pairs = [(move.ours[0], move.theirs) for move in conversion.resolve_mappings(marian.TENSOR_MAPPINGS, ours)]
    return {
        name: worst(got[name].grad.reshape(expected[other].grad.shape), expected[other].grad) for name, other in pairs
    }


def test_only_the_padding_embedding_has_another_gradient(tmp_path: Path) -> None:
    """If the decoder starts with padding, as in opus-mt, `transformers` gives its embedding no gradient."""
    theirs = make_marian(1)
    theirs.save_pretrained(tmp_path)
    ours, batch, pad = load(tmp_path), make_marian_batch(theirs.config, 1), theirs.config.pad_token_id
    batch.target[:, 0] = pad
    compute_loss(run_hf_seq2seq(theirs, batch), batch).backward()
    compute_loss(run_seq2seq(ours, batch), batch).backward()
    difference = (ours.target_embedding.weight.grad - theirs.model.decoder.embed_tokens.weight.grad).abs()
    assert difference[pad].max() > 1e-4
    difference[pad] = 0
    assert difference.max() < 1e-9


@pytest.mark.parametrize("case", FEW)
def test_greedy_search_matches_transformers(case: int, tmp_path: Path) -> None:
    theirs, batch = make_marian(case), make_marian_batch(make_marian_config(case), case)
    theirs.final_logits_bias[0, theirs.config.eos_token_id] += 1.5  # so that sentences end at different times
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    expected = theirs.generate(
        batch.source, attention_mask=batch.source_mask.long(), num_beams=1, do_sample=False, max_length=13
    )[:, 1:]
    start, end = ours.config.start_id, ours.config.end_id
    got = greedy_search(ours, batch.source, batch.source_lengths, start_id=start, end_id=end, max_length=12)
    assert [until(row, end) for row in got.tolist()] == [until(row, end) for row in expected.tolist()]


# Round trips.


def load_with_transformers(folder: Path) -> Any:
    """Load a saved folder with `transformers`; no tensor may be missing or unexpected."""
    model, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize(("share", "tie", "bias"), [(True, True, False), (True, False, True), (False, True, False)])
def test_transformers_loads_a_saved_model(order: Any, share: bool, tie: bool, bias: bool, tmp_path: Path) -> None:
    """Interleaved sines and cosines, the paper's order, are permuted to Marian's order when saved."""
    stack = StackConfig(layers=2, width=18, heads=2, ffn_width=24, positions=SinusoidalConfig(order=order))
    config = Seq2SeqConfig(
        vocab=31,
        encoder=stack,
        decoder=mirror_encoder(stack),
        share_embeddings=share,
        tie_output=tie,
        output_bias=bias,
    )
    ours = build(config).double().eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight += 0.1 * torch.randn_like(weight)
    marian.save(ours, tmp_path / "out")
    theirs = load_with_transformers(tmp_path / "out")
    batch = make_marian_batch(theirs.config, 0)
    assert worst(run_hf_seq2seq(theirs, batch)[batch.real], run_seq2seq(ours, batch)[batch.real]) < 1e-10
    assert worst(run_seq2seq(load(tmp_path / "out"), batch), run_seq2seq(ours, batch)) < 1e-10


def test_generate_never_produces_padding(tmp_path: Path) -> None:
    """In published models the padding logit is zero, often the largest, so their generation config bans it."""
    ours = build(make_tiny_config(output_bias=True)).eval()
    with torch.no_grad():
        ours.output.bias[ours.config.start_id] = 100.0
    marian.save(ours, tmp_path / "out")
    written = load_with_transformers(tmp_path / "out").generate(torch.tensor([[5, 6, 2]]), max_length=8, num_beams=2)
    assert ours.config.start_id not in written[0, 1:-1]


def make_tiny_config(**changes: Any) -> Seq2SeqConfig:
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=24)
    return replace(Seq2SeqConfig(vocab=23, encoder=stack, decoder=mirror_encoder(stack)), **changes)


def test_an_attent_folder_loads(tmp_path: Path) -> None:
    ours = build(make_tiny_config()).eval()
    ours.save(tmp_path / "m")
    assert same_bits(attent.load(str(tmp_path / "m")), ours)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float64])
def test_precision_is_preserved(precision: torch.dtype, tmp_path: Path) -> None:
    make_marian(0, precision).save_pretrained(tmp_path / "a")
    ours = load(tmp_path / "a")
    assert not ours.training
    assert {weight.dtype for weight in ours.state_dict().values()} == {precision}
    marian.save(ours, tmp_path / "b")
    assert {tensor.dtype for tensor in load_file(tmp_path / "b" / "model.safetensors").values()} == {precision}
    assert load_with_transformers(tmp_path / "b").dtype == precision


# File variants.


def test_an_opus_mt_folder_of_2020_loads(tmp_path: Path) -> None:
    theirs = transformers.MarianMTModel(transformers.MarianConfig.from_dict(OPUS_MT_2020)).eval()
    with torch.no_grad():
        theirs.final_logits_bias.normal_()
    theirs.save_pretrained(tmp_path)
    tables = {name: make_sinusoids(torch.arange(512), 16, "halves") for name in marian.POSITION_TABLES}
    change_tensors(tmp_path, lambda tensors: tensors | tables)
    (tmp_path / "config.json").write_text(json.dumps(OPUS_MT_2020))
    (tmp_path / "generation_config.json").unlink()
    ours, batch = load(tmp_path), make_marian_batch(theirs.config, 0)
    assert (ours.config.start_id, ours.config.end_id) == (40, 0)
    assert worst(run_seq2seq(ours, batch)[batch.real], run_hf_seq2seq(theirs, batch)[batch.real]) < 1e-5


def test_tied_tensors_load_under_any_name(tmp_path: Path) -> None:
    config = make_marian_config(0)
    config.share_encoder_decoder_embeddings = config.tie_word_embeddings = True
    config.decoder_vocab_size = config.vocab_size
    transformers.MarianMTModel(config).save_pretrained(tmp_path)
    expected = load(tmp_path)
    for keep in (
        [marian.OUTPUT],
        [marian.TARGET],
        [marian.SHARED, marian.SOURCE, marian.TARGET, marian.OUTPUT],
    ):
        change_tensors(tmp_path, lambda tensors, keep=keep: rename_tied_tensors(tensors, keep))
        assert same_bits(load(tmp_path), expected)


def rename_tied_tensors(tensors: dict[str, Tensor], keep: list[str]) -> dict[str, Tensor]:
    ends = (marian.SHARED, marian.SOURCE, marian.TARGET, marian.OUTPUT)
    shared = next(tensors[name] for name in ends if name in tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in ends} | dict.fromkeys(keep, shared)


def test_shared_embeddings_with_an_untied_output(tmp_path: Path) -> None:
    """The format of transformers 4; transformers 5 would initialize both embeddings of such a file randomly."""
    theirs = make_marian(0)
    theirs.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    vocab, width = theirs.config.vocab_size, theirs.config.d_model
    shared, output = (torch.randn(vocab, width, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = {marian.SHARED: shared, marian.OUTPUT: output, marian.LOGITS_BIAS: torch.zeros(1, vocab).double()}
    change_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "layers" in k} | ends)
    change_json(
        tmp_path / "config.json",
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=False,
        decoder_vocab_size=vocab,
    )
    ours = load(tmp_path)
    assert ours.source_embedding.weight is ours.target_embedding.weight
    assert torch.equal(ours.source_embedding.weight, shared)
    assert torch.equal(ours.output.weight, output)


def test_a_model_without_bias_has_none(tmp_path: Path) -> None:
    theirs = make_marian(2)
    theirs.save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != marian.LOGITS_BIAS})
    theirs.final_logits_bias.zero_()
    ours, batch = load(tmp_path), make_marian_batch(theirs.config, 2)
    assert ours.output.bias is None
    assert worst(run_seq2seq(ours, batch)[batch.real], run_hf_seq2seq(theirs, batch)[batch.real]) < 1e-10


def test_token_ids_may_be_in_generation_config(tmp_path: Path) -> None:
    make_marian(4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in marian.CONFIG_KEYS.token_keys:
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load(tmp_path)
    assert (ours.config.start_id, ours.config.end_id) == (1, 2)


def test_symlinks_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    make_marian(5).save_pretrained(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert same_bits(load(tmp_path / "snapshot"), load(tmp_path / "blobs"))
