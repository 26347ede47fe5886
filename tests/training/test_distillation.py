"""Students: their shapes, sizes and speeds, and the command that trains one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attent
from attent.cli import main
from attent.interop import ctranslate2 as converter
from attent.models import Seq2SeqConfig, build
from attent.text.tokenizer import Tokenizer
from attent.training import distillation
from attent.training.config import read_run
from attent.training.distillation import SHAPES, StudentShape, choose_shape, estimate_int8_bytes, measure_speed
from attent.training.events import Event, Note
from attent.training.run_options import TrainError
from tests.training.runs import reverse, sentences, write_corpus

TRAINED = Path(__file__).parents[1] / "models" / "saved_model"
TINY: dict[str, Any] = {
    "src": "en", "tgt": "xx", "batch_tokens": 256, "hold_out": 10, "steps": 2, "valid_sentences": 4, "beam_size": 1,
    "threads": 1, "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("distillation")
    write_corpus(home / "pairs.tsv", 120)
    (home / "text.en").write_text("".join(f"{text}\n" for text in sentences(100)), encoding="utf-8")
    shape = {"model.width": 64, "model.ffn_width": 64, "model.layers": 1}
    attent.train(home / "pairs.tsv", out=home / "teacher", size="tiny", settings=shape, **TINY | {"steps": 40})
    return home


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TRAINED)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [StudentShape(6, 2, 64), StudentShape(2, 1, 128)])
def test_estimated_size_is_that_of_a_conversion(shape: StudentShape, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = shape.build_config(tokenizer)
    converter.write_conversion(build(config), tokenizer, tmp_path / "int8", quantization="int8", suppressed_tokens=())
    assert estimate_int8_bytes(config) == pytest.approx((tmp_path / "int8" / "model.bin").stat().st_size, rel=0.03)


def test_shapes_are_listed_by_size(tokenizer: Tokenizer) -> None:
    sizes = [estimate_int8_bytes(shape.build_config(tokenizer, 32_000)) for shape in SHAPES]
    assert sizes == sorted(sizes)
    assert 16e6 < sizes[0] < 18e6  # 6+2 layers of width 256, as Firefox has them


def test_largest_shape_within_the_megabytes_is_chosen(tokenizer: Tokenizer) -> None:
    assert str(choose_shape(TRAINED, tokenizer, 32_000, 32.0, None, None)[0]) == "6+2x384"
    assert str(choose_shape(TRAINED, tokenizer, 8_000, 32.0, None, None)[0]) == "12+1x384"
    with pytest.raises(TrainError, match="`megabytes` must be at least 17"):
        choose_shape(TRAINED, tokenizer, 32_000, 5.0, None, None)


@pytest.mark.slow
def test_shape_is_chosen_by_its_measured_speed(tokenizer: Tokenizer) -> None:
    slowest = measure_speed(SHAPES[-1].build_config(tokenizer), 1)
    assert choose_shape(TRAINED, tokenizer, None, None, slowest / 4, 1)[0] == SHAPES[-1]
    with pytest.raises(TrainError, match="`speed` must be at most"):
        choose_shape(TRAINED, tokenizer, None, None, 1e6, 1)


def test_measured_speed_falls_with_the_decoder(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "MEASURE_SECONDS", 0.3)
    fast, slow = (measure_speed(StudentShape(1, n, 128).build_config(tokenizer), 1) for n in (1, 8))
    assert fast > 1.5 * slow


def test_measured_speed_is_that_of_the_requested_vocabulary(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def record(config: Seq2SeqConfig, threads: int | None) -> float:
        sizes.append(config.vocab)
        return 1e6

    monkeypatch.setattr(distillation, "measure_speed", record)
    choose_shape(TRAINED, tokenizer, 100_000, None, 100.0, 1)
    assert sizes == [100_000]


@pytest.mark.parametrize("text", ["6x384", "0+2x384", "6+2x100", "small"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(TrainError, match=r"`size` must be layers .* but is .*; give one such as 6\+2x256"):
        StudentShape.parse(text)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_student_learns_the_translation_closest_to_the_reference(home: Path, tmp_path: Path) -> None:
    notes: list[str] = []

    def collect(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    out = tmp_path / "student"
    attent.distil(home / "pairs.tsv", teacher=home / "teacher", out=out, size="2+1x64", callbacks=collect, **TINY)
    run = read_run(out / "run.toml")
    assert run.model is not None
    assert (run.model.encoder.layers, run.model.decoder.layers, run.model.encoder.width) == (2, 1, 64)
    assert Tokenizer.load(out).fingerprint == Tokenizer.load(home / "teacher").fingerprint
    translator = attent.Translator.load(home / "teacher", device="cpu")
    (file,) = (path for path in (out / "state/data/synthetic").glob("*.jsonl") if "translations" not in path.name)
    pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    candidates = [[each.text for each in translator(pair["src"], n_best=4).n_best] for pair in pairs]
    assert all(pair["tgt"] in texts for pair, texts in zip(pairs, candidates, strict=True))
    assert any(pair["tgt"] != texts[0] for pair, texts in zip(pairs, candidates, strict=True))
    assert not any(pair["tgt"] == reverse(pair["src"]) for pair in pairs)  # the references are not learned
    assert any("closest to the reference of 4, beam 4" in note for note in notes)
    card = (out / "card.md").read_text(encoding="utf-8")
    assert f"pairs.tsv (translated by {home / 'teacher'}, closest to the reference of 4, beam 4)" in card
    assert f"of {home / 'teacher'}, one for both languages" in card
    resumed = attent.distil(home / "pairs.tsv", teacher=home / "teacher", out=out, size="2+1x64", **TINY | {"steps": 3})
    assert resumed.step == 3


def test_command_distils_text_by_an_ensemble(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--src en --tgt xx --size 1+1x64 --vocab 350 --batch-tokens 256 --steps 2 --beam-size 1 --threads 1".split()
    )
    arguments = ["distil", str(home / "teacher"), str(home / "teacher"), "--data", str(home / "text.en"), *options]
    out = tmp_path / "student"
    assert main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    assert Tokenizer.load(out).source.size == 350
    assert "held out" in capsys.readouterr().err  # of the translations: there are no pairs
    assert main(["distil", "--out", str(out), "--steps", "3"]) == 0, capsys.readouterr().err
    assert "resuming" in capsys.readouterr().err


def test_default_shape_is_as_wide_as_a_narrow_teacher(home: Path) -> None:
    shape, reason = choose_shape(home / "teacher", Tokenizer.load(home / "teacher"), None, None, None, None)
    assert (str(shape), reason) == ("6+2x64", "the default")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"teacher": None}, "a student needs a teacher"),
        ({"size": "6+2x64", "megabytes": 10.0}, "only one of `size`, `megabytes` and `speed`"),
        ({"n_best": 0}, "`n_best` must be 1 or more"),
        ({"data": "nowhere.tsv"}, "nowhere.tsv: there is no such file or folder"),
        ({"data": ()}, "a student needs text, but none is named"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str, home: Path, tmp_path: Path) -> None:
    given = {"data": home / "pairs.tsv", "teacher": home / "teacher", **TINY, **options}
    with pytest.raises(ValueError, match=problem):
        attent.distil(out=tmp_path / "student", **given)
