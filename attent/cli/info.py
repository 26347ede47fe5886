"""`attent info`: what a model folder is, on one page: the model, its tokenizer, how far its training has come.

It reads and changes nothing. Every checksum of the model is verified on the way; checkpoints are only counted, since
training verifies those itself when it goes on.
"""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attent.formatting import escape_invisible, format_bytes

if TYPE_CHECKING:
    from attent.models import Model
    from attent.nn import StackConfig
    from attent.text import Tokenizer
    from attent.training.events import Event, Validated

EXIT_FAILED = 1
LABEL_WIDTH = 14  # columns of the names on the left
PAGE_WIDTH = 80
STATE_FOLDER, RUN_FILE, FINISHED_FILE = "state", "run.toml", "finished.json"
# What a person asks about a run first; run.toml has the rest.
SHOWN_SETTINGS = (
    "task", "size", "init_from",  "data.train", "data.src", "data.tgt", "data.valid", "train.steps", "train.batch_tokens",
    "train.lr", "train.warmup", "train.schedule", "train.label_smoothing", "model.encoder.dropout",
    "model.stack.dropout", "train.ema", "train.seed",
)  # fmt: skip
PART_NAMES = {
    "source_embedding": "source embedding",
    "target_embedding": "target embedding",
    "embedding": "embedding",
    "segment_embedding": "kinds of text",
    "patch_embedding": "patches",
    "class_token": "class token",
    "encoder": "encoder",
    "decoder": "decoder",
    "masked_lm": "masked words",
    "pooler": "pooler",
    "classifier": "classifier",
    "output": "output",
}
MODEL_KINDS = {
    "seq2seq": "encoder-decoder Transformer",
    "causal": "decoder-only Transformer, a language model",
    "encoder": "encoder-only Transformer, a reader of text",
    "vision": "encoder-only Transformer, a reader of images",
}
MAX_LABELS = 8  # that are named
SPAN_MODEL_COMMANDS = ("train --from", "fill", "look")  # what a model is made for that has learned to fill spans


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    kind: str
    saved_by: str  # "attent", "Hugging Face"
    encoder: dict[str, Any] | None
    decoder: dict[str, Any] | None
    vocabulary: int | None
    target_vocabulary: int | None
    images: str  # what it reads, where that is no text
    labels: tuple[str, ...]  # that it chooses among
    commands: tuple[str, ...]  # that it is made for
    parameters: int
    parts: dict[str, int]  # what is shared counts once, where it comes first
    precision: str
    checked: bool  # against checksums; a Hugging Face folder has none


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    kind: str
    joint: bool
    source_size: int
    target_size: int
    languages: tuple[str, ...]  # that have a tag
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TrainingInfo:
    settings: dict[str, Any]  # the main ones of run.toml, by their path
    checkpoints: tuple[int, ...]  # steps
    step: int | None  # that the log has come to
    ended: str | None  # why, when it has
    last: dict[str, Any] | None  # validation
    best: dict[str, Any] | None
    weights: str | None  # which of all were kept at the end
    scores: tuple[dict[str, Any], ...]  # of those, once the run is complete


@dataclass(frozen=True, kw_only=True)
class FolderInfo:
    folder: str
    bytes: int
    state_bytes: int  # of it, what only resuming needs
    model: ModelInfo | None
    tokenizer: TokenizerInfo | None
    training: TrainingInfo | None
    problems: tuple[str, ...]


def info(
    model: Annotated[Path, Parameter(help="a model folder, attent's or Hugging Face's")],
    *,
    json: Annotated[bool, Parameter(help="print everything as one JSON object", negative="")] = False,
) -> int:
    """Say what a model folder holds, whether it is whole, and how far its training has come."""
    facts = inspect_folder(model)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console that cannot show a letter shows its number
    print(
        json_module.dumps(asdict(facts), indent=2, ensure_ascii=False, default=str)
        if json
        else "\n".join(format_page(facts))
    )
    return EXIT_FAILED if facts.problems else 0


# ---- looking ---------------------------------------------------------------------------------------------------------


def inspect_folder(folder: Path) -> FolderInfo:
    """All that can be said. What is damaged is a problem among the facts; what is no model at all is an error."""
    from attent.storage.errors import FolderError

    root = folder.expanduser()
    problems: list[str] = []
    training = inspect_training(root, problems)
    model = None
    try:
        model = inspect_model(root, str(folder))
    except FolderError as error:
        if training is None:
            raise
        if not _has_no_model(root):
            problems.append(str(error))
    if model is not None and training is not None and training.settings.get("task") == "spans":
        model = replace(model, commands=SPAN_MODEL_COMMANDS)
    tokenizer = inspect_tokenizer(root, problems)
    sizes = _measure_sizes(root)
    return FolderInfo(
        folder=str(folder),
        bytes=sum(sizes.values()),
        state_bytes=sizes[STATE_FOLDER],
        model=model,
        tokenizer=tokenizer,
        training=training,
        problems=tuple(problems),
    )


