"""`attent.train` as a notebook uses it: help, data in memory, callbacks, the result, and a real kernel."""

from __future__ import annotations

import doctest
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas
import pytest

import attent
from attent.data.corpus import open_corpora
from attent.data.in_memory import InMemoryCorpus, is_in_memory
from attent.data.pairs import CorpusError, LanguagePair, Pair
from attent.storage.errors import AttentError
from attent.training.events import Ended, Event, Note, Progress, read_events
from attent.training.progress import NotebookDisplay, TrainingDisplay, open_display
from attent.training.result import TrainResult
from attent.training.run_options import (
    OPTION_PATHS,
    SETTING_TABLES,
    PythonOptions,
    RunOptions,
    TrainError,
    TrainOptions,
)
from tests.training.runs import ROOT, reverse, sentences
from tests.training.test_progress import STARTED, make_progress, make_validation

PAIRS = [(sentence, reverse(sentence)) for sentence in sentences(60)]
TINY: dict[str, Any] = {
    "src": "en", "tgt": "xx", "size": "tiny", "batch_tokens": 256, "hold_out": 6, "steps": 3, "valid_sentences": 4,
    "beam_size": 1, "threads": 1, "settings": {"model.width": 32, "model.ffn_width": 64, "model.layers": 1},
}  # fmt: skip


def train_tiny(out: Path, data: Any = PAIRS, **options: Any) -> TrainResult:
    return attent.train(data, out=out, **{"progress": False, **TINY, **options})


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_the_typed_arguments_are_the_settings_of_a_run() -> None:
    assert set(SETTING_TABLES.values()) < set(TrainOptions.__mro__)
    own = {option.name for table in (RunOptions, PythonOptions) for option in fields(table)}
    in_tables = {option.name for table in SETTING_TABLES.values() for option in fields(table)}
    assert {option.name for option in fields(TrainOptions)} == own | in_tables
    assert set(OPTION_PATHS) < own


def test_help_has_a_line_for_each_argument() -> None:
    parameters = inspect.signature(attent.train).parameters
    lines = [line.strip() for line in (attent.train.__doc__ or "").splitlines() if line.startswith("    ")]
    described = {line.partition(" (")[0]: line for line in lines if not line.startswith(">")}
    assert set(parameters) <= set(described)
    assert len(parameters) > 70
    for name in parameters:
        assert len(described[name].partition("): ")[2]) > 8, name
        assert "--" not in described[name]
    assert described["lr"] == "lr (float): peak learning rate, after the warm-up"
    default = "adam for translation, adamw for other tasks"
    assert described["optimizer"] == f"optimizer (Literal['adam', 'adamw']): [default: {default}]"
    assert parameters["data"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["out"].default is inspect.Parameter.empty


def test_the_example_of_the_help_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder().find(attent.train, "train", globs={})
    assert doctest.DocTestRunner().run(example) == doctest.TestResults(0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "3"}, "`steps` must be an integer"),
        ({"lr": -1.0}, "`lr` must be greater than 0"),
        ({"optimizer": "sgd"}, "`optimizer` must be one of 'adam', 'adamw'"),
        ({"stepz": 3}, "unknown setting `stepz`; did you mean `steps`?"),
        ({"task": "lm", "src": None, "tgt": None}, "`data` must be files for the task lm"),
        ({"valid": [("a", 3)]}, "`valid` must be text, but row 0"),
    ],
)
def test_an_error_names_the_argument_and_writes_nothing(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match="`") as caught:
        train_tiny(tmp_path / "run", **options)
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


# ---- data in memory --------------------------------------------------------------------------------------------------


