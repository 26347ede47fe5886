"""Convert our Seq2Seq to a CTranslate2 model, which opens damaged files without an error: `is_intact` checks them."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from attent import settings
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.pruning import restore_heads
from attent.models.seq2seq import find_suppressed_tokens
from attent.models.weights import collect_tensors
from attent.nn import LearnedConfig, RelativeConfig, RotaryConfig, SinusoidalConfig, StackConfig, make_sinusoids
from attent.nn.config import Activation
from attent.storage.atomic import NEW_SUFFIX, atomic_folder, make_folder, write_synced
from attent.storage.errors import AttentError, FolderError
from attent.storage.manifest import explain_save_errors, find_damage, hash_file, read_manifest, write_manifest
from attent.text.tokenizer import Tokenizer, Vocabulary

CONVERSION_VERSION = 1  # increment it when older conversions must be made again
MAX_POSITIONS = 2048  # of the sinusoids that are written (4 MB at width 512); longer texts use the PyTorch engine
SUPPRESSED_LOGIT = -1e9  # the logit of a suppressed token: probability 0, but finite
STALE_SECONDS = 3600  # a conversion takes seconds
CHECKSUMS_FILE, ORIGIN_FILE = "checksums.json", "origin.json"
QUANTIZATIONS = ("int8", "int16", "float16", "bfloat16", "float32")
INSTALL_HINT = "CTranslate2 is not installed; run: pip install 'ctranslate2>=4.8.4'"


class ConversionError(AttentError):
    """The model cannot be written for CTranslate2; the message says why."""


def import_ctranslate2() -> Any:
    try:
        import ctranslate2
        import ctranslate2.specs
    except ImportError as error:
        raise ConversionError(f"{INSTALL_HINT} ({error})") from error
    return ctranslate2


def write_conversion(
    model: Seq2Seq,
    tokenizer: Tokenizer | None,
    folder: str | os.PathLike[str],
    *,
    quantization: str = "int8",
    suppressed_tokens: Iterable[int] | None = None,
) -> None:
    """Write a conversion atomically, replacing an older one.

    tokenizer          names the tokens; without it they are `<0>`, `<1>` and so on
    suppressed_tokens  target ids that are never generated; None: `find_suppressed_tokens`
    """
    root = Path(folder).expanduser().absolute()
    default_banned = find_suppressed_tokens(model.config, tokenizer)
    banned = default_banned if suppressed_tokens is None else sorted(set(suppressed_tokens))
    origin = {"fingerprint": compute_fingerprint(model, tokenizer, quantization, banned), "quantization": quantization}
    spec = to_spec(model, tokenizer, banned)
    spec.validate()
    spec.optimize(quantization=quantization)
    with explain_save_errors(root, "conversion"):
        make_folder(root.parent)
        for aside in root.parent.glob(f".{root.name}.*{NEW_SUFFIX}"):  # of killed processes; recent ones may be in use
            if time.time() - aside.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(aside, ignore_errors=True)
        with atomic_folder(root) as staged:
            spec.save(os.fspath(staged))
            write_synced(staged / ORIGIN_FILE, json.dumps(origin, indent=2).encode())
            write_manifest(staged / CHECKSUMS_FILE, {path.name: hash_file(path) for path in sorted(staged.iterdir())})
            is_conversion = (root / ORIGIN_FILE).exists() or (root / CHECKSUMS_FILE).exists()
            if root.exists() and not is_conversion and not (root.is_dir() and not any(root.iterdir())):
                raise FolderError(f"{root}: holds something else than a conversion; give another folder, or remove it")


def is_intact(folder: Path, fingerprint: str) -> bool:
    """True if the folder holds a conversion of exactly this model, with valid checksums."""
    try:
        entries = read_manifest(folder / CHECKSUMS_FILE, "conversion")
        intact = {"model.bin", "config.json", ORIGIN_FILE} <= entries.keys() and all(
            find_damage(folder / name, entry) is None for name, entry in entries.items()
        )
        return intact and settings.read_json(folder / ORIGIN_FILE).get("fingerprint") == fingerprint
    except (FolderError, settings.SettingsError, OSError):
        return False


def compute_fingerprint(
    model: Seq2Seq, tokenizer: Tokenizer | None, quantization: str, suppressed_tokens: Sequence[int]
) -> str:
    """Hash everything that determines the conversion: options, versions, config and the weights in memory."""
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ConversionError(f"`quantization` must be one of {known}, but is {quantization!r}")
    facts = {
        "layout": CONVERSION_VERSION,
        "ctranslate2": import_ctranslate2().__version__,
        "quantization": quantization,
        "suppressed_tokens": list(suppressed_tokens),
        "model": settings.to_dict(model.config),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    seen: dict[int, str] = {}
    for name, tensor in collect_tensors(model, build_empty(model.config)).items():
        first = seen.setdefault(tensor.data_ptr(), name)
        digest.update(f"{name} {first} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if first == name:  # embeddings may have three names
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def build_vocabularies(config: Seq2SeqConfig, tokenizer: Tokenizer | None) -> tuple[list[str], list[str]]:
    """Return the names of all source and target ids. They are unique, since CTranslate2's interface takes names."""
    source, target = (None, None) if tokenizer is None else (tokenizer.source, tokenizer.target)
    return name_tokens(source, config.vocab), name_tokens(target, config.output_vocab)