def _has_no_model(root: Path) -> bool:
    from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE
    from attent.storage.manifest import MANIFEST_FILE

    return not any((root / name).exists() for name in (CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE))


def inspect_model(root: Path, name: str) -> ModelInfo:
    from attent import interop
    from attent.interop import hf_folder

    model = interop.load(name)  # verifies every checksum of ours
    ours = hf_folder.is_attent_folder(root)
    encoder, decoder = _describe_stacks(model)
    return ModelInfo(
        kind=MODEL_KINDS[model.config.kind],
        saved_by="attent" if ours else "Hugging Face",
        encoder=encoder,
        decoder=decoder,
        vocabulary=getattr(model.config, "vocab", None),
        target_vocabulary=getattr(model.config, "output_vocab", None),
        images=_describe_images(model),
        labels=getattr(model.config, "labels", ()),
        commands=_list_commands(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parts=_count_parameters(model),
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
        checked=ours,
    )


def _describe_stacks(model: Model) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    from attent.models import CausalLM, Seq2Seq

    if isinstance(model, Seq2Seq):
        return _describe_stack(model.config.encoder), _describe_stack(model.config.decoder)
    return (
        (None, _describe_stack(model.config.stack))
        if isinstance(model, CausalLM)
        else (_describe_stack(model.config.stack), None)
    )


def _describe_images(model: Model) -> str:
    from attent.models import VisionTransformer

    if not isinstance(model, VisionTransformer):
        return ""
    config = model.config
    colour = {1: "grey", 3: "in colour"}.get(config.channels, f"of {config.channels} channels")
    patches = f"in {pluralize(config.num_patches, 'patch')} of {config.patch_size} x {config.patch_size}"
    fit = "the middle of a picture" if config.fit == "crop" else "a picture squashed to a square"
    return f"{config.image_size} x {config.image_size}, {colour}, {patches}; {fit}"


def _list_commands(model: Model) -> tuple[str, ...]:
    from attent.models import CausalLM, Seq2Seq, TextEncoder

    if isinstance(model, Seq2Seq):
        return ("translate", "score", "look")
    if isinstance(model, CausalLM):
        return ("generate", "embed", "look")
    fill = ("fill",) if isinstance(model, TextEncoder) and model.masked_lm is not None else ()
    return (*fill, *(("classify",) if model.config.labels else ()), "embed", "look")


def _describe_stack(config: StackConfig) -> dict[str, Any]:
    return {
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "pruned": config.num_removed_heads,
        "ffn_width": config.ffn_width,
        "activation": config.activation,
        "positions": config.positions.kind,
        "norm": f"{config.norm_order}-{config.norm}",
    }


def _count_parameters(model: Model) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[name.partition(".")[0]] += parameter.numel()
    shared = getattr(model.config, "share_embeddings", False)
    names = PART_NAMES | ({"source_embedding": "embedding"} if shared else {})
    return {told: counts[name] for name, told in names.items() if counts[name]}


def inspect_tokenizer(root: Path, problems: list[str]) -> TokenizerInfo | None:
    from attent.text.tokenizer import TOKENIZER_FORMATS, Tokenizer, TokenizerError

    names = {name for layout in TOKENIZER_FORMATS for name in layout.required_files}
    if not any((root / name).exists() for name in names):
        return None
    try:
        tokenizer = Tokenizer.load(root)
    except (TokenizerError, OSError, ImportError) as error:  # ImportError: tokenizer.json needs an extra
        problems.append(f"the tokenizer cannot be read: {error}")
        return None
    return TokenizerInfo(
        kind=_describe_tokenizer(tokenizer),
        joint=tokenizer.joint,
        source_size=tokenizer.source.size,
        target_size=tokenizer.target.size,
        languages=tokenizer.source.tags,
        sha256=tokenizer.fingerprint,
    )


def _describe_tokenizer(tokenizer: Tokenizer) -> str:
    from attent.text.vocabulary import SentencePieceVocabulary

    if not isinstance(tokenizer.source, SentencePieceVocabulary):
        return "Marian (SentencePiece)" if "source.spm" in tokenizer.files else "tokenizer.json"
    processor = tokenizer.source.processor
    pieces = [
        i
        for i in range(processor.get_piece_size())
        if not (processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i))
    ]
    if all(len(processor.id_to_piece(i)) == 1 for i in pieces):
        return "SentencePiece characters"
    merges = all(processor.get_score(i).is_integer() for i in pieces)  # BPE's scores count the merges
    return f"SentencePiece {'BPE' if merges else 'unigram'}"


