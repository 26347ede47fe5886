"""`attent train`: the run folder, kinds of input, settings, resuming, and an error message for each failure."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attent import cli
from attent.decoding.translator import Translator
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.session import open_inspector
from attent.models import folder
from attent.storage.errors import FolderError
from attent.storage.manifest import hash_file
from attent.text.tokenizer import Tokenizer
from attent.training import checkpoint
from attent.training.config import TrainConfig, TrainError, UserSettings, read_run
from attent.training.tasks import translation
from tests.training.runs import (
    MAX_EXTRA_TOKENS,
    ROOT,
    checkpoint_facts,
    contents,
    digest,
    events,
    fingerprint,
    reverse,
    sentences,
    write_corpus,
)

SMALL = (
    "--size tiny --set model.width=16 --set model.ffn_width=32 --set model.layers=1 --batch-tokens 128 --vocab 300 "
    "--hold-out 6 --steps 4 --save-every 2 --valid-every 2 --valid-sentences 4 --beam-size 1"
).split()
NAMES = (
    "steps seed batch_tokens accumulate lr warmup label_smoothing save_every valid_every keep_last average patience"
).split()

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module", autouse=True)
def short_translations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attent.decoding.options.MAX_EXTRA_TOKENS", MAX_EXTRA_TOKENS)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.tsv", 60)


def train(data: Path | str, out: Path, *more: str) -> int:
    return cli.main(["train", "--data", str(data), "--src", "en", "--tgt", "xx", "--out", str(out), *SMALL, *more])


@pytest.fixture(scope="module")
def finished_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(corpus, out) == 0
    return out


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")


def error_message(capsys: Capture, call: Callable[[], int], *words: str, code: int = 1) -> str:
    """Return the error message on stderr, which must contain the words."""
    capsys.readouterr()
    assert call() == code
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("attent: error: ")]
    assert len(errors) == 1, printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


@pytest.fixture
def unchanged_run(run: Path) -> Iterator[None]:
    """Check that the test leaves every file of the run unchanged."""
    before = contents(run)
    yield
    assert contents(run) == before


# ---- the run folder --------------------------------------------------------------------------------------------------


def test_checkpoint_has_all_files(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "manifest.json", "tokenizer.model", "tokenizer_format.json", "run.toml",
        "card.md", "log.jsonl", "curves.svg", "state", "alignment.json", "heads.json",
    }  # fmt: skip
    assert "<svg" in (finished_run / "curves.svg").read_text()
    card = (finished_run / "card.md").read_text()
    assert "corpus.tsv" in card
    assert "|version:" in card  # sacreBLEU's signature
    run = read_run(finished_run / "run.toml")
    assert run.train.steps == 4
    assert run.model is not None
    assert run.model.encoder.width == 16
    assert [event["step"] for event in events(finished_run, "validated")] == [2, 4]
    assert events(finished_run, "ended")[-1]["reason"] == "steps"
    assert any("model: tiny" in event["text"] for event in events(finished_run, "note"))


def test_validation_pairs_are_held_out_of_training(finished_run: Path) -> None:
    notes = [event["text"] for event in events(finished_run, "note")]
    assert any("6 of 60 pairs" in text for text in notes)
    assert any(text.startswith("data: 54 pairs for training") for text in notes)


def test_a_finished_run_is_reported_and_unchanged(run: Path, corpus: Path, capsys: Capture) -> None:
    before = contents(run)
    assert train(corpus, run) == 0
    assert "this run is complete at step 4" in capsys.readouterr().err
    after = contents(run)
    assert {name for name in before if before[name] != after[name]} <= {"log.jsonl"}
    assert before.keys() == after.keys()


def test_info_and_average_accept_a_run(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["info", str(run)]) == 0
    assert "width 16" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["average", str(run), "--out", str(tmp_path / "mean"), "--last", "2"]) == 0
    assert "steps 2, 4" in capsys.readouterr().out
    assert cli.main(["info", str(tmp_path / "mean")]) == 0
    error_message(capsys, lambda: cli.main(["average", str(run), "--out", str(run)]), "nothing is overwritten")
    assert cli.main(["average", str(run), str(tmp_path / "mean"), "--out", str(tmp_path / "both")]) == 0


def test_quiet_prints_only_the_end(corpus: Path, tmp_path: Path, capsys: Capture) -> None:
    assert train(corpus, tmp_path / "run", "--quiet") == 0
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("done: 4 steps")
    assert len(printed.err.splitlines()) == 1


# ---- kinds of input --------------------------------------------------------------------------------------------------


def test_a_separate_validation_set(corpus: Path, tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own.tsv", 5, seed=9)
    assert train(corpus, tmp_path / "run", "--valid", str(own)) == 0
    notes = [event["text"] for event in events(tmp_path / "run", "note")]
    assert any(text.startswith("validation ") and "own.tsv" in text and "5 sentences" in text for text in notes)
    assert not any("held out" in text for text in notes)


def test_without_validation_the_last_checkpoint_is_the_model(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(corpus, out, "--set", "data.hold_out=0") == 0
    last = checkpoint.load_checkpoint(out / "state" / "step-00000004").tensors["weights"]
    model = folder.read_folder(out).tensors
    assert all(model[name].equal(tensor) for name, tensor in last.items())


def test_several_target_languages_get_tags(tmp_path: Path) -> None:
    lines = ["en\tde\tfr"] + [f"{text}\t{reverse(text)}\t{text.upper()}" for text in sentences(40)]
    (tmp_path / "text.tsv").write_text("\n".join(lines) + "\n")
    out = tmp_path / "run"
    assert (
        cli.main(
            ["train", "--data", str(tmp_path / "text.tsv"), "--src", "en", "--tgt", "de,fr", "--out", str(out), *SMALL]
        )
        == 0
    )
    assert set(Tokenizer.load(out).source.tags) == {"de", "fr"}
    assert len(events(out, "validated")) == 2


@pytest.mark.parametrize(
    ("more", "files"),
    [
        pytest.param(["--set", "data.tokenizer.kind=char"], {"tokenizer.model"}, marks=pytest.mark.slow),
        (["--set", "data.tokenizer.joint=false"], {"source.model", "target.model"}),
    ],
    ids=["characters", "separate vocabularies"],
)
def test_other_tokenizers(more: list[str], files: set[str], corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(corpus, out, *more) == 0
    assert {path.name for path in out.glob("*.model")} == files
    assert train(corpus, out, *more, "--set", "train.steps=6") == 0  # resumes
    assert max(checkpoint_facts(out)) == 6


class Stdin:
    """A stdin that can be read once, like a pipe."""

    def __init__(self, text: bytes) -> None:
        self.buffer = io.BytesIO(text)


def test_standard_input_is_stored_for_resuming(
    corpus: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "stdin", Stdin(corpus.read_bytes()))
    assert train("-", out) == 0
    assert hash_weights(out) == hash_weights(finished_run)
    assert train("-", out) == 0  # stdin is not read again
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    assert cli.main(["train", "--out", str(out), "--steps", "6"]) == 0
    assert max(checkpoint_facts(out)) == 6


def hash_weights(out: Path) -> str:
    return fingerprint(out)["weights.safetensors"]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_flag_set_and_run_file_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"lr": 0.25, "label_smoothing": 0.25}.get(name, 7)
    file = tmp_path / "run.toml"
    file.write_text(f"[train]\n{name} = {value}\n")
    requests: list[Any] = []

    def capture(_: Path, requested: UserSettings) -> None:
        requests.append(requested)
        raise TrainError("captured")

    monkeypatch.setattr(checkpoint, "check_folder", capture)
    for words in (
        [f"--{name.replace('_', '-')}", str(value)],
        ["--set", f"train.{name}={value}"],
        ["--config", str(file)],
    ):
        assert cli.main(["train", "--data", "x", "--out", "y", *words]) == 1
    assert requests == [{"data": {"train": ["x"]}, "train": {name: value}}] * 3
    assert type(requests[0]["train"][name]) is type(getattr(replace(TrainConfig(), **{name: value}), name))


def test_a_run_file_reproduces_its_run_exactly(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    assert cli.main(["train", "--config", str(finished_run / "run.toml"), "--out", str(out)]) == 0
    assert fingerprint(out) == fingerprint(finished_run)


def test_more_steps_resume_the_run(run: Path, corpus: Path, capsys: Capture) -> None:
    assert train(corpus, run, "--set", "train.steps=6") == 0
    assert "from step 4" in capsys.readouterr().err
    assert max(checkpoint_facts(run)) == 6
    assert cli.main(["train", "--out", str(run), "--steps", "8"]) == 0
    assert max(checkpoint_facts(run)) == 8
    assert read_run(run / "run.toml").train.steps == 8
    assert cli.main(["train", "--out", str(run)]) == 0
    assert "complete at step 8" in capsys.readouterr().err


def test_help_lists_every_flag_and_needs_no_torch() -> None:
    program = "import sys; from attent import cli; cli.main(['train', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    for name in [
        *NAMES,
        "data",
        "src",
        "tgt",
        "out",
        "size",
        "config",
        "set",
        "from",
        "valid",
        "test",
        "freeze",
        "lora",
    ]:
        assert f"--{name.replace('_', '-')}" in done.stdout, name


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_waiting_threads_sleep_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the variables of OpenMP are set already."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    assert cli.main(["train", "--data", str(tmp_path / "nowhere.tsv"), "--out", str(tmp_path / "run")]) != 0
    assert [os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")] == ["passive", "10000"]
    assert os.environ["KMP_BLOCKTIME"] == "200"


def test_missing_data_or_folder_is_refused(tmp_path: Path, capsys: Capture) -> None:
    error_message(capsys, lambda: cli.main(["train", "--out", str(tmp_path / "run")]), "name a corpus with --data")
    error_message(capsys, lambda: cli.main(["train", "--data", "x.tsv"]), "--out", code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected", "code"),
    [
        (["--set", "train.lrr=1"], ["train.lrr", "did you mean `train.lr`"], 1),
        (["--set", "modle.width=8"], ["modle", "model"], 1),
        (["--set", "model.widht=8"], ["--set", "did you mean `model.width`"], 1),
        (["--set", "train.lr=fast"], ["train.lr", "fast"], 1),
        (["--set", "train.label_smoothing=1"], ["label_smoothing", "less than 1"], 1),
        (["--lrr", "1"], ["--lrr", "attent train --help"], 2),
        (["--steps", "many"], ["--steps", "many"], 2),
        (["--size", "huge"], ["--size", "huge"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_invalid_settings_are_refused(
    words: list[str], expected: list[str], code: int, corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    call = ["train", "--data", str(corpus), "--out", str(tmp_path / "run"), *words]
    error_message(capsys, lambda: cli.main(call), *expected, code=code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nlrr = 1\n", ["train.lrr", "`lr`"]),
        ("[model]\nwidht = 8\n", ["did you mean `model.width`"]),
        ("[trian]\nlr = 1\n", ["trian", "train"]),
        ("[train]\nlr = \n", ["line 2"]),
        ('[train]\nsteps = "x"\n', ["train.steps"]),
    ],
)
def test_invalid_run_files_are_refused(text: str, expected: list[str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    error_message(
        capsys, lambda: cli.main(["train", "--config", str(file), "--out", str(tmp_path / "run")]), str(file), *expected
    )
    missing = ["train", "--config", str(tmp_path / "none.toml"), "--out", str(tmp_path / "run")]
    error_message(capsys, lambda: cli.main(missing), "none.toml")
    assert not (tmp_path / "run").exists()


def test_a_corpus_without_usable_pairs_is_refused_and_its_folder_is_reusable(tmp_path: Path, capsys: Capture) -> None:
    same = tmp_path / "same.tsv"
    same.write_text("".join(f"{text}\t{text}\n" for text in sentences(30)))
    out = tmp_path / "run"
    message = error_message(capsys, lambda: train(same, out), "no pairs are left", "same.tsv:", "attent data")
    assert "--set data.filters" in message
    assert not (out / "run.toml").exists()
    (tmp_path / "empty.tsv").write_text("")
    error_message(capsys, lambda: train(tmp_path / "empty.tsv", tmp_path / "run2"), "empty.tsv")
    error_message(capsys, lambda: train(tmp_path / "none.tsv", tmp_path / "run3"), "none.tsv")
    assert train(same, out, "--set", "data.filters.identical=false") == 0


def test_an_output_path_in_or_at_a_file_is_refused(corpus: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    error_message(capsys, lambda: train(corpus, file), str(file), "is a file")
    error_message(capsys, lambda: train(corpus, file / "run"), str(file))
    assert file.read_text() == "precious"


def test_a_read_only_folder_is_refused(
    corpus: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    error_message(capsys, lambda: train(corpus, tmp_path / "run"), str(tmp_path / "run"), "cannot be written to")


def test_a_folder_with_another_run_is_refused(run: Path, corpus: Path, unchanged_run: None, capsys: Capture) -> None:
    message = error_message(
        capsys,
        lambda: train(corpus, run, "--seed", "5", "--set", "model.layers=2", "--set", "train.keep_last=9"),
        str(run), "other settings", "train.seed: (not set) -> 5", "model.encoder.layers: 1 -> 2", "another --out",
    )  # fmt: skip
    assert "keep_last" not in message
    error_message(capsys, lambda: cli.main(["train", "--out", str(run), "--lr", "1"]), "train.lr: (not set) -> 1")


def test_a_folder_with_a_model_or_other_files_is_refused(
    run: Path, corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.rmtree(run / "state")
    before = contents(run)
    error_message(capsys, lambda: train(corpus, run), str(run), "contains a model", f"--from {run}")
    assert contents(run) == before
    other = tmp_path / "photos"
    other.mkdir()
    (other / "sea.jpg").write_bytes(b"sea")
    error_message(capsys, lambda: train(corpus, other), "contains other files (sea.jpg)")
    assert contents(other) == contents(tmp_path / "photos")
    assert [path.name for path in other.iterdir()] == ["sea.jpg"]


def test_a_folder_in_use_is_refused(run: Path, corpus: Path, unchanged_run: None, capsys: Capture) -> None:
    with checkpoint.lock_folder(run):
        error_message(capsys, lambda: train(corpus, run), "in use by another training process")


def test_a_changed_corpus_is_refused(run: Path, tmp_path: Path, capsys: Capture, corpus: Path) -> None:
    copy = tmp_path / "mine.tsv"
    copy.write_bytes(corpus.read_bytes())
    out = tmp_path / "own"
    assert train(copy, out) == 0
    copy.write_text(copy.read_text().replace("river", "brook"))
    before = checkpoint_facts(out), fingerprint(out)
    error_message(capsys, lambda: train(copy, out, "--set", "train.steps=6"), "the data must match its checkpoints")
    assert (checkpoint_facts(out), fingerprint(out)) == before


def test_a_replaced_tokenizer_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    other = write_corpus(tmp_path / "other.tsv", 60, seed=11)
    other.write_text(other.read_text().replace("a", "o"))
    assert train(other, tmp_path / "other") == 0
    shutil.copy(tmp_path / "other" / "tokenizer.model", run / "tokenizer.model")
    before = contents(run)
    error_message(capsys, lambda: cli.main(["train", "--out", str(run), "--steps", "6"]), "tokenizer")
    after = contents(run)
    assert {name for name in before if before[name] != after[name]} <= {
        "run.toml",
        "manifest.json",
        "state/requested.json",
    }


def test_a_pretrained_model_with_another_tokenizer_is_refused(
    run: Path, corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert train(corpus, tmp_path / "large", "--set", "data.tokenizer.vocab=320") == 0
    shutil.copy(tmp_path / "large" / "tokenizer.model", run / "tokenizer.model")
    manifest = json.loads((run / "manifest.json").read_text())
    entry = hash_file(run / "tokenizer.model")
    manifest["files"]["tokenizer.model"] = {"sha256": entry.sha256, "bytes": entry.bytes}
    (run / "manifest.json").write_text(json.dumps(manifest, indent=2))
    call = ["train", "--data", str(corpus), "--from", str(run), "--out", str(tmp_path / "further"), "--steps", "2"]
    error_message(capsys, lambda: cli.main(call), str(run), "tokenizer")
    assert not (tmp_path / "further" / "run.toml").exists()


def use_model(out: Path) -> tuple[list[str], object]:
    """Return translations with their alignments, and what the look page shows; a warning is an error."""

    def refuse(message: str) -> None:
        raise FolderError(message)

    lines = sentences(2)
    translator = Translator.load(out, engine="torch")
    aligned = translator.translate([*lines, " ".join(lines * 4)], alignment=True)
    shown = open_inspector(out, warn=refuse).inspect(InspectionRequest(text=lines[0]))
    return [repr(translation) for translation in aligned], shown


@pytest.mark.slow
def test_every_file_that_influences_a_result_is_verified(run: Path) -> None:
    expected = use_model(run)
    chosen, harmless = random.Random(0), {"card.md", "curves.svg", "log.jsonl"}
    paths = [path for path in run.iterdir() if path.is_file()]
    assert {"alignment.json", "heads.json", "run.toml", "tokenizer.model"} <= {path.name for path in paths}
    for path in paths:
        whole = path.read_bytes()
        for offset in (0, chosen.randrange(len(whole))):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << chosen.randrange(8)]) + whole[offset + 1 :])
            if path.name in harmless:
                assert use_model(run) == expected, path.name
            else:
                with pytest.raises(FolderError, match=path.name):
                    use_model(run)
        path.unlink()
        (run.parent / path.name).write_bytes(whole)
        path.symlink_to(run.parent / path.name)
        if path.name not in harmless:
            with pytest.raises(FolderError, match=f"{path.name}: is a link out of the folder"):
                use_model(run)
        path.unlink()
        path.write_bytes(whole)
    assert use_model(run) == expected


def test_a_model_is_fine_tuned(finished_run: Path, corpus: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "further"
    more = "--steps 2 --save-every 1 --valid-every 1 --hold-out 6 --beam-size 1".split()
    call = [
        "train",
        "--data",
        str(corpus),
        "--src",
        "en",
        "--tgt",
        "xx",
        "--from",
        str(finished_run),
        "--out",
        str(out),
        *more,
    ]
    assert cli.main(call) == 0
    assert read_run(out / "run.toml").model == read_run(finished_run / "run.toml").model
    assert (out / "tokenizer.model").read_bytes() == (finished_run / "tokenizer.model").read_bytes()
    first, start = (
        events(out, "validated")[0],
        [event for event in events(finished_run, "validated") if event["best"]][-1],
    )
    assert abs(first["loss"] - start["loss"]) < 0.2
    assert any(event["text"].startswith("model: 1+1 layers") for event in events(out, "note"))
    error_message(
        capsys,
        lambda: cli.main(
            ["train", "--data", str(corpus), "--from", str(tmp_path / "no"), "--out", str(tmp_path / "x")]
        ),
        str(tmp_path / "no"),
    )


def test_a_damaged_older_checkpoint_only_skips_averaging(run: Path, corpus: Path, capsys: Capture) -> None:
    path = run / "state" / "step-00000002" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert train(corpus, run, "--set", "train.steps=6") == 0
    printed = capsys.readouterr().err
    assert f"warning: {path}" in printed
    assert "averaging is skipped" in printed


# ---- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3, 4],
    ids=["validation", "last validation", "the mean", "the scores"],
)
def test_a_run_stopped_during_translation_resumes_exactly(
    at: int, finished_run: Path, corpus: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = 0, translation.translate_texts

    def translate(*arguments: Any, **options: Any) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(translation, "translate_texts", translate)
    out = tmp_path / "run"
    assert train(corpus, out) == 143
    assert f"resume with: attent train --out {out}" in capsys.readouterr().err
    assert train(corpus, out) == 0
    assert fingerprint(out) == fingerprint(finished_run)
    assert (out / "card.md").exists()


# ---- a full disk -----------------------------------------------------------------------------------------------------


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "function",
    [
        "write_safetensors",
        pytest.param("write_synced", marks=pytest.mark.slow),
        pytest.param("write_manifest", marks=pytest.mark.slow),
        "fsync_path",
    ],
)
def test_a_full_disk_while_saving_is_reported(
    function: str, run: Path, corpus: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, model = checkpoint_facts(run), digest(run / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(folder, function, full_disk)
        error_message(
            capsys,
            lambda: train(corpus, run, "--set", "train.steps=6"),
            str(run),
            "the disk is full",
            "free some space",
        )
    after = checkpoint_facts(run)  # a checkpoint precedes its model
    assert max(before) in after
    assert all(after[step] == facts for step, facts in before.items() if step in after)
    assert digest(run / "model.safetensors") == model
    assert train(corpus, run, "--set", "train.steps=6") == 0
    assert max(checkpoint_facts(run)) == 6


def test_a_full_disk_at_the_start_is_reported(
    corpus: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        error_message(capsys, lambda: train(corpus, tmp_path / "run"), "the disk is full")
    assert train(corpus, tmp_path / "run") == 0
