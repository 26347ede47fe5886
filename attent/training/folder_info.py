"""Description of a model folder: the model, its tokenizer, and the progress of its training.

Reads only. Every checksum of the model is verified; checkpoints are only listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attent import interop, settings
from attent.decoding.engines.ctranslate2 import find_ignored_conversions
from attent.formatting import format_count
from attent.interop import MODEL_DESCRIPTIONS, get_model_kind, hf_folder
from attent.models import CausalLM, Model, Seq2Seq, TextEncoder
from attent.models.config import DecoderStackConfig, EncoderStackConfig, get_stack_configs
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE, read_tokenizer
from attent.nn import ImageConfig, StackConfig, get_attention_layers
from attent.storage.errors import FolderError
from attent.storage.manifest import MANIFEST_FILE
from attent.text.tokenizer import TokenizerError
from attent.text.vocabulary import SentencePieceVocabulary
from attent.training.checkpoint import list_steps
from attent.training.config import flatten_settings
from attent.training.event_log import LOG_FILE, read_events
from attent.training.events import Ended, Event, Progress, Started, Validated
from attent.training.run_folder import FINISHED_FILE, RUN_FILE, STATE_FOLDER

# The main settings; run.toml has the rest.
SHOWN_SETTINGS = (
    "task", "arch", "size", "init_from", "data.train", "data.src", "data.tgt", "data.valid", "train.steps",
    "train.batch_tokens", "train.lr", "train.warmup", "train.schedule", "train.label_smoothing",
    "model.encoder.dropout", "model.stack.dropout", "train.ema", "train.seed",
)  # fmt: skip
PART_NAMES = {
    "source_embedding": "source embedding",
    "target_embedding": "target embedding",
    "embedding": "embedding",
    "segment_embedding": "segment embedding",
    "patch_embedding": "patches",
    "class_token": "class token",
    "encoder": "encoder",
    "decoder": "decoder",
    "memory_projection": "projection to the decoder",
    "ctc_output": "CTC output",
    "masked_lm": "masked LM head",
    "pooler": "pooler",
    "classifier": "classifier",
    "output": "output",
}
MODEL_KINDS = {
    "seq2seq": "encoder-decoder Transformer",
    "causal": "decoder-only Transformer (language model)",
    "encoder": "encoder-only Transformer (text)",
    "vision": "encoder-only Transformer (images)",
}
SPAN_MODEL_COMMANDS = ("train --from", "fill", "look")  # of a model trained on span corruption


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    kind: str
    saved_by: str  # "attent", "Hugging Face"
    encoder: dict[str, Any] | None
    decoder: dict[str, Any] | None
    vocabulary: int | None
    target_vocabulary: int | None
    images: str  # input of an image model, else ""
    labels: tuple[str, ...]
    commands: tuple[str, ...]  # of attent that use it
    parameters: int
    parts: dict[str, int]  # parameters; shared ones count once
    precision: str
    has_checksums: bool  # which were verified; Hugging Face folders have none


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    kind: str
    joint: bool
    source_size: int
    target_size: int
    languages: tuple[str, ...]  # with a tag
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TrainingInfo:
    settings: dict[str, Any]  # `SHOWN_SETTINGS` of run.toml
    checkpoints: tuple[int, ...]  # steps
    step: int | None  # the last in the log
    stop_reason: str | None
    last_validation: dict[str, Any] | None
    best_validation: dict[str, Any] | None
    weights: str | None  # of a complete run: which were chosen
    scores: tuple[dict[str, Any], ...]  # of a complete run


@dataclass(frozen=True, kw_only=True)
class FolderInfo:
    folder: str
    bytes: int
    state_bytes: int  # of checkpoints and data, needed only for resuming
    model: ModelInfo | None
    tokenizer: TokenizerInfo | None
    training: TrainingInfo | None
    problems: tuple[str, ...]
    ignored_conversions: tuple[str, ...]  # CTranslate2 conversions that came with the folder, which are never used


def inspect_folder(folder: Path) -> FolderInfo:
    """Describe a folder; damage is listed in `problems`, and a folder without a model or a run is an error."""
    root = folder.expanduser()
    problems: list[str] = []
    training = inspect_training(root, problems)
    model = None
    try:
        model = inspect_model(root, str(folder))
    except FolderError as error:
        if training is None:
            raise
        if any((root / name).exists() for name in (CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE)):
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
        ignored_conversions=tuple(path.name for path in find_ignored_conversions(root)),
    )


def inspect_model(root: Path, name: str) -> ModelInfo:
    model = interop.load(name)  # verifies the checksums of attent folders
    is_ours, kind = hf_folder.is_attent_folder(root), MODEL_KINDS[model.config.kind]
    if isinstance(model, Seq2Seq):
        kind = kind.replace("Transformer", model.config.decoder.description.partition(",")[0])
    counts: Counter[str] = Counter()
    for parameter_name, parameter in model.named_parameters():
        counts[parameter_name.partition(".")[0]] += parameter.numel()
    shared = getattr(model.config, "share_embeddings", False)
    part_names = PART_NAMES | ({"source_embedding": "embedding"} if shared else {})
    stacks = {name: _describe_stack(config) for name, config in get_stack_configs(model.config).items()}
    return ModelInfo(
        kind=kind,
        saved_by="attent" if is_ours else "Hugging Face",
        encoder=stacks.get("encoder"),
        decoder=stacks.get("decoder"),
        vocabulary=getattr(model.config, "vocab", None),
        target_vocabulary=getattr(model.config, "output_vocab", None),
        images=_describe_images(model),
        labels=getattr(model.config, "labels", ()),
        commands=_list_commands(model),
        parameters=counts.total(),
        parts={label: counts[name] for name, label in part_names.items() if counts[name]},
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
        has_checksums=is_ours,
    )


def _describe_images(model: Model) -> str:
    config = model.config.frontend if isinstance(model, Seq2Seq) else model.config
    if not isinstance(config, ImageConfig):
        return ""
    color = {1: "grayscale", 3: "RGB"}.get(config.channels, f"{config.channels} channels")
    patches = f"{format_count(config.num_patches, 'patch', 'patches')} of {config.patch_size} x {config.patch_size}"
    fit = "center crop" if config.fit == "crop" else "resized to a square"
    return f"{config.image_size} x {config.image_size}, {color}, {patches}; {fit}"


def _list_commands(model: Model) -> tuple[str, ...]:
    if isinstance(model, Seq2Seq | CausalLM):
        look = ("look",) if get_attention_layers(model) else ()
        command = MODEL_DESCRIPTIONS[get_model_kind(model)][1].removeprefix("attent ")
        return (command, "score" if isinstance(model, Seq2Seq) else "embed", *look)
    fill = ("fill",) if isinstance(model, TextEncoder) and model.masked_lm is not None else ()
    return (*fill, *(("classify",) if model.config.labels else ()), "embed", "look")


def _describe_stack(config: EncoderStackConfig | DecoderStackConfig) -> dict[str, Any]:
    if not isinstance(config, StackConfig):
        return {"layers": config.layers, "width": config.width, "description": config.description}
    return {
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "pruned": config.num_removed_heads,
        "compatibility": config.compatibility,
        "ffn_width": config.ffn_width,
        "activation": config.activation,
        "positions": config.positions.kind,
        "norm": f"{config.norm_order}-{config.norm}",
    }


def inspect_tokenizer(root: Path, problems: list[str]) -> TokenizerInfo | None:
    try:
        tokenizer = read_tokenizer(root)
    except (FolderError, TokenizerError, OSError, ImportError) as error:  # ImportError: tokenizer.json needs an extra
        problems.append(f"the tokenizer cannot be read: {error}")
        return None
    if tokenizer is None:
        return None
    kind = "Marian (SentencePiece)" if "source.spm" in tokenizer.files else "tokenizer.json"
    return TokenizerInfo(
        kind="SentencePiece" if isinstance(tokenizer.source, SentencePieceVocabulary) else kind,
        joint=tokenizer.joint,
        source_size=tokenizer.source.size,
        target_size=tokenizer.target.size,
        languages=tokenizer.source.tags,
        sha256=tokenizer.fingerprint,
    )


def inspect_training(root: Path, problems: list[str]) -> TrainingInfo | None:
    state, run, log = root / STATE_FOLDER, root / RUN_FILE, root / LOG_FILE
    if not (state.is_dir() or run.is_file() or log.is_file()):
        return None
    try:
        events = read_events(log)
    except OSError as error:
        events = []
        problems.append(f"{log}: cannot be read ({error.strerror}); check its permissions")
    progress = _summarize_events(events)
    return TrainingInfo(
        settings=_read_settings(run, problems),
        checkpoints=tuple(list_steps(state)) if state.is_dir() else (),
        **progress,
        **_read_finished(state / FINISHED_FILE, progress["step"], problems),
    )


def _read_finished(path: Path, step: int | None, problems: list[str]) -> dict[str, Any]:
    """Read the summary of a complete run; empty if training has continued since."""
    summary: dict[str, Any] = {}
    try:
        summary = settings.read_json(path) if path.is_file() else {}
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
    if step is not None and summary.get("step") != step:
        summary = {}
    scores = summary.get("scores")
    return {
        "weights": summary.get("weights"),
        "scores": tuple(item for item in scores if isinstance(item, dict)) if isinstance(scores, list) else (),
    }


def _read_settings(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tables = settings.read_toml_dict(path)
    except (settings.SettingsError, OSError) as error:
        problems.append(str(error))
        return {}
    resolved = dict(flatten_settings(tables))
    return {name: resolved[name] for name in SHOWN_SETTINGS if resolved.get(name) is not None}


def _summarize_events(events: Sequence[Event]) -> dict[str, Any]:
    validated = [event for event in events if isinstance(event, Validated)]
    best = [event for event in validated if event.best]
    phases = [event for event in events if isinstance(event, Started | Progress | Ended)]  # notes may follow the end
    ended = phases[-1] if phases and isinstance(phases[-1], Ended) else None
    return {
        "step": max((e.step for e in events if isinstance(e, Progress | Validated | Ended)), default=None),
        "stop_reason": ended.reason if ended else None,
        "last_validation": _summarize_validation(validated[-1]) if validated else None,
        "best_validation": _summarize_validation(best[-1]) if best else None,
    }


def _summarize_validation(event: Validated) -> dict[str, Any]:
    loss = event.loss if event.loss == event.loss else None  # JSON has no NaN
    return {"step": event.step, "loss": loss, "metrics": dict(event.metrics)}


def _measure_sizes(root: Path) -> Counter[str]:
    """Sum the bytes of each top-level entry; links and files that vanish meanwhile count as nothing."""
    sizes: Counter[str] = Counter()
    for path in root.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(root).parts[0]] += path.stat().st_size
        except OSError:
            continue
    return sizes
