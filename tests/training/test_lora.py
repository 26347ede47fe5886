"""Frozen parameters do not change, LoRA adapters train instead, and the result is a plain model; the command fine-tunes
our models and Marian ones.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attent import interop, models
from attent.cli import main
from attent.decoding.translator import translate_texts
from attent.interop.export import convert_model
from attent.models import Seq2Seq
from attent.nn.lora import LoRAError, LowRankUpdate, add_lora, freeze_parameters, matches_pattern, merge_lora
from attent.text.tokenizer import Tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer
from tests.training.toys import RECIPE, are_equal, batches, build_toy_run, model


def logits(network: Seq2Seq) -> Tensor:
    batch = batches().get_batch(0, 0)
    was, _ = network.training, network.eval()
    with torch.no_grad():
        outputs: Tensor = network(batch.source.ids, batch.target.ids, batch.source.lengths, batch.target.lengths)
    network.train(was)
    return outputs


def randomize(network: nn.Module) -> None:
    for part in network.modules():
        if isinstance(part, LowRankUpdate):
            nn.init.normal_(part.up, std=0.1)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def test_lora_starts_as_the_same_function() -> None:
    plain = model()
    adapted = copy.deepcopy(plain)
    add_lora(adapted, 4)
    assert torch.equal(logits(plain), logits(adapted))
    randomize(adapted)
    assert not torch.allclose(logits(plain), logits(adapted), atol=1e-3)


def test_merging_gives_a_plain_model_with_the_same_outputs() -> None:
    adapted = model()
    names = list(adapted.state_dict())
    add_lora(adapted, 4)
    randomize(adapted)
    before = logits(adapted)
    merge_lora(adapted)
    assert list(adapted.state_dict()) == names or set(adapted.state_dict()) == set(names)
    torch.testing.assert_close(logits(adapted), before, rtol=1e-5, atol=1e-5)


def test_every_matrix_of_the_stacks_has_an_adapter_and_only_adapters_train() -> None:
    network = model()
    matrices = sum(
        isinstance(part, nn.Linear) for stack in (network.encoder, network.decoder) for part in stack.modules()
    )
    add_lora(network, 4)
    learning = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert len(learning) == 2 * matrices
    assert all(name.endswith((".up", ".down")) for name in learning)


def test_a_run_changes_adapters_only_and_has_optimizer_state_for_them_only(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, lora=4))
    before = toy_run.weights()
    toy_run.trainer.run()
    after = toy_run.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    added = {name for name in before if name.endswith((".up", ".down"))}
    assert changed == added
    assert {name.rpartition(":")[0] for name in toy_run.trainer.optimizer.get_state()} == added


def test_a_lora_run_publishes_a_plain_model(tmp_path: Path) -> None:
    toy_run = build_toy_run(tmp_path, replace(RECIPE, lora=4, steps=3, lr=0.05), validated=False)
    toy_run.trainer.run()
    loaded = models.read_model(tmp_path)
    assert set(loaded.state_dict()) == set(model().state_dict())
    torch.testing.assert_close(logits(loaded), logits(toy_run.trainer.model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(loaded), logits(model()), atol=1e-3)


def test_a_rank_that_saves_nothing_is_refused() -> None:
    with pytest.raises(LoRAError, match=r"`train.lora` must be at most 16, .* but is 17"):
        add_lora(model(), 17)


# ---- freezing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("encoder", lambda name: name.startswith("encoder.")),
        ("decoder.blocks.0.self_attn", lambda name: name.startswith("decoder.blocks.0.self_attn.")),
        ("*embedding*", lambda name: "embedding" in name),
        ("*norm*", lambda name: "norm" in name),
    ],
)
def test_a_pattern_freezes_matching_parameters_only(pattern: str, frozen: Callable[[str], bool]) -> None:
    network = model()
    freeze_parameters(network, (pattern,))
    stays = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert stays
    assert stays == {name for name, _ in network.named_parameters() if frozen(name)}


def test_a_pattern_matches_whole_names() -> None:
    assert not matches_pattern("encoders.weight", "encoder")
    assert not matches_pattern("decoder.blocks.10.self_attn.query.weight", "decoder.blocks.1")


def test_patterns_that_match_nothing_or_everything_are_refused() -> None:
    with pytest.raises(LoRAError, match=r"no parameter matches `encodr`; the model's modules are .*encoder, decoder"):
        freeze_parameters(model(), ("encoder", "encodr"))
    with pytest.raises(LoRAError, match="no parameter is left to train"):
        freeze_parameters(model(), ("*",))


def test_frozen_parameters_do_not_change_in_a_run(tmp_path: Path) -> None:
    start = model()
    freeze_parameters(start, ("encoder",))
    toy_run = build_toy_run(tmp_path, start=start)
    before = toy_run.weights()
    toy_run.trainer.run()
    changed = {name for name, tensor in toy_run.weights().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not name.startswith("encoder.")}


# ---- fine-tuning by the command --------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[:120]
    path = tmp_path / "corpus.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def run_training(corpus: Path, out: Path, *more: str, steps: int = 12) -> list[dict[str, Any]]:
    """Train by the command and return its log events."""
    words = ["train", "--data", str(corpus), "--src", "en", "--tgt", "de", "--out", str(out), "--quiet"]
    recipe = (
        f"--device cpu --steps {steps} --batch-tokens 512 --valid-every 6 --valid-sentences 4 --hold-out 10 --lr 0.01"
    )
    assert main([*words, *recipe.split(), "--warmup", "2", "--set", "decode.beam_size=1", *more]) == 0
    return [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def loss_falls(log: list[dict[str, Any]]) -> bool:
    losses = [event["loss"] for event in log if event["event"] == "validated"]
    first = next(event["loss"] for event in log if event["event"] == "progress")
    return bool(losses[-1] < losses[0] < first)


def can_translate(folder: Path) -> bool:
    translations = translate_texts(interop.load(folder), Tokenizer.load(folder), ["A dog is waiting."], beam_size=1)
    return len(translations) == 1 and isinstance(translations[0], str)


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "ours", model(), tokenizer())
    return tmp_path / "ours"


def test_a_model_is_fine_tuned_with_a_frozen_encoder(tmp_path: Path, corpus: Path, base_folder: Path) -> None:
    log = run_training(corpus, tmp_path / "out", "--from", str(base_folder), "--freeze", "encoder")
    assert loss_falls(log)
    before, after = (
        dict(models.read_model(base_folder).named_parameters()),
        dict(models.read_model(tmp_path / "out").named_parameters()),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("encoder.")}
    assert Tokenizer.load(tmp_path / "out") == Tokenizer.load(base_folder)
    assert can_translate(tmp_path / "out")


def test_a_model_is_fine_tuned_with_lora(tmp_path: Path, corpus: Path, base_folder: Path) -> None:
    log = run_training(corpus, tmp_path / "out", "--from", str(base_folder), "--lora", "4")
    assert loss_falls(log)
    before, after = models.read_model(base_folder).state_dict(), models.read_model(tmp_path / "out").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linears = {f"{name}.weight" for name, part in model().named_modules() if isinstance(part, nn.Linear)}
    assert changed
    assert changed <= linears
    assert can_translate(tmp_path / "out")
    started = next(event for event in log if event["event"] == "started")
    assert 0 < started["trainable_parameters"] < started["parameters"]


@pytest.mark.parametrize("more", [(), ("--lora", "4")])
def test_a_model_in_half_precision_is_fine_tuned_in_float32(
    more: tuple[str, ...], tmp_path: Path, corpus: Path, base_folder: Path
) -> None:
    convert_model(base_folder, tmp_path / "half", dtype="float16")
    assert loss_falls(run_training(corpus, tmp_path / "out", "--from", str(tmp_path / "half"), *more))
    assert {tensor.dtype for tensor in models.read_model(tmp_path / "out").state_dict().values()} == {torch.float32}


def test_fine_tuning_resumes_after_the_base_model_is_deleted(tmp_path: Path, corpus: Path, base_folder: Path) -> None:
    """Its weights are in the checkpoint; only a new run would need the base model."""
    run_training(corpus, tmp_path / "out", "--from", str(base_folder), "--lora", "4", steps=4)
    shutil.rmtree(base_folder)
    log = run_training(corpus, tmp_path / "out", "--from", str(base_folder), "--lora", "4", steps=6)
    assert [event["step"] for event in log if event["event"] == "ended"][-1] == 6


def marian(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    from tests.text.imported_tokenizers import marian_folder

    marian_folder(folder)
    vocab = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    torch.manual_seed(5)
    config = transformers.MarianConfig(
        vocab_size=vocab, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=128,
        pad_token_id=vocab - 1, decoder_start_token_id=vocab - 1, eos_token_id=0, forced_eos_token_id=0, dropout=0.1,
    )  # fmt: skip
    transformers.MarianMTModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "more",
    [pytest.param((), marks=pytest.mark.slow), ("--freeze", "encoder"), ("--lora", "4")],
    ids=["all", "freeze", "lora"],
)
def test_a_marian_folder_is_fine_tuned(tmp_path: Path, corpus: Path, more: tuple[str, ...]) -> None:
    start = marian(tmp_path / "marian")
    log = run_training(corpus, tmp_path / "out", "--from", str(start), *more)
    assert loss_falls(log)
    assert can_translate(tmp_path / "out")
    before, after = interop.load(start).state_dict(), models.read_model(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert not are_equal(before, after)
    if "encoder" in more:
        assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder."))
