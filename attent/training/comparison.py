"""`attent compare`: train several models on the same data at a matched budget, resumably, and measure each of them."""

import gc
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from attent import __version__, settings
from attent.data.arrays import select_evenly
from attent.data.pairs import CorpusError
from attent.data.process_pool import exit_with_parent
from attent.data.token_store import TokenStore
from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translation, Translator
from attent.inspection.session import look
from attent.interop import load_as
from attent.models import Seq2Seq, build
from attent.nn import StackConfig, set_backend
from attent.nn.devices import choose_device
from attent.scoring.evaluate import evaluate
from attent.storage.machine import count_usable_cores
from attent.text.tokenizer import Tokenizer
from attent.training import autoconfig, checkpoint, run
from attent.training import config as run_config
from attent.training.config import RunConfig, TrainError, read_run
from attent.training.events import (
    LOG_FILE,
    Ended,
    EventHandler,
    Progress,
    Started,
    Validated,
    ValidationSample,
    read_events,
)
from attent.training.hardware import activate_device, get_device_name
from attent.training.tasks.base import RunContext
from attent.training.tasks.translation_data import PreparedData, build_train_batches, prepare_data, read_eval_set

TABLE3_FILE = Path(__file__).with_name("table3.toml")
RUNS_FOLDER, RESULTS_FOLDER = "runs", "results"
FORWARD_BACKWARD = 3  # the backward pass takes twice the FLOPs of the forward pass
NUM_COUNTED_PAIRS = 16  # whose FLOPs are counted
NUM_TIMED = 3  # translations of the test set, after a warm-up
NUM_SAMPLES = 6  # translations in the report
ATTENTION_WORDS = range(8, 13)  # of the sentence whose attention is drawn

Budget = Literal["params", "minutes", "flops"]
RunId = tuple[str, int]  # entry and seed
FlatSettings = dict[str, Any]  # by path, such as `train.lr`
OpenDisplay = Callable[[], AbstractContextManager[EventHandler]]