def inspect_training(root: Path, problems: list[str]) -> TrainingInfo | None:
    from attent.training import event_log
    from attent.training.checkpoint import list_steps

    state, run, told = root / STATE_FOLDER, root / RUN_FILE, root / event_log.LOG_FILE
    if not (state.is_dir() or run.is_file() or told.is_file()):
        return None
    try:
        events = event_log.read_events(told) if told.is_file() else []
    except OSError as error:
        events = []
        problems.append(f"{told}: cannot be read ({error.strerror}); check its permissions")
    progress = _summarize_events(events)
    return TrainingInfo(
        settings=_read_settings(run, problems),
        checkpoints=tuple(list_steps(state)) if state.is_dir() else (),
        **progress,
        **_read_finished(state / FINISHED_FILE, progress["step"], problems),
    )


def _read_finished(path: Path, step: int | None, problems: list[str]) -> dict[str, Any]:
    """What the run wrote when it was complete; a run that has gone on since is complete no longer."""
    from attent import settings

    facts: dict[str, Any] = {}
    try:
        facts = settings.read_json(path) if path.is_file() else {}
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
    if step is not None and facts.get("step") != step:
        facts = {}
    scores = facts.get("scores")
    return {
        "weights": facts.get("weights"),
        "scores": tuple(one for one in scores if isinstance(one, dict)) if isinstance(scores, list) else (),
    }


def _read_settings(path: Path, problems: list[str]) -> dict[str, Any]:
    from attent import settings

    if not path.is_file():
        return {}
    try:
        tables = settings.read_toml_dict(path)
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
        return {}
    return {name: value for name in SHOWN_SETTINGS if (value := _get_setting(tables, name)) is not None}


def _get_setting(tables: Mapping[str, Any], path: str) -> Any:
    value: Any = tables
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _summarize_events(events: Sequence[Event]) -> dict[str, Any]:
    from attent.training.events import Ended, Progress, Started, Validated

    validated = [event for event in events if isinstance(event, Validated)]
    best = [event for event in validated if event.best]
    moves = [event for event in events if isinstance(event, Started | Progress | Ended)]  # notes may follow the end
    ended = moves[-1] if moves and isinstance(moves[-1], Ended) else None
    return {
        "step": max((e.step for e in events if isinstance(e, Progress | Validated | Ended)), default=None),
        "ended": ended.reason if ended else None,
        "last": _summarize_validation(validated[-1]) if validated else None,
        "best": _summarize_validation(best[-1]) if best else None,
    }


def _summarize_validation(event: Validated) -> dict[str, Any]:
    loss = event.loss if event.loss == event.loss else None  # JSON has no NaN
    return {"step": event.step, "loss": loss, "metrics": dict(event.metrics)}


def _measure_sizes(root: Path) -> Counter[str]:
    """Bytes of what lies in the folder, by its first name inside; links and what vanishes meanwhile count nothing."""
    sizes: Counter[str] = Counter()
    for path in root.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(root).parts[0]] += path.stat().st_size
        except OSError:
            continue
    return sizes


# ---- the page --------------------------------------------------------------------------------------------------------


def format_page(folder_info: FolderInfo) -> Iterator[str]:
    for problem in folder_info.problems:
        yield from format_row("PROBLEM", problem)
    yield from format_row("folder", folder_info.folder)
    kept = (
        f", of which {format_bytes(folder_info.state_bytes)} only for resuming ({STATE_FOLDER}/)"
        if folder_info.state_bytes
        else ""
    )
    yield from format_row("on disk", format_bytes(folder_info.bytes) + kept)
    yield from _model_rows(folder_info.model)
    if folder_info.tokenizer:
        yield from _tokenizer_rows(folder_info.tokenizer, folder_info.model)
    elif folder_info.model and folder_info.model.vocabulary is not None:
        yield from format_row("tokenizer", "none in this folder")
    if folder_info.training:
        yield from _training_rows(folder_info.training)


def _model_rows(model: ModelInfo | None) -> Iterator[str]:
    if model is None:
        yield from format_row("model", "none yet, or none that can be read")
        return
    yield from format_row("model", f"{model.kind}, saved by {model.saved_by}")
    yield from format_row(
        "", "every checksum holds" if model.checked else "has no checksums (Hugging Face writes none)"
    )
    yield from format_row("made for", ", ".join(f"attent {command}" for command in model.commands))
    if model.encoder and model.encoder == model.decoder:
        yield from format_row("both stacks", format_stack(model.encoder))
    else:
        yield from format_row("encoder", format_stack(model.encoder)) if model.encoder else ()
        yield from format_row("decoder", format_stack(model.decoder)) if model.decoder else ()
    yield from _input_rows(model)
    yield from format_row("parameters", f"{model.parameters:,} in {model.precision}")
    yield from format_row("", ", ".join(f"{name} {count:,}" for name, count in model.parts.items()))


