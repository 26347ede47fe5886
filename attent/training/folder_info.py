"""Description of a model folder, every checksum of which is verified, as rows of text."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attent import interop, settings
from attent.formatting import format_bytes, format_count
from attent.interop import MODEL_DESCRIPTIONS, get_model_kind, hf_folder
from attent.interop.export import read_origin
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder
from attent.models.config import DecoderStackConfig, EncoderStackConfig, get_stack_configs
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE, read_tokenizer
from attent.nn import StackConfig, get_attention_layers
from attent.scoring.metrics import format_metrics
from attent.storage.errors import FolderError
from attent.storage.hub import locate_model
from attent.storage.manifest import MANIFEST_FILE
from attent.text.tokenizer import TokenizerError
from attent.text.vocabulary import SentencePieceVocabulary
from attent.training.checkpoint import FINISHED_FILE, RUN_FILE, STATE_FOLDER, list_steps
from attent.training.config import UserSettings, flatten_settings
from attent.training.events import LOG_FILE, Ended, Event, Progress, Started, Validated, read_events

MODEL_KINDS = {
    "seq2seq": "encoder-decoder Transformer",
    "causal": "decoder-only Transformer (language model)",
    "encoder": "encoder-only Transformer (text)",
    "vision": "encoder-only Transformer (images)",
}
SPAN_MODEL_COMMANDS = ("train --from", "look")  # of a model trained on span corruption
STOP_REASONS = {"steps": "complete", "patience": "stopped early, no improvement", "stopped": "stopped by the user"}
MAX_LABELS = 8

Rows = Iterator[tuple[str, str]]  # (label, text); a row without a label continues the one before


@dataclass(frozen=True)
class FolderInfo:
    rows: list[tuple[str, str]]
    problems: list[str]  # damage


def inspect_folder(folder: Path) -> FolderInfo:
    """Describe a folder; a folder without a model or a run is an error."""
    root = locate_model(folder)
    problems: list[str] = []
    run = _read_run(root / RUN_FILE, problems)
    training = list(_describe_training(root, run, problems))
    rows = [("folder", str(root))]
    if origin := read_origin(root):
        rows.append(("origin", f"{origin} of the Hugging Face hub"))
    rows += _describe_sizes(root)
    try:
        rows += _describe_model(interop.load(root), root, run)  # verifies the checksums of attent folders
    except FolderError as error:
        if not training:
            raise
        if any((root / name).exists() for name in (CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE)):
            problems.append(str(error))
        rows.append(("model", "none, or none that can be read"))
    rows += _describe_tokenizer(root, problems)
    return FolderInfo([*(("PROBLEM", problem) for problem in problems), *rows, *training], problems)


def _describe_sizes(root: Path) -> Rows:
    """Sum the bytes of all files; links and files that vanish meanwhile count as nothing."""
    sizes: Counter[str] = Counter()  # by top-level entry
    for path in root.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(root).parts[0]] += path.stat().st_size
        except OSError:
            continue
    state = sizes[STATE_FOLDER]
    resuming = f", of which {format_bytes(state)} only for resuming ({STATE_FOLDER}/)" if state else ""
    yield "on disk", format_bytes(sizes.total()) + resuming


def _describe_model(model: Model, root: Path, run: Mapping[str, Any]) -> Rows:
    is_ours, config, kind = hf_folder.is_attent_folder(root), model.config, MODEL_KINDS[model.config.kind]
    if isinstance(model, Seq2Seq):
        kind = kind.replace("Transformer", model.config.decoder.description.partition(",")[0])
    source = "attent" if is_ours else "Hugging Face" if (root / CONFIG_FILE).is_file() else "Marian"
    yield "model", f"{kind}, saved by {source}"
    yield "", "all checksums match" if is_ours else f"no checksums ({source} format)"
    commands = SPAN_MODEL_COMMANDS if run.get("task") == "spans" else _list_commands(model)
    yield "use with", ", ".join(f"attent {command}" for command in commands)
    stacks = {name: _describe_stack(stack) for name, stack in get_stack_configs(config).items()}
    yield from [("both stacks", stacks["encoder"])] if len({*stacks.values()}) < len(stacks) else stacks.items()
    vocab, output_vocab = getattr(config, "vocab", None), getattr(config, "output_vocab", None)
    if vocab is not None:
        yield "vocabulary", f"{vocab:,}" + (f" and {output_vocab:,}" if output_vocab not in (None, vocab) else "")
    if labels := getattr(config, "labels", ()):
        yield "labels", f"{len(labels):,}: {', '.join(labels[:MAX_LABELS])}{' ...' * (len(labels) > MAX_LABELS)}"
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():  # shared ones count once
        counts[name.partition(".")[0].replace("_", " ")] += parameter.numel()
    yield "parameters", f"{counts.total():,} in {str(next(model.parameters()).dtype).removeprefix('torch.')}"
    yield "", ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _list_commands(model: Model) -> tuple[str, ...]:
    if isinstance(model, Seq2Seq | CausalLM):
        look = ("look",) if get_attention_layers(model) else ()
        command = MODEL_DESCRIPTIONS[get_model_kind(model)][1].removeprefix("attent ")
        return (command, "score" if isinstance(model, Seq2Seq) else "embed", *look)
    fill = ("fill",) if isinstance(model, TextEncoder) and model.masked_lm is not None else ()
    return (*fill, *(("classify",) if model.config.labels else ()), "embed", "look")


def _describe_stack(config: EncoderStackConfig | DecoderStackConfig) -> str:
    size = f"{format_count(config.layers, 'layer')}, width {config.width:,}"
    if not isinstance(config, StackConfig):
        return f"{size}, {config.description}"
    heads = format_count(config.heads, "head") + " (additive)" * (config.compatibility == "additive")
    pruned = f" ({config.num_removed_heads} pruned in all layers)" if config.num_removed_heads else ""
    return (
        f"{size}, {heads}{pruned}, FFN width {config.ffn_width:,}, {config.activation}, "
        f"{config.positions.kind} positions, {config.norm_order}-{config.norm} norm"
    )


def _describe_tokenizer(root: Path, problems: list[str]) -> Rows:
    try:
        tokenizer = read_tokenizer(root)
    except (FolderError, TokenizerError, OSError, ImportError) as error:  # ImportError: tokenizer.json needs an extra
        problems.append(f"the tokenizer cannot be read: {error}")
        return
    if tokenizer is None:
        return
    kind = "Marian (SentencePiece)" if "source.spm" in tokenizer.files else "tokenizer.json"
    kind = "SentencePiece" if isinstance(tokenizer.source, SentencePieceVocabulary) else kind
    sizes = [tokenizer.source.size] if tokenizer.joint else [tokenizer.source.size, tokenizer.target.size]
    yield "tokenizer", f"{kind}, {' and '.join(f'{size:,}' for size in sizes)} pieces"
    if tags := tokenizer.source.tags:
        yield "", f"target languages: {', '.join(tags)}"
    yield "", f"SHA-256 {tokenizer.fingerprint[:16]}…"


def _describe_training(root: Path, run: Mapping[str, Any], problems: list[str]) -> Rows:
    state, log, events = root / STATE_FOLDER, root / LOG_FILE, list[Event]()
    if not (state.is_dir() or (root / RUN_FILE).is_file() or log.is_file()):
        return
    try:
        events = read_events(log)
    except OSError as error:
        problems.append(f"{log}: cannot be read ({error.strerror}); check its permissions")
    step = max((e.step for e in events if isinstance(e, Progress | Validated | Ended)), default=None)
    phases = [event for event in events if isinstance(event, Started | Progress | Ended)]  # notes may follow the end
    steps = list_steps(state) if state.is_dir() else []
    if step is not None:
        status = STOP_REASONS[phases[-1].reason] if phases and isinstance(phases[-1], Ended) else ""
        yield "training", f"{format_count(step, 'step')}; {status or 'running or interrupted'}"
    yield "checkpoints", f"{len(steps):,}, the newest at step {steps[-1]:,}" if steps else "none"
    validated = [event for event in events if isinstance(event, Validated)]
    best = [event for event in validated if event.best]
    for label, validation in (("last validated", validated[-1:]), ("best", best[-1:])):
        for event in validation:
            yield label, f"step {event.step:,}: loss {event.loss:.3f}, {format_metrics(event.metrics)}".rstrip(", ")
    yield from _describe_scores(state / FINISHED_FILE, step, problems)


def _describe_scores(path: Path, step: int | None, problems: list[str]) -> Rows:
    """Yield the scores of a complete run, unless training has continued since."""
    try:
        summary = settings.read_json(path) if path.is_file() else {}
        if summary and step in (None, summary["step"]):
            yield "weights", str(summary["weights"])
            for scores in summary["scores"]:
                count = format_count(scores["num_examples"], scores["unit"])
                loss = f"loss {scores['metrics']['loss']:.3f}" if "loss" in scores["metrics"] else ""
                metrics = ", ".join(filter(None, [loss, format_metrics(scores["metrics"])]))
                yield "scores", f"{scores['split']} {scores['name']} of {count}: {metrics}"
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
    except (KeyError, TypeError, ValueError):
        problems.append(f"{path}: is damaged; train again with the same --out to score the model again")


def _read_run(path: Path, problems: list[str]) -> UserSettings:
    try:
        return flatten_settings(settings.read_toml_dict(path)) if path.is_file() else {}
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
        return {}
