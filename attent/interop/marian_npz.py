"""Models that Marian has written (OPUS-MT, HPLT): MODEL.npz, with its settings inside -> Seq2Seq.

They differ from what `transformers` makes of them (`marian`) in the wavelengths of the positions and in epsilon.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.interop.conversion import ACTIVATION_FROM_HF, explain_config_errors, read_family_tables
from attent.interop.hf_folder import Device
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.config import mirror_encoder
from attent.models.weights import assign_weights
from attent.nn import SinusoidalConfig, StackConfig
from attent.storage.errors import AttentError, FolderError
from attent.text.tokenizer_formats import MarianFolder, parse_yaml, read_marian_tokenizer

SETTINGS = "special:model.yml"
NORM_EPS = 1e-6
PAD_BIAS = -1e4  # Marian's output has no padding: give it no probability
OUTPUT = "decoder_ff_logit_out"
UNTIED_OUTPUTS = (f"{OUTPUT}_Wt", f"{OUTPUT}_W")  # the second is transposed, as in old versions
BLOCK_TENSOR = re.compile(r"(\w+)\.blocks\.(\d+)\.(self_attn|cross_attn|feedforward)(?:\.(\w+)|_residual\.norm)\.\w+")
LAYERS = {"self_attn": ("self", "Wo"), "cross_attn": ("context", "Wo"), "feedforward": ("ffn", "ffn")}
PARTS = {"query": "q", "key": "k", "value": "v", "output": "o", "expand": "1", "contract": "2"}


def load(native: MarianFolder, *, dtype: torch.dtype | None, device: Device | None) -> Seq2Seq:
    files, path = read_marian_tokenizer(native), native.model
    source = json.loads(files["vocab.json"])
    target = json.loads(files.get("target_vocab.json", files["vocab.json"]))
    tensors: dict[str, Tensor] = {}  # by Marian's names
    with open_npz(path) as arrays:
        settings = parse_yaml(arrays[SETTINGS].tobytes().rstrip(b"\0"), path)
        model = build_empty(to_config(settings, source, target, set(arrays), path))
        names = {name: get_marian_name(name, model.config, set(arrays)) for name in model.state_dict()}
        for name, theirs in names.items():
            if theirs not in tensors:  # else tied
                tensor = convert_tensor(name, theirs, torch.from_numpy(arrays[theirs]))
                tensors[theirs] = tensor.to(device, dtype or torch.float32).contiguous()
        unknown = {name for name in set(arrays) - tensors.keys() if not name.startswith("special:")}
    if unknown:
        raise FolderError(f"{path}: `{min(unknown)}` is not known in a Transformer of Marian; use another model")
    return assign_weights(model, {name: tensors[theirs] for name, theirs in names.items()}, path)


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, np.ndarray[Any, Any]]]:
    """Open an .npz, whose arrays are read on demand; a pickle in it is refused."""
    try:
        with zipfile.ZipFile(path), np.load(path) as arrays:
            yield arrays
    except AttentError:
        raise
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FolderError(f"{path}: cannot be read as a Marian model ({error}); get it again") from error


def to_config(
    settings: Mapping[str, Any], source: Mapping[str, int], target: Mapping[str, int], stored: Set[str], where: Path
) -> Seq2SeqConfig:
    """The ids of both sides include padding; `stored` are the names of the tensors."""
    for key, allowed in read_family_tables()["marian_npz"]["required"].items():
        value = settings.get(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise FolderError(f"{where}: `{key}` must be {choices}, but is {value!r}; use another model")
    shared, ffn_width = "Wemb" in stored, int(settings["transformer-dim-ffn"])
    with explain_config_errors(where, {"width": "dim-emb", "heads": "transformer-heads"}):
        encoder = StackConfig(
            layers=int(settings["enc-depth"]),
            width=int(settings["dim-emb"]),
            heads=int(settings["transformer-heads"]),
            ffn_width=ffn_width,
            activation=ACTIVATION_FROM_HF[settings["transformer-ffn-activation"]],
            positions=SinusoidalConfig(order="marian"),
            norm_eps=NORM_EPS,
            embedding_norm="n" in settings["transformer-postprocess-emb"],
        )
        decoder_ffn_width = int(settings.get("transformer-decoder-dim-ffn", 0)) or ffn_width
        return Seq2SeqConfig(
            vocab=len(source),
            target_vocab=None if shared else len(target),
            encoder=encoder,
            decoder=replace(mirror_encoder(encoder), layers=int(settings["dec-depth"]), ffn_width=decoder_ffn_width),
            share_embeddings=shared,
            tie_output=stored.isdisjoint(UNTIED_OUTPUTS),
            output_bias=f"{OUTPUT}_b" in stored,
            start_id=target["<pad>"],
            end_id=target["</s>"],
        )


def get_marian_name(name: str, config: Seq2SeqConfig, stored: Set[str]) -> str:
    """Return Marian's name of a tensor."""
    if name.endswith("_embedding.weight") or (name == "output.weight" and config.tie_output):
        return "Wemb" if config.share_embeddings else "encoder_Wemb" if "source" in name else "decoder_Wemb"
    if name in ("output.weight", "output.bias"):
        names = (f"{OUTPUT}_b",) if name == "output.bias" else UNTIED_OUTPUTS
        return next((name for name in names if name in stored), names[0])
    side, is_bias = name.partition(".")[0], name.endswith(".bias")
    norm = "ln_bias" if is_bias else "ln_scale"
    match = BLOCK_TENSOR.fullmatch(name)
    if match is None:
        return f"{side}_emb_{norm}_pre"
    (layer, normalized), linear = LAYERS[match[3]], match[4]
    part = f"{'b' if is_bias else 'W'}{PARTS[linear]}" if linear else f"{normalized}_{norm}"
    return f"{side}_l{int(match[2]) + 1}_{layer}_{part}"


def convert_tensor(name: str, theirs: str, tensor: Tensor) -> Tensor:
    """Return Marian's tensor as ours: matrices are (outputs, inputs), and the vocabulary ends with padding."""
    if not theirs.endswith(("Wemb", "Wt")):
        tensor = tensor.flatten() if len(tensor) == 1 else tensor.t()
    if name == "output.bias":
        return F.pad(tensor, (0, 1), value=PAD_BIAS)
    return F.pad(tensor, (0, 0, 0, 1)) if name == "output.weight" or "_embedding." in name else tensor
