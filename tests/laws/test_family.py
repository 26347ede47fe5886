"""Laws for every model family: padding, packing, causality, order, stepping, observers, backends, saving."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attent
from attent.models import (
    CausalConfig,
    CausalLM,
    EncoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    TextEncoder,
    VisionConfig,
    VisionTransformer,
    build,
)
from attent.nn import Packing, set_backend
from tests.laws.family import (
    CAUSAL,
    ENCODERS,
    T5_TOY,
    TEXT,
    VISION,
    every_causal,
    every_encoder,
    every_model,
    every_text,
    every_vision,
    make_model,
    pictures,
    read,
    sentences,
)
from tests.laws.helpers import (
    assert_close,
    assert_same_gradients,
    gradients,
    make_tensor,
    noise_like,
    pad_with_noise,
    parametrize_all,
    precise,
    randomize,
    unpad,
)


def alone(model: nn.Module, texts: list[Tensor]) -> list[Tensor]:
    return [read(model, text[None])[0] for text in texts]


def loss_of(logits: list[Tensor], texts: list[Tensor]) -> Tensor:
    return F.cross_entropy(torch.cat(logits), torch.cat(texts), reduction="sum")


def packed(texts: list[Tensor], rows: list[list[int]], width: int) -> tuple[Tensor, Packing]:
    """Texts by number laid into rows, noise behind them."""
    laid = [torch.cat([texts[i] for i in row]) for row in rows]
    lengths = [[len(texts[i]) for i in row] for row in rows]
    ids = torch.stack([torch.cat([row, noise_like(row, width - len(row))]) for row in laid])
    return ids, Packing.from_lengths(lengths, width, device=ids.device)


@every_text
def test_padding_changes_nothing(config: ModelConfig, device: torch.device) -> None:
    model, texts = make_model(config, device), sentences(device)
    expected = alone(model, texts)
    ids, lengths = pad_with_noise(texts, extra=3)
    logits = read(model, ids, lengths)
    assert_close(unpad(logits, lengths), torch.cat(expected))
    actual = [row[: len(text)] for row, text in zip(logits, texts, strict=True)]
    assert_same_gradients(gradients(loss_of(actual, texts), model), gradients(loss_of(expected, texts), model))


@pytest.mark.parametrize("rows", [[[0, 1], [2], [3]], [[3, 1, 2, 0]]], ids=["rows", "flat"])
@every_text
def test_packed_equals_separate(config: ModelConfig, rows: list[list[int]], device: torch.device) -> None:
    model, texts = make_model(config, device), sentences(device)
    ids, packing = packed(texts, rows, 15)
    order = [i for row in rows for i in row]
    logits = read(model, ids, packing=packing)
    counts = [[len(texts[i]) for i in row] for row in rows]
    actual = [piece for out, each in zip(logits, counts, strict=True) for piece in out[: sum(each)].split(each)]
    ordered = [texts[i] for i in order]
    expected = alone(model, ordered)
    assert_close(torch.cat(actual), torch.cat(expected))
    assert_same_gradients(gradients(loss_of(actual, ordered), model), gradients(loss_of(expected, ordered), model))


@every_encoder
def test_packed_texts_are_classified_as_each_alone(config: EncoderConfig, device: torch.device) -> None:
    model, texts = make_model(config, device), sentences(device)
    assert isinstance(model, TextEncoder)
    rows = [[0, 1], [2], [3]]
    ids, packing = packed(texts, rows, 9)
    logits = model.classify(model(ids, packing=packing), packing)
    there = packing.ends > F.pad(packing.ends, (1, 0))[:, :-1]
    assert there.sum() == 4
    assert_close(logits[there], torch.cat([model.classify(model(text[None])) for text in texts]))


@every_text
def test_the_order_of_the_batch_does_not_matter(config: ModelConfig, device: torch.device) -> None:
    model, (ids, lengths) = make_model(config, device), pad_with_noise(sentences(device))
    order = make_tensor(2, 0, 3, 1, device=device)
    assert_close(
        unpad(read(model, ids[order], lengths[order]), lengths[order]),
        unpad(read(model, ids, lengths)[order], lengths[order]),
    )


@every_text
def test_the_future_is_seen_by_encoders_alone(config: ModelConfig, device: torch.device) -> None:
    model, (text,) = make_model(config, device), sentences(device, (6,))
    out = read(model, text[None])
    for t in range(6):
        other = text.clone()
        other[t:] = (other[t:] + 1) % 17
        changed = read(model, other[None])
        if isinstance(model, CausalLM):
            assert_close(changed[:, :t], out[:, :t])
        elif t:
            assert not torch.allclose(changed[:, 0], out[:, 0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(changed[:, t], out[:, t], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1, 1), (3, 1, 2)], ids=["one", "several"])
@every_causal
def test_step_by_step_equals_all_at_once(config: CausalConfig, chunks: tuple[int, ...], device: torch.device) -> None:
    model = make_model(config, device)
    assert isinstance(model, CausalLM)
    ids = torch.stack(sentences(device, (6, 6)))
    cache = model.init_decoder_state(rows=2, capacity=6)
    steps = [model.step(part, cache) for part in ids.split(list(chunks), 1)]
    assert_close(torch.cat(steps, 1), model(ids))


@every_causal
def test_ragged_prompts_equal_each_alone(config: CausalConfig, device: torch.device) -> None:
    model, texts = make_model(config, device), sentences(device)
    assert isinstance(model, CausalLM)
    more = torch.stack(sentences(device, (2, 2, 2, 2)))
    ids, lengths = pad_with_noise(texts)
    cache = model.init_decoder_state(rows=4, capacity=10)
    model.step(ids, cache, lengths)
    actual = torch.cat([model.step(token, cache) for token in more.split(1, 1)], 1)
    for row, text in enumerate(texts):
        assert_close(actual[row], model(torch.cat([text, more[row]])[None])[0, -2:])


@every_causal
def test_beams_follow_their_rows(config: CausalConfig, device: torch.device) -> None:
    model, rows = make_model(config, device), make_tensor(2, 0, 0, 1, device=device)
    assert isinstance(model, CausalLM)
    ids = torch.stack(sentences(device, (5, 5, 5)))
    cache = model.init_decoder_state(rows=3, capacity=5)
    model.step(ids[:, :3], cache)
    cache.reorder(rows)
    assert_close(model.step(ids[rows, 3:], cache), model(ids[rows])[:, 3:])


def pass_through(model: nn.Module, device: torch.device) -> Tensor:
    """Some input of its kind, through the whole model."""
    torch.manual_seed(3)
    if isinstance(model, VisionTransformer):
        return model(pictures(model.config, 2, device))
    ids, lengths = pad_with_noise(sentences(device))
    return read(model, ids, lengths) if isinstance(model, CausalLM | TextEncoder) else model(ids, ids, lengths, lengths)


@every_model
def test_the_tap_changes_no_output_and_its_rows_sum_to_one(config: ModelConfig, device: torch.device) -> None:
    model = make_model(config, device)
    plain = pass_through(model, device)
    with attent.record(model) as trace:
        assert torch.equal(pass_through(model, device), plain)
    assert trace
    for weights in trace.values():
        assert_close(weights[0].sum(-1), torch.ones_like(weights[0][..., 0]))


@every_model
def test_a_whole_model_is_the_same_by_equation_1(config: ModelConfig, device: torch.device) -> None:
    model = make_model(config, device)
    set_backend(model, "explicit")
    expected = pass_through(model, device)
    set_backend(model, "auto")
    actual = pass_through(model, device)
    assert_close(actual, expected)
    assert_same_gradients(gradients(actual.square().mean(), model), gradients(expected.square().mean(), model))


@parametrize_all("config", {**TEXT, **VISION, **T5_TOY}, quick=("gpt2", "llama3", "bert", "vit", "t5"))
def test_the_model_compiles_in_one_graph(config: ModelConfig, device: torch.device) -> None:
    model = make_model(config, device)
    expected = pass_through(model, device)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(pass_through_compiled(model, device), expected.detach())


def pass_through_compiled(model: nn.Module, device: torch.device) -> Tensor:
    def whole() -> Tensor:
        return pass_through_given(model, given)

    torch.manual_seed(3)
    if isinstance(model, VisionTransformer):
        given: tuple[Tensor, ...] = (pictures(model.config, 2, device),)
    else:
        given = pad_with_noise(sentences(device))
    return torch.compile(whole, backend="eager", fullgraph=True)()


def pass_through_given(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    if isinstance(model, CausalLM | TextEncoder):
        return read(model, *given)
    return model(*given) if isinstance(model, VisionTransformer) else model(given[0], given[0], given[1], given[1])


@every_model
def test_dropout_is_off_in_use_and_on_in_training(config: ModelConfig, device: torch.device) -> None:
    with_dropout = {"dropout": 0.5, "attention_dropout": 0.0, "activation_dropout": 0.0}
    if isinstance(config, Seq2SeqConfig):
        config = attent.presets.replace_stacks(config, **with_dropout)
    else:
        config = replace(config, stack=replace(config.stack, **with_dropout))
    model = make_model(config, device)
    assert torch.equal(pass_through(model, device), pass_through(model, device))
    model.train()
    first = pass_through(model, device)
    torch.manual_seed(4)
    assert not torch.allclose(first, pass_through_other(model, device))


def pass_through_other(model: nn.Module, device: torch.device) -> Tensor:
    """The same input, other draws: the dropout is drawn behind it."""
    torch.manual_seed(3)
    if isinstance(model, VisionTransformer):
        given: tuple[Tensor, ...] = (pictures(model.config, 2, device),)
    else:
        given = pad_with_noise(sentences(device))
    torch.manual_seed(99)
    return pass_through_given(model, given)


@pytest.mark.parametrize("rate", ["embedding_dropout", "output_dropout"])
def test_the_first_and_the_last_dropout_have_rates_of_their_own(rate: str, device: torch.device) -> None:
    """With nothing else dropped, a rate near one leaves next to nothing of the embeddings, or of the output."""
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "output_dropout": 0.0}
    stack = replace(CAUSAL["llama2"].stack, **quiet)
    ids = torch.stack(sentences(device, (6, 6)))
    for other, differs in (({rate: 0.99}, True), ({rate: 0.0}, False)):
        model = make_model(replace(CAUSAL["llama2"], stack=replace(stack, **other)), device)
        assert isinstance(model, CausalLM)
        plain = model.compute_states(ids)
        dropped = model.train().compute_states(ids)
        assert torch.allclose(dropped, plain) != differs
        if rate == "output_dropout" and differs:
            assert (dropped == 0).double().mean() > 0.9


@every_model
def test_saved_and_loaded_gives_the_same_bits(config: ModelConfig, device: torch.device, tmp_path: Path) -> None:
    model = make_model(config, device).to(torch.float32)
    model.save(tmp_path / "model")
    again = attent.load(tmp_path / "model").to(device)
    assert again.config == config
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert len(list(again.parameters())) == len(list(model.parameters()))  # what was tied is tied again


@every_text
def test_the_first_loss_is_near_ln_v(config: ModelConfig, device: torch.device) -> None:
    wide = replace(config, vocab=1000, stack=replace(config.stack, width=64))  # type: ignore[union-attr,arg-type]
    model = build(wide).to(device).eval()
    ids = torch.randint(0, 1000, (8, 20)).to(device)
    loss = F.cross_entropy(read(model, ids).flatten(0, 1), torch.randint(0, 1000, (160,)).to(device))
    assert abs(loss.item() - math.log(1000)) < 0.8


@parametrize_all("config", T5_TOY)
def test_t5_begins_calmly(config: Seq2SeqConfig, device: torch.device) -> None:
    """Its scores are unscaled: W^Q must start so that no token is picked alone. (Where the output is the embedding, a
    model with the norm first begins with the word that it reads, so that its first loss is above ln V.)"""
    wide = attent.presets.replace_stacks(replace(config, vocab=1000), width=256, heads=4, head_width=64)
    model = build(wide).to(device).eval()
    ids = torch.randint(0, 1000, (4, 20)).to(device)
    with attent.record(model) as trace:
        loss = F.cross_entropy(model(ids, ids).flatten(0, 1), torch.randint(0, 1000, (80,)).to(device))
    assert abs(loss.item() - math.log(1000)) < (5.0 if config.tie_output else 0.8)
    for path, weights in trace.items():
        assert weights[0][:, :, -1].amax(-1).mean() < 0.3, path


@every_vision
def test_no_label_is_likelier_at_first(config: VisionConfig, device: torch.device) -> None:
    model = build(config).to(device, precise(device)).eval()
    assert_close(
        model(pictures(config, 2, device)).softmax(-1), torch.full((2, 3), 1 / 3, device=device, dtype=precise(device))
    )


@every_vision
def test_each_pixel_matters_and_only_to_its_own_image(config: VisionConfig, device: torch.device) -> None:
    model = make_model(config, device)
    pixels = pictures(config, 2, device).requires_grad_()
    model(pixels)[0].sum().backward()
    assert pixels.grad is not None
    assert (pixels.grad[0] != 0).all()
    assert (pixels.grad[1] == 0).all()


def test_patches_are_taken_row_by_row(device: torch.device) -> None:
    """Of an image of 12 x 12 in patches of 4: token 1 + 3 r + c sees rows 4 r to 4 r + 3 and columns 4 c to 4 c + 3."""
    model = randomize(build(VISION["vit"]).to(device, precise(device)))
    pixels = pictures(VISION["vit"], 1, device)
    plain = model.patch_embedding(pixels)
    pixels[0, 2, 5, 11] += 1
    changed = (model.patch_embedding(pixels) - plain).abs().sum(-1)[0]
    assert changed.nonzero().flatten().tolist() == [5]


def test_bytes_become_what_the_model_reads(device: torch.device) -> None:
    model = build(VISION["vit"]).to(device)
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(1, 3, 12, 12)
    read_as = model.normalize(pixels)[0, :, 0, 0].tolist()
    assert read_as == pytest.approx([(0 - 0.5) / 0.2, (0.2 - 0.4) / 0.3, (1 - 0.3) / 0.4])
    assert torch.allclose(model.normalize(pixels / 255), model.normalize(pixels), atol=1e-6)


def test_a_mean_is_of_patches_alone(device: torch.device) -> None:
    states = torch.randn(2, 10, 32).to(device)
    assert_close(build(VISION["vit-mean"]).to(device).pool(states), states[:, 1:].mean(1))
    assert_close(build(VISION["vit-without-class"]).to(device).pool(states), states.mean(1))


def test_what_a_model_does_not_have_is_refused_by_name(device: torch.device) -> None:
    bare = build(replace(ENCODERS["bert-one-segment"], masked_lm=False, labels=())).to(device)
    states = bare(torch.zeros(1, 3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="no head for masked words"):
        bare.masked_logits(states)
    with pytest.raises(ValueError, match="no classifier"):
        bare.classify(states)
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="`segments` must be None"):
        bare(ids, None, ids)
    with pytest.raises(ValueError, match="no classifier"):
        build(replace(VISION["vit"], labels=()))(pictures(VISION["vit"], 1, device))
    with pytest.raises(ValueError, match=r"pixels must be floating numbers of \(B, 3, 12, 12\), but are"):
        build(VISION["vit"])(torch.zeros(1, 3, 8, 8))


def test_every_family_is_among_the_toys() -> None:
    """The corners that published models have: shared heads, one key head, both scalings, gates, biases, segments."""
    stacks = [config.stack for config in (*TEXT.values(), *VISION.values())]
    stacks += [config.encoder for config in T5_TOY.values()]
    assert {stack.kv_heads for stack in stacks} >= {None, 1, 2}
    assert {stack.gated for stack in stacks} == {stack.bias for stack in stacks} == {True, False}
    assert {stack.norm_order for stack in stacks} == {"pre", "post"}
    assert {type(stack.positions).__name__ for stack in stacks} >= {"LearnedConfig", "RotaryConfig", "RelativeConfig"}
