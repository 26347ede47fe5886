"""Image classification: batches, augmentation, the loss, and a run from files to a classifier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attent import load
from attent.cli import main
from attent.data.images import ImageDataConfig, ImageDataset, ImageShape
from attent.models import VisionConfig, VisionTransformer, build
from attent.nn import LearnedConfig, StackConfig
from attent.training.config import DataConfig, RunConfig, TrainError
from attent.training.events import Event, Note, StopRequested
from attent.training.tasks.base import RunContext
from attent.training.tasks.image_classification import (
    ImageClassificationTask,
    ImageLoader,
    ImageObjective,
    build_vision_config,
    check_image_shape,
    choose_patch,
    describe_augmentation,
    erase_random,
    find_all_splits,
    flip_random,
    hold_out_valid_images,
    measure_accuracy,
    shift_random,
)
from tests.data.image_sets import make_bar_images, write_class_folders, write_idx

PLAIN = ImageDataConfig(flip=0, shift=0, erase=0)
SMALL = ["--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.ffn_width=32"]


def bars(count: int = 60, side: int = 8, seed: int = 0) -> ImageDataset:
    pixels, labels = make_bar_images(count, side, seed)
    return ImageDataset("bars", pixels[:, None], labels.astype("<i4"), ("lying", "standing", "none"))


def small(images: ImageDataset) -> VisionTransformer:
    torch.manual_seed(0)
    config = build_vision_config("tiny", ImageShape(images.pixels.shape[-1], 1), 4, images)
    return build(replace(config, stack=replace(config.stack, layers=1, width=32, heads=2, ffn_width=64)))


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_image_at_most_once() -> None:
    batches = ImageLoader(bars(), PLAIN, batch_size=16, row_length=4, seed=3)
    assert batches.num_batches(0) == 3
    seen = np.concatenate([batches.get_batch(1, step).example_ids for step in range(3)])
    assert len(set(seen.tolist())) == 48
    assert {len(batches.get_batch(0, step)) for step in range(3)} == {16}
    assert not np.array_equal(seen[:16], batches.get_batch(0, 0).example_ids)


def test_a_batch_depends_on_seed_epoch_and_step_alone() -> None:
    config = ImageDataConfig(erase=1.0)
    first, again, other = (ImageLoader(bars(), config, batch_size=16, row_length=4, seed=seed) for seed in (1, 1, 2))
    list(zip(range(5), first.iter_batches(workers=2), strict=False))  # iterating changes nothing
    for name in ("pixels", "labels"):
        tensor, same, other_step, other_seed = (
            getattr(batch, name)
            for batch in (first.get_batch(2, 1), again.get_batch(2, 1), first.get_batch(2, 2), other.get_batch(2, 1))
        )
        assert torch.equal(tensor, same)
        assert not torch.equal(tensor, other_step)
        assert not torch.equal(tensor, other_seed)


def test_validation_batches_are_all_images_unchanged() -> None:
    images = bars()
    batches = ImageLoader(images, None, batch_size=16, row_length=4)
    pixels = torch.cat([batches.get_batch(0, step).pixels for step in range(batches.num_batches(0))])
    assert np.array_equal(pixels.numpy(), images.pixels)


def test_a_slice_of_a_batch_has_its_rows() -> None:
    batch = ImageLoader(bars(), ImageDataConfig(), batch_size=10, row_length=4).get_batch(0, 0)
    part = batch.slice_rows(3, 7)
    assert (part.num_targets, part.num_tokens, part.num_padded_tokens, len(part)) == (4, 16, 16, 4)
    assert torch.equal(part.pixels, batch.pixels[3:7])
    assert torch.equal(part.labels, batch.labels[3:7])
    assert np.array_equal(part.example_ids, batch.example_ids[3:7])


# ---- augmentation ----------------------------------------------------------------------------------------------------


def test_images_are_flipped_at_the_rate() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (400, 1, 4, 4), np.uint8)
    result = flip_random(pixels, 0.25, np.random.default_rng(1))
    flipped = [np.array_equal(new, old[..., ::-1]) for new, old in zip(result, pixels, strict=True)]
    same = [np.array_equal(new, old) for new, old in zip(result, pixels, strict=True)]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert 70 < sum(flipped) < 130


def test_images_are_shifted_by_up_to_the_maximum_each_way() -> None:
    pixels = np.zeros((300, 1, 9, 9), np.uint8)
    pixels[:, :, 4, 4] = 200
    positions = {tuple(np.argwhere(image[0])[0]) for image in shift_random(pixels, 2, np.random.default_rng(0))}
    assert positions == {(row, column) for row in range(2, 7) for column in range(2, 7)}


def test_images_are_erased_at_the_rate() -> None:
    pixels = np.zeros((400, 1, 16, 16), np.uint8)
    erase_random(pixels, 0.25, np.random.default_rng(0))
    share = (pixels > 0).mean((1, 2, 3))
    assert 70 < (share > 0).sum() < 130
    assert share.max() < 0.3


def test_the_description_names_the_augmentations_that_are_on() -> None:
    config = ImageDataConfig(shift=0.1, flip=0.0, erase=0.25)
    assert describe_augmentation(config, 28) == "augmentation: shift by up to 3 pixels, random erasing of 25%"


def test_the_loss_is_smoothed_and_the_reported_one_is_not() -> None:
    images = bars()
    model = small(images)
    torch.nn.init.normal_(model.classifier.weight)  # type: ignore[union-attr]
    batch = ImageLoader(images, PLAIN, batch_size=12, row_length=4).get_batch(0, 0)
    loss, plain = ImageObjective(model, smoothing=0.1)(batch)
    log_probs = model(model.normalize(batch.pixels)).log_softmax(-1)
    target = torch.nn.functional.one_hot(batch.labels, 3)
    assert torch.allclose(loss, -((target * 0.9 + 0.1 / 3) * log_probs).sum(), atol=1e-4)
    assert torch.allclose(plain, -(target * log_probs).sum(), atol=1e-4)


def test_the_loss_is_the_sum_over_slices() -> None:
    images = bars()
    objective = ImageObjective(small(images))
    batch = ImageLoader(images, PLAIN, batch_size=12, row_length=4).get_batch(0, 0)
    whole, entropy = objective(batch)
    parts = [objective(batch.slice_rows(start, start + 4))[0] for start in (0, 4, 8)]
    assert torch.allclose(whole, torch.stack(parts).sum(), atol=1e-4)
    assert torch.allclose(
        entropy, torch.tensor(12 * np.log(3), dtype=torch.float32)
    )  # an untrained classifier is uniform
    assert not entropy.requires_grad


# ---- model and accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("image", "patch"), [(28, 4), (32, 4), (64, 8), (96, 8), (128, 16), (224, 16), (29, 29)])
def test_the_patch_size_follows_the_image_size(image: int, patch: int) -> None:
    assert choose_patch(image) == patch


def test_accuracy_is_measured_in_eval_mode_and_the_mode_restored() -> None:
    images = bars()
    model = small(images)
    model.encoder.dropout.p = 0.5
    torch.nn.init.normal_(model.classifier.weight)  # type: ignore[union-attr]
    assert {measure_accuracy(model.train(), images) for _ in range(5)} == {measure_accuracy(model.eval(), images)}
    assert not model.training
    measure_accuracy(model.train(), images)
    assert model.training


def test_the_direction_of_bars_is_learned() -> None:
    images = bars(240, seed=1)
    model = small(images)
    objective = ImageObjective(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = ImageLoader(images, ImageDataConfig(erase=0), batch_size=48, row_length=4, seed=1)
    for (_, batch), _ in zip(batches.iter_batches(workers=0), range(120), strict=False):
        (objective(batch)[0] / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert measure_accuracy(model, bars(90, seed=2)) > 88
    assert model.training


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(data: Path, out: Path, *more: str) -> int:
    command = ["train", "--task", "images", "--data", str(data), "--out", str(out), "--quiet", "--device", "cpu"]
    return main([*command, "--precision", "float32", *more])


def test_a_resumed_run_gives_the_same_weights(tmp_path: Path) -> None:
    data = write_idx(tmp_path / "set")
    settings = ["--valid-every", "4", "--save-every", "4", "--batch-tokens", "64", "--warmup", "2", *SMALL]
    assert train(data, tmp_path / "whole", "--steps", "8", *settings) == 0
    assert train(data, tmp_path / "halves", "--steps", "4", "--schedule", "inverse_sqrt", *settings) == 0
    assert train(data, tmp_path / "halves", "--steps", "8", "--schedule", "inverse_sqrt", *settings) == 0
    assert train(data, tmp_path / "straight", "--steps", "8", "--schedule", "inverse_sqrt", *settings) == 0
    halves, straight = load(tmp_path / "halves"), load(tmp_path / "straight")
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, halves.state_dict()[name])
    scores = json.loads((tmp_path / "whole" / "state" / "finished.json").read_text())["scores"]
    assert [(score["split"], score["num_examples"]) for score in scores] == [("validation", 6), ("test", 60)]
    metrics = scores[1]["metrics"]
    assert 0 <= metrics["accuracy_low"] <= metrics["accuracy"] <= metrics["accuracy_high"] <= 100
    assert "attent classify" in (tmp_path / "whole" / "card.md").read_text()


def test_a_model_is_fine_tuned_on_other_labels(tmp_path: Path) -> None:
    settings = ["--steps", "2", "--batch-tokens", "16"]
    assert train(write_idx(tmp_path / "set", test=False), tmp_path / "first", *settings, *SMALL) == 0
    other = write_class_folders(tmp_path / "other", count=4)
    assert train(other, tmp_path / "second", *settings, "--from", str(tmp_path / "first")) == 0
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert isinstance(second, VisionTransformer)
    assert second.config.labels == ("cat", "dog")
    assert first.config.stack == second.config.stack  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--hold-out", "99"], "`data.hold_out` must be less than the 60 images there are"),
        (["--set", "model.patch_size=16"], "`patch_size` must divide 8"),
        (["--valid", "/nowhere"], "/nowhere: must be a folder of images, but does not exist"),
        (["--set", "data.images.flip=2"], "`flip` must be from 0 to 1, but is 2"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    assert train(write_idx(tmp_path / "set", test=False), tmp_path / "out", *flags) == 1
    assert expected in capsys.readouterr().err


def test_a_single_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    write_class_folders(tmp_path / "set", ("cat",))
    assert train(tmp_path / "set", tmp_path / "out") == 1
    assert "must have at least two classes" in capsys.readouterr().err


def test_the_images_have_the_size_of_the_model_that_a_run_resumes_or_starts_from(tmp_path: Path) -> None:
    """`write_idx` makes images of 8 x 8 pixels; the model of this run reads 4 x 4."""
    data = str(write_idx(tmp_path / "set", test=False))
    context = RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=lambda event: None)
    stack = StackConfig(layers=1, width=8, heads=2, ffn_width=8)
    vision = VisionConfig(image_size=4, patch_size=2, channels=1, stack=stack, labels=("a", "b", "c"))
    run = RunConfig(task="images", model=vision, data=DataConfig(train=(data,)))
    task = ImageClassificationTask(run, None, context)
    assert (task.shape.size, task.shape.channels) == (4, 1)
    assert task.train_data.pixels.shape[1:] == (1, 4, 4)
    assert ImageClassificationTask(replace(run, model=None), None, context).shape.size == 8
    for size, channels in ((8, None), (None, 3)):
        images = ImageDataConfig(image_size=size, channels=channels)
        with pytest.raises(TrainError, match=r"must match the model .*: image_size 4, channels 1, but is"):
            ImageClassificationTask(replace(run, data=replace(run.data, images=images)), None, context)
    images = ImageDataConfig(image_size=4, channels=1)
    assert ImageClassificationTask(replace(run, data=replace(run.data, images=images)), None, context).shape.size == 4


def test_requested_settings_of_the_model_are_applied_to_the_preset(tmp_path: Path) -> None:
    data = str(write_idx(tmp_path / "set", test=False))
    context = RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=lambda event: None)
    task = ImageClassificationTask(RunConfig(task="images", data=DataConfig(train=(data,))), None, context)
    requested = {"task": "images", "model": {"patch_size": 2, "class_token": True, "stack": {"layers": 3}}}
    size, vision, reason = task.choose_model(RunConfig(task="images", size="small"), requested)
    assert (size, reason, vision.stack.width) == ("small", "as requested", 256)
    assert (vision.patch_size, vision.class_token, vision.stack.layers, vision.image_size) == (2, True, 3, 8)
    assert vision.stack.positions == LearnedConfig(max_length=17)
    size, vision, reason = task.choose_model(RunConfig(task="images"), {"task": "images"})
    assert (size, reason) == ("tiny", f"for {len(task.train_data):,} images on a CPU")
    assert (vision.patch_size, vision.class_token, vision.pooling) == (4, False, "mean")
    for name, value in (("image_size", 16), ("channels", 3)):
        with pytest.raises(TrainError, match="follow the data"):
            task.choose_model(RunConfig(task="images"), {"task": "images", "model": {name: value}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(), "images must be in one folder: --data FOLDER, but 0 are named"),
        (DataConfig(train=("a", "b")), "images must be in one folder: --data FOLDER, but 2 are named"),
        (DataConfig(train=("a",), valid=("b", "c")), "validation images must be in one folder, but 2 are named"),
    ],
)
def test_images_are_in_one_folder(data: DataConfig, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        find_all_splits(data)


def test_a_folder_without_training_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.data.images.find_splits", lambda folder: {"test": None})
    with pytest.raises(TrainError, match="must have training images, but has only its test part"):
        find_all_splits(DataConfig(train=("a",)))


def test_the_size_of_images_is_that_of_the_model_to_fine_tune() -> None:
    shape, config = ImageShape(32, 3), small(bars()).config
    check_image_shape(ImageDataConfig(), shape, config)
    check_image_shape(ImageDataConfig(image_size=32, channels=3), shape, config)
    check_image_shape(ImageDataConfig(image_size=64), shape, None)
    message = "must match the model that is fine-tuned: image_size 32, channels 3, but is"
    for changed, given in ((ImageDataConfig(image_size=64), "64 and 3"), (ImageDataConfig(channels=1), "32 and 1")):
        with pytest.raises(TrainError, match=f"{message} {given}; leave it out"):
            check_image_shape(changed, shape, config)


def test_a_tenth_or_one_image_of_each_class_is_held_out(tmp_path: Path) -> None:
    events: list[Event] = []
    context = RunContext(data_dir=tmp_path, device=torch.device("cpu"), report=events.append)
    for count, held_out in ((60, 6), (24, 3)):
        rest, valid = hold_out_valid_images(bars(count), None, 1, context)
        assert (len(rest), len(valid)) == (count - held_out, held_out)
    note = "held out 6 of 60 images for validation (name your own with --valid)"
    assert events[0] == Note(text=note)
    one_each = ImageDataset("few", bars(3).pixels, np.arange(3, dtype="<i4"), ("a", "b", "c"))
    with pytest.raises(TrainError, match="few: has too few images of each class to hold some out"):
        hold_out_valid_images(one_each, 1, 1, context)


def test_a_batch_beyond_the_epoch_is_refused() -> None:
    batches = ImageLoader(bars(), PLAIN, batch_size=16, row_length=4)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"epoch 2 has 3 batches, so there is no batch {index}"):
            batches.get_batch(2, index)


def test_a_stop_during_scoring_is_raised() -> None:
    with pytest.raises(StopRequested):
        measure_accuracy(small(bars()), bars(), lambda: True)


def test_rdrop_is_refused_for_images() -> None:
    with pytest.raises(ValueError, match=r"`rdrop` must be 0 except for translation, but is 0\.5"):
        ImageObjective(small(bars()), rdrop=0.5)