def _input_rows(model: ModelInfo) -> Iterator[str]:
    """What goes in, and what it chooses among."""
    if model.images:
        yield from format_row("images", model.images)
    if model.vocabulary is not None:
        same = model.target_vocabulary in (None, model.vocabulary)
        yield from format_row(
            "vocabulary", f"{model.vocabulary:,}" + ("" if same else f" and {model.target_vocabulary:,}")
        )
    if model.labels:
        some = ", ".join(model.labels[:MAX_LABELS]) + (" ..." if len(model.labels) > MAX_LABELS else "")
        yield from format_row("labels", f"{len(model.labels):,}: {some}")


def format_stack(stack: Mapping[str, Any]) -> str:
    pruned = f" ({stack['pruned']} pruned in all layers)" if stack["pruned"] else ""
    return (
        f"{pluralize(stack['layers'], 'layer')}, width {stack['width']:,}, {pluralize(stack['heads'], 'head')}{pruned}, "
        f"FFN width {stack['ffn_width']:,}, {stack['activation']}, {stack['positions']} positions, {stack['norm']} norm"
    )


def _tokenizer_rows(tokenizer: TokenizerInfo, model: ModelInfo | None) -> Iterator[str]:
    one_sided = model is not None and model.target_vocabulary is None
    pieces = f"{tokenizer.source_size:,} pieces" + ("" if one_sided else " for both sides")
    if not tokenizer.joint:
        pieces = f"{tokenizer.source_size:,} and {tokenizer.target_size:,} pieces"
    yield from format_row("tokenizer", f"{tokenizer.kind}, {pieces}")
    if tokenizer.languages:
        yield from format_row("", f"languages to ask for: {', '.join(tokenizer.languages)}")
    yield from format_row("", f"SHA-256 {tokenizer.sha256[:16]}…")


def _training_rows(training: TrainingInfo) -> Iterator[str]:
    words = {"steps": "all updates done", "patience": "stopped early, no longer better", "stopped": "stopped by hand"}
    if training.step is not None:
        how = words.get(training.ended or "", "not ended: it runs, or was interrupted")
        yield from format_row("training", f"{pluralize(training.step, 'update')}; {how}")
    if training.checkpoints:
        kept = training.checkpoints
        yield from format_row("checkpoints", f"{len(kept):,} kept, the newest of step {kept[-1]:,}")
    elif training.step is not None:
        yield from format_row("checkpoints", "none")
    if training.last:
        yield from format_row("last checked", format_validation(training.last))
    if training.best:
        yield from format_row("best", format_validation(training.best))
    if training.weights:
        yield from format_row("kept", f"{training.weights}")
    for one in training.scores:
        yield from format_row("scored", format_set_scores(one))
    told = [
        f"{name.removeprefix('train.')} {format_value(value)}"
        for name, value in training.settings.items()
        if value != []
    ]
    if told:
        yield from format_row("run.toml", ", ".join(told))


def format_validation(validation: Mapping[str, Any]) -> str:
    return f"step {validation['step']:,}: {format_metrics(validation)}"


def format_set_scores(scores: Mapping[str, Any]) -> str:
    count, unit = scores.get("num_examples"), scores.get("unit")
    size = f" of {pluralize(count, str(unit))}" if isinstance(count, int) else ""
    return f"{scores.get('split', 'set')} {scores.get('name', '')}{size}: {format_metrics(scores)}"


def format_metrics(scores: Mapping[str, Any]) -> str:
    """`loss 2.000, BLEU 31.2, exact 4.1%`"""
    from attent.scoring import metrics as scoring

    metrics = {name: value for name, value in scores.get("metrics", {}).items() if isinstance(value, int | float)}
    losses = {name: scores.get(name, metrics.get(name)) for name in ("loss", "perplexity")}
    parts = [f"{name} {value:.3f}" for name, value in losses.items() if isinstance(value, int | float)]
    return ", ".join([*parts, *filter(None, [scoring.format_metrics(metrics)])])


def pluralize(count: int, noun: str) -> str:
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending if count != 1 else ''}"


def format_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def format_row(name: str, text: str) -> Iterator[str]:
    """A name and what is to be said, broken at spaces so that a page has 80 columns."""
    from rich.cells import cell_len, chop_cells

    lines = [""]
    for word in escape_invisible(text).split(" "):
        for i, part in enumerate(chop_cells(word, PAGE_WIDTH - LABEL_WIDTH) or [""]):
            joined = f"{lines[-1]} {part}" if lines[-1] and i == 0 else lines[-1] + part
            if cell_len(joined) <= PAGE_WIDTH - LABEL_WIDTH:
                lines[-1] = joined
            else:
                lines.append(part)
    yield f"{name:<{LABEL_WIDTH}}{lines[0]}".rstrip()
    yield from (" " * LABEL_WIDTH + line for line in lines[1:])
