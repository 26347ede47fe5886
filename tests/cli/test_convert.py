"""`attent convert`: the converted model computes the same, and nothing is overwritten."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.cli.convert import Quantization, TargetFormat, convert
from attent.decoding.loading import load_tokenizer
from attent.interop import load
from attent.models import CausalConfig, Seq2Seq, Seq2SeqConfig, VisionConfig, build, presets, weights
from attent.models.config import mirror_encoder
from attent.models.folder import read_extra_files
from attent.nn import ImageConfig, LearnedConfig, StackConfig
from attent.storage.errors import FolderError
from attent.text.tokenizer import Tokenizer
from attent.training.loop import write_model
from attent.training.tasks.captioning import build_caption_config
from tests.laws.helpers import randomize
from tests.text.corpus import lines, tokenizer

Capture = pytest.CaptureFixture[str]

ODD = [
    "",
    " ",
    "a  b",
    "tab\there",
    "Straße “x” ’s",
    "日本語",
    "😀👩‍👩‍👧",
    "é e\u0301",
    "<0x41>",
    "ＦＵＬＬ ﬁ ①",
    "{name} %s",
]


def write_seq2seq_folder(root: Path, joint: bool = True, **changes: Any) -> Path:
    words = tokenizer(joint=joint)
    encoder = replace(StackConfig(layers=1, width=16, heads=2, ffn_width=24), **changes)
    config = Seq2SeqConfig(
        vocab=words.source.size,
        target_vocab=words.target.size,
        encoder=encoder,
        decoder=mirror_encoder(encoder),
        share_embeddings=joint,
    )
    write_model(root / "ours", randomize(Seq2Seq(config)), words)
    return root / "ours"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write_seq2seq_folder(tmp_path)


def compute_logits(model: Seq2Seq) -> torch.Tensor:
    torch.manual_seed(1)
    size = min(model.config.vocab, model.config.output_vocab)
    return model(torch.randint(4, size, (3, 7)), torch.randint(4, size, (3, 5)))


def make_varied_texts(count: int = 150) -> list[str]:
    """Return lines of the corpus, edge cases, and random characters of many scripts."""
    rng = random.Random(1)
    alphabets = [(32, 127), (160, 0x250), (0x370, 0x600), (0x4E00, 0x9FFF), (0x1F300, 0x1F600)]
    random_texts = [
        "".join(chr(rng.randrange(*rng.choice(alphabets))) for _ in range(rng.randrange(1, 40))) for _ in range(count)
    ]
    return [*lines()[0][:count], *lines()[1][:count], *ODD, *(text.replace("▁", "") for text in random_texts)]


# --- to Hugging Face and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [True, False])
def test_transformers_loads_the_converted_model(joint: bool, tmp_path: Path, capsys: Capture) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    ours = write_seq2seq_folder(tmp_path, joint)
    convert(ours, tmp_path / "theirs", to="hf")
    assert "MarianMTModel of transformers, with its tokenizer" in capsys.readouterr().out
    words, their_words = Tokenizer.load(ours), transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    texts = make_varied_texts()
    assert [their_words(text).input_ids for text in texts] == words.encode_source(texts)
    assert [their_words(text_target=text).input_ids for text in texts] == words.encode_target(texts)
    rows = words.target.encode(texts)
    assert [their_words.decode(row) for row in rows] == [words.target.decode(row).strip() for row in rows]
    their_model = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    source, target = torch.randint(4, 300, (3, 7)), torch.randint(4, 300, (3, 5))
    with torch.no_grad():
        theirs = their_model(input_ids=source, decoder_input_ids=target).logits
        assert torch.allclose(load(ours)(source, target), theirs, atol=1e-4)


def test_target_language_tags_match_marian(ours: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert(ours, tmp_path / "theirs", to="hf")
    words = Tokenizer.load(ours)
    assert words.source.tags == ("de", "pt-BR")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    assert [theirs(">>pt-BR<<A man").input_ids] == words.encode_source(["A man"], "pt-BR")
    assert Tokenizer.load(tmp_path / "theirs").encode_source(["A man"], "de") == words.encode_source(["A man"], "de")


@pytest.mark.parametrize("joint", [True, False])
def test_round_trip_through_hugging_face_gives_the_same_model(joint: bool, tmp_path: Path) -> None:
    ours = write_seq2seq_folder(tmp_path, joint)
    convert(ours, tmp_path / "theirs", to="hf")
    convert(tmp_path / "theirs", tmp_path / "back", to="attent")
    assert torch.allclose(compute_logits(load(tmp_path / "back")), compute_logits(load(ours)), atol=1e-4)
    texts = make_varied_texts(30)
    assert load_tokenizer(tmp_path / "back").encode_source(texts) == load_tokenizer(ours).encode_source(texts)
    manifest = json.loads((tmp_path / "back" / "manifest.json").read_text())
    assert {"source.spm", "target.spm", "vocab.json"} <= manifest["files"].keys()
    convert(tmp_path / "back", tmp_path / "again", to="hf")
    assert (tmp_path / "again" / "vocab.json").read_bytes() == (tmp_path / "theirs" / "vocab.json").read_bytes()


def test_conversion_to_attent_copies_the_model(ours: Path, tmp_path: Path, capsys: Capture) -> None:
    convert(ours, tmp_path / "copy", to="attent")
    assert capsys.readouterr().out == f"{tmp_path / 'copy'}: an attent model, with its tokenizer\n"
    assert torch.equal(compute_logits(load(tmp_path / "copy")), compute_logits(load(ours)))
    assert Tokenizer.load(tmp_path / "copy") == Tokenizer.load(ours)


# --- other models than translators ---------------------------------------------------------------------------------


def write_causal_lm_folder(root: Path) -> Path:
    """Save a LLaMA model with a tokenizer in the files of GPT-2 and LLaMA 3."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    files = {
        "tokenizer.json": words.to_str().encode(),
        "tokenizer_config.json": b'{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}',
        "chat_template.jinja": b"{{ messages }}",
    }
    stack = replace(presets.LLAMA, layers=1, width=8, heads=2, ffn_width=12)
    model = randomize(build(CausalConfig(vocab=4, stack=stack, tie_output=False, end_ids=(0,))))
    weights.save_model(model, root / "lm", files)
    return root / "lm"


