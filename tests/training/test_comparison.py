"""`attent compare`: a real comparison of tiny models, its report in Chromium, resuming, budgets and table 3."""

from __future__ import annotations

import html
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from attent import cli
from attent.data.token_store import TokenSequences, TokenStore
from attent.formatting import escape_markdown, markdown_table
from attent.interop import load_as
from attent.models import Seq2Seq, build, presets
from attent.text.tokenizer import Tokenizer
from attent.training import comparison, comparison_report
from attent.training.comparison import ComparisonEntry, EntryResult, RunMeasurements, compare, read_entries
from attent.training.config import RunConfig, TrainConfig, read_run
from attent.training.events import Event, EventHandler, Progress, ValidationSample
from attent.training.run_options import Precision
from tests.inspection.conftest import browser as browser
from tests.inspection.conftest import watch_problems
from tests.training.runs import checkpoint_facts, write_corpus

COMMON = {
    "data.src": "en", "data.tgt": "xx", "data.hold_out": 6, "data.tokenizer.vocab": 300, "size": "tiny",
    "model.width": 16, "model.layers": 1, "train.steps": 4, "train.batch_tokens": 128,
    "train.save_every": 2, "train.valid_every": 2, "train.valid_sentences": 4, "decode.beam_size": 1,
}  # fmt: skip
COMPARISON = """
[common.train]
steps = 9
[entries.post]
label = "post-norm <b>"
[entries.pre]
label = "pre-norm"
model.norm_order = "pre"
[entries.same]
[entries.lstm]
arch = "lstm-no-attention"
"""
POST = ComparisonEntry(name="post", label="post", settings={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete comparison, made by the command."""
    home = tmp_path_factory.mktemp("comparison")
    write_corpus(home / "corpus.tsv", 60)
    (home / "entries.toml").write_text(COMPARISON)
    assert run_command(home) == 0
    return home


def run_command(home: Path, *more: str) -> int:
    flags = [f"--set={path}={value}" for path, value in COMMON.items()]
    data, entries = str(home / "corpus.tsv"), str(home / "entries.toml")
    return cli.main(["compare", "--data", data, "--config", entries, "--out", str(home / "out"), *flags, *more])


def read_results(home: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((home / "out" / "results").glob("*.json"))}


@pytest.mark.slow
def test_entries_with_the_same_settings_share_a_run(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "out" / "runs").iterdir()) == [
        "lstm-seed1",
        "post-seed1",
        "pre-seed1",
    ]
    results = read_results(folder)
    assert results["pre-seed1"]["settings"]["model.decoder.norm_order"] == "pre"
    assert results["post-seed1"]["measurements"]["steps"] == 4  # flags take precedence over the file's `common`


def test_report_shows_every_entry(folder: Path) -> None:
    report = (folder / "out" / "report.md").read_text()
    assert report.startswith("# Comparison: corpus.tsv\n")
    for label in ("post-norm \\<b\\>", "pre-norm", "same", "lstm"):
        assert f"| {label} |" in report
    measured = read_results(folder)["post-seed1"]["measurements"]
    assert f"| {measured['bleu']:.2f} | {measured['chrf']:.1f} |" in report
    assert [len(point) for point in measured["curve"]] == [3, 3]
    assert measured["curve"][-1][1] == pytest.approx(measured["flops"])
    assert sum(sentences for _, sentences, _ in measured["by_length"]) == 6
    assert read_results(folder)["lstm-seed1"]["measurements"]["attention"] == ""
    for name in ("scores.svg", "curves.svg", "results/post-seed1.svg", "results/pre-seed1.svg"):
        assert f"({name})" in report
        assert (folder / "out" / name).read_text().lstrip().startswith("<?xml")


def test_report_without_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_report, "find_spec", lambda name: None)
    entry, common = read_entries([folder / "entries.toml"])[0], COMMON | {"data.train": [str(folder / "corpus.tsv")]}
    shutil.copytree(folder / "out" / "results", tmp_path / "results", ignore=shutil.ignore_patterns("*.svg"))
    comparison_report.write_report(compare([entry], tmp_path, common=common), tmp_path, "Title", "Budget: params.")
    report = (tmp_path / "report.md").read_text()
    assert "## Translations side by side" in report
    assert ".svg" not in report
    assert "Attention side by side" not in report


def test_time_and_memory_are_those_of_the_steps(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "out" / "runs" / "post-seed1", tmp_path / "run")
    log, memory = tmp_path / "run" / "log.jsonl", iter((700, 900, 800))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        event.update({"seconds": 1e6} if "seconds" in event else {})  # the clock also runs during validations
        if "tokens_per_second" in event:
            event.update(tokens_per_second=100.0, peak_memory=next(memory, None))
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    measured = comparison.measure_run(tmp_path / "run")
    (started,) = (event for event in events if "steps_per_epoch" in event)
    stored = read_results(folder)["post-seed1"]["measurements"]
    assert measured.epochs == pytest.approx(4 / started["steps_per_epoch"])
    assert measured.seconds * 100 == pytest.approx(stored["seconds"] * stored["train_tokens_per_second"])
    assert measured.curve[-1][0] == pytest.approx(measured.seconds)
    assert measured.peak_memory == 900


def test_report_states_jobs_and_precision_of_each_run(folder: Path, tmp_path: Path) -> None:
    common = COMMON | {"data.train": [str(folder / "corpus.tsv")]}
    shutil.copytree(folder / "out" / "results", tmp_path / "results")
    (result,) = compare([POST], tmp_path, common=common, jobs=3)  # stored: it was trained alone
    comparison_report.write_report([result], tmp_path, "Title", "")
    assert "at a time" not in (tmp_path / "report.md").read_text()
    others = [replace(result.runs[0], jobs=3, precision="bfloat16 (LSTM layers float32)", bleu=99.0)]
    comparison_report.write_report([result, replace(result, runs=(*others,))], tmp_path, "Title", "")
    report = (tmp_path / "report.md").read_text()
    assert "1 or 3 runs at a time" in report
    assert "| bfloat16 (LSTM layers float32) |" in report
    assert f"| {result.runs[0].precision} |" in report


def test_one_layout_for_all_entries(folder: Path) -> None:
    lstm = ComparisonEntry(name="lstm", label="lstm", settings={"arch": "lstm"})
    packed = ComparisonEntry(name="packed", label="packed", settings={"data.layout": "packed"})
    file = read_entries([folder / "out" / "runs" / "post-seed1" / "run.toml"])[0]  # which states `bucketed`

    def match(device: str, *entries: ComparisonEntry) -> list[str | None]:
        planned = {(entry.name, 1): comparison.plan_run(entry, COMMON, 1) for entry in entries}
        matched = comparison.match_layouts(planned, torch.device(device))
        return [each.settings.get("data.layout") for each in matched.values()]

    assert match("cuda", POST, lstm, packed, file) == ["fixed", "fixed", "packed", "fixed"]
    assert match("cuda", POST, file) == [None, None]  # packed
    assert match("cpu", POST, lstm) == [None, None]  # bucketed


@pytest.mark.parametrize(
    ("arch", "precision", "expected"),
    [
        ("transformer", "float32", "float32"),
        ("transformer", "bfloat16", "bfloat16; decoding float32"),
        ("lstm", "bfloat16", "bfloat16 (LSTM layers float32); decoding float32"),
    ],
)
def test_precision(arch: str, precision: Precision, expected: str) -> None:
    model = build(presets.ARCHS[arch](50, "tiny"))
    run = RunConfig(train=TrainConfig(precision=precision))
    assert comparison.describe_precision(run, model) == expected


def test_text_is_shown_literally(tmp_path: Path) -> None:
    text = "a | b <b> ![x](secret.svg) \\ `c` *d*"
    result = EntryResult(entry=replace(ENTRY, label=text), runs=(RUN,))
    blocks = list(comparison_report.build_blocks([result], "", False))
    page = comparison_report.render_page(text, "\n\n".join(blocks), tmp_path)
    assert f"<td>{html.escape(text, quote=False)}</td>" in page
    assert "<img" not in page
    assert f"| {escape_markdown(text)} |" in blocks[2]


RUN = RunMeasurements(
    name="a-seed1", data="c.tsv", conditions="a CPU", parameters=1_250_000, precision="float32", steps=1_000,
    epochs=2.5, seconds=60.0, flops=2e12, valid_loss=2.0, train_tokens_per_second=1_000.0,
    decode_tokens_per_second=2_000.0, test_set="t.tsv", bleu=30.0, chrf=50.0, signature="sig",
    curve=((1.0, 10.0, 5.0), (2.0, 20.0, 7.0)), by_length=(("1-10", 1_200, 30.0), ("11-", 2, 40.0)),
    samples=(ValidationSample(source="s", reference="r", output="o"),), attention="", peak_memory=None,
)  # fmt: skip
OTHER_RUN = replace(
    RUN, name="a-seed2", precision="bfloat16", steps=3_000, epochs=3.5, seconds=120.0, flops=4e12, valid_loss=None,
    train_tokens_per_second=3_000.0, decode_tokens_per_second=3_000.0, bleu=31.0, chrf=51.0, peak_memory=2**31,
    by_length=(("1-10", 1_200, 31.0), ("11-", 2, 42.0)), jobs=2,
)  # fmt: skip
ENTRY = ComparisonEntry(name="a", label="model a", settings={})


def test_rows_have_means_over_the_runs() -> None:
    one = comparison_report.format_entry(EntryResult(entry=ENTRY, runs=(RUN,)))
    assert dict(zip(comparison_report.SCORE_COLUMNS[1:], one[1:], strict=True)) == {
        "model": "model a", "runs": "1", "parameters": "1.2 million", "steps": "1,000", "epochs": "2.5",
        "time": "1 min 0 s", "training FLOPs": "2.0e12", "validation loss": "2.000", "BLEU": "30.00", "chrF": "50.0",
        "training tokens/s": "1,000", "decoding tokens/s": "2,000", "peak memory": "", "precision": "float32",
    }  # fmt: skip
    both = EntryResult(entry=replace(ENTRY, label="a"), runs=(RUN, OTHER_RUN), failures=("diverged", "diverged"))
    assert comparison_report.format_entry(both) == [
        "", "a; failed: diverged", "2 of 4", "1.2 million", "2,000", "3.0", "1 min 30 s", "3.0e12", "2.000",
        "30.50 (30.00-31.00)", "50.5", "2,000", "2,500", "2.0 GiB", "float32; bfloat16",
    ]  # fmt: skip
    assert one[0] == "a"
    without = comparison_report.format_entry(EntryResult(entry=ENTRY, runs=(OTHER_RUN,)))
    assert without[8] == ""
    failed = comparison_report.format_entry(EntryResult(entry=ENTRY, runs=(), failures=("diverged",)))
    assert failed == ["a", "model a; failed: diverged", "0 of 1", *[""] * 12]


def test_conditions_state_seeds_and_jobs() -> None:
    one = EntryResult(entry=ENTRY, runs=(RUN,))
    text = comparison_report.describe_conditions([one], "Budget: params.")
    assert text.startswith("Budget: params. Test set: t.tsv; BLEU: sig. Time is that of the steps")
    assert text.endswith(" a CPU.")
    assert text.count("a CPU") == 1
    several = comparison_report.describe_conditions([one, replace(one, runs=(RUN, OTHER_RUN))], "")
    assert "Means over the runs (one per seed), with the lowest and the highest. 1 or 2 runs at a time" in several
    parallel = comparison_report.describe_conditions([replace(one, runs=(OTHER_RUN,))], "")
    assert "Means over" not in parallel
    assert "2 runs at a time" in parallel


def list_headings(blocks: Iterable[str]) -> list[str]:
    return [block.removeprefix("## ") for block in blocks if block.startswith("## ")]


def test_sections_of_the_report() -> None:
    results = [EntryResult(entry=ENTRY, runs=(RUN, OTHER_RUN)), EntryResult(entry=POST, runs=(RUN,))]
    failed = EntryResult(entry=ENTRY, runs=(), failures=("diverged",))
    blocks = list(comparison_report.build_blocks([*results, failed], "", True))
    assert list_headings(blocks) == [
        "Scores", "BLEU against time, FLOPs and sentence length", "Translations side by side",
    ]  # fmt: skip
    scores, figure, _, _, curves, lengths, _, samples = blocks[2:]
    assert (figure.endswith("(scores.svg)"), curves.endswith("(curves.svg)")) == (True, True)
    assert len(scores.splitlines()) == 2 + 3
    assert lengths.splitlines() == [
        "| words | sentences | model a | post |",
        "| --- | ---: | ---: | ---: |",
        "| 1-10 | 1,200 | 30.5 | 30.0 |",
        "| 11- | 2 | 41.0 | 40.0 |",
    ]
    assert samples.splitlines()[2:] == ["| source | s |", "| reference | r |", "| model a | o |", "| post | o |"]
    plain = list(comparison_report.build_blocks(results, "", False))
    assert list_headings(plain) == ["Scores", "BLEU by sentence length", "Translations side by side"]
    assert "svg" not in "".join(plain)
    many = results[1:] * comparison_report.MAX_DETAILED
    assert len(list_headings(comparison_report.build_blocks(many, "", True))) == 3
    assert len(list_headings(comparison_report.build_blocks([*many, *results], "", True))) == 1
    attention = [replace(results[1], runs=(replace(RUN, attention="{}"), RUN)), results[1]]
    *_, heading, _, images = comparison_report.build_blocks(attention, "", True)
    assert (heading, images) == ("## Attention side by side", "| post |\n| --- |\n| ![post](results/a-seed1.svg) |")
    assert len(list_headings(comparison_report.build_blocks(attention, "", False))) == 3


def test_figures_show_runs_and_means() -> None:
    results = [EntryResult(entry=ENTRY, runs=(RUN, OTHER_RUN)), EntryResult(entry=POST, runs=(RUN,))]
    figure = comparison_report.plot_scores(results)
    (axes,) = figure.axes
    dots, mean, *_ = axes.lines
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([30.0, 31.0], [0, 0])
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([30.5, 30.5], [-0.35, 0.35])
    assert list(axes.lines[2].get_ydata()) == [1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["model a", "post"]
    assert (axes.get_ylim(), axes.get_xlabel()) == ((1.5, -0.5), "test BLEU")
    assert figure.get_figheight() == pytest.approx(1.36)
    time, flops, length = comparison_report.plot_curves(results).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in time.lines] == [([1, 2], [5, 7])] * 3
    assert list(flops.lines[0].get_xdata()) == [10, 20]
    assert [list(line.get_ydata()) for line in length.lines] == [[30.5, 41], [30, 40]]
    assert [label.get_text() for label in length.get_xticklabels()] == ["1-10", "11-"]
    assert [axes.get_xlabel() for axes in (time, flops, length)] == [
        "training time (s)", "training FLOPs", "words of the source",
    ]  # fmt: skip
    assert [axes.get_ylabel() for axes in (time, flops, length)] == ["validation BLEU", "", "test BLEU"]
    assert [text.get_text() for text in length.get_legend().get_texts()] == ["model a", "post"]


def test_figures_of_few_entries_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(comparison_report, "save_figure", lambda figure, path: names.append(path.name))
    monkeypatch.setattr(comparison_report, "plot_head", dict)
    result = EntryResult(entry=ENTRY, runs=(replace(RUN, attention="{}"),))
    comparison_report.draw_figures([result] * comparison_report.MAX_DETAILED, tmp_path)
    assert names == ["scores.svg", "curves.svg", *["a-seed1.svg"] * comparison_report.MAX_DETAILED]
    names.clear()
    comparison_report.draw_figures([result] * (comparison_report.MAX_DETAILED + 1), tmp_path)
    assert names == ["scores.svg"]


def test_tables_and_images_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg/>")
    table = markdown_table(("name", "empty", "n"), [["x", "", "1"], ["y", "", ""]], (2,))
    page = comparison_report.render_page("a < b", f"{table}\n\n![a \\<b\\>](a.svg)", tmp_path)
    assert '<th class="number">n</th>' in page
    assert '<td class="number">1</td>' in page
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+" alt="a &lt;b&gt;"' in page
    assert "<title>a &lt; b</title>" in page


def test_speed_is_the_median_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = iter([0.0, 1.0, 10.0, 12.0, 20.0, 30.0]), []

    class Timed:
        def translate(self, *arguments: object, to: str) -> list[SimpleNamespace]:
            calls.append((*arguments, to))
            return [SimpleNamespace(token_ids=[1, 2]), SimpleNamespace(token_ids=[1])]

    monkeypatch.setattr(comparison.time, "perf_counter", lambda: next(clock))
    translations, speed = comparison.measure_speed(Timed(), ["a", "b"], "options", "de")  # type: ignore[arg-type]
    assert (len(translations), speed) == (2, 5 / 2)
    assert calls == [(["a", "b"], "options", "de")] * 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
def test_page_in_a_browser(folder: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems = watch_problems(page)
    page.goto((folder / "out" / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (
        page.evaluate("[...document.images].map((image) => image.naturalWidth > 100)") == [True] * 5
    )  # two entries share a run
    assert page.evaluate("getComputedStyle(document.body).fontSize") == "15px"  # the policy allows the style
    assert "post-norm <b>" in page.inner_text("table >> nth=0")
    assert problems == []
    page.close()


def test_complete_comparison_is_not_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / "out" / "runs").rglob("*")}
    assert run_command(folder) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "out" / "runs").rglob("*")} == before
    assert run_command(folder, "--set=train.steps=5") == 1
    assert "other settings (train.steps)" in capsys.readouterr().err


def test_interrupted_run_is_resumed(folder: Path, tmp_path: Path) -> None:
    common = COMMON | {"data.train": [str(folder / "corpus.tsv")]}

    @contextmanager
    def interrupt() -> Iterator[EventHandler]:
        def handle(event: Event) -> None:
            if isinstance(event, Progress):
                os.kill(os.getpid(), signal.SIGINT)

        yield handle

    with pytest.raises(KeyboardInterrupt):
        compare([POST], tmp_path, common=common, open_display=interrupt)
    assert not (tmp_path / "results").exists()
    (result,) = compare([POST], tmp_path, common=common)
    assert result.runs[0].steps == 4
    expected = checkpoint_facts(folder / "out" / "runs" / "post-seed1")
    assert checkpoint_facts(tmp_path / "runs" / "post-seed1")[4] == expected[4]


@pytest.mark.slow
def test_runs_end_with_a_killed_comparison(folder: Path, tmp_path: Path) -> None:
    flags = [f"--set={path}={value}" for path, value in (COMMON | {"train.steps": 100_000}).items()]
    command = [sys.executable, "-m", "attent", "compare", "--data", str(folder / "corpus.tsv"), "--jobs", "2"]
    command += ["--config", str(folder / "entries.toml"), "--out", str(tmp_path / "out"), *flags]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = tmp_path / "out" / "runs"
    deadline = time.monotonic() + 60
    while len(list(runs.glob("*/log.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    children = process.children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_other_entries_go_on_where_one_fails(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "out" / "results", tmp_path / "results")
    common, messages = COMMON | {"data.train": [str(folder / "corpus.tsv")]}, list[str]()
    bad = ComparisonEntry(name="bad", label="bad", settings={"data.filters.max_chars": 3})
    failed, complete = results = compare([bad, POST], tmp_path, common=common, notify=messages.append)
    assert (failed.runs, len(complete.runs), complete.failures) == ((), 1, ())
    assert "bad-seed1: failed: no pairs are left" in messages[-1]
    comparison_report.write_report(results, tmp_path, "Title", "Budget: params.")
    report = (tmp_path / "report.md").read_text()
    assert "| bad; failed: no pairs are left" in report
    assert "| 0 of 1 |" in report
    with pytest.raises(ValueError, match="no pairs are left"):
        compare([bad], tmp_path, common=common)


def test_missing_corpus_is_reported_once(tmp_path: Path) -> None:
    messages, common = list[str](), COMMON | {"data.train": [str(tmp_path / "missing.tsv")]}
    other = ComparisonEntry(name="other", label="other", settings={"train.lr": 0.5})
    with pytest.raises(ValueError, match=r"missing\.tsv"):
        compare([POST, other], tmp_path, common=common, notify=messages.append)
    assert messages == ["2 of 2 runs to train, 1 at a time"]


@pytest.mark.slow
def test_same_flops_for_other_batches(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "out", tmp_path, dirs_exist_ok=True)
    common = COMMON | {"data.train": [str(folder / "corpus.tsv")]}
    own = {"train.batch_tokens": 64, "train.accumulate": 3, "train.rdrop": 1.0, "model.encoder.ffn_width": 600}
    other = ComparisonEntry(name="other", label="other", settings=own)
    first, second = (result.runs[0] for result in compare([POST, other], tmp_path, common=common, budget="flops"))
    assert second.flops == pytest.approx(first.flops, abs=0.51 * second.flops / second.steps)
    trained = tmp_path / "runs" / "other-seed1"
    store = comparison.open_data(read_run(trained / "run.toml"), Tokenizer.load(trained), trained).store
    pair_flops = comparison.count_pair_flops(load_as(trained, Seq2Seq), store)
    assert second.flops == pytest.approx(2 * 3 * second.epochs * len(store) * pair_flops)  # R-Drop: two passes
    reference, planned = (comparison.plan_run(entry, common, 1) for entry in (POST, other))
    minutes = {path: value for path, value in planned.settings.items() if path != "train.steps"}
    timed = replace(planned, settings=minutes | {"train.minutes": 1.0})
    matched = comparison.match_flops(timed, reference, first.flops, tmp_path)
    assert (matched.settings["train.steps"], "train.minutes" in matched.settings) == (second.steps, False)
    assert comparison.match_flops(timed, reference, 9 * first.flops, tmp_path).settings["train.steps"] > second.steps
    assert comparison.match_flops(reference, reference, 1.0, tmp_path) is reference


def test_run_files_are_entries(folder: Path) -> None:
    files = [folder / "out" / "runs" / name / "run.toml" for name in ("post-seed1", "pre-seed1")]
    entries = read_entries(files)
    assert [entry.name for entry in entries] == ["post-seed1", "pre-seed1"]
    planned = comparison.plan_run(entries[1], {"train.lr": 0.5, "data.train": ["other.tsv"]}, 7).settings
    assert (planned["model.encoder.norm_order"], planned["train.steps"], planned["train.seed"]) == ("pre", 4, 7)
    assert (planned["train.lr"], planned["data.train"]) == (0.5, ["other.tsv"])  # flags change a run file
    assert comparison.plan_run(entries[1], {"train.minutes": 1.0}, 7).settings.get("train.steps") is None
    with pytest.raises(ValueError, match="two are called `post-seed1`"):
        read_entries(files[:1] * 2)


def test_flops_of_lstm_layers_are_counted() -> None:
    model = build(presets.lstm_no_attention(50, "tiny"))
    row = TokenSequences.from_rows([[3] * 7])
    flops = comparison.count_pair_flops(model, TokenStore.from_sequences(row, row, (0, 0), "", Path()))
    layers = [module for module in model.modules() if isinstance(module, torch.nn.LSTM)]
    weights = sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.dim() == 2)
    output = model.output(torch.zeros(1, 1, model.config.encoder.width)).numel() * model.config.encoder.width
    assert weights > 0
    assert 1.0 <= flops / (2 * 7 * (weights + output)) < 1.1  # the rest makes the first state of the decoder


def test_rows_of_table_3_are_valid() -> None:
    entries = read_entries([comparison.TABLE3_FILE])
    planned = [comparison.plan_run(entry, {"data.train": ["corpus.tsv"]}, 1) for entry in entries]
    assert len({each.key for each in planned}) == len(planned) == 24
    assert {entry.name[0] for entry in entries} == set("bABCDEF")
    for each in planned:  # equation 3: in proportion to width^-0.5
        width = each.settings.get("model.encoder.width", 256)
        assert each.settings["train.lr"] == pytest.approx(0.00313 * (width / 256) ** -0.5, rel=0.002)


@pytest.mark.parametrize(
    ("flags", "message"), [(["--jobs", "0"], "`--jobs` must be 1"), (["--table3", "--arch", "lstm"], "only one of")]
)
def test_flags_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert cli.main(["compare", "--data", "corpus.tsv", "--out", str(tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err


def test_minutes_must_be_given() -> None:
    with pytest.raises(ValueError, match="--minutes"):
        compare([POST], Path(), common={}, budget="minutes")


def test_seeds_must_be_different() -> None:
    with pytest.raises(ValueError, match="must be different, but are 1 2 1"):
        compare([POST], Path(), common={}, seeds=(1, 2, 1))
