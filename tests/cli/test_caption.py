"""`attent caption`: a line for each image, a sentence for each file that is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attent
from attent.cli import main
from attent.decoding.options import SearchOptions
from attent.models import build
from attent.models.weights import save_model
from attent.nn import ImageConfig
from attent.scoring.metrics import CAPTION_METRICS, compute_metrics
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.tasks.captioning import build_caption_config
from tests.data.image_sets import CAPTIONS, write_captions


def save_captioner(folder: Path, tags: tuple[str, ...] = ()) -> Path:
    """Save an untrained caption model of grey images of 8 x 8."""
    torch.manual_seed(0)
    tokenizer = train_monolingual_tokenizer(CAPTIONS["en"], TokenizerConfig(), tags=tags)
    image = ImageConfig(image_size=8, patch_size=4, channels=1, class_token=False)
    config = fit_to_tokenizer(build_caption_config("tiny", tokenizer.target.size, image), tokenizer)
    encoder, decoder = (replace(stack, layers=1, width=16, heads=2, ffn_width=32) for stack in config.stacks)
    save_model(build(replace(config, encoder=encoder, decoder=decoder)), folder, dict(tokenizer.files))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_captioner(tmp_path_factory.mktemp("caption") / "model")


FLAGS = ["--device", "cpu", "--max-length", "5"]


def test_bad_images_are_reported_and_the_others_captioned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_captions(tmp_path, 2)
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    names = ["0.png", "text.png", "folder", "gone.png", "empty.png", "1.png"]
    files = [str(tmp_path / name) for name in names]
    assert main(["caption", str(model), *files, *FLAGS]) == 1
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()] == [files[0], files[5]]
    messages = err.splitlines()
    assert len(messages) == 5
    for message, words in zip(messages, ("recognize", "Is a directory", "No such file", "recognize"), strict=False):
        assert words in message
    assert "4 of 6 images" in messages[-1]


def test_a_folder_stands_for_its_images(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_captions(tmp_path / "data" / "more", 2)  # and a table, which is not an image
    assert main(["caption", str(model), str(tmp_path / "data"), *FLAGS]) == 0
    names = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [str(tmp_path / "data" / "more" / f"{number}.png") for number in range(2)]
    assert main(["caption", str(model), str(tmp_path / "gone.png"), *FLAGS]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_captions_do_not_depend_on_the_other_images(model: Path, tmp_path: Path) -> None:
    write_captions(tmp_path, 5)
    captioner = attent.Captioner.load(model, device="cpu")
    files = [tmp_path / f"{number}.png" for number in range(5)]
    together = captioner.caption(files)
    for file, caption in zip(files, together, strict=True):
        alone = captioner.caption([captioner.read_image(file)])[0]
        assert (alone.text, alone.token_ids) == (caption.text, caption.token_ids)
        assert alone.score == pytest.approx(caption.score, abs=1e-4)
    assert captioner.caption([]) == []


def test_captions_are_written_to_a_file_as_json(model: Path, tmp_path: Path) -> None:
    write_captions(tmp_path, 2)
    out, files = tmp_path / "out.jsonl", [str(tmp_path / f"{number}.png") for number in (1, 0, 1)]
    assert main(["caption", str(model), *files, "--json", "-o", str(out), *FLAGS]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["image"] for record in records] == files
    assert records[0] == records[2]
    assert records[0].keys() == {"image", "text", "score"}


def test_a_language_is_chosen_by_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_captioner(tmp_path / "model", ("de", "en"))
    write_captions(tmp_path, 1)
    image = str(tmp_path / "0.png")
    assert main(["caption", str(model), image, *FLAGS]) == 1
    assert "choose one with --to: de, en" in capsys.readouterr().err
    assert main(["caption", str(model), image, "--to", "fr", *FLAGS]) == 1
    assert "must be one of its target languages (de, en), but is `fr`" in capsys.readouterr().err
    assert main(["caption", str(model), image, "--to", "de", *FLAGS]) == 0
    captioner = attent.Captioner.load(model, device="cpu")
    scores = {captioner.caption([image], to=language)[0].log_prob for language in captioner.languages}
    assert len(scores) == 2  # the tag is read


def test_translating_names_the_command_for_captions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("text\n")
    assert main(["translate", str(model), str(tmp_path / "text.txt"), "--device", "cpu"]) == 1
    assert "attent caption" in capsys.readouterr().err


def test_a_beam_must_be_positive(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", str(model), "x.png", "--beam-size", "0"]) == 2
    assert "`--beam-size` must be 1 or more" in capsys.readouterr().err


def test_a_caption_model_is_scored_against_all_references(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_captions(tmp_path, 4)  # two captions of each image
    with file.open("a") as stream:
        stream.write("gone.png\tmissing\ntext.png\tdamaged\n0.png\t\n")
    (tmp_path / "text.png").write_text("text")
    captioner = attent.Captioner.load(model, device="cpu")
    options = SearchOptions(beam_size=1, max_length=5)
    outputs = [caption.text for caption in captioner.caption([tmp_path / f"{i}.png" for i in range(4)], options)]
    flags = ["--beam-size", "1", "--max-length", "5", "--device", "cpu"]
    assert main(["score", str(model), "--data", str(file), "--json", *flags]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    _, gone, damaged = err.splitlines()
    assert gone.startswith(f"attent: warning: {file}:10: {tmp_path / 'gone.png'}: ")
    assert damaged.startswith(f"attent: warning: {file}:11: {tmp_path / 'text.png'}: ")
    assert (report["num_pairs"], report["num_skipped"], report["num_unreadable"]) == (4, 3, 2)
    assert [sentence["output"] for sentence in report["sentences"]] == [" ".join(text.splitlines()) for text in outputs]
    label = CAPTIONS["en"][0]
    assert report["sentences"][0]["reference"] == f"{label} | there is {label}"
    expected = compute_metrics(
        [sentence["output"] for sentence in report["sentences"]],
        [(text, f"there is {text}") for text in (CAPTIONS["en"][i % 3] for i in range(4))],
        CAPTION_METRICS,
        resamples=0,
    )
    assert {score["metric"]: score["value"] for score in report["scores"]} == {s.metric: s.value for s in expected}
    assert main(["score", str(model), "--data", str(file), *flags]) == 1
    out = capsys.readouterr().out
    assert "at most 5 tokens" in out
    assert "3 lines without a pair, 2 because a file cannot be read" in out
    assert main(["score", str(model), "--data", str(file), "--force-decode", *flags]) == 1
    assert "is for translators, but this is a caption model" in capsys.readouterr().err


def test_files_of_captions_are_scored_against_all_references(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, outputs = write_captions(tmp_path, 3), tmp_path / "outputs.txt"  # two captions of each image, and a header
    outputs.write_text(f"there is {CAPTIONS['en'][0]}\n{CAPTIONS['en'][1]}\nelse\n")
    assert main(["score", "--data", str(file), "--hypotheses", str(outputs), "-m", "exact", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_pairs"], report["scores"][0]["value"]) == (3, pytest.approx(200 / 3))


def test_captions_in_one_language_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, flags = save_captioner(tmp_path / "model", ("de", "en")), ["--max-length", "5", "--device", "cpu", "--json"]
    file = write_captions(tmp_path, 3, languages=("en", "de"))
    assert main(["score", str(model), "--data", str(file), "-m", "exact", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["num_pairs"] == 6
    assert main(["score", str(model), "--data", str(file), "-m", "exact", "--tgt", "de", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [sentence["reference"] for sentence in report["sentences"]] == list(CAPTIONS["de"])
    assert main(["score", str(model), "--data", str(file), "--tgt", "fr", *flags]) == 1
    assert "must have captions in `fr`, but its languages are de, en" in capsys.readouterr().err