def name_tokens(vocabulary: Vocabulary | None, size: int) -> list[str]:
    known = 0 if vocabulary is None else min(vocabulary.size, size)
    pieces = [] if vocabulary is None else vocabulary.to_pieces(range(known))
    pieces += [f"<{'' if vocabulary is None else 'unused_'}{i}>" for i in range(known, size)]
    taken: dict[str, None] = {}
    for i, piece in enumerate(pieces):
        name = piece
        while name in taken:
            name = f"{name}<{i}>"
        taken[name] = None
    return list(taken)


def check_expressible(config: Seq2SeqConfig) -> None:
    encoder, decoder = config.stacks
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        if not isinstance(stack.positions, SinusoidalConfig | LearnedConfig | RotaryConfig | RelativeConfig):
            reject_field(f"{side}.positions", stack.positions, "sinusoidal, learned, rotary or relative")
        if isinstance(stack.positions, RotaryConfig) and stack.positions.scaling is not None:
            reject_field(f"{side}.positions.scaling", stack.positions.scaling, "None")
        required = {"window": (None, (None, None)), "scale_by_layer": (False,), "compatibility": ("dot",)}
        for name, allowed in required.items():
            if getattr(stack, name) not in allowed:
                reject_field(f"{side}.{name}", getattr(stack, name), str(allowed[0]))
    if config.frontend is not None:
        reject_field("frontend", config.frontend, "None")
    if config.output_transform:
        reject_field("output_transform", True, "False")
    if encoder.norm_eps != decoder.norm_eps:
        reject_field("decoder.norm_eps", decoder.norm_eps, f"that of the encoder, {encoder.norm_eps},")


def reject_field(name: str, value: object, required: str) -> None:
    raise ConversionError(
        f"`{name}` must be {required} for CTranslate2, but is {value!r}; use the PyTorch engine (--engine torch)"
    )


def to_spec(model: Seq2Seq, tokenizer: Tokenizer | None, suppressed_tokens: Sequence[int]) -> Any:
    """Build the specification from copies, since CTranslate2 quantizes in place; pruned heads become zeros."""
    model = restore_heads(model)
    config = model.config
    check_expressible(config)
    specs = import_ctranslate2().specs
    tensors = {
        name: tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, tensor in collect_tensors(model, build_empty(config)).items()
    }
    encoder, decoder = config.stacks
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(encoder.layers, encoder.heads, **build_spec_options(encoder)),
        specs.TransformerDecoderSpec(decoder.layers, decoder.heads, **build_spec_options(decoder)),
    )
    for side, stack, target in (("encoder", encoder, spec.encoder), ("decoder", decoder, spec.decoder)):
        target.scale_embeddings = config.scale_embeddings
        fill_stack(target, stack, side, tensors)
    spec.encoder.embeddings[0].weight = tensors["source_embedding.weight"]
    spec.decoder.embeddings.weight = tensors["target_embedding.weight"]
    if config.scale_output:
        spec.decoder.scale_outputs = decoder.width**-0.5
    spec.decoder.projection.weight = tensors["output.weight"]
    bias = tensors.get("output.bias", torch.zeros(config.output_vocab).numpy())
    bias[list(suppressed_tokens)] = SUPPRESSED_LOGIT
    spec.decoder.projection.bias = bias
    source, target = build_vocabularies(config, tokenizer)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.layer_norm_epsilon = encoder.norm_eps
    spec.config.bos_token = spec.config.decoder_start_token = target[config.start_id]
    spec.config.eos_token = target[config.end_id]
    spec.config.unk_token = target[config.end_id if tokenizer is None else tokenizer.target.unknown]
    return spec