@dataclass(frozen=True, kw_only=True)
class ComparisonEntry:
    """One row of a comparison. Common settings take precedence over `defaults`, its own `settings` over both."""

    name: str
    label: str
    settings: FlatSettings
    defaults: FlatSettings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    name: str  # of its folder
    settings: FlatSettings

    @property
    def key(self) -> str:
        return json.dumps(self.settings, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    name: str
    data: str  # names of the training corpora
    conditions: str  # device, versions and date
    parameters: int
    precision: str  # of training, and of decoding if it differs
    steps: int
    epochs: float
    seconds: float  # of the steps, without validations, checkpoints and compilation
    flops: float  # of training
    valid_loss: float | None  # the lowest
    train_tokens_per_second: float  # of source and target
    decode_tokens_per_second: float
    test_set: str
    bleu: float
    chrf: float
    signature: str  # of BLEU
    curve: tuple[tuple[float, float, float], ...]  # of each validation: seconds, FLOPs, BLEU
    by_length: tuple[tuple[str, int, float], ...]  # words of the source, sentences, BLEU
    samples: tuple[ValidationSample, ...]
    attention: str  # JSON for `plot_head`: the cross-attention head that aligns best; empty without cross-attention
    peak_memory: int | None  # bytes on the GPU during training
    jobs: int = 1  # runs that trained at the same time


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    entry: ComparisonEntry
    runs: tuple[RunMeasurements, ...]  # one per seed, without those that failed
    failures: tuple[str, ...] = ()  # the errors of those


def read_entries(paths: Sequence[Path]) -> list[ComparisonEntry]:
    """Read `common` settings and `entries.NAME`; a run file is one entry, named after the file or its folder."""
    entries: dict[str, ComparisonEntry] = {}
    for path in paths:
        tables = settings.read_toml_dict(path)
        stem = path.resolve().parent.name if path.name == checkpoint.RUN_FILE else path.stem
        defaults = run_config.flatten_settings(tables.get("common", {}) if "entries" in tables else tables)
        if "entries" not in tables:
            defaults.pop("data.layout", None)  # chosen for that model alone
        for name, table in tables.get("entries", {stem: {}}).items():
            if name in entries:
                raise TrainError(f"{path}: entries must have different names, but two are called `{name}`; rename one")
            own = run_config.flatten_settings(table)
            entries[name] = ComparisonEntry(name=name, label=own.pop("label", name), settings=own, defaults=defaults)
    return list(entries.values())


def plan_run(entry: ComparisonEntry, common: FlatSettings, seed: int) -> PlannedRun:
    defaults = dict(entry.defaults)
    if "train.minutes" in common:
        defaults.pop("train.steps", None)
    elif "train.steps" in defaults | common | entry.settings:
        defaults.pop("train.minutes", None)  # from which a run.toml has its steps
    merged: FlatSettings = {}
    for part in (defaults, common, entry.settings, {"train.seed": seed}):
        requested = run_config.read_user_settings(None, part, ())  # which expands `model.dropout` to both stacks
        merged |= run_config.flatten_settings(requested)
    run_config.read_user_settings(None, merged, ())
    return PlannedRun(name=f"{entry.name}-seed{seed}", settings=merged)


def match_layouts(planned: dict[RunId, PlannedRun], device: torch.device) -> dict[RunId, PlannedRun]:
    """Train all models on padded rows if some cannot be trained on packed ones, so that a step reads the same pairs."""
    kinds = {each.settings.get("model.encoder.kind", StackConfig.kind) for each in planned.values()}
    if device.type == "cpu" or kinds == {StackConfig.kind}:
        return planned
    return {key: replace(each, settings={"data.layout": "fixed"} | each.settings) for key, each in planned.items()}


def match_flops(planned: PlannedRun, reference: PlannedRun, flops: float, out: Path) -> PlannedRun:
    """Plan as many steps as take `flops`, those of training the complete run `reference`."""
    if planned.key == reference.key:
        return planned
    folder = out / RUNS_FOLDER / reference.name
    config, tokenizer = read_run(folder / checkpoint.RUN_FILE), Tokenizer.load(folder)
    prepared = open_data(config, tokenizer, folder)
    tables = run_config.read_user_settings(None, planned.settings, ())
    other, data_size = run_config.build_run_config(tables, "--set"), prepared.data_size
    device = activate_device(other.train.device)
    size, model, _ = autoconfig.choose_model(other, tables, data_size, tokenizer, device.type)
    layout = autoconfig.choose_layout(other.data.layout, model, device)
    train = autoconfig.fill_train_config(other.train, size, model, data_size, device)
    other = replace(other, data=replace(other.data, layout=layout), train=train)
    steps = max(1, round(flops / count_step_flops(other, build(model), prepared)))
    unchanged = {path: value for path, value in planned.settings.items() if path != "train.minutes"}
    return replace(planned, settings=unchanged | {"train.steps": steps, "size": size})


def compare(
    entries: Sequence[ComparisonEntry],
    out: Path,
    *,
    common: FlatSettings,
    seeds: Sequence[int] = (1,),
    budget: Budget = "params",
    jobs: int = 1,
    open_display: OpenDisplay = lambda: nullcontext(lambda event: None),
    notify: Callable[[str], None] = lambda text: None,
) -> list[EntryResult]:
    """Train and measure every entry with every seed, `jobs` at a time; complete runs are not repeated.

    budget  params: the size and steps of each entry; minutes: the time `train.minutes` for each; flops: as many
            training FLOPs as the first entry
    """
    if budget == "minutes" and "train.minutes" not in common:
        raise TrainError("`--budget minutes` needs the time of each run; give it with --minutes")
    if len(set(seeds)) < len(seeds):
        raise TrainError(f"`--seeds` must be different, but are {' '.join(map(str, seeds))}; give each once")
    planned = {(entry.name, seed): plan_run(entry, common, seed) for entry in entries for seed in seeds}
    planned = match_layouts(planned, choose_device(common.get("train.device")))
    if budget == "flops":
        references = {seed: planned[entries[0].name, seed] for seed in seeds}
        measured, failures = run_all(list(references.values()), out, jobs, open_display, notify)
        if failures:
            raise TrainError(f"the FLOPs of the first entry are not known, since it failed: {min(failures.values())}")
        for (name, seed), each in planned.items():
            reference = references[seed]
            planned[name, seed] = match_flops(each, reference, measured[reference.key].flops, out)
    measured, failures = run_all(list(planned.values()), out, jobs, open_display, notify)
    results = []
    for entry in entries:
        keys = [planned[entry.name, seed].key for seed in seeds]
        runs = tuple(measured[key] for key in keys if key in measured)
        failed = tuple(failures[key] for key in keys if key in failures)
        results.append(EntryResult(entry=entry, runs=runs, failures=failed))
    return results


def run_all(
    planned: Sequence[PlannedRun], out: Path, jobs: int, open_display: OpenDisplay, notify: Callable[[str], None]
) -> tuple[dict[str, RunMeasurements], dict[str, str]]:
    """Return the new measurements and errors by run; raise the last if all fail, or at once for unreadable corpora."""
    distinct = dict[str, PlannedRun]()
    for each in planned:
        distinct.setdefault(each.key, each)
    measured = {key: stored for key, each in distinct.items() if (stored := load_measurements(each, out))}
    failures = dict[str, str]()
    pending = [each for key, each in distinct.items() if key not in measured]
    if pending:
        notify(f"{len(pending):,} of {len(distinct):,} runs to train, {jobs} at a time")
    with closing(start_runs(pending, out, jobs, open_display)) as results:
        for each, get_result in results:
            try:
                measured[each.key] = result = get_result()
                outcome = f"{result.bleu:.2f} BLEU, {result.steps:,} steps in {result.seconds:.0f} s"
            except (ValueError, OSError, RuntimeError) as error:
                failures[each.key] = str(error)
                if len(failures) == len(distinct) or (isinstance(error, CorpusError) and not measured):
                    raise
                outcome = f"failed: {error}"
            notify(f"[{len(measured) + len(failures)}/{len(distinct)}] {each.name}: {outcome}")
    return measured, failures


def start_runs(
    pending: Sequence[PlannedRun], out: Path, jobs: int, open_display: OpenDisplay
) -> Generator[tuple[PlannedRun, Callable[[], RunMeasurements]], None, None]:
    """Yield each run and how to get its result. Several jobs are processes; Ctrl-C reaches them, and each saves."""
    if jobs == 1:
        for each in pending:
            with open_display() as display:
                yield each, partial(train_and_measure, each, out, 1, display)
        return
    jobs = min(jobs, max(1, len(pending)))
    threads = max(1, count_usable_cores() // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, init_worker, (threads,)) as pool:
        try:
            futures = {pool.submit(train_and_measure, each, out, jobs): each for each in pending}
            for future in as_completed(futures):
                yield futures[future], future.result
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def init_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    exit_with_parent()  # a killed comparison must not train on


def load_measurements(planned: PlannedRun, out: Path) -> RunMeasurements | None:
    path = out / RESULTS_FOLDER / f"{planned.name}.json"
    stored = settings.read_json(path) if path.exists() else None
    if stored and stored["settings"] != planned.settings:
        changes = ", ".join(sorted(run_config.diff_settings(stored["settings"], planned.settings)))
        raise TrainError(f"{path}: was measured with other settings ({changes}); give another --out")
    return settings.from_dict(RunMeasurements, stored["measurements"], str(path)) if stored else None


def train_and_measure(
    planned: PlannedRun, out: Path, jobs: int, callback: EventHandler = lambda event: None
) -> RunMeasurements:
    """Train a run, or resume it, and store its measurements. Raise KeyboardInterrupt if a signal stopped it."""
    if torch.cuda.is_available():
        gc.collect()  # the model of the run before, which its search graphs keep
        torch.cuda.empty_cache()
    folder = out / RUNS_FOLDER / planned.name
    result = run.train(out=folder, settings=planned.settings, callbacks=[callback], progress=False)
    if result.stop_reason == "stopped":
        raise KeyboardInterrupt
    path = out / RESULTS_FOLDER / f"{planned.name}.json"
    path.parent.mkdir(exist_ok=True)
    measured = replace(measure_run(folder), jobs=jobs)
    settings.write_json({"settings": planned.settings, "measurements": settings.to_dict(measured)}, path)
    return measured


def open_data(config: RunConfig, tokenizer: Tokenizer, folder: Path) -> PreparedData:
    data_dir = folder / checkpoint.STATE_FOLDER / "data"
    context = RunContext(data_dir=data_dir, device=torch.device("cpu"), report=lambda event: None)
    return prepare_data(config, tokenizer, context)


def measure_run(folder: Path) -> RunMeasurements:
    """Translate the test set (without one, the validation set) with a complete run, and read its log."""
    config = read_run(folder / checkpoint.RUN_FILE)
    translator = Translator.load(folder, device=activate_device(config.train.device), engine="torch")
    prepared = open_data(config, translator.tokenizer, folder)
    texts = read_eval_set(prepared.splits.tests[:1] or prepared.splits.valid, prepared.splits.use_tags, "test")
    to = texts.language if prepared.splits.use_tags else None
    if not texts or (prepared.splits.use_tags and to is None):
        raise TrainError("a comparison needs a test set in one target language; name them with --test and --tgt")
    sources, references = texts.titles, [str(reference) for reference in texts.references]
    options = SearchOptions(beam_size=config.decode.beam_size, length_penalty=config.decode.length_penalty)
    translations, speed = measure_speed(translator, sources, options, to)
    outputs, metrics = [item.text for item in translations], ("bleu", "chrf")
    evaluation = evaluate(sources, references, outputs, metrics=metrics, language=texts.language, resamples=0)
    events = read_events(folder / LOG_FILE)
    started = [event for event in events if isinstance(event, Started)][-1]
    ended = [event for event in events if isinstance(event, Ended)][-1]
    validated = [event for event in events if isinstance(event, Validated)]
    progress = [event for event in events if isinstance(event, Progress)]
    step_tokens = sum(prepared.store.meta.token_counts.values()) / started.steps_per_epoch
    speeds = [event.tokens_per_second for event in progress if math.isfinite(event.tokens_per_second)]
    train_speed = median(speeds or [ended.step * step_tokens / ended.seconds])
    step_seconds = step_tokens / train_speed
    step_flops = count_step_flops(config, load_as(folder, Seq2Seq), prepared)
    by_length = sorted(evaluation.sentences, key=lambda sentence: (len(sentence.source.split()), sentence.number))
    drawn = next((i for i, text in enumerate(sources) if len(text.split()) in ATTENTION_WORDS), 0)
    return RunMeasurements(
        name=folder.name,
        data=", ".join(Path(name).name for name in config.data.train),
        conditions=f"{get_device_name(translator.device)}; attent {__version__}, torch {torch.__version__}, "
        f"{date.today().isoformat()}",
        parameters=started.parameters,
        precision=describe_precision(config, translator.model),
        steps=ended.step,
        epochs=ended.step / started.steps_per_epoch,
        seconds=ended.step * step_seconds,
        flops=ended.step * step_flops,
        valid_loss=min((event.loss for event in validated if math.isfinite(event.loss)), default=None),
        train_tokens_per_second=train_speed,
        decode_tokens_per_second=speed,
        test_set=texts.name,
        bleu=evaluation.scores[0].value,
        chrf=evaluation.scores[1].value,
        signature=evaluation.scores[0].signature,
        curve=tuple((e.step * step_seconds, e.step * step_flops, e.metrics.get("bleu", 0.0)) for e in validated),
        by_length=tuple(
            (f"{group.min_length}-{group.max_length or ''}", group.sentences, group.scores[0].value)
            for group in evaluation.groups
        ),
        samples=tuple(
            ValidationSample(source=sentence.source, reference=sentence.reference, output=sentence.output)
            for sentence in select_evenly(by_length, NUM_SAMPLES)
        ),
        attention=record_attention(folder, sources[drawn], references[drawn], to),
        peak_memory=max((event.peak_memory for event in progress if event.peak_memory), default=None),
    )


def measure_speed(
    translator: Translator, sources: Sequence[str], options: SearchOptions, to: str | None
) -> tuple[list[Translation], float]:
    """Return the translations and the median tokens per second of all sources at once, after a warm-up."""
    translations, speeds = translator.translate(sources, options, to=to), list[float]()
    num_tokens = sum(len(translation.token_ids) + 1 for translation in translations)
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        translator.translate(sources, options, to=to)
        speeds.append(num_tokens / (time.perf_counter() - start))
    return translations, median(speeds)


def describe_precision(config: RunConfig, model: torch.nn.Module) -> str:
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in model.modules())
    training = str(config.train.precision) + (", compiled" if config.train.compile else "")
    if has_lstm and config.train.precision != "float32":
        training += " (LSTM layers float32)"
    decoding = str(next(model.parameters()).dtype).removeprefix("torch.")
    return training if decoding == config.train.precision else f"{training}; decoding {decoding}"


def count_step_flops(config: RunConfig, model: Seq2Seq, prepared: PreparedData) -> float:
    passes = FORWARD_BACKWARD * (2 if config.train.rdrop else 1)
    num_batches = build_train_batches(prepared, config.data, config.train).num_batches(0)
    num_pairs = len(prepared.store) / num_batches * config.train.accumulate
    return passes * num_pairs * count_pair_flops(model, prepared.store)


def count_pair_flops(model: Seq2Seq, store: TokenStore) -> float:
    """FLOPs of the forward pass on a sentence pair: the mean over some of the training pairs, without padding."""
    set_backend(model, "explicit")  # whose matrix products are counted
    pairs = select_evenly(range(len(store)), NUM_COUNTED_PAIRS)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32")  # of Intel GPUs, whenever oneDNN's flags are set
        with torch.backends.mkldnn.flags(enabled=False):  # its LSTM is one operation, which is not counted
            for i in pairs:
                model(*(torch.tensor(side[i].astype("int64"))[None] for side in (store.source, store.target)))
    return counter.get_total_flops() / len(pairs)


def record_attention(folder: Path, source: str, target: str, to: str | None) -> str:
    """Record the head that aligns best, on a test sentence and its reference."""
    try:
        inspection = look(folder, source, target=target, to=to, kind="cross")
        path, head = inspection.select_head()
    except ValueError:  # no cross-attention
        return ""
    document = inspection.label_rows(path, head)
    shown = {"sides": document["sides"], "layers": [layer for layer in document["layers"] if layer["path"] == path]}
    return json.dumps({"document": shown, "path": path, "head": head})
