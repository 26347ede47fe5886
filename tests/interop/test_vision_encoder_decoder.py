"""VisionEncoderDecoder: search as in `transformers`, start and end tokens, file variants, rejected folders and models.

`test_parity` compares logits and gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.options import SearchOptions
from attent.interop import load, save_hf
from attent.interop import vision_encoder_decoder as ved
from attent.models import Seq2Seq, Seq2SeqConfig, build
from attent.models.config import mirror_encoder
from attent.models.pruning import remove_heads
from attent.nn import ImageConfig, LearnedConfig, SinusoidalConfig, StackConfig
from tests.greedy import greedy_search
from tests.interop.families import (
    make_captions,
    make_pixels,
    make_vit_bert,
    make_vit_gpt2,
    run_captioner,
    run_hf_captioner,
    transformers,
)
from tests.interop.folders import assert_rejected, change_json, change_tensors
from tests.interop.parity import exact, projection, same_bits, until, worst
from tests.searching import beam_search

MAKERS: dict[str, Callable[..., Any]] = {"vit-bert": make_vit_bert, "vit-gpt2": make_vit_gpt2}
every_decoder = pytest.mark.parametrize("name", MAKERS)
every_case = pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case}", marks=pytest.mark.slow if case >= 4 else ())
        for name in MAKERS
        for case in range(30)
    ],
)
ENCODER = StackConfig(
    layers=2,
    width=12,
    heads=3,
    ffn_width=20,
    activation="gelu",
    positions=LearnedConfig(max_length=5),
    norm_order="pre",
)
GPT2 = Seq2SeqConfig(
    vocab=23,
    frontend=ImageConfig(image_size=8, patch_size=4, mean=(0.1, 0.2, 0.3), resample="bicubic"),
    encoder=ENCODER,
    decoder=replace(mirror_encoder(ENCODER), width=16, heads=2, positions=LearnedConfig(max_length=9)),
    share_embeddings=False,
    scale_embeddings=False,
    start_id=3,
    end_id=4,
)
BERT = replace(
    GPT2,
    decoder=replace(GPT2.decoder, norm_order="post", embedding_norm=True),
    output_bias=True,
    output_transform=True,
)


# Search.


def make_searchable(name: str, case: int) -> tuple[Any, torch.Tensor, int]:
    """A model whose texts depend on the image, images, and a token that it generates, to be the end."""
    theirs = MAKERS[name](case, pad_token_id=16)
    pixels = 3 * make_pixels(theirs.config.encoder, case, rows=5)
    with torch.no_grad():
        theirs.get_input_embeddings().weight.mul_(2)
        for key, weight in theirs.named_parameters():
            if "crossattention" in key and weight.dim() == 2:
                weight.mul_(2)
    with exact(theirs):
        tokens = theirs.generate(pixels, max_new_tokens=4, do_sample=False, bad_words_ids=[[1]], eos_token_id=None)
    return theirs, pixels, int(tokens[0, -1])


@every_case
def test_searches_match_generate(name: str, case: int, tmp_path: Path) -> None:
    theirs, pixels, end = make_searchable(name, case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    limits = {"start_id": ours.config.start_id, "end_id": end, "max_length": 8}
    options = {"eos_token_id": end, "max_new_tokens": 8, "do_sample": False, "bad_words_ids": [[1]]}

    with exact(theirs):
        expected = theirs.generate(pixels, **options)[:, 1:].tolist()
    actual = greedy_search(ours, pixels, **limits).tolist()
    assert [until(row, end) for row in actual] == [until(row, end) for row in expected]

    with exact(theirs):
        out = theirs.generate(
            pixels,
            num_beams=3,
            length_penalty=0.6,
            early_stopping="never",
            renormalize_logits=True,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    search = SearchOptions(beam_size=3, length_penalty=0.6, rank_truncated_equally=True)
    best = beam_search(ours, pixels, **limits, options=search)
    expected = [until(row, end) for row in out.sequences[:, 1:].tolist()]
    assert [row[:n] for row, n in zip(best.tokens[:, 0].tolist(), best.lengths[:, 0].tolist(), strict=True)] == [
        row[:8] for row in expected
    ]
    torch.testing.assert_close(best.scores[:, 0], out.sequences_scores.float(), rtol=1e-5, atol=1e-5)


@every_decoder
def test_texts_depend_on_the_image(name: str, tmp_path: Path) -> None:
    """The comparison of searches would hold too for a model that ignores its source."""
    different = 0
    for case in range(10):
        theirs, pixels, end = make_searchable(name, case)
        different += len({tuple(row) for row in theirs.generate(pixels, max_new_tokens=8, eos_token_id=end).tolist()})
    assert different > 20


def test_the_gradient_of_token_type_0_is_that_of_all_positions(tmp_path: Path) -> None:
    theirs = make_vit_bert(3)
    segments = theirs.decoder.bert.embeddings.token_type_embeddings.weight.requires_grad_(True)
    batch = make_captions(theirs.config, 3)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with exact(theirs):
        projection(run_hf_captioner(theirs, batch)["logits"]).backward()
    projection(run_captioner(ours, batch, ())["logits"]).backward()
    assert worst(ours.decoder.positions.weight.grad.sum(0), segments.grad[0]) < 1e-9


# Start and end tokens.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_vit_gpt2(0).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def set_tokens(folder: Path, top: dict[str, Any], decoder: dict[str, Any], generation: dict[str, Any]) -> None:
    keys = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    data = json.loads((folder / "config.json").read_text())
    data = {key: value for key, value in data.items() if key not in keys} | top
    data["decoder"] = {key: value for key, value in data["decoder"].items() if key not in keys} | decoder
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "generation_config.json").write_text(json.dumps(generation))


@pytest.mark.parametrize(
    ("top", "decoder", "generation", "expected"),
    [
        ({"decoder_start_token_id": 5, "eos_token_id": 6}, {}, {}, (5, 6)),
        ({"decoder_start_token_id": 5, "eos_token_id": 5, "pad_token_id": 5}, {}, {}, (5, 5)),  # as GPT-2 has one
        ({"bos_token_id": 7, "eos_token_id": 6}, {}, {}, (7, 6)),
        ({}, {}, {"decoder_start_token_id": 5, "eos_token_id": [6]}, (5, 6)),
        ({"decoder_start_token_id": 5}, {"bos_token_id": 9, "eos_token_id": 8}, {}, (5, 8)),
        ({}, {"bos_token_id": 9, "eos_token_id": 8}, {"eos_token_id": 6}, (9, 6)),
        ({}, {"decoder_start_token_id": 4, "bos_token_id": 9, "eos_token_id": 8}, {}, (4, 8)),
    ],
)
def test_start_and_end_are_those_of_generate(
    top: dict[str, Any], decoder: dict[str, Any], generation: dict[str, Any], expected: tuple[int, int], folder: Path
) -> None:
    set_tokens(folder, top, decoder, generation)
    config = load(folder).config
    assert (config.start_id, config.end_id) == expected
    if not generation:
        (folder / "generation_config.json").unlink()
        theirs = transformers.VisionEncoderDecoderModel.from_pretrained(folder).generation_config
        start = theirs.bos_token_id if theirs.decoder_start_token_id is None else theirs.decoder_start_token_id
        assert (start, theirs.eos_token_id) == expected


@pytest.mark.parametrize(
    ("top", "decoder", "generation", "words"),
    [
        ({"eos_token_id": 2}, {}, {}, ["config.json: missing key `decoder_start_token_id`"]),
        ({"decoder_start_token_id": 1}, {}, {}, ["config.json: `eos_token_id` must be one token id"]),
        ({"decoder_start_token_id": 1, "eos_token_id": [2, 3]}, {}, {}, ["`eos_token_id` must be one token id"]),
        ({"decoder_start_token_id": 1, "eos_token_id": 99}, {}, {}, ["`eos_token_id` must be a token id from 0 to"]),
        ({"decoder_start_token_id": 1}, {"eos_token_id": "x"}, {}, ["config.json, `decoder`", "eos_token_id", "x"]),
        (
            {"decoder_start_token_id": 1, "eos_token_id": 2},
            {},
            {"eos_token_id": 3},
            ["generation_config.json: `eos_token_id` must be that of config.json, 2, but is 3"],
        ),
    ],
)
def test_missing_or_contradictory_tokens_are_rejected(
    top: dict[str, Any], decoder: dict[str, Any], generation: dict[str, Any], words: list[str], folder: Path
) -> None:
    set_tokens(folder, top, decoder, generation)
    assert_rejected(folder, *words)


# Variants of files.

OLD_KEYS: dict[str, Any] = {  # of every section, in folders of transformers 4
    **dict.fromkeys(("bad_words_ids", "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task")),
    **dict.fromkeys(("exponential_decay_length_penalty", "prefix", "problem_type", "sep_token_id", "torch_dtype")),
    **dict.fromkeys(("do_sample", "early_stopping", "is_encoder_decoder", "tie_encoder_decoder", "torchscript"), False),
    "_name_or_path": "",
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 20,
    "pruned_heads": {},
    "return_dict": True,
    "tie_word_embeddings": True,
    "transformers_version": "4.12.0.dev0",
    "use_bfloat16": False,
}


@every_decoder
def test_folders_of_older_versions_are_loaded(name: str, tmp_path: Path) -> None:
    """All keys in both sections, masks and positions among the tensors, and both names of tied ones."""
    MAKERS[name](2).save_pretrained(tmp_path)  # tied
    expected = load(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    encoder = {**data["encoder"], **OLD_KEYS, "add_cross_attention": False, "is_decoder": False}
    decoder = {**data["decoder"], **OLD_KEYS}
    del encoder["pooler_act"], encoder["pooler_output_size"]
    change_json(tmp_path / "config.json", encoder=encoder, decoder=decoder, transformers_version=None)
    tied = {
        "decoder.transformer.wte.weight": "decoder.lm_head.weight",
        "decoder.bert.embeddings.word_embeddings.weight": "decoder.cls.predictions.decoder.weight",
        "decoder.cls.predictions.bias": "decoder.cls.predictions.decoder.bias",
    }
    gpt2_mask = {"decoder.transformer.h.0.crossattention.bias": torch.ones(1, 1, 9, 9).bool()}
    old = gpt2_mask if name == "vit-gpt2" else {"decoder.bert.embeddings.position_ids": torch.arange(9)[None]}
    change_tensors(tmp_path, lambda new: new | {b: new[a] for a, b in tied.items() if a in new} | old)
    assert same_bits(load(tmp_path), expected)


def test_images_are_preprocessed_as_the_folder_says(folder: Path) -> None:
    size = json.loads((folder / "config.json").read_text())["encoder"]["image_size"]
    keys = {"image_mean": 0.25, "image_std": 0.5, "size": {"shortest_edge": size}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))
    frontend = load(folder).config.frontend
    assert (frontend.mean, frontend.std, frontend.fit, frontend.resample) == ((0.25,), (0.5,), "crop", "bicubic")
    change_json(folder / "preprocessor_config.json", do_pad=True)
    assert_rejected(folder, "preprocessor_config.json: `do_pad` must be false")


# Error messages of rejected folders.


@pytest.mark.parametrize(
    ("side", "changes", "words"),
    [
        (None, {"encoder": None}, ["config.json: `encoder` must be the config of a model, but is None"]),
        (None, {"architectures": ["DonutModel"]}, ["`architectures` must be ['VisionEncoderDecoderModel']"]),
        (None, {"tie_encoder_decoder": True}, ["`tie_encoder_decoder` must be False"]),
        (None, {"text_config": {}}, ["`text_config` is not a key of a VisionEncoderDecoder config"]),
        ("encoder", {"model_type": "swin"}, ["config.json: `encoder.model_type` must be vit", "but is `swin`"]),
        ("encoder", {"qkv_bias": False}, ["config.json, `encoder`: `qkv_bias` must be True"]),
        ("encoder", {"num_hidden_layers": 9999}, ["too few for `num_hidden_layers`=9999"]),
        ("encoder", {"image_size": [4, 8]}, ["`encoder`: `image_size` must be of a square"]),
        ("decoder", {"model_type": "trocr"}, ["`decoder.model_type` must be bert or gpt2", "but is `trocr`"]),
        ("decoder", {"is_decoder": False}, ["config.json, `decoder`: `is_decoder` must be True"]),
        ("decoder", {"add_cross_attention": False}, ["`decoder`: `add_cross_attention` must be True"]),
        ("decoder", {"cross_attention_hidden_size": 8}, ["`decoder`: `cross_attention_hidden_size` must be None"]),
        ("decoder", {"activation_function": "tanh"}, ["`decoder`", "activation_function", "tanh"]),
        ("decoder", {"n_head": 7}, ["`decoder`: `n_embd` must be a multiple of `n_head`=7"]),
        ("decoder", {"n_layer": 9999}, ["too few for `n_layer`=9999"]),
        ("decoder", {"layer_scale": 1}, ["`decoder`: `layer_scale` is not a key of a VisionEncoderDecoder config"]),
    ],
)
def test_unsupported_config_is_rejected(
    side: str | None, changes: dict[str, Any], words: list[str], folder: Path
) -> None:
    data = json.loads((folder / "config.json").read_text())
    change_json(folder / "config.json", **(changes if side is None else {side: data[side] | changes}))
    assert_rejected(folder, *words)


def test_cross_attention_must_be_stated(folder: Path) -> None:
    """Without the key, transformers would ignore the tensors of cross-attention."""
    data = json.loads((folder / "config.json").read_text())
    del data["decoder"]["add_cross_attention"]
    change_json(folder / "config.json", decoder=data["decoder"])
    assert_rejected(folder, "`decoder`: `add_cross_attention` must be True", "but is False")


def test_an_untied_bert_is_rejected(tmp_path: Path) -> None:
    ved.save(build(BERT), tmp_path / "out")
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    change_json(tmp_path / "out" / "config.json", decoder=data["decoder"] | {"tie_word_embeddings": False})
    assert_rejected(tmp_path / "out", "`decoder`: `tie_word_embeddings` must be True")


@pytest.mark.parametrize(
    ("shape", "words"), [(None, "missing: "), ((2, 16), "must be [1, 16], but is [2, 16]"), ((1, 3), "[1, 3]")]
)
def test_token_types_of_another_shape_are_rejected(shape: tuple[int, ...] | None, words: str, tmp_path: Path) -> None:
    ved.save(build(BERT), tmp_path / "out")
    other = {} if shape is None else {ved.SEGMENTS: torch.zeros(shape)}
    change_tensors(tmp_path / "out", lambda tensors: {k: v for k, v in tensors.items() if k != ved.SEGMENTS} | other)
    assert_rejected(tmp_path / "out", "token_type_embeddings.weight", words)


# Models of attent.


@pytest.mark.parametrize("config", [BERT, GPT2, replace(GPT2, tie_output=False), replace(GPT2, start_id=4)])
def test_a_model_of_attent_is_written_and_read_again(config: Seq2SeqConfig, tmp_path: Path) -> None:
    model = build(config).eval()
    save_hf(model, tmp_path / "out", pad=5)
    assert same_bits(load(tmp_path / "out"), model)
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "out").eval()
    pixels, target = torch.randn(2, 3, 8, 8), torch.randint(0, 23, (2, 7))
    with torch.no_grad():
        assert worst(model(pixels, target), theirs(pixel_values=pixels, decoder_input_ids=target).logits) < 1e-5
    assert (theirs.config.decoder_start_token_id, theirs.generation_config.pad_token_id) == (config.start_id, 5)
    tokens = theirs.generate(pixels, do_sample=False)[:, 1:].tolist()  # with the defaults of the folder
    ours = greedy_search(model, pixels, start_id=config.start_id, end_id=4, max_length=8, suppressed_tokens=[5])
    assert [until(row, 4) for row in ours.tolist()] == [until(row, 4) for row in tokens]


def test_pruned_heads_become_zeros(tmp_path: Path) -> None:
    model = build(GPT2).eval()
    pruned = remove_heads(model, {"decoder.blocks.0.cross_attn": [1], "encoder.blocks.1.self_attn": [0]})
    ved.save(pruned, tmp_path / "out")
    pixels, target = torch.randn(2, 3, 8, 8), torch.randint(0, 23, (2, 7))
    with torch.no_grad():
        assert worst(load(tmp_path / "out")(pixels, target), pruned(pixels, target)) < 1e-5


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(GPT2, output_bias=True), "output_bias"),
        (replace(GPT2, output_transform=True), "output_transform"),
        (replace(GPT2, scale_embeddings=True), "scale_embeddings"),
        (replace(GPT2, scale_output=True), "scale_output"),
        (replace(GPT2, encoder=replace(ENCODER, norm_order="post")), "stack.norm_order"),
        (replace(GPT2, encoder=replace(ENCODER, bias=False)), "stack.bias"),
        (replace(GPT2, decoder=replace(GPT2.decoder, positions=SinusoidalConfig())), "stack.positions"),
        (replace(GPT2, frontend=replace(GPT2.frontend, class_token=False)), "class_token"),
        (replace(BERT, output_transform=False), "output_transform"),
        (replace(BERT, output_bias=False), "output_bias"),
        (replace(BERT, tie_output=False), "tie_output"),
        (replace(BERT, decoder=replace(BERT.decoder, embedding_norm=False)), "stack.embedding_norm"),
    ],
)
def test_a_config_without_equivalent_is_not_saved(config: Seq2SeqConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^`{field}` must be .* for a .* model, but is .*keep it as an attent"):
        ved.save(build(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_translator_is_not_saved_as_a_captioner(tmp_path: Path) -> None:
    model = Seq2Seq(Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER)))
    with pytest.raises(ValueError, match=r"^`frontend` must be of images \(ImageConfig\)"):
        ved.save(model, tmp_path / "out")
    with pytest.raises(ValueError, match="`pad` must be a token id, from 0 to 22, but is 23"):
        ved.save(build(GPT2), tmp_path / "out", pad=23)
