"""`attent info` on complete, unfinished and damaged runs, and on Hugging Face folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

import attent
from attent.cli.info import format_row, info
from attent.interop import marian
from attent.models import CausalConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, VisionConfig, weights
from attent.models.config import mirror_encoder
from attent.nn import AudioConfig, StackConfig
from attent.storage.errors import FolderError
from attent.text import TokenizerConfig, train_tokenizer
from attent.training.checkpoint import Checkpoint, save_checkpoint
from attent.training.events import Ended, Event, EventLog, Note, Progress, Started, Validated

ENCODER = StackConfig(layers=2, width=16, heads=2, ffn_width=32)
RUN = '[data]\ntrain = ["own.tmx"]\nsrc = "en"\ntgt = "de"\n[train]\nsteps = 40\nlr = 0.002\nsteps_of_mine = 1\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "en-de"
    config = Seq2SeqConfig(vocab=50, encoder=ENCODER, decoder=mirror_encoder(ENCODER))
    attent.build(config).save(root)
    return root


def write_run(root: Path, ended: bool = True) -> None:
    root.mkdir(exist_ok=True)
    (root / "run.toml").write_text(RUN, encoding="utf-8")
    events: list[Event] = [
        Validated(step=10, epoch=1, loss=2.0, metrics={"bleu": 31.25, "chrf": 50.0},
            best=True, validations_since_best=0, seconds=1),
        Validated(step=20, epoch=2, loss=2.5, metrics={"bleu": 30.0, "chrf": 51.0},
            best=False, validations_since_best=1, seconds=2),
        Progress(
            step=25, epoch=2.5, loss=1.0, perplexity=3.0, lr=0.1, grad_norm=1.0, tokens_per_second=1.0, seconds=3,
            seconds_left=None,
        ),
    ]  # fmt: skip
    log = EventLog(root / "log.jsonl")
    for event in [*events, *([Ended(step=25, reason="patience", seconds=3.0)] if ended else [])]:
        log(event)
    log.close()


STARTED = Started(step=25, steps=40, steps_per_epoch=10.0, parameters=1, trainable_parameters=1, device="CPU")
END = Ended(step=25, reason="steps", seconds=3.0)
NOTE = Note(text="the model is saved", step=25)
FINISHED = {
    "step": 25,
    "reason": "steps",
    "weights": "mean of the last 2 checkpoints",
    "scores": [
        {
            "name": "flickr",
            "split": "test",
            "num_examples": 1_000,
            "unit": "pair",
            "metrics": {"bleu": 38.64, "chrf": 62.0, "exact": 4.06},
        }
    ],
}


def append_events(root: Path, *events: Event) -> None:
    log = EventLog(root / "log.jsonl", from_step=25)
    for event in events:
        log(event)
    log.close()


def run_info(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert info(folder) == code
    page = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in page.splitlines())
    return " ".join(page.split())


def test_a_model_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_info(folder, capsys)
    model = attent.load(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    for text in (
        "saved by attent",
        "all checksums match",
        "2 layers, width 16, 2 heads, FFN width 32",
        f"{count:,} in",
    ):
        assert text in page


def test_additive_compatibility_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = replace(ENCODER, compatibility="additive")
    attent.build(Seq2SeqConfig(vocab=50, encoder=encoder, decoder=mirror_encoder(ENCODER))).save(tmp_path / "model")
    page = run_info(tmp_path / "model", capsys)
    assert "encoder 2 layers, width 16, 2 heads (additive), FFN" in page
    assert "decoder 2 layers, width 16, 2 heads, FFN" in page


def test_parameter_counts_add_up_and_count_tied_weights_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total, *parts = read_parameter_counts(run_info(folder, capsys))
    assert sum(parts) == total
    assert parts[0] == 50 * 16
    assert len(parts) == 3  # embedding, encoder, decoder: the output is tied


def read_parameter_counts(page: str) -> list[int]:
    """The numbers of the row `parameters`: the total, then those of each part."""
    row = re.search(r"parameters .*?(?= tokenizer| training|$)", page)
    assert row is not None
    return [int(number.replace(",", "")) for number in re.findall(r"\b\d[\d,]*\b(?!-)", row[0])]


def test_a_tokenizer_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"a small line, number {i}, of some text about {i * i} things" for i in range(300)]
    tokenizer = train_tokenizer(lines, lines, TokenizerConfig(vocab=340), tags=("de", "fr"))
    weights.save_model(attent.load(folder), folder, tokenizer.files)
    page = run_info(folder, capsys)
    assert f"SentencePiece, {tokenizer.source.size} pieces" in page
    assert "target languages: de, fr" in page
    assert tokenizer.fingerprint[:16] in page


def test_training_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder)
    for step in (10, 20):
        save_checkpoint(folder / "state", Checkpoint(step=step, state={}, tensors={"weights": {}}))
    page = run_info(folder, capsys)
    for text in (
        "25 steps; stopped early",
        "2, the newest at step 20",
        "last validated step 20: loss 2.500, BLEU 30.0",
        "best step 10: loss 2.000, BLEU 31.2",
        "only for resuming",
    ):
        assert text in page


def test_a_run_without_a_saved_model_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ended=False)
    page = run_info(tmp_path, capsys)
    assert "model none" in page
    assert "25 steps; running or interrupted" in page


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((END, NOTE, NOTE), "complete"),
        ((END, NOTE, STARTED), "running or interrupted"),
        ((END, STARTED, END, NOTE), "complete"),
        ((NOTE,), "running or interrupted"),
    ],
)
def test_run_status_is_that_of_the_last_start_or_end(
    folder: Path, capsys: pytest.CaptureFixture[str], events: tuple[Event, ...], status: str
) -> None:
    write_run(folder, ended=False)
    append_events(folder, *events)
    assert f"25 steps; {status}" in run_info(folder, capsys)


def test_final_scores_of_a_complete_run_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder)
    (folder / "state").mkdir()
    (folder / "state" / "finished.json").write_text(json.dumps(FINISHED), encoding="utf-8")
    page = run_info(folder, capsys)
    assert "weights mean of the last 2 checkpoints" in page
    assert "scores test flickr of 1,000 pairs: BLEU 38.6, chrF 62.0, exact 4.1%" in page


def test_final_scores_of_a_resumed_run_are_not_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder)
    (folder / "state").mkdir()
    (folder / "state" / "finished.json").write_text(json.dumps({**FINISHED, "step": 20}), encoding="utf-8")
    assert "scored" not in run_info(folder, capsys)
    (folder / "state" / "finished.json").write_text("{", encoding="utf-8")
    assert "finished.json" in run_info(folder, capsys, code=1)


@pytest.mark.parametrize(
    "damaged",
    [{"step": 25}, {**FINISHED, "scores": [{"name": "flickr"}]}, {**FINISHED, "scores": 3}, {"weights": "best"}],
)
def test_a_summary_without_its_keys_is_reported(
    folder: Path, damaged: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder)
    (folder / "state").mkdir()
    (folder / "state" / "finished.json").write_text(json.dumps(damaged), encoding="utf-8")
    assert "finished.json: is damaged; train again" in run_info(folder, capsys, code=1)


def test_a_damaged_model_is_reported_with_the_rest_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    page = run_info(folder, capsys, code=1)
    assert "PROBLEM" in page
    assert "SHA-256" in page
    assert "25 steps" in page


def test_a_damaged_model_without_a_run_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FolderError, match=r"config\.json"):
        info(folder)


def test_an_invalid_run_file_is_reported_as_a_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.toml").write_text("lr = = 3", encoding="utf-8")
    assert "is not valid TOML" in run_info(folder, capsys, code=1)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="does not exist"):
        info(tmp_path / "nowhere")


def test_a_hugging_face_folder_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = replace(mirror_encoder(ENCODER), layers=1)
    config = Seq2SeqConfig(vocab=50, encoder=ENCODER, decoder=decoder, output_bias=True)
    marian.save(attent.build(config), tmp_path / "hf", pad=0)
    page = run_info(tmp_path / "hf", capsys)
    assert "saved by Hugging Face" in page
    assert "no checksums" in page
    assert "encoder 2 layers" in page
    assert "decoder 1 layer," in page


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            CausalConfig(vocab=50, stack=replace(ENCODER, causal=True)),
            ["(language model)", "use with attent generate, attent embed, attent look", "decoder 2 layers"],
        ),
        (
            EncoderConfig(vocab=50, stack=ENCODER, masked_lm=True, pooler=True, segments=2),
            [
                "encoder-only Transformer (text)",
                "use with attent fill, attent embed",
                "segment embedding 32, encoder",
                "pooler 272",
            ],
        ),
        (
            VisionConfig(image_size=8, patch_size=4, channels=1, stack=ENCODER, labels=tuple("abcdefghijk")),
            [
                "encoder-only Transformer (images)",
                "use with attent classify",
                "labels 11: a, b,",
            ],
        ),
        (
            Seq2SeqConfig(
                vocab=50,
                frontend=AudioConfig(),
                encoder=replace(ENCODER, width=24),
                decoder=mirror_encoder(ENCODER),
                share_embeddings=False,
                ctc=True,
            ),
            ["use with attent transcribe, attent score, attent look", "memory projection 400", "ctc output"],
        ),
    ],
)
def test_every_kind_of_model_is_described_with_the_commands_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: ModelConfig, expected: list[str]
) -> None:
    attent.build(config).save(tmp_path / "model")
    page = run_info(tmp_path / "model", capsys)
    for words in expected:
        assert words in page
    total, *parts = read_parameter_counts(page)
    assert sum(parts) == total


def test_accuracy_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder, ended=False)
    better = Validated(
        step=25,
        epoch=3,
        loss=1.5,
        best=True,
        validations_since_best=0,
        seconds=3,
        metrics={"accuracy": 91.25},
    )
    append_events(folder, better, END)
    scores = [
        {"name": "held-out part", "split": "test", "num_examples": 20, "unit": "image", "metrics": {"accuracy": 90.0}}
    ]
    (folder / "state").mkdir()
    (folder / "state" / "finished.json").write_text(json.dumps({**FINISHED, "scores": scores}), encoding="utf-8")
    page = run_info(folder, capsys)
    assert "best step 25: loss 1.500, accuracy 91.25%" in page
    assert "scores test held-out part of 20 images: accuracy 90.00%" in page


def test_long_words_are_wrapped_and_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(format_row("folder", "x" * 200 + " \x1b[31m " + "語" * 60))
    assert all(cell_len(line) <= 80 for line in lines)
    assert "\\x1b[31m" in "".join(lines)


def test_a_span_model_has_its_own_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder)
    assert "use with attent translate, attent score, attent look" in run_info(folder, capsys)
    (folder / "run.toml").write_text(f'task = "spans"\n{RUN}', encoding="utf-8")
    assert "use with attent train --from, attent look" in run_info(folder, capsys)


def test_counts_of_one_are_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = replace(ENCODER, layers=1, heads=1)
    attent.build(VisionConfig(image_size=8, patch_size=8, stack=stack, fit="squash")).save(tmp_path / "vit")
    page = run_info(tmp_path / "vit", capsys)
    assert "1 layer, width 16, 1 head, FFN width 32" in page
