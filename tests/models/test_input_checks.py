"""Invalid calls of models, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attent
from attent.models import Seq2Seq, Seq2SeqConfig, build, shift_right
from attent.models.config import CausalConfig, EncoderConfig, VisionConfig, mirror_encoder
from attent.models.folder import check_tensors
from attent.models.output import OutputProjection
from attent.nn import ImageConfig, LearnedConfig, Packing, StackConfig
from attent.storage.errors import FolderError
from tests.greedy import greedy_search

ENCODER = StackConfig(layers=1, width=8, heads=2, ffn_width=8, dropout=0.0)
CONFIG = Seq2SeqConfig(vocab=9, encoder=ENCODER, decoder=mirror_encoder(ENCODER))
CAPTIONS = replace(CONFIG, frontend=ImageConfig(image_size=8, patch_size=4, channels=1), share_embeddings=False)
CAUSAL = replace(ENCODER, causal=True)
TEXT = EncoderConfig(vocab=9, stack=ENCODER)
VISION = VisionConfig(image_size=8, patch_size=4, stack=replace(ENCODER, positions=LearnedConfig(max_length=5)))


def ids(*values: int, rows: int = 2) -> torch.Tensor:
    return torch.tensor([values] * rows)


def model() -> Seq2Seq:
    return build(CONFIG).eval()


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "id beyond the vocabulary": (
        lambda: model()(ids(3, 9), ids(1)),
        (
            "token ids must be from 0 to 8, the vocabulary, but range from 3 to 9; were they made by "
            "another model's tokenizer?"
        ),
    ),
    "negative id": (lambda: model()(ids(3), ids(1, -1)), "from 0 to 8, the vocabulary, but range from -1 to 1"),
    "ids of the other vocabulary": (
        lambda: build(replace(CONFIG, target_vocab=5, share_embeddings=False))(ids(8), ids(6)),
        "token ids must be from 0 to 4",
    ),
    "ids without a batch": (
        lambda: model()(ids(1)[0], ids(1)),
        "source must be a tensor of int64 or int32 of (B, T), but is torch.int64 of",
    ),
    "ids with a point": (lambda: model()(ids(1).float(), ids(1)), "but is torch.float32 of (2, 1)"),
    "source lengths": (
        lambda: model()(ids(1, 2), ids(1), torch.tensor([3, 1])),
        "must be between 0 and 2, the length of the tensor, but ranges from 1 to 3",
    ),
    "lengths of images": (
        lambda: build(CAPTIONS)(torch.zeros(2, 1, 8, 8), ids(1), torch.tensor([4, 4])),
        "`source_lengths` must be None for images, which have no padding; leave it out",
    ),
    "target lengths": (
        lambda: model()(ids(1, 2), ids(1), None, torch.tensor([2, 1])),
        "must be between 0 and 1, the length of the tensor",
    ),
    "lengths and packing": (
        lambda: model()(
            ids(1),
            ids(1),
            torch.tensor([1, 1]),
            packing=(Packing.from_lengths([[1], [1]]), Packing.from_lengths([[1], [1]])),
        ),
        "give `lengths` (padded rows) or `packing` (packed rows), but not both",
    ),
    "more steps than room": (
        lambda: [step := model(), cache := step.init_decoder_state(ids(1), capacity=1), step.step(ids(1, 2), cache)],
        "the cache must have room for 2 tokens, but its capacity is 1",
    ),
    "start outside the vocabulary": (
        lambda: greedy_search(model(), ids(1), start_id=9, end_id=2, max_length=2),
        "token ids must be from 0 to 8",
    ),
    "sides of different rows": (
        lambda: model()(ids(1), ids(1, rows=1)),
        "source and target must have the same number of rows, but have 2 and 1",
    ),
    "one sentence shifted": (lambda: shift_right(ids(1)[0], 1), "target must be a tensor of int64 or int32 of (B, T)"),
    "no vocabulary": (
        lambda: Seq2SeqConfig(vocab=0),
        "`vocab` must be a number from 1 to 16,777,216, but is 0",
    ),
    "two vocabularies shared": (
        lambda: Seq2SeqConfig(vocab=9, target_vocab=7),
        (
            "`target_vocab` must be `vocab`=9 to share embeddings, but is 7; give both sides one vocabulary, or set "
            "`share_embeddings` to false"
        ),
    ),
    "two widths": (
        lambda: replace(CONFIG, decoder=replace(CONFIG.decoder, width=16)),
        "`encoder.width` must equal `decoder.width`, but they are 8 and 16",
    ),
    "an encoder that looks back only": (
        lambda: replace(CONFIG, encoder=replace(ENCODER, causal=True)),
        "`encoder.causal` and `encoder.cross_attention` must be false",
    ),
    "a decoder without a source": (
        lambda: replace(CONFIG, decoder=replace(ENCODER, causal=True)),
        "`decoder.causal` and `decoder.cross_attention` must be true",
    ),
    "start id": (lambda: replace(CONFIG, start_id=9), "`start_id` must be a token id from 0 to 8, but is 9"),
    "end id": (lambda: replace(CONFIG, end_id=-1), "`end_id` must be a token id from 0 to 8, but is -1"),
    "not a config": (
        lambda: build({"vocab": 9}),
        "`config` must be that of a model, such as a Seq2SeqConfig (see attent.presets), but is a dict",
    ),
    "preset without vocabulary": (
        lambda: attent.presets.base(vocab=0),
        "`vocab` must be a number from 1 to 16,777,216, but is 0",
    ),
    "a language model that looks ahead": (
        lambda: CausalConfig(vocab=9, stack=ENCODER),
        "`stack.causal` must be true and `stack.cross_attention` false in a decoder-only model",
    ),
    "a language model with a source": (
        lambda: CausalConfig(vocab=9, stack=CONFIG.decoder),
        "`stack.causal` must be true and `stack.cross_attention` false in a decoder-only model",
    ),
    "start of a language model": (
        lambda: CausalConfig(vocab=9, stack=CAUSAL, start_id=9),
        "`start_id` must be of token ids from 0 to 8, but one is 9",
    ),
    "ends of a language model": (
        lambda: CausalConfig(vocab=9, stack=CAUSAL, end_ids=(8, -1)),
        "`end_ids` must be of token ids from 0 to 8, but one is -1",
    ),
    "an encoder that is causal": (
        lambda: EncoderConfig(vocab=9, stack=CAUSAL),
        "`stack.causal` and `stack.cross_attention` must be false in an encoder",
    ),
    "labels of texts": (
        lambda: EncoderConfig(vocab=9, stack=ENCODER, labels=("a", "b", "b")),
        "`labels` must differ, but 'b' is there twice",
    ),
    "segments": (lambda: EncoderConfig(vocab=9, stack=ENCODER, segments=-1), "`segments` must be 0 or more, but is -1"),
    "labels of images": (lambda: replace(VISION, labels=("a", "a")), "`labels` must differ, but 'a' is there twice"),
    "size of images": (lambda: replace(VISION, image_size=0), "`image_size` must be a number from 1 to"),
    "patches": (lambda: replace(VISION, patch_size=3), "`image_size` must be a multiple of `patch_size`=3, but is 8"),
    "channels": (lambda: replace(VISION, channels=0), "`channels` must be a number from 1 to"),
    "pooling": (lambda: replace(VISION, pooling="max"), "`pooling` must be one of"),
    "fit": (lambda: replace(VISION, fit="pad"), "`fit` must be one of"),
    "resample": (lambda: replace(VISION, resample="box"), "`resample` must be one of"),
    "smaller than the crop": (
        lambda: replace(VISION, resize_to=7),
        "`resize_to` must be at least `image_size`=8, but is 7",
    ),
    "pooling without a class token": (
        lambda: replace(VISION, class_token=False),
        "`pooling` must be mean where there is no `class_token`, but is class",
    ),
    "means": (lambda: replace(VISION, mean=(0.5, 0.5)), "`mean` must have a number for each of 3 channels, or one for"),
    "deviations": (lambda: replace(VISION, std=(0.5,) * 4), "`std` must have a number for each of 3 channels, or one"),
    "no deviation": (lambda: replace(VISION, std=(0.5, 0.0, 1.0)), "`std` must be more than 0, but is (0.5, 0.0, 1.0)"),
    "images without a classifier": (
        lambda: build(VISION)(torch.zeros(1, 3, 8, 8)),
        "this model has no classifier (`labels` is empty in its config); see `compute_states`",
    ),
    "bytes as pixels": (
        lambda: build(VISION).compute_states(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)),
        "pixels must be floating numbers of (B, 3, 8, 8), but are torch.uint8 of (1, 3, 8, 8)",
    ),
    "another size": (
        lambda: build(VISION).compute_states(torch.zeros(1, 3, 8, 9)),
        "pixels must be floating numbers of (B, 3, 8, 8), but are torch.float32 of (1, 3, 8, 9)",
    ),
    "no tensor": (
        lambda: build(VISION).compute_states([1]),  # type: ignore[arg-type]
        "pixels must be floating numbers of (B, 3, 8, 8), but are <class 'list'>",
    ),
    "segments without embeddings": (
        lambda: build(TEXT)(ids(1), segments=ids(0)),
        "`segments` must be None for a model with `segments`=0, which has no segment embeddings",
    ),
    "segments beyond the embeddings": (
        lambda: build(replace(TEXT, segments=2))(ids(1, 1), segments=ids(0, 2)),
        "`segments` must be from 0 to 1, the segment embeddings of the model, but range from 0 to 2",
    ),
    "no masked words": (lambda: build(TEXT).masked_logits(torch.zeros(1, 8)), "this model has no head for masked"),
    "no labels": (lambda: build(TEXT).classify(torch.zeros(1, 1, 8)), "this model has no classifier (`labels` is"),
    "stacks of an LSTM": (
        lambda: attent.presets.lstm(9, "tiny").stacks,
        "only a Transformer is supported here, but `encoder.kind` is lstm",
    ),
}


def test_values_at_their_limits_are_accepted() -> None:
    assert CausalConfig(vocab=9, stack=CAUSAL, start_id=0, end_ids=(0, 8)).start_id == 0
    assert EncoderConfig(vocab=9, stack=ENCODER, segments=0, labels=("a", "b")).labels == ("a", "b")
    config = replace(VISION, resize_to=8, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0), class_token=False, pooling="mean")
    assert config.num_patches == 4
    assert replace(CONFIG, start_id=0, end_id=8).end_id == 8
    build(replace(TEXT, segments=2))(ids(1, 1), segments=ids(0, 1))


def test_segments_are_embedded_without_a_scale() -> None:
    model = build(replace(TEXT, segments=2, scale_embeddings=True)).eval()
    assert model.segment_embedding is not None
    assert torch.equal(model.segment_embedding(ids(1)), model.segment_embedding.weight[1].expand(2, 1, -1))
    assert torch.allclose(model.embedding(ids(3)), model.embedding.weight[3] * 8**0.5)
    assert torch.equal(model(ids(1, 2)), model(ids(1, 2), segments=ids(0, 0)))
    assert not torch.equal(model(ids(1, 2)), model(ids(1, 2), segments=ids(0, 1)))


def test_pixels_are_normalized_by_channel() -> None:
    model = build(replace(VISION, mean=(0.0, 0.5, 1.0), std=(1.0, 2.0, 4.0)))
    pixels = torch.ones(1, 3, 8, 8)
    for values in (pixels, (255 * pixels).byte()):
        assert model.normalize(values)[0, :, 3, 5].tolist() == [1.0, 0.25, 0.0]


def test_images_are_pooled_by_the_class_token_or_the_mean_patch() -> None:
    states = torch.arange(5.0).repeat(1, 8, 1).mT  # (1, T, E)
    assert build(VISION).pool(states)[0, 0] == 0
    assert build(replace(VISION, pooling="mean")).pool(states)[0, 0] == 2.5
    assert build(replace(VISION, pooling="mean", class_token=False)).pool(states)[0, 0] == 2.0


@pytest.mark.parametrize("scaled", [False, True])
def test_states_are_scaled_on_request_before_the_output(scaled: bool) -> None:
    output = OutputProjection(5, 16, tied_to=None, scaled=scaled)
    states = torch.randn(2, 16)
    assert torch.equal(output.prepare_states(states), states / 4 if scaled else states)
    assert torch.allclose(output(states), (states / 4 if scaled else states) @ output.weight.T)
    assert output.bias is None
    assert OutputProjection(5, 16, tied_to=None).scale is None
    assert OutputProjection(5, 16, tied_to=None, bias=True).bias is not None


def test_states_are_transformed_on_request_before_the_output() -> None:
    """As in BERT: a layer, the stack's activation, its norm; then the matrix."""
    stack = StackConfig(width=16, heads=2, activation="gelu", norm_eps=1e-3)
    output, states = OutputProjection(5, 16, tied_to=None, scaled=True, transform=stack), torch.randn(2, 16)
    layer = output.transform.dense
    transformed = F.layer_norm(F.gelu(states @ layer.weight.T + layer.bias), (16,), eps=1e-3)
    assert torch.allclose(output.prepare_states(states), transformed / 4, atol=1e-6)
    assert torch.allclose(output(states), transformed / 4 @ output.weight.T, atol=1e-6)
    assert OutputProjection(5, 16, tied_to=None).transform is None


@pytest.mark.parametrize("count", [3, 4])
def test_the_first_three_wrong_tensors_are_named(count: int) -> None:
    expected = {f"weight_{i}": torch.Size([2]) for i in range(count)}
    more = " and 1 more" if count > 3 else ""
    with pytest.raises(FolderError, match=f"missing: `weight_0`, `weight_1`, `weight_2`{more}\\. Take config"):
        check_tensors(expected, {}, "file")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_calls_are_refused(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
