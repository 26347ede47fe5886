"""Captioning: batches, the loss, and a run from files to a caption model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attent import Captioner, load
from attent.cli import main
from attent.data.captions import CaptionDataset, prepare_captions, read_captions
from attent.data.images import ImageDataConfig, ImageShape
from attent.data.text_batches import IGNORE_INDEX
from attent.models import Seq2Seq, Seq2SeqConfig, VisionTransformer, build
from attent.nn import ImageConfig, LearnedConfig, SinusoidalConfig
from attent.nn.frontends import normalize_pixels
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.config import TrainError
from attent.training.run import train
from attent.training.step_graphs import get_signature
from attent.training.tasks.base import RunContext
from attent.training.tasks.captioning import CaptionLoader, CaptionObjective, build_caption_config, hold_out_images
from tests.data.image_sets import CAPTIONS, write_captions, write_class_folders

PLAIN = ImageDataConfig(flip=0, shift=0, erase=0)
SMALL = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.ffn_width": 32}


def prepare(tmp_path: Path, languages: tuple[str, ...] = ()) -> tuple[CaptionDataset, Tokenizer]:
    file = write_captions(tmp_path / "data", 12, languages=languages)
    captions = prepare_captions(read_captions([file]), ImageShape(8, 1), tmp_path / "store")
    return captions, train_monolingual_tokenizer(captions.texts, TokenizerConfig(), tags=languages)


def make_loader(captions: CaptionDataset, tokenizer: Tokenizer, config: ImageDataConfig | None) -> CaptionLoader:
    return CaptionLoader(captions, tokenizer, config, start_id=1, max_tokens=32, batch_size=8, num_patches=4, seed=3)


def make_model(tokenizer: Tokenizer) -> Seq2Seq:
    torch.manual_seed(0)
    image = ImageConfig(image_size=8, patch_size=4, channels=1, class_token=False)
    config = fit_to_tokenizer(build_caption_config("tiny", tokenizer.target.size, image), tokenizer)
    encoder, decoder = (replace(stack, layers=1, width=16, heads=2, ffn_width=32) for stack in config.stacks)
    return build(replace(config, encoder=encoder, decoder=decoder))


def make_context(folder: Path) -> RunContext:
    return RunContext(data_dir=folder, device=torch.device("cpu"), report=lambda event: None)


# ---- batches and the loss --------------------------------------------------------------------------------------------


def test_a_row_is_an_image_with_its_caption(tmp_path: Path) -> None:
    captions, tokenizer = prepare(tmp_path)
    batch = make_loader(captions, tokenizer, PLAIN).get_batch(2, 1)
    for row, index in enumerate(batch.example_ids):
        pixels, _ = captions.images.take(captions.image_ids[[index]])
        assert np.array_equal(batch.pixels[row], pixels[0])
        labels = batch.labels[row][batch.labels[row] != IGNORE_INDEX].tolist()
        assert labels == tokenizer.encode_target([captions.texts[index]])[0]
        assert batch.inputs[row, : len(labels)].tolist() == [1, *labels[:-1]]
    assert batch.num_targets == int((batch.labels >= 0).sum())
    part = batch.slice_rows(2, 5)
    assert torch.equal(part.pixels, batch.pixels[2:5])
    assert part.num_targets == int((batch.labels[2:5] >= 0).sum())
    assert (len(part), part.example_ids.tolist()) == (3, batch.example_ids[2:5].tolist())


def test_a_language_tag_is_read_but_not_predicted(tmp_path: Path) -> None:
    captions, tokenizer = prepare(tmp_path, ("de", "en"))
    batch = make_loader(captions, tokenizer, None).get_batch(0, 0)
    tags = [tokenizer.target.get_tag_id(str(captions.languages[i])) for i in batch.example_ids]
    assert batch.inputs[:, 1].tolist() == tags
    assert len(set(tags)) == 2
    assert (batch.labels[:, 0] == IGNORE_INDEX).all()
    text = tokenizer.target.decode([token for token in batch.labels[0].tolist() if token >= 0])
    assert text == captions.texts[0]


def test_a_batch_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    captions, tokenizer = prepare(tmp_path)
    first, again = (make_loader(captions, tokenizer, ImageDataConfig(flip=0.5)) for _ in range(2))
    list(zip(range(5), first.iter_batches(workers=2), strict=False))
    for name in ("pixels", "inputs", "labels"):
        assert torch.equal(getattr(first.get_batch(1, 2), name), getattr(again.get_batch(1, 2), name))
    assert not torch.equal(first.get_batch(1, 2).pixels, first.get_batch(2, 2).pixels)


@torch.no_grad()
def test_batches_of_the_same_shapes_have_one_signature(tmp_path: Path) -> None:
    loader = make_loader(*prepare(tmp_path), None)
    first, second = (loader.get_batch(0, index) for index in (0, 1))
    assert len({get_signature(first), get_signature(second)}) == 1
    assert get_signature(first) != get_signature(first.slice_rows(0, 1))


def test_the_loss_is_that_of_the_logits(tmp_path: Path) -> None:
    captions, tokenizer = prepare(tmp_path, ("de", "en"))
    model = make_model(tokenizer).eval()
    batch = make_loader(captions, tokenizer, None).get_batch(0, 1)
    frontend = model.config.frontend
    assert isinstance(frontend, ImageConfig)
    pixels = normalize_pixels(batch.pixels, frontend, model.target_embedding.weight)
    total = 0.0
    for row in range(len(batch)):  # one at a time, without padding
        length = int((batch.labels[row] >= 0).sum()) + 1
        logits = model(pixels[row : row + 1], batch.inputs[row : row + 1, :length])[0, 1:]
        labels = batch.labels[row, 1:length]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    loss, plain = CaptionObjective(model).eval()(batch)
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert float(plain) == pytest.approx(total, rel=1e-5)
    parts = [CaptionObjective(model).eval()(batch.slice_rows(a, b))[1] for a, b in ((0, 3), (3, len(batch)))]
    assert float(sum(parts)) == pytest.approx(total, rel=1e-5)


def test_images_are_held_out_with_all_of_their_captions(tmp_path: Path) -> None:
    captions, _ = prepare(tmp_path, ("de", "en"))
    rest, held_out = hold_out_images(captions, 3, 1, make_context(tmp_path))
    assert (len(held_out.paths), len(held_out), len(rest.paths), len(rest)) == (3, 6, 9, 18)
    assert not set(rest.paths) & set(held_out.paths)
    other = hold_out_images(captions, 3, 2, make_context(tmp_path))[1]
    assert other.paths != held_out.paths


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_learns_captions_in_two_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_captions(tmp_path / "data", 60, languages=("en", "de"))
    write_captions(tmp_path / "other", 30, languages=("en", "de"), seed=1)
    (tmp_path / "other" / "train.tsv").rename(tmp_path / "other" / "test.tsv")
    out, sizes = tmp_path / "out", {"model.width": 32, "model.layers": 2, "model.heads": 2, "model.ffn_width": 64}
    result = train(
        str(file),
        out=out,
        task="caption",
        steps=250,
        batch_tokens=128,
        lr=3e-3,
        valid_every=125,
        shift=0.0,
        seed=1,
        device="cpu",
        threads=1,
        precision="float32",
        settings=sizes,
        test=(str(tmp_path / "other" / "test.tsv"),),
    )
    scores = {str(scores["name"]): scores["metrics"] for scores in result.scores}
    assert {"test.tsv", "test.tsv (de)", "test.tsv (en)"} <= scores.keys()
    assert scores["test.tsv (de)"]["exact"] > 80
    assert scores["test.tsv"].keys() >= {"cider", "bleu", "chrf", "exact"}
    captioner = Captioner.load(out, device="cpu")
    assert captioner.languages == ("de", "en")
    images = [tmp_path / "other" / f"{number}.png" for number in range(6)]
    for language in ("de", "en"):
        texts = [hypothesis.text for hypothesis in captioner.caption(images, to=language)]
        assert set(texts) <= set(CAPTIONS[language])
    capsys.readouterr()
    assert main(["caption", str(out), str(images[0]), "--to", "en"]) == 0
    text = captioner.caption(images[:1], to="en")[0].text
    assert capsys.readouterr().out == f"{images[0]}\t{text}\n"
    card = (out / "card.md").read_text()
    assert "all captions of images drawn at random" in card
    assert "attent caption" in card


def run_captions(file: Path, out: Path, *flags: str) -> int:
    sizes = SMALL | {"model.frontend.patch_size": 2}
    small = [part for name, value in sizes.items() for part in ("--set", f"{name}={value}")]
    fixed = ["--batch-tokens", "32", "--device", "cpu", "--threads", "1", "--precision", "float32"]
    return main(
        ["train", "--task", "caption", "--data", str(file), "--out", str(out), *fixed, *small, "--erase", "0.5", *flags]
    )


def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_captions(tmp_path / "data", 12, languages=("en", "de"))
    flags = ["--save-every", "2", "--valid-every", "2", "--valid-sentences", "2", "--schedule", "inverse_sqrt"]
    assert run_captions(file, tmp_path / "whole", "--steps", "4", *flags) == 0
    assert run_captions(file, tmp_path / "parts", "--steps", "2", *flags) == 0
    assert run_captions(file, tmp_path / "parts", "--steps", "4", *flags) == 0
    config = load(tmp_path / "whole").config
    assert isinstance(config, Seq2SeqConfig)
    assert isinstance(config.frontend, ImageConfig)
    assert config.frontend.num_patches == 16
    assert [stack.positions for stack in config.stacks] == [SinusoidalConfig()] * 2
    assert "(2 captions of 1 image, beam 4)" in capsys.readouterr().err
    states = [load(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    summaries = [json.loads((tmp_path / name / "state" / "finished.json").read_text()) for name in ("whole", "parts")]
    assert summaries[0]["scores"] == summaries[1]["scores"]


def test_a_run_starts_from_an_image_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = write_class_folders(tmp_path / "classes", side=8)
    sizes = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    flags = ["--device", "cpu", "--threads", "1", "--steps", "1", "--hold-out", "0"]
    vit = tmp_path / "vit"
    assert main(["train", "--task", "images", "--data", str(folders), "--out", str(vit), *flags, *sizes]) == 0
    file = write_captions(tmp_path / "data", 12)
    out, start = tmp_path / "out", ["train", "--task", "caption", "--data", str(file), *flags]
    base = [*start, "--from", str(vit)]
    assert main([*base, "--out", str(out), "--lr", "1e-9"]) == 0
    encoder, captioner = load(vit), load(out)
    assert isinstance(encoder, VisionTransformer)
    assert isinstance(captioner, Seq2Seq)
    assert isinstance(captioner.config.stacks[0].positions, LearnedConfig)
    for name, tensor in encoder.encoder.state_dict().items():
        assert torch.allclose(tensor, captioner.encoder.state_dict()[name], atol=1e-5)
    weight = captioner.source_embedding.state_dict()["patch_embedding.weight"]
    assert torch.allclose(encoder.patch_embedding.weight, weight, atol=1e-5)
    again = tmp_path / "again"
    assert main([*start, "--from", str(out), "--out", str(again)]) == 0  # from a caption model
    assert isinstance(load(again), Seq2Seq)
    capsys.readouterr()
    pairs = ["train", "--data", "phrases", "--from", str(out), "--steps", "1", "--device", "cpu"]
    assert main([*pairs, "--out", str(tmp_path / "y")]) == 1
    assert "for --task translate, but is a caption model" in capsys.readouterr().err
    assert main([*base, "--out", str(tmp_path / "x"), "--lora", "4"]) == 1
    assert "has no decoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": ["model.frontend.patch_size=3"]}, "patch_size` must divide 8"),
        ({"hold_out": 12}, "must be less than the 12 images"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    file = write_captions(tmp_path / "data", 12)
    with pytest.raises((TrainError, ValueError), match=message):
        train(str(file), out=tmp_path / "out", task="caption", steps=1, device="cpu", **options)  # type: ignore[arg-type]


def test_a_test_set_in_another_language_is_refused(tmp_path: Path) -> None:
    file = write_captions(tmp_path / "data", 12, languages=("en", "de"))
    (tmp_path / "data" / "valid.tsv").write_text("image\ttext\tlanguage\n0.png\tun trait\tfr\n")
    with pytest.raises(TrainError, match="must be among de, en, but `fr` is another"):
        train(str(file), out=tmp_path / "out", task="caption", steps=1, device="cpu")


def test_a_translator_is_not_a_caption_model(tmp_path: Path) -> None:
    from attent.models import presets
    from attent.models.weights import save_model

    tokenizer = train_monolingual_tokenizer(["a text"], TokenizerConfig())
    model = build(replace(presets.tiny(tokenizer.target.size), start_id=1, end_id=2))
    save_model(model, tmp_path / "translator", dict(tokenizer.files))
    file = write_captions(tmp_path / "data", 12)
    with pytest.raises(TrainError, match="must be a caption model or an image encoder"):
        train(
            str(file),
            out=tmp_path / "out",
            task="caption",
            init_from=str(tmp_path / "translator"),
            steps=1,
            device="cpu",
        )
