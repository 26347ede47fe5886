"""An oracle from outside: the same weights in `transformers`' T5 and ours, the same numbers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attent.decoding import greedy_search
from attent.interop import load, t5
from attent.models import Seq2SeqConfig, build, presets
from attent.models.config import mirror_encoder
from attent.nn import RelativeConfig, SinusoidalConfig, StackConfig
from attent.storage.errors import FolderError
from tests.interop.exact import exact, gradient_errors, projection, randomise, same_bits, save_gradients
from tests.interop.marians import Batch, change_json, our_logits, their_logits, transformers, worst

CASES = [pytest.param(case, marks=pytest.mark.slow) if case >= 16 else case for case in range(30)]
FEWER = [pytest.param(case, marks=pytest.mark.slow) if case >= 6 else case for case in range(30)]
FEED_FORWARDS = ["relu", "gated-gelu", "gelu", "gated-silu", "gelu_new", "gated-relu", "gated-gelu_new", "silu"]
STACK = StackConfig(
    layers=2,
    width=12,
    heads=3,
    head_width=5,
    ffn_width=20,
    positions=RelativeConfig(buckets=8, max_distance=20),
    norm="rms",
    norm_order="pre",
    norm_eps=1e-6,
    bias=False,
    scale=1.0,
    attention_dropout=0.1,
    activation_dropout=0.1,
    output_dropout=0.1,
)
CONFIG = Seq2SeqConfig(
    vocab=23,
    encoder=STACK,
    decoder=mirror_encoder(STACK),
    scale_embeddings=False,
    scale_output=True,
    start_id=0,
    end_id=1,
)
OUTPUTS = [(True, True), (False, False), (True, False), (False, True)]  # tied, scaled: 1.0, 1.1, and what else can be


def random_config(seed: int) -> Any:
    """Any shape that T5 has: heads that do not fill the width, unequal sides, few buckets or many."""
    dice = random.Random(seed)
    buckets = dice.choice([4, 8, 32])
    return transformers.T5Config(
        vocab_size=dice.choice([17, 31]),
        d_model=dice.choice([8, 12, 15]),
        d_kv=dice.choice([2, 4, 5]),
        d_ff=dice.choice([7, 24]),
        num_layers=dice.choice([1, 2, 3]),
        num_decoder_layers=dice.choice([1, 2, 3]),
        num_heads=dice.choice([1, 2, 3]),
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=buckets + dice.choice([1, 9, 96]),
        feed_forward_proj=FEED_FORWARDS[seed % len(FEED_FORWARDS)],
        layer_norm_epsilon=dice.choice([1e-6, 1e-3]),
        dropout_rate=dice.choice([0.0, 0.1]),
        tie_word_embeddings=OUTPUTS[seed % 4][1],  # by which it tells whether to scale
        decoder_start_token_id=0,
        attn_implementation=dice.choice(["eager", "sdpa"]),
    )


def random_model(seed: int) -> Any:
    model = transformers.T5ForConditionalGeneration(random_config(seed)).double().eval()
    if not OUTPUTS[seed % 4][0]:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")  # as after loading a file with an output of its own
    randomise(model, seed)
    return model


def random_batch(config: Any, seed: int, rows: int = 4) -> Batch:
    """Long enough for distances that share a bucket."""
    generator = torch.Generator().manual_seed(seed + 1000)
    target = torch.randint(2, config.vocab_size, (rows, 12), generator=generator)
    target[:, 0] = config.decoder_start_token_id
    return Batch(
        source=torch.randint(2, config.vocab_size, (rows, 24), generator=generator),
        target=target,
        labels=target,
        source_lengths=torch.randint(1, 25, (rows,), generator=generator),
        target_lengths=torch.randint(1, 13, (rows,), generator=generator),
    )


# Their numbers and ours.


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_theirs(case: int, tmp_path: Path) -> None:
    theirs = random_model(case)
    batch = random_batch(theirs.config, case)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load(tmp_path / "weights")
    assert (ours.config.tie_output, ours.config.scale_output) == OUTPUTS[case % 4]
    with exact(theirs):
        expected = their_logits(theirs, batch)[batch.real]
    got = our_logits(ours, batch)[batch.real]
    assert worst(got, expected) < 1e-10

    projection(expected).backward()
    projection(got).backward()
    save_gradients(theirs, tmp_path / "gradients")
    assert not gradient_errors(ours, load(tmp_path / "gradients"))


@pytest.mark.parametrize("case", FEWER)
def test_there_and_back_and_in_float32(case: int, tmp_path: Path) -> None:
    theirs = random_model(case).float()
    batch = random_batch(theirs.config, case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, expected = load(tmp_path / "theirs"), their_logits(theirs, batch)[batch.real]
    assert worst(our_logits(ours, batch)[batch.real], expected) < 1e-5

    t5.save(ours, tmp_path / "ours")
    assert same_bits(load(tmp_path / "ours"), ours)
    assert worst(their_logits(reopened(tmp_path / "ours"), batch)[batch.real], expected) < 1e-5


def reopened(folder: Path) -> Any:
    """What `transformers` makes of a folder of ours: nothing missing, nothing left over."""
    model, info = transformers.T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("case", [0, 1, 3, 4, 5])
def test_greedy_writes_their_tokens(case: int, tmp_path: Path) -> None:
    """40 prompts each, step by step with a cache."""
    theirs = random_model(case)
    with torch.no_grad():
        for block in theirs.decoder.block:
            block.layer[1].EncDecAttention.o.weight *= 5  # so that it hangs on the source what is written
    theirs.save_pretrained(tmp_path)
    ours, batch = load(tmp_path), random_batch(theirs.config, case, rows=40)
    expected = theirs.generate(
        batch.source,
        attention_mask=batch.source_mask.long(),
        do_sample=False,
        max_length=13,
        suppress_tokens=[theirs.config.decoder_start_token_id],  # ours never writes the start
    )[:, 1:]
    start, end = ours.config.start_id, ours.config.end_id
    got = greedy_search(ours, batch.source, batch.source_lengths, start=start, end=end, max_length=12)
    assert len({tuple(row) for row in expected.tolist()}) > 10
    assert [until(row, end) for row in got.tolist()] == [until(row, end) for row in expected.tolist()]


def until(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


# How files differ.


def rewrite_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def test_a_file_of_2020_loads(tmp_path: Path) -> None:
    """Copies of the embedding, and a bias of the first cross-attention that nothing reads."""
    random_model(0).save_pretrained(tmp_path)
    expected = load(tmp_path)
    left_over = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def aged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = dict.fromkeys([t5.SOURCE, t5.TARGET, t5.OUTPUT], tensors[t5.SHARED])
        return tensors | copies | {left_over: torch.randn(32, 8).double()}

    rewrite_tensors(tmp_path, aged)
    stored = json.loads((tmp_path / "config.json").read_text())
    new = ("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings", "classifier_dropout")
    old = {key: value for key, value in stored.items() if key not in new}
    old |= {"n_positions": 512, "architectures": ["T5WithLMHeadModel"], "task_specific_params": {}, "output_past": True}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert same_bits(load(tmp_path), expected)


def test_an_output_that_is_said_not_to_be_tied_is_not_scaled(tmp_path: Path) -> None:
    """As flan-t5 says it, without `scale_decoder_outputs`."""
    theirs = random_model(1)
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps(stored | {"tie_word_embeddings": False}))
    ours, batch = load(tmp_path), random_batch(theirs.config, 1)
    assert (ours.config.tie_output, ours.config.scale_output) == (False, False)
    with exact(theirs):
        assert worst(our_logits(ours, batch)[batch.real], their_logits(theirs, batch)[batch.real]) < 1e-10


def test_tied_tensors_may_stand_under_any_name(tmp_path: Path) -> None:
    random_model(0).save_pretrained(tmp_path)
    expected, tensors = load(tmp_path), load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name != t5.SHARED}
    for keep in ([t5.SOURCE], [t5.OUTPUT], [t5.TARGET, t5.OUTPUT]):
        rewrite_tensors(tmp_path, lambda _, keep=keep: rest | dict.fromkeys(keep, tensors[t5.SHARED]))
        assert same_bits(load(tmp_path), expected)


def test_mt5_is_read_too(tmp_path: Path) -> None:
    """It has the shape of T5 1.1, and never scales, whatever its config says of ties."""
    config = transformers.MT5Config(
        vocab_size=23, d_model=12, d_kv=5, d_ff=20, num_layers=1, num_heads=3, feed_forward_proj="gated-gelu"
    )
    theirs = transformers.MT5ForConditionalGeneration(config).double().eval()
    randomise(theirs, 0)
    theirs.save_pretrained(tmp_path)
    ours, batch = t5.load(tmp_path), random_batch(config, 0)
    with exact(theirs):
        assert worst(our_logits(ours, batch)[batch.real], their_logits(theirs, batch)[batch.real]) < 1e-10


@pytest.mark.parametrize(
    ("preset", "facts"),
    [
        (presets.t5_small(), t5.T5Keys()),
        (presets.t5_base(), t5.T5Keys(num_layers=12, d_model=768, num_heads=12, d_ff=3072)),
        (
            presets.t5_v1_1_base(),
            t5.T5Keys(
                num_layers=12,
                d_model=768,
                num_heads=12,
                d_ff=2048,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
            ),
        ),
    ],
)
def test_presets_are_what_published_configs_say(preset: Seq2SeqConfig, facts: t5.Facts) -> None:
    assert t5.to_config(facts, tied=facts.tie_word_embeddings, where=Path("config.json")) == preset


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_every_feed_forward_can_be_written(activation: Any, gated: bool, tmp_path: Path) -> None:
    stack = replace(STACK, layers=1, activation=activation, gated=gated)
    ours = build(replace(CONFIG, encoder=stack, decoder=mirror_encoder(stack))).double().eval()
    t5.save(ours, tmp_path / "out")
    assert same_bits(load(tmp_path / "out"), ours)
    theirs = reopened(tmp_path / "out")
    batch = random_batch(theirs.config, 0)
    with exact(theirs):
        assert worst(their_logits(theirs, batch)[batch.real], our_logits(ours, batch)[batch.real]) < 1e-10


# What is refused, by the words that a person will read.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    t5.save(build(CONFIG), tmp_path / "t5")
    return tmp_path / "t5"


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(FolderError) as caught:
        load(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_attention_num_buckets": 6}, ["`relative_attention_num_buckets` must be a multiple of 4"]),
        ({"relative_attention_max_distance": 8}, ["`relative_attention_max_distance` must be more than", "=8", "is 8"]),
        ({"feed_forward_proj": "gated-quick_gelu"}, ["`feed_forward_proj` must be one of", "`gated-quick_gelu`"]),
        ({"feed_forward_proj": "double-gelu"}, ["`feed_forward_proj` must be one of", "`double-gelu`"]),
        ({"dense_act_fn": "gelu"}, ["`dense_act_fn` must be 'relu', as `feed_forward_proj`"]),
        ({"is_gated_act": True}, ["`is_gated_act` must be False"]),
        ({"hidden_size": 13}, ["`hidden_size` must equal `d_model`=12"]),
        ({"architectures": ["T5EncoderModel"]}, ["`architectures` must be ['T5ForConditionalGeneration']"]),
        ({"layer_scale": 0.1}, ["`layer_scale` is not a key of a T5 config"]),
        ({"eos_token_id": [1, 2]}, ["`eos_token_id` must be"]),
        ({"d_ff": 21}, ["encoder.block.0.layer.1.DenseReluDense.wo.weight", "[12, 21]", "[12, 20]"]),
        ({"num_decoder_layers": 3}, ["missing", "decoder.block.2.layer.0.layer_norm.weight"]),
    ],
)
def test_a_config_that_cannot_be_computed(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    change_json(folder / "config.json", **changes)
    refused(folder, *words)


def test_embeddings_that_differ(folder: Path) -> None:
    rewrite_tensors(folder, lambda tensors: tensors | {t5.TARGET: torch.zeros(23, 12)})
    refused(folder, "`shared.weight` and `decoder.embed_tokens.weight` must be equal")


def test_tensors_that_are_missing_or_unknown(folder: Path) -> None:
    rewrite_tensors(folder, lambda tensors: tensors | {"decoder.adapter.weight": torch.zeros(2)})
    refused(folder, "not known", "decoder.adapter.weight")
    rewrite_tensors(
        folder, lambda tensors: {n: t for n, t in tensors.items() if n not in (t5.SHARED, "lm_head.weight")}
    )
    refused(folder, "missing")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"norm_order": "post"}, "encoder.norm_order"),
        ({"positions": SinusoidalConfig()}, "encoder.positions"),
        ({"scale": None}, "encoder.scale"),
        ({"bias": True}, "encoder.bias"),
        ({"attention_dropout": 0.0}, "encoder.attention_dropout"),
    ],
)
def test_a_stack_that_t5_has_no_words_for(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    stack = replace(STACK, **changes)
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a T5 model"):
        t5.save(build(replace(CONFIG, encoder=stack, decoder=mirror_encoder(stack))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, share_embeddings=False), "share_embeddings"),
        (replace(CONFIG, output_bias=True), "output_bias"),
        (replace(CONFIG, scale_embeddings=True), "scale_embeddings"),
        (replace(CONFIG, decoder=replace(CONFIG.decoder, heads=2)), "decoder.heads"),
    ],
)
def test_a_model_that_t5_has_no_words_for(config: Seq2SeqConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be .* for a T5 model"):
        t5.save(build(config), tmp_path / "out")