class FakeDataset:
    """The interface of `datasets.Dataset` that is used; `Dataset` itself is not a dependency."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns_by_name = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns_by_name)

    def __len__(self) -> int:
        return len(next(iter(self.columns_by_name.values())))

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns_by_name[name]


EN, DE = ["a\tdog", "two\nlines", ""], ["ein Hund", "zwei Zeilen", "nichts"]
ROWS = [{"de": de, "en": en} for en, de in zip(EN, DE, strict=True)]


@pytest.mark.parametrize(
    "data",
    [
        list(zip(EN, DE, strict=True)),
        [[en, de] for en, de in zip(EN, DE, strict=True)],
        [{"id": 3, **row} for row in ROWS],
        pandas.DataFrame({"id": [1, 2, 3], "de": DE, "en": EN}),
        pandas.DataFrame({"source": EN, "target": DE}),
        pandas.DataFrame(list(zip(EN, DE, strict=True))),
        FakeDataset({"en": EN, "de": DE}),
        FakeDataset({"id": [1, 2, 3], "translation": ROWS}),
    ],
    ids=["tuples", "lists", "dicts", "frame", "two columns", "numbered columns", "dataset", "translation"],
)
def test_texts_in_memory_are_read_as_they_are(data: Any, tmp_path: Path) -> None:
    assert is_in_memory(data)
    corpus = InMemoryCorpus(data, "data", ("en", "de"))
    corpus.write(tmp_path / corpus.name)
    (opened,) = open_corpora([str(tmp_path / corpus.name)], LanguagePair("en", "de"))
    pairs = list(opened)
    assert [(pair.source, pair.target) for pair in pairs if isinstance(pair, Pair)] == list(zip(EN, DE, strict=True))


def generate_pairs() -> Iterator[tuple[str, str]]:
    yield "a", "b"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([("a", "b"), ("c", None)], "must be text, but row 1 (from 0) has None as tgt; remove the row"),
        (pandas.DataFrame({"en": ["a"], "de": [float("nan")]}), "must be text, but row 0 (from 0) has nan as de"),
        ([("a", "b"), ("c",)], "must have pairs (source, target), but row 1 (from 0) is ('c',)"),
        ([Path("a.tsv"), ("a", "b")], "must have pairs (source, target), but row 0"),
        (generate_pairs(), "must be files, pairs or a table, but is of type generator; make a list of it"),
        ({"train": 1, "test": 2}, "must be files, pairs or a table, but is of type dict; give one of train, test"),
        (pandas.DataFrame({"id": [1], "a": ["x"], "b": ["y"]}), "must have the columns en and de, but has id, a, b"),
        (3, "must be files, pairs or a table, but is of type int"),
    ],
)
def test_unusable_data_is_refused_with_its_row(data: Any, message: str) -> None:
    with pytest.raises(CorpusError) as caught:
        InMemoryCorpus(data, "data", ("en", "de"))
    assert str(caught.value).startswith(f"`data` {message}")


def test_a_frame_can_have_several_targets(tmp_path: Path) -> None:
    corpus = InMemoryCorpus(pandas.DataFrame({"en": ["a"], "fr": ["c"], "de": ["b"]}), "data", ("en", "de,fr"))
    corpus.write(tmp_path / corpus.name)
    opened = open_corpora([str(tmp_path / corpus.name)], LanguagePair("en", "de,fr"))
    assert [pair.target for each in opened for pair in each if isinstance(pair, Pair)] == ["b", "c"]


def test_a_run_on_pairs_is_resumed_with_them_or_without_and_refuses_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train_tiny(out, PAIRS[:50], valid=PAIRS[50:55], test=PAIRS[55:])
    assert [(scores["split"], scores["num_examples"]) for scores in result.scores] == [("validation", 5), ("test", 5)]
    assert train_tiny(out, PAIRS[:50], steps=4).step == 4
    assert attent.train(out=out, progress=False).step == 4
    with pytest.raises(TrainError, match=r"other settings \(data.train: "):
        train_tiny(out, PAIRS[:49])
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(TrainError, match="contains other files"):
        train_tiny(other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


# ---- callbacks and result --------------------------------------------------------------------------------------------


def test_a_callback_that_raises_stops_the_run_after_it_is_saved(tmp_path: Path) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, Progress):
            raise RuntimeError("too slow")

    events: list[Event] = []
    with pytest.raises(RuntimeError, match="too slow") as caught:
        train_tiny(tmp_path, callbacks=[fail, events.append])
    assert caught.value.__notes__ == ["The run is saved at step 1; the same call resumes it."]
    assert isinstance(events[-1], Ended)
    assert any(isinstance(event, Progress) for event in read_events(tmp_path / "log.jsonl"))
    notes: list[Event] = []
    assert train_tiny(tmp_path, callbacks=notes.append).stop_reason == "steps"
    assert any(isinstance(event, Note) and "from step 1" in event.text for event in notes)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train_tiny(tmp_path_factory.mktemp("notebook") / "run <1>", valid_every=2)


def test_the_result_has_the_history_of_the_log(result: TrainResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["step"] for row in result.history] == [1, 2, 3]
    assert {"epoch", "loss", "lr", "tokens_per_second"} <= result.history[0].keys()
    assert "bleu" not in result.history[0]
    assert {"loss", "valid_loss", "bleu", "chrf"} <= result.history[1].keys()
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3]
    assert frame["loss"][3] == result.history[2]["loss"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(AttentError, match="`to_frame` needs pandas"):
        result.to_frame()


def test_the_result_says_what_to_type_next(result: TrainResult) -> None:
    assert repr(result).startswith(f"{result.out}: trained for 3 steps\nvalidation ")
    code = f'translator = attent.Translator.load({str(result.out)!r})\nprint(translator("..."))'
    assert repr(result).endswith(f"\n\n{code}")
    exec(code, {"attent": attent})
    assert "BLEU" in result._repr_html_()
    assert "<1>" not in result._repr_html_()
    stopped = TrainResult(out=Path("runs/x"), step=1, stop_reason="stopped")
    assert repr(stopped) == "runs/x: stopped after 1 step\n\nattent.train(out='runs/x')  # resumes the run"
    assert stopped.history == []
    assert stopped.to_frame().empty


# ---- the display -----------------------------------------------------------------------------------------------------


def test_outside_of_a_notebook_the_display_is_that_of_the_command() -> None:
    assert isinstance(open_display(), TrainingDisplay)


def test_the_display_shows_progress_curves_and_escaped_text(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(NotebookDisplay, "_draw", lambda self: drawn.append(self._repr_html_()))
    display = NotebookDisplay()
    display.begin_run("runs/<x>", [make_progress(400)])
    for event in (
        Note(text="1,000 <b>pairs</b>"),
        Note(text="slow\x1b[31m", level="warning"),
        STARTED,
        make_progress(800),
        make_validation(800, bleu=31.25),
    ):
        display(event)
    page = drawn[-1]
    assert "runs/&lt;x&gt;" in page
    assert "1,000 &lt;b&gt;pairs&lt;/b&gt;" in page
    assert "warning: slow\\x1b[31m" in page
    assert "width: 10.0%" in page
    assert "BLEU 31.2" in page
    assert page.count("<polyline") == 4  # two losses, BLEU and chrF
    assert "#000" not in page  # the color of the text follows the theme
    with display:
        display(Ended(step=8_000, reason="steps", seconds=5))
    assert "<details>" in display._repr_html_()
    assert repr(display).startswith("done: 8,000 steps in 5 s; best at step 800")


def test_the_display_is_drawn_at_most_once_a_second_for_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[object] = []
    monkeypatch.setattr("IPython.display.display", lambda page, display_id: type("", (), {"update": updates.append})())
    now = [100.0]
    monkeypatch.setattr("attent.training.progress.time.monotonic", lambda: now[0])
    display = NotebookDisplay()
    for step in range(30):
        now[0] = 100 + step / 10
        display(make_progress(step))
    assert len(updates) == 2  # after the first


# ---- a kernel --------------------------------------------------------------------------------------------------------

CELL = """
import time
from pathlib import Path
import attent