def build_spec_options(stack: StackConfig) -> dict[str, Any]:
    activations = dict(zip(get_args(Activation), ("RELU", "GELU", "GELUTanh", "SWISH"), strict=True))
    shaped: dict[str, Any] = {
        "pre_norm": stack.norm_order == "pre",
        "activation": getattr(import_ctranslate2().specs.Activation, activations[stack.activation]),
        "ffn_glu": stack.gated,
        "rms_norm": stack.norm == "rms",
        "layernorm_embedding": stack.embedding_norm,
        "relative_attention_bias": isinstance(stack.positions, RelativeConfig),
        "num_heads_kv": stack.kv_heads,
        "head_dim": stack.head_width,
    }
    if isinstance(stack.positions, RotaryConfig):
        shaped["rotary_dim"] = 0  # all features of a head
        shaped["rotary_interleave"] = stack.positions.order == "interleaved"
        shaped["rotary_base"] = stack.positions.base
    return shaped


def fill_stack(spec: Any, stack: StackConfig, side: str, tensors: dict[str, Any]) -> None:
    match stack.positions:
        case SinusoidalConfig():
            # CTranslate2's own sinusoids start at position 1 and have other wavelengths.
            table = make_sinusoids(torch.arange(MAX_POSITIONS), stack.width, stack.positions.order)
            spec.position_encodings.encodings = table.numpy()
        case LearnedConfig():
            spec.position_encodings.encodings = tensors[f"{side}.positions.weight"]
        case RelativeConfig():
            for layer in spec.layer:
                layer.self_attention.relative_attention_bias = tensors[f"{side}.positions.weight"]
                layer.self_attention.relative_attention_max_distance = np.int32(stack.positions.max_distance)
    if stack.embedding_norm:
        set_norm(spec.layernorm_embedding, f"{side}.embedding_norm", tensors)
    if stack.norm_order == "pre":
        set_norm(spec.layer_norm, f"{side}.norm", tensors)
    for i, layer in enumerate(spec.layer):
        block = f"{side}.blocks.{i}"
        set_attention(layer.self_attention, f"{block}.self_attn", stack, tensors, cross=False)
        set_norm(layer.self_attention.layer_norm, f"{block}.self_attn_residual.norm", tensors)
        if stack.cross_attention:
            set_attention(layer.attention, f"{block}.cross_attn", stack, tensors, cross=True)
            set_norm(layer.attention.layer_norm, f"{block}.cross_attn_residual.norm", tensors)
        for linear, name in (("linear_0", "expand"), ("linear_1", "contract"), ("linear_0_noact", "gate")):
            if name != "gate" or stack.gated:
                set_linear(getattr(layer.ffn, linear), [f"{block}.feedforward.{name}"], tensors)
        set_norm(layer.ffn.layer_norm, f"{block}.feedforward_residual.norm", tensors)


def set_norm(spec: Any, name: str, tensors: dict[str, Any]) -> None:
    spec.gamma = tensors[f"{name}.weight"]
    if f"{name}.bias" in tensors:
        spec.beta = tensors[f"{name}.bias"]


def set_attention(spec: Any, name: str, stack: StackConfig, tensors: dict[str, Any], *, cross: bool) -> None:
    together = [["query"], ["key", "value"]] if cross else [["query", "key", "value"]]
    for linear, parts in zip(spec.linear, [*together, ["output"]], strict=True):
        set_linear(linear, [f"{name}.{part}" for part in parts], tensors)
    if stack.scale is not None:
        spec.queries_scale = float(stack.scale)


def set_linear(spec: Any, parts: list[str], tensors: dict[str, Any]) -> None:
    spec.weight = np.concatenate([tensors[f"{part}.weight"] for part in parts])
    if f"{parts[0]}.bias" in tensors:
        spec.bias = np.concatenate([tensors[f"{part}.bias"] for part in parts])


def get_max_length(stack: StackConfig) -> int | None:
    """Return the number of positions of a conversion; None: no limit."""
    match stack.positions:
        case SinusoidalConfig():
            return MAX_POSITIONS
        case LearnedConfig():
            return stack.positions.max_length
    return None
