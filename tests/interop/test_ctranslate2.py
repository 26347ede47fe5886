"""Conversion to CTranslate2: equal probabilities, and detection of stale or damaged conversions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.interop import ctranslate2 as converter
from attent.interop.ctranslate2 import (
    ConversionError,
    compute_fingerprint,
    is_intact,
    name_tokens,
    write_conversion,
)
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import (
    AlibiConfig,
    LearnedConfig,
    LinearScaling,
    RelativeConfig,
    RotaryConfig,
    SinusoidalConfig,
    StackConfig,
)
from attent.storage.errors import FolderError
from tests.laws.helpers import randomize
from tests.text.corpus import tokenizer

engine = pytest.importorskip("ctranslate2")

TOY = StackConfig(layers=2, width=32, heads=4, ffn_width=40, dropout=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "sines first": {"positions": SinusoidalConfig(order="halves")},
    "learned": {"positions": LearnedConfig(max_length=30), "norm_order": "pre"},
    "BART": {"positions": LearnedConfig(max_length=30), "embedding_norm": True, "activation": "gelu"},
    "rotary": {"positions": RotaryConfig(base=100.0), "norm": "rms", "norm_order": "pre"},
    "rotary neighbours": {"positions": RotaryConfig(order="interleaved"), "activation": "silu"},
    "T5": {"positions": RelativeConfig(buckets=8, max_distance=12), "norm": "rms", "bias": False, "scale": 1.0},
    "gated": {"gated": True, "activation": "gelu", "norm": "rms"},
    "few keys": {"kv_heads": 2, "activation": "gelu_tanh", "norm_eps": 1e-2},
    "one key": {"kv_heads": 1, "head_width": 12, "gated": True, "activation": "silu", "bias": False},
}
SOURCES = [[5, 6, 7, 8, 2], [9, 2], [3] * 20 + [2]]
TARGETS = [[4, 5, 6], [7, 3] * 7, [8]]


def make_config(encoder: dict[str, Any], decoder: dict[str, Any], **changes: Any) -> Seq2SeqConfig:
    stacks = {"encoder": replace(TOY, **encoder), "decoder": replace(TOY, **decoder, causal=True, cross_attention=True)}
    return Seq2SeqConfig(**{"vocab": 23, **stacks, **changes})


def make_model(*stacks: dict[str, Any], **changes: Any) -> Seq2Seq:
    return randomize(Seq2Seq(make_config(*stacks, **changes)))


@pytest.fixture
def toy() -> Seq2Seq:
    return make_model({}, {})


def score_with_ctranslate2(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """Return log-probabilities by forced decoding, including the end token."""
    translator = engine.Translator(str(folder), compute_type="float32", intra_threads=1)
    scored = translator.score_batch(*([[f"<{i}>" for i in row] for row in rows] for rows in (sources, targets)))
    return [result.log_probs for result in scored]


def score_with_attent(model: Seq2Seq, source: list[int], target: list[int], suppressed: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([[model.config.start_id, *target]]))[0]
    logits[:, suppressed] = float("-inf")
    labels = torch.tensor([*target, model.config.end_id])
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].tolist()


def max_difference(model: Seq2Seq, folder: Path, suppressed: list[int]) -> float:
    ct2_log_probs = score_with_ctranslate2(folder, SOURCES, TARGETS)
    pairs = zip(SOURCES, TARGETS, ct2_log_probs, strict=True)
    return max(
        abs(ours - theirs)
        for source, target, row in pairs
        for ours, theirs in zip(score_with_attent(model, source, target, suppressed), row, strict=True)
    )


# --- equal probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["both", "encoder", "decoder"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_gives_each_token_the_same_probability(kind: str, side: str, tmp_path: Path) -> None:
    plain = {"norm_eps": KINDS[kind].get("norm_eps", 1e-5)}  # must be equal on both sides
    stacks = {"both": (KINDS[kind], KINDS[kind]), "encoder": (KINDS[kind], plain), "decoder": (plain, KINDS[kind])}
    model = make_model(*stacks[side], output_bias=True)
    write_conversion(model, None, tmp_path / "made", quantization="float32", suppressed_tokens=())
    assert max_difference(model, tmp_path / "made", []) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"target_vocab": 19, "share_embeddings": False, "tie_output": False},
        {"scale_embeddings": False},
        {"scale_output": True},
        {"start_id": 2},  # starts with the end token
        {"start_id": 0, "end_id": 1},
    ],
    ids=str,
)
def test_embedding_and_special_token_settings_are_converted(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model({}, {}, **changes)
    write_conversion(model, None, tmp_path / "made", quantization="float32", suppressed_tokens=())
    assert max_difference(model, tmp_path / "made", []) < 1e-4


def test_encoder_and_decoder_may_differ_in_size(tmp_path: Path) -> None:
    model = make_model({"layers": 1, "heads": 2, "ffn_width": 24}, {"layers": 3, "heads": 8, "activation": "gelu"})
    write_conversion(model, None, tmp_path / "made", quantization="float32", suppressed_tokens=())
    assert max_difference(model, tmp_path / "made", []) < 1e-4


def test_suppressed_tokens_have_no_probability(toy: Seq2Seq, tmp_path: Path) -> None:
    write_conversion(toy, None, tmp_path / "made", quantization="float32", suppressed_tokens=[1, 9])
    assert max_difference(toy, tmp_path / "made", [1, 9]) < 1e-4
    assert score_with_ctranslate2(tmp_path / "made", [SOURCES[0]], [[9]])[0][0] < -1e8


def test_int8_is_close(toy: Seq2Seq, tmp_path: Path) -> None:
    write_conversion(toy, None, tmp_path / "made", suppressed_tokens=())
    assert 1e-5 < max_difference(toy, tmp_path / "made", []) < 0.5


def test_conversion_does_not_change_the_model(toy: Seq2Seq, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in toy.state_dict().items()}
    write_conversion(toy, None, tmp_path / "made")
    assert all(torch.equal(before[name], tensor) for name, tensor in toy.state_dict().items())


def test_half_precision_can_be_converted(toy: Seq2Seq, tmp_path: Path) -> None:
    halved = toy.to(torch.bfloat16)
    write_conversion(halved, None, tmp_path / "made", quantization="float32", suppressed_tokens=())
    assert max_difference(halved.float(), tmp_path / "made", []) < 1e-4


# --- unsupported configs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "decoder", "words"),
    [
        ({"positions": AlibiConfig()}, {}, "`encoder.positions` must be sinusoidal, learned, rotary or relative"),
        ({}, {"window": (3, 0)}, "`decoder.window` must be None for CTranslate2, but is (3, 0)"),
        ({}, {"compatibility": "additive"}, "`decoder.compatibility` must be dot for CTranslate2, but is 'additive'"),
        ({}, {"scale_by_layer": True}, "`decoder.scale_by_layer` must be False for CTranslate2, but is True"),
        (
            {"positions": RotaryConfig(scaling=LinearScaling(factor=2.0))},
            {},
            "`encoder.positions.scaling` must be None for CTranslate2",
        ),
        ({"norm_eps": 1e-3}, {}, "`decoder.norm_eps` must be that of the encoder, 0.001,"),
    ],
)
def test_unsupported_config_is_rejected(encoder: Any, decoder: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError) as caught:
        write_conversion(make_model(encoder, decoder), None, tmp_path / "made")
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_transform_before_the_output_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="`output_transform` must be False for CTranslate2, but is True"):
        write_conversion(make_model({}, {}, output_transform=True), None, tmp_path / "made")


def test_an_unknown_quantization_is_rejected(toy: Seq2Seq, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"`quantization` must be one of int8, int16, .*, but is 'int4'"):
        write_conversion(toy, None, tmp_path / "made", quantization="int4")


# --- vocabulary ----------------------------------------------------------------------------------------------------


class DuplicatePieces:
    """A vocabulary with duplicate pieces."""

    size = 4

    def to_pieces(self, ids: Any) -> list[str]:
        return [["a", "b", "a", "a<2>"][i] for i in ids]


def test_token_names_are_unique() -> None:
    assert name_tokens(DuplicatePieces(), 6) == ["a", "b", "a<2>", "a<2><3>", "<unused_4>", "<unused_5>"]  # type: ignore[arg-type]
    assert name_tokens(None, 3) == ["<0>", "<1>", "<2>"]


def test_vocabulary_has_the_pieces_of_the_tokenizer(tmp_path: Path) -> None:
    words = tokenizer()
    write_conversion(make_model({}, {}, vocab=words.source.size + 2), words, tmp_path / "made")
    stored = json.loads((tmp_path / "made" / "shared_vocabulary.json").read_text())
    assert stored == [
        *words.source.to_pieces(range(words.source.size)),
        *(f"<unused_{words.source.size + i}>" for i in (0, 1)),
    ]
    facts = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (facts["decoder_start_token"], facts["eos_token"], facts["unk_token"]) == ("<s>", "</s>", "<unk>")


def test_special_tokens_and_unused_ids_are_suppressed() -> None:
    words, size = tokenizer(), tokenizer().target.size
    config = make_model({}, {}, vocab=size + 1).config
    assert find_suppressed_tokens(config, words) == [words.target.pad, 1, words.target.unknown, size]
    assert find_suppressed_tokens(make_model({}, {}, start_id=2).config, None) == []  # the end token is not suppressed


# --- folders -------------------------------------------------------------------------------------------------------


def is_current(folder: Path, model: Seq2Seq) -> bool:
    return is_intact(folder, compute_fingerprint(model, None, "int8", find_suppressed_tokens(model.config, None)))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip_bit(folder / "model.bin"),
    "a flipped bit in the words": lambda folder: flip_bit(folder / "shared_vocabulary.json"),
    "a file cut short": lambda folder: os.truncate(folder / "model.bin", 100),
    "a missing file": lambda folder: (folder / "config.json").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "damaged checksums": lambda folder: flip_bit(folder / "checksums.json"),
    "checksums of nothing": lambda folder: (folder / "checksums.json").write_text('{"format_version": 1, "files": {}}'),
    "no origin": lambda folder: (folder / "origin.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_detected_and_repaired(kind: str, toy: Seq2Seq, tmp_path: Path) -> None:
    write_conversion(toy, None, tmp_path / "made")
    assert is_current(tmp_path / "made", toy)
    DAMAGES[kind](tmp_path / "made")
    assert not is_current(tmp_path / "made", toy)
    write_conversion(toy, None, tmp_path / "made")
    assert is_current(tmp_path / "made", toy)


def test_a_conversion_of_other_weights_is_stale(toy: Seq2Seq, tmp_path: Path) -> None:
    write_conversion(toy, None, tmp_path / "made")
    with torch.no_grad():
        toy.encoder.blocks[0].self_attn.key.bias[0] += 1e-6
    assert not is_current(tmp_path / "made", toy)


def test_fingerprint_depends_on_every_input(toy: Seq2Seq) -> None:
    wider = Seq2Seq(replace(toy.config, scale_embeddings=False))
    wider.load_state_dict(toy.state_dict())
    fingerprints = {
        compute_fingerprint(toy, None, "int8", []),
        compute_fingerprint(toy, tokenizer(), "int8", []),
        compute_fingerprint(toy, None, "float32", []),
        compute_fingerprint(toy, None, "int8", [1]),
        compute_fingerprint(wider, None, "int8", []),
    }
    assert len(fingerprints) == 5


def test_other_folders_are_not_replaced(toy: Seq2Seq, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "letters.txt").write_text("dear")
    with pytest.raises(FolderError, match="holds something else than a conversion"):
        write_conversion(toy, None, tmp_path / "made")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "letters.txt"]


def test_a_failed_write_leaves_the_old_conversion(
    toy: Seq2Seq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_conversion(toy, None, tmp_path / "made")

    def raise_disk_full(path: object, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converter, "write_synced", raise_disk_full)
    with pytest.raises(FolderError, match="the disk is full; an older conversion in the folder is intact"):
        write_conversion(toy, None, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert is_current(tmp_path / "made", toy)


def test_stale_temporary_folders_are_removed(toy: Seq2Seq, tmp_path: Path) -> None:
    for name, age in ((".made.a.new", 2 * converter.STALE_SECONDS), (".made.b.new", 10)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_conversion(toy, None, tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.b.new", "made"]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(converter.ConversionError, match="ctranslate2"):
        converter.import_ctranslate2()
