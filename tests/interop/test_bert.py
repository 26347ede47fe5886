"""BERT: special cases of the comparison with `transformers`, file variants, and rejected folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attent.interop import bert, load
from attent.models import EncoderConfig, build, presets
from attent.nn import LearnedConfig, RotaryConfig, StackConfig
from tests.interop.families import (
    BERT_CLASSES,
    make_bert,
    make_bert_batch,
    make_bert_config,
    run_bert,
    run_hf_bert,
    transformers,
)
from tests.interop.folders import assert_rejected, change_json, change_tensors
from tests.interop.parity import (
    exact,
    gradient_errors,
    max_error,
    projection,
    randomise,
    same_bits,
    save_gradients,
    worst,
)

STACK = StackConfig(
    layers=2,
    width=12,
    heads=3,
    ffn_width=20,
    activation="gelu",
    positions=LearnedConfig(max_length=11),
    norm_eps=1e-12,
    embedding_norm=True,
)
CONFIG = EncoderConfig(vocab=23, stack=STACK, segments=2, masked_lm=True, pooler=True)


def test_only_the_padding_embedding_has_another_gradient(tmp_path: Path) -> None:
    theirs = make_bert(0)
    theirs.save_pretrained(tmp_path / "weights")
    ours, batch = load(tmp_path / "weights"), make_bert_batch(theirs.config, 0)
    batch.ids[:, 0] = theirs.config.pad_token_id
    expected = run_hf_bert(theirs, batch)
    projection(*expected.values()).backward()
    projection(*run_bert(ours, batch, expected).values()).backward()
    save_gradients(theirs, tmp_path / "gradients")
    assert gradient_errors(ours, load(tmp_path / "gradients")).keys() == {"embedding.weight"}


# File variants.


def test_a_file_of_2019_loads(tmp_path: Path) -> None:
    """Norm weights named gamma and beta, a `position_ids` tensor, and copies of tied weights."""
    make_bert(4, "BertForPreTraining").save_pretrained(tmp_path)
    expected = load(tmp_path)

    def to_old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        return old | {
            "bert.embeddings.position_ids": torch.arange(expected.config.stack.positions.max_length)[None],
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
        }

    change_tensors(tmp_path, to_old_names)
    change_json(tmp_path / "config.json", position_embedding_type="absolute", gradient_checkpointing=False)
    assert same_bits(load(tmp_path), expected)


def test_integer_dropout_rates_and_dtype_are_accepted(tmp_path: Path) -> None:
    make_bert(0).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    ours = load(tmp_path, dtype=torch.bfloat16)
    assert ours.config.stack.dropout == 0
    assert {weight.dtype for weight in ours.state_dict().values()} == {torch.bfloat16}
    assert ours.masked_lm.output.weight is ours.embedding.weight


def test_all_heads_survive_a_round_trip(tmp_path: Path) -> None:
    ours = build(replace(CONFIG, labels=("bad", "good"))).double().eval()
    randomise(ours, 1)
    bert.save(ours, tmp_path / "out")
    assert "bert.embeddings.word_embeddings.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(load(tmp_path / "out"), ours)
    batch = make_bert_batch(transformers.BertConfig.from_pretrained(tmp_path / "out"), 0)
    for kind in BERT_CLASSES[:3]:
        theirs = getattr(transformers, kind).from_pretrained(tmp_path / "out").eval()
        with exact(theirs):
            expected = run_hf_bert(theirs, batch)
        assert len(expected) > 1
        assert max_error(run_bert(ours, batch, expected), expected) < 1e-10


def test_transformers_loads_a_model_without_segments(tmp_path: Path) -> None:
    """BERT requires segment embeddings: the first one, added to every token, is saved as zeros."""
    ours = build(replace(CONFIG, segments=0)).double().eval()
    bert.save(ours, tmp_path / "out")
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    batch = make_bert_batch(theirs.config, 0)
    with exact(theirs):
        expected = run_hf_bert(theirs, batch)
    states = ours(batch.ids, batch.lengths)
    assert worst(ours.masked_logits(states)[batch.real], expected["words"]) < 1e-10


def test_labels_are_ordered_by_id(tmp_path: Path) -> None:
    make_bert(1, "BertForSequenceClassification").save_pretrained(tmp_path)
    count = len(load(tmp_path).config.labels)
    names = {str(i): f"name {i}" for i in reversed(range(count))}
    change_json(tmp_path / "config.json", id2label=names, num_labels=count)
    assert load(tmp_path).config.labels == tuple(f"name {i}" for i in range(count))


def test_duplicate_labels_are_numbered(tmp_path: Path) -> None:
    """ImageNet has two classes named crane."""
    make_bert(1, "BertForSequenceClassification").save_pretrained(tmp_path)
    count = len(load(tmp_path).config.labels)
    change_json(tmp_path / "config.json", id2label={str(i): "crane" for i in range(count)})
    assert load(tmp_path).config.labels[:2] == ("crane", "crane (1)")


def test_two_labels_need_no_names(tmp_path: Path) -> None:
    """`transformers` omits its default of two labels from config.json."""
    config = make_bert_config(0)
    config.num_labels = 2
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in stored.items() if "label" not in k}))
    assert load(tmp_path).config.labels == ("LABEL_0", "LABEL_1")


def test_preset_matches_the_published_config() -> None:
    facts = bert.BertKeys(vocab_size=30_522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    heads = {"masked_lm": True, "pooler": True, "labels": ()}
    assert bert.to_config(facts, heads, Path("config.json")) == presets.bert_base()


def test_pad_must_be_a_token_id(tmp_path: Path) -> None:
    bert.save(build(CONFIG), tmp_path / "good", pad=3)
    assert transformers.BertModel.from_pretrained(tmp_path / "good").embeddings.word_embeddings.padding_idx == 3
    with pytest.raises(ValueError, match="`pad` must be a token id, from 0 to 22, but is 23"):
        bert.save(build(CONFIG), tmp_path / "bad", pad=23)


# Error messages of rejected folders.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert.save(build(replace(CONFIG, masked_lm=False, labels=("a", "b"))), tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, ["`position_embedding_type` must be", "`relative_key`"]),
        ({"is_decoder": True}, ["`is_decoder` must be False"]),
        ({"tie_word_embeddings": False}, ["`tie_word_embeddings` must be True"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act", "quick_gelu"]),
        ({"rope_theta": 1e4}, ["`rope_theta` is not a key of a BERT config"]),
        ({"architectures": ["BertForTokenClassification"]}, ["`architectures` must be", "BertForTokenClassification"]),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, ["`id2label` must name 2 labels", "'2': 'c'"]),
        ({"id2label": {"0": "a", "5": "b"}}, ["`id2label` must name", "0 to 1"]),
        ({"problem_type": "multi_label_classification"}, ["`problem_type` must be single_label_classification"]),
        ({"num_attention_heads": 5}, ["`hidden_size` must be a multiple of `num_attention_heads`=5"]),
        ({"intermediate_size": 21}, ["encoder.layer.0.intermediate.dense.weight", "[21, 12]", "[20, 12]"]),
    ],
)
def test_unsupported_config_is_rejected(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    change_json(folder / "config.json", **changes)
    assert_rejected(folder, *words)


def test_a_classifier_without_pooler_is_rejected(folder: Path) -> None:
    change_tensors(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "pooler" not in name})
    assert_rejected(folder, "`classifier.weight`", "pooler")


def test_invalid_segments_are_named_in_the_error() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"`segments` must be from 0 to 1, the segment embeddings .* but range from 0 to 2"
    ):
        build(CONFIG)(ids, None, torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="`segments` must be a tensor of int64"):
        build(CONFIG)(ids, None, torch.zeros(3))


def test_a_regression_head_is_rejected(folder: Path) -> None:
    regression_head = {"classifier.weight": torch.zeros(1, 12), "classifier.bias": torch.zeros(1)}
    change_tensors(folder, lambda tensors: tensors | regression_head)
    assert_rejected(folder, "config.json: a classifier must have two labels or more", "rerankers, are not supported")


def test_an_untied_output_is_rejected(tmp_path: Path) -> None:
    bert.save(build(CONFIG), tmp_path / "bert")
    other = {"cls.predictions.decoder.weight": torch.zeros(23, 12)}
    change_tensors(tmp_path / "bert", lambda tensors: tensors | other)
    assert_rejected(tmp_path / "bert", "cls.predictions.decoder.weight", "must be equal", "word_embeddings.weight")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, stack=replace(STACK, norm_order="pre")), "stack.norm_order"),
        (replace(CONFIG, stack=replace(STACK, embedding_norm=False)), "stack.embedding_norm"),
        (replace(CONFIG, stack=replace(STACK, positions=RotaryConfig())), "stack.positions"),
        (replace(CONFIG, stack=replace(STACK, kv_heads=1)), "stack.kv_heads"),
        (replace(CONFIG, stack=replace(STACK, window=(2, 2))), "stack.window"),
        (replace(CONFIG, stack=replace(STACK, scale_by_layer=True)), "stack.scale_by_layer"),
        (replace(CONFIG, scale_embeddings=True), "scale_embeddings"),
        (replace(CONFIG, pooler=False, labels=("a", "b")), "pooler"),
    ],
)
def test_a_config_without_bert_equivalent_is_not_saved(config: EncoderConfig, field: str, tmp_path: Path) -> None:
    config = (
        config if config.stack.positions != RotaryConfig() else replace(config, stack=replace(config.stack, heads=2))
    )
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a BERT model"):
        bert.save(build(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_architecture_is_that_of_the_heads() -> None:
    stack = StackConfig(layers=1, width=8, heads=2, ffn_width=8, positions=LearnedConfig(max_length=4))
    config = EncoderConfig(vocab=9, stack=stack)
    assert bert.choose_architecture(config) == "BertModel"
    assert bert.choose_architecture(replace(config, masked_lm=True)) == "BertForMaskedLM"
    labelled = replace(config, pooler=True, labels=("a", "b"))
    assert bert.choose_architecture(labelled) == "BertForSequenceClassification"
