"""What is frozen stays, what LoRA adds learns in its place, and the result is a plain model; models are trained further
by the command, ours and Marian ones.
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
from attent.models import Seq2Seq
from attent.nn.lora import LoRAError, LowRankUpdate, add_lora, freeze_parameters, matches_pattern, merge_lora
from attent.text.tokenizer import Tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer
from tests.training.toys import RECIPE, are_equal, batches, build_toy_run, model


def logits(of: Seq2Seq) -> Tensor:
    batch = batches().get_batch(0, 0)
    was, _ = of.training, of.eval()
    with torch.no_grad():
        found: Tensor = of(batch.source.ids, batch.target.ids, batch.source.lengths, batch.target.lengths)
    of.train(was)
    return found


def shaken(of: nn.Module) -> None:
    for part in of.modules():
        if isinstance(part, LowRankUpdate):
            nn.init.normal_(part.up, std=0.1)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def test_it_begins_as_the_same_function() -> None:
    plain = model()
    adapted = copy.deepcopy(plain)
    add_lora(adapted, 4)
    assert torch.equal(logits(plain), logits(adapted))
    shaken(adapted)
    assert not torch.allclose(logits(plain), logits(adapted), atol=1e-3)


def test_merged_it_is_a_plain_model_with_the_same_outputs() -> None:
    adapted = model()
    names = list(adapted.state_dict())
    add_lora(adapted, 4)
    shaken(adapted)
    before = logits(adapted)
    merge_lora(adapted)
    assert list(adapted.state_dict()) == names or set(adapted.state_dict()) == set(names)
    torch.testing.assert_close(logits(adapted), before, rtol=1e-5, atol=1e-5)


def test_beside_every_matrix_of_the_stacks_stands_one_and_only_these_learn() -> None:
    of = model()
    matrices = sum(isinstance(part, nn.Linear) for stack in (of.encoder, of.decoder) for part in stack.modules())
    add_lora(of, 4)
    learning = [name for name, parameter in of.named_parameters() if parameter.requires_grad]
    assert len(learning) == 2 * matrices
    assert all(name.endswith((".up", ".down")) for name in learning)


def test_a_run_changes_only_the_added_matrices_and_keeps_state_of_them_alone(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, lora=4))
    before = made.weights()
    made.trainer.run()
    after = made.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    added = {name for name in before if name.endswith((".up", ".down"))}
    assert changed == added
    assert {name.rpartition(":")[0] for name in made.trainer.optimizer.get_state()} == added


def test_the_folder_of_such_a_run_is_a_plain_model(tmp_path: Path) -> None:
    made = build_toy_run(tmp_path, replace(RECIPE, lora=4, steps=3, lr=0.05), validated=False)
    made.trainer.run()
    found = models.read_model(tmp_path)
    assert set(found.state_dict()) == set(model().state_dict())
    torch.testing.assert_close(logits(found), logits(made.trainer.model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(found), logits(model()), atol=1e-3)


def test_a_rank_that_is_no_saving_is_refused() -> None:
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
def test_a_pattern_freezes_what_it_names_and_nothing_else(pattern: str, frozen: Callable[[str], bool]) -> None:
    of = model()
    freeze_parameters(of, (pattern,))
    stays = {name for name, parameter in of.named_parameters() if not parameter.requires_grad}
    assert stays
    assert stays == {name for name, _ in of.named_parameters() if frozen(name)}


def test_a_name_is_no_part_of_another() -> None:
    assert not matches_pattern("encoders.weight", "encoder")
    assert not matches_pattern("decoder.blocks.10.self_attn.query.weight", "decoder.blocks.1")


def test_patterns_that_fit_nothing_or_all_are_refused_with_what_there_is() -> None:
    with pytest.raises(LoRAError, match=r"no parameter matches `encodr`; the model's modules are .*encoder, decoder"):
        freeze_parameters(model(), ("encoder", "encodr"))
    with pytest.raises(LoRAError, match="no parameter is left to train"):
        freeze_parameters(model(), ("*",))


def test_frozen_parts_stay_in_a_run(tmp_path: Path) -> None:
    start = model()
    freeze_parameters(start, ("encoder",))
    made = build_toy_run(tmp_path, start=start)
    before = made.weights()
    made.trainer.run()
    changed = {name for name, tensor in made.weights().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not name.startswith("encoder.")}


# ---- trained further by the command ----------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[:120]
    path = tmp_path / "corpus.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def trained(corpus: Path, out: Path, *more: str, steps: int = 12) -> list[dict[str, Any]]:
    """What the command writes into its log."""
    words = ["train", "--data", str(corpus), "--src", "en", "--tgt", "de", "--out", str(out), "--quiet"]
    recipe = (
        f"--device cpu --steps {steps} --batch-tokens 512 --valid-every 6 --valid-sentences 4 --hold-out 10 --lr 0.01"
    )
    assert main([*words, *recipe.split(), "--warmup", "2", "--set", "decode.beam_size=1", *more]) == 0
    return [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def falls(log: list[dict[str, Any]]) -> bool:
    losses = [event["loss"] for event in log if event["event"] == "validated"]
    first = next(event["loss"] for event in log if event["event"] == "progress")
    return bool(losses[-1] < losses[0] < first)


def translates(folder: Path) -> bool:
    found = translate_texts(interop.load(folder), Tokenizer.load(folder), ["A dog is waiting."], beam_size=1)
    return len(found) == 1 and isinstance(found[0], str)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_model(tmp_path / "ours", model(), tokenizer())
    return tmp_path / "ours"


def test_a_model_of_ours_is_trained_further_with_its_encoder_frozen(tmp_path: Path, corpus: Path, ours: Path) -> None:
    log = trained(corpus, tmp_path / "out", "--from", str(ours), "--freeze", "encoder")
    assert falls(log)
    before, after = (
        dict(models.read_model(ours).named_parameters()),
        dict(models.read_model(tmp_path / "out").named_parameters()),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("encoder.")}
    assert Tokenizer.load(tmp_path / "out") == Tokenizer.load(ours)
    assert translates(tmp_path / "out")


def test_a_model_of_ours_is_trained_further_with_lora(tmp_path: Path, corpus: Path, ours: Path) -> None:
    log = trained(corpus, tmp_path / "out", "--from", str(ours), "--lora", "4")
    assert falls(log)
    before, after = models.read_model(ours).state_dict(), models.read_model(tmp_path / "out").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linears = {f"{name}.weight" for name, part in model().named_modules() if isinstance(part, nn.Linear)}
    assert changed
    assert changed <= linears
    assert translates(tmp_path / "out")
    started = next(event for event in log if event["event"] == "started")
    assert 0 < started["trainable_parameters"] < started["parameters"]


def test_a_run_from_another_goes_on_when_that_has_gone(tmp_path: Path, corpus: Path, ours: Path) -> None:
    """Its weights are in the checkpoint; only what a new run would need is not there any more."""
    trained(corpus, tmp_path / "out", "--from", str(ours), "--lora", "4", steps=4)
    shutil.rmtree(ours)
    log = trained(corpus, tmp_path / "out", "--from", str(ours), "--lora", "4", steps=6)
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
def test_a_marian_folder_is_trained_further(tmp_path: Path, corpus: Path, more: tuple[str, ...]) -> None:
    start = marian(tmp_path / "marian")
    log = trained(corpus, tmp_path / "out", "--from", str(start), *more)
    assert falls(log)
    assert translates(tmp_path / "out")
    before, after = interop.load(start).state_dict(), models.read_model(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert not are_equal(before, after)
    if "encoder" in more:
        assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder."))