def test_a_language_model_survives_a_round_trip(tmp_path: Path, capsys: Capture) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_causal_lm_folder(tmp_path)
    convert(folder, tmp_path / "theirs", to="hf")
    assert "LlamaForCausalLM of transformers, with its tokenizer" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")("abba").input_ids == [3, 2, 1]
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.allclose(load(folder)(ids), theirs(ids).logits, atol=1e-5)
    convert(tmp_path / "theirs", tmp_path / "back", to="attent")
    assert read_extra_files(tmp_path / "back") == read_extra_files(folder)
    assert torch.equal(load(tmp_path / "back")(ids), load(folder)(ids))


def test_a_model_is_stored_in_another_precision(tmp_path: Path) -> None:
    convert(write_causal_lm_folder(tmp_path), tmp_path / "half", to="attent", dtype="bfloat16")
    assert {weight.dtype for weight in load(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_a_vision_model_needs_no_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    stack = replace(presets.VIT, layers=1, width=8, heads=2, ffn_width=12, positions=LearnedConfig(max_length=5))
    model = randomize(build(VisionConfig(image_size=8, patch_size=4, stack=stack, labels=("cat", "dog"))))
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="hf")
    convert(tmp_path / "theirs", tmp_path / "back", to="attent")
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'theirs'}: ViTForImageClassification of transformers",
        f"{tmp_path / 'back'}: an attent model",
    ]
    pixels = torch.rand(2, 3, 8, 8)
    assert torch.equal(load(tmp_path / "back")(pixels), load(tmp_path / "ours")(pixels))