def wait_for_interrupt(event):
    if type(event).__name__ == "Progress":
        Path("training").touch()
        while not Path("interrupted").exists():
            time.sleep(0.01)

run = attent.train(pairs, out="run", callbacks=[wait_for_interrupt], **options)
print(run.stop_reason, run.step, len(run.history))
"""


def test_an_interrupted_kernel_saves_and_the_same_cell_resumes(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path), env=kernel_environment())
    outputs: list[dict[str, Any]] = []

    def run(code: str) -> list[dict[str, Any]]:
        outputs.clear()
        reply = client.execute_interactive(code, output_hook=outputs.append, timeout=120)
        assert reply["content"]["status"] == "ok", reply
        return [message["content"] | {"type": message["msg_type"]} for message in outputs]

    def interrupt() -> None:
        end = time.monotonic() + 100
        while not (tmp_path / "training").exists() and time.monotonic() < end:
            time.sleep(0.01)
        manager.interrupt_kernel()
        (tmp_path / "interrupted").touch()

    try:
        run(f"pairs, options = {PAIRS!r}, {TINY!r}")
        thread = threading.Thread(target=interrupt)
        thread.start()
        printed, pages = split_outputs(run(CELL))
        thread.join()
        assert printed == "stopped 1 1\n"
        assert "stopped after 1 step" in pages[-1]["text/plain"]
        printed, pages = split_outputs(run(CELL))
        assert printed == "steps 3 3\n"
        assert "resuming run from step 1" in pages[-1]["text/html"]
        assert "<svg" in pages[-1]["text/html"]
        assert pages[-1]["text/plain"].startswith("done: 3 steps")
        completions = client.complete("attent.train(valid_ev", reply=True, timeout=60)["content"]["matches"]
        assert "valid_every=" in completions
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def kernel_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def split_outputs(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The printed text, and the pages of one display that is updated in place."""
    printed = "".join(message["text"] for message in messages if message["type"] == "stream")
    shown = [message for message in messages if message["type"] in ("display_data", "update_display_data")]
    assert [message["type"] for message in shown].count("display_data") == 1
    assert len({message["transient"]["display_id"] for message in shown}) == 1
    return printed, [message["data"] for message in shown]