def test_a_captioner_survives_a_round_trip(tmp_path: Path, capsys: Capture) -> None:
    """With GPT-2's tokenizer, in which one token starts, ends and pads."""
    transformers = pytest.importorskip("transformers")
    files = read_extra_files(write_causal_lm_folder(tmp_path))
    stack = replace(presets.VIT, layers=1, width=8, heads=2, ffn_width=12, positions=LearnedConfig(max_length=5))
    config = Seq2SeqConfig(
        vocab=4,
        frontend=ImageConfig(image_size=8, patch_size=4, mean=(0.2, 0.3, 0.4)),
        encoder=stack,
        decoder=mirror_encoder(replace(stack, width=12)),
        share_embeddings=False,
        scale_embeddings=False,
        start_id=0,
        end_id=0,
    )
    weights.save_model(randomize(build(config)), tmp_path / "ours", files)
    convert(tmp_path / "ours", tmp_path / "theirs", to="hf")
    assert "VisionEncoderDecoderModel of transformers, with its tokenizer" in capsys.readouterr().out
    pixels, target = torch.rand(2, 3, 8, 8), torch.tensor([[0, 1, 2], [0, 3, 3]])
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        logits = theirs(pixel_values=pixels, decoder_input_ids=target).logits
        assert torch.allclose(load(tmp_path / "ours")(pixels, target), logits, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs").decode([3, 2]) == "ab b"
    convert(tmp_path / "theirs", tmp_path / "back", to="attent")
    assert read_extra_files(tmp_path / "back") == files
    assert load(tmp_path / "back").config == config
    assert torch.equal(load(tmp_path / "back")(pixels, target), load(tmp_path / "ours")(pixels, target))


def test_a_missing_tokenizer_is_reported(tmp_path: Path, capsys: Capture) -> None:
    load(write_causal_lm_folder(tmp_path)).save(tmp_path / "bare")
    convert(tmp_path / "bare", tmp_path / "theirs", to="hf")
    assert capsys.readouterr().out.endswith(
        "LlamaForCausalLM of transformers, without a tokenizer (the original has none)\n"
    )


def test_a_captioner_from_scratch_is_not_a_hugging_face_model(tmp_path: Path) -> None:
    files = read_extra_files(write_causal_lm_folder(tmp_path))
    config = build_caption_config("tiny", 4, ImageConfig(image_size=8, patch_size=4, class_token=False))
    weights.save_model(build(config), tmp_path / "ours", files)
    with pytest.raises(ValueError, match=r"for a ViT model, but is .* keep it as an attent folder"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="hf")
    assert not (tmp_path / "theirs").exists()


def test_ctranslate2_accepts_only_translators(tmp_path: Path) -> None:
    folder = write_causal_lm_folder(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"must be a .* for CTranslate2, but is a language model.*; use it as it is$",
    ):
        convert(folder, tmp_path / "quick", to="ctranslate2")
    assert not (tmp_path / "quick").exists()


# --- to CTranslate2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "float32"])
def test_ctranslate2_loads_the_converted_model(
    quantization: Quantization, ours: Path, tmp_path: Path, capsys: Capture
) -> None:
    package = pytest.importorskip("ctranslate2")
    convert(ours, tmp_path / "quick", to="ctranslate2", quantization=quantization)
    assert f"a CTranslate2 model ({quantization}), with its tokenizer" in capsys.readouterr().out
    words = Tokenizer.load(tmp_path / "quick")
    assert words == Tokenizer.load(ours)
    translator = package.Translator(str(tmp_path / "quick"), intra_threads=1)
    pieces = words.source.to_pieces(words.encode_source(["A man walks."])[0])
    hypothesis = translator.translate_batch([pieces], max_decoding_length=9)[0].hypotheses[0]
    known = set(words.target.to_pieces(range(words.target.size)))
    assert hypothesis
    assert set(hypothesis) <= known - {"<pad>", "<s>"}


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["attent", "hf", "ctranslate2"])
def test_nothing_is_overwritten(to: TargetFormat, ours: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters.txt").write_text("dear")
    for out in ("full", "full/letters.txt", "ours"):
        with pytest.raises(ValueError, match="exists, and nothing is overwritten; give a new or an empty"):
            convert(ours, tmp_path / out, to=to)
    assert (tmp_path / "full" / "letters.txt").read_text() == "dear"


@pytest.mark.parametrize("to", ["attent", "hf", "ctranslate2"])
def test_an_empty_folder_is_accepted(to: TargetFormat, ours: Path, tmp_path: Path) -> None:
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    (tmp_path / "deep" / "empty").mkdir(parents=True)
    convert(ours, tmp_path / "deep" / "empty", to=to)
    assert (tmp_path / "deep" / "empty" / "config.json").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["empty"]


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    write_seq2seq_folder(tmp_path, norm_order="pre")
    with pytest.raises(ValueError, match=r"`encoder.norm_order` must be 'post' for a Marian model, but is 'pre'"):
        convert(tmp_path / "ours", tmp_path / "theirs", to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_ctranslate2_model_cannot_be_converted_back(ours: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    convert(ours, tmp_path / "quick", to="ctranslate2")
    with pytest.raises(ValueError, match='must have "format": "attent" or a `model_type`, but has neither'):
        convert(tmp_path / "quick", tmp_path / "back", to="attent")


def test_quantization_is_that_of_ctranslate2(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--quantization int16 is for --to ctranslate2"):
        convert(ours, tmp_path / "out", quantization="int16")
    assert not (tmp_path / "out").exists()


def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="must be a model folder, but does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "out", to="hf")
