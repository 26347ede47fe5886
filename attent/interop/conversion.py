"""What every family of foreign models shares: which settings it may have, and where each tensor goes.

A family is a table of names (`Row`), a dataclass of the settings that say what the model is, and lists of those that
must have one value or change nothing (`Keys`). Any other setting is refused by name, and so is any tensor that has no
place. What is read is told to be wrong by the headers of files, before any tensor of them is read; then each goes into
its final place, in its final precision, one by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from attent import settings
from attent.interop import hf_folder
from attent.interop.hf_folder import LazyTensor
from attent.models.folder import check_tensors
from attent.models.weights import WEIGHT_DTYPES, assign_weights, build_empty_like, collect_tensors, find_tied_names
from attent.nn import StackConfig
from attent.nn.argument_checks import MAX_SIZE
from attent.nn.feedforward import Activation
from attent.storage.errors import FolderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

# --- settings: every key of a config.json is accounted for ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigKeys(Generic[F]):
    """The keys that a family's config.json may have."""

    family: str  # as people call it
    schema: type[F]  # those that say what the model is
    required_values: Mapping[
        str, tuple[object, ...]
    ]  # key -> values that mean what we compute; the first is the usual one
    aliases: Mapping[str, str]  # further name -> the key that it must equal
    ignored: Mapping[str, Sequence[str]]  # why a key cannot change what the model computes -> such keys
    token_keys: tuple[str, ...] = ()  # facts that may stand in generation_config.json too, where they must be the same
    generation_overrides: tuple[str, ...] = ()  # facts that generation_config.json, if it has them, knows better
    field_to_key: Mapping[str, str] = field(default_factory=dict)  # field of our config -> the key that it comes from

    @property
    def schema_keys(self) -> set[str]:
        return {field.name for field in fields(self.schema)}

    def is_ignored(self, key: str) -> bool:
        return any(key in keys for keys in self.ignored.values())


COMMON_IGNORED = {  # harmless in every family
    "how transformers is called, and where a file came from": """
        _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
        attn_implementation chunk_size_feed_forward dtype finetuning_task gradient_checkpointing
        name_or_path output_attentions output_hidden_states output_past problem_type
        return_dict task_specific_params tokenizer_class torch_dtype torchscript transformers_version
        transformers.js_config use_bfloat16 use_cache xla_device
    """.split(),
    "search: left to whoever searches": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty force_bos_token_to_be_generated force_words_ids forced_bos_token_id
        forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
        renormalize_logits repetition_penalty return_dict_in_generate suppress_tokens temperature
        tf_legacy_loss top_k top_p typical_p
    """.split(),
}
COMMON_REQUIRED: dict[str, tuple[object, ...]] = {  # in every family, key -> values as in `Keys.fixed`
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
}
LABEL_KEYS = ["id2label", "label2id", "num_labels"]  # harmless where no head reads them

REFUSAL_HINTS = {  # what else is to be said of a key that is refused
    "auto_map": "it names code of the folder, and no such code is ever run here",
    "trust_remote_code": "no code of a folder is ever run here",
    "quantization_config": "quantised weights are not read; take those in float32, bfloat16 or float16",
}


def read_config(root: Path, keys: ConfigKeys[F]) -> F:
    """The facts of a folder, after every key of its config.json has been accounted for."""
    where = root / hf_folder.CONFIG_FILE
    data = hf_folder.read_json(where)
    for key, value in data.items():
        check_key(key, value, data, keys, where)
    known = {key: value for key, value in data.items() if key in keys.schema_keys}
    sizes = {field.name for field in fields(keys.schema) if "float" not in str(field.type)}
    for key, value in known.items():
        if key in sizes and isinstance(value, int) and value > MAX_SIZE:
            raise FolderError(f"{where}: `{key}` must be at most {MAX_SIZE}, but is {value:.3g}; correct it")
    told = merge_generation_tokens(known, root, keys)
    try:
        return settings.from_dict(keys.schema, told, where=str(find_faulty_file(known, told, root, keys)))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def find_faulty_file(known: dict[str, Any], merged: dict[str, Any], root: Path, keys: ConfigKeys[F]) -> Path:
    """The file to name if the facts are wrong: generation_config.json where they are right without it."""
    if merged == known:
        return root / hf_folder.CONFIG_FILE
    try:
        settings.from_dict(keys.schema, known, where="")
    except settings.SettingsError:
        return root / hf_folder.CONFIG_FILE
    return root / hf_folder.GENERATION_FILE


def check_key(key: str, value: object, data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> None:
    """Refuses a key that we do not know, or a value of it that we do not compute."""
    if key in keys.required_values and not any(is_same_value(value, wanted) for wanted in keys.required_values[key]):
        raise FolderError(
            f"{where}: `{key}` must be {keys.required_values[key][0]!r} for a {keys.family} model that attent can compute, "
            f"but is {hf_folder.quote_value(value)}"
        )
    if key in keys.aliases and not is_same_value(value, data.get(keys.aliases[key])):
        other = keys.aliases[key]
        raise FolderError(
            f"{where}: `{key}` must equal `{other}`={data.get(other)!r}, but is "
            f"{hf_folder.quote_value(value)}; find out which one is true of the weights, and give both that value"
        )
    if not (key in keys.schema_keys or key in keys.required_values or key in keys.aliases or keys.is_ignored(key)):
        near = get_close_matches(key, [*keys.schema_keys, *keys.required_values], n=1, cutoff=0.8)
        hint = f" ({REFUSAL_HINTS[key]})" if key in REFUSAL_HINTS else f" (did you mean `{near[0]}`?)" if near else ""
        raise FolderError(
            f"{where}: {hf_folder.quote_value(key)} is not a key of a {keys.family} config that attent knows{hint}, and "
            f"might change what the model computes; take a version of the model without it, or remove the key "
            f"from the file if you know that it does not"
        )


def is_same_value(value: object, expected: object) -> bool:
    """Equal, and not a truth value where a number is meant or the other way round."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def merge_generation_tokens(data: dict[str, Any], root: Path, keys: ConfigKeys[F]) -> dict[str, Any]:
    """Token ids from generation_config.json, where there is one."""
    path = root / hf_folder.GENERATION_FILE
    generation = hf_folder.read_json(path) if path.exists() else {}
    for key in keys.token_keys:
        here, there = data.get(key), generation.get(key)
        if here is not None and there is not None and here not in (there, [there]) and there != [here]:
            raise FolderError(
                f"{path}: `{key}` must be that of {hf_folder.CONFIG_FILE}, {hf_folder.quote_value(here)}, but is "
                f"{hf_folder.quote_value(there)}; give both files the one that the model was trained with"
            )
    told = {key: generation.get(key) for key in (*keys.token_keys, *keys.generation_overrides)}
    found = {key: value for key, value in told.items() if value is not None}
    return data | {
        key: value for key, value in found.items() if key in keys.generation_overrides or data.get(key) is None
    }


def drop_invalid_id(token: int | None, vocab: int) -> int | None:
    """A token id of a config, if it is one: the defaults of transformers are beyond small vocabularies."""
    return token if token is not None and 0 <= token < vocab else None


def drop_invalid_ids(tokens: int | tuple[int, ...] | None, vocab: int) -> tuple[int, ...]:
    several = tokens if isinstance(tokens, tuple) else (tokens,)
    return tuple(token for token in several if token is not None and 0 <= token < vocab)


HFActivation = Literal["relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish"]
ACTIVATION_FROM_HF: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION_TO_HF: dict[Activation, HFActivation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
}


class Seq2SeqTokens(Protocol):
    """The facts of a model with a decoder that reads an encoder's output."""

    @property
    def decoder_start_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None: ...


def get_start_id(tokens: Seq2SeqTokens, where: Path) -> int:
    """What the decoder reads first. Published models start from the padding token."""
    start = tokens.pad_token_id if tokens.decoder_start_token_id is None else tokens.decoder_start_token_id
    if start is None:
        raise FolderError(f"{where}: missing key `decoder_start_token_id`, the decoder's first; add it")
    return start


def get_end_id(tokens: Seq2SeqTokens, where: Path) -> int:
    ends = tokens.eos_token_id if isinstance(tokens.eos_token_id, tuple) else (tokens.eos_token_id,)
    if len(ends) != 1 or ends[0] is None:
        raise FolderError(
            f"{where}: `eos_token_id` must be one token id, the one that ends a sentence, but is "
            f"{hf_folder.quote_value(tokens.eos_token_id)}; give that one"
        )
    return ends[0]


# --- names: where each tensor goes ----------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """How their tensor stands to ours: `split` gives ours as views of theirs, `join` gives theirs."""

    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


IDENTICAL = TensorLayout(lambda theirs: [theirs], lambda ours: ours[0])
TRANSPOSED = TensorLayout(lambda theirs: [theirs.t()], lambda ours: ours[0].t())  # (inputs, outputs); a bias is as ours


def add_leading_axes(count: int) -> TensorLayout:
    """Theirs has so many axes of size 1 in front."""
    return TensorLayout(lambda theirs: [theirs.flatten(0, count)], lambda ours: ours[0][(None,) * count])


def concat_transposed(parts: int) -> TensorLayout:
    """Theirs is (inputs, outputs), with the outputs of several of ours beside each other; biases in the same order."""
    return TensorLayout(
        lambda theirs: [part.t() for part in theirs.chunk(parts, -1)], lambda ours: torch.cat([p.t() for p in ours], -1)
    )


class TensorMapping(NamedTuple):
    """A line of a family's table: a module (its weight and its bias, if it has one) or one tensor; `{i}` counts layers.

    A line whose tensors a model does not have is not for it; but a model has no tensor without a line.
    """

    ours: str | tuple[str, ...]  # several: theirs holds them all
    theirs: str
    layout: TensorLayout = IDENTICAL


class ResolvedMapping(NamedTuple):
    """One tensor of theirs, and which of ours it holds."""

    ours: tuple[str, ...]
    theirs: str
    layout: TensorLayout


def resolve_mappings(
    mappings: Iterable[TensorMapping], model: nn.Module, *, omitted_prefix: str = ""
) -> list[ResolvedMapping]:
    """Every tensor of a model. `bare` is a prefix of their names that the file at hand leaves out."""
    names = model.state_dict().keys()
    found = [move for row in mappings for move in resolve_mapping(row, names, omitted_prefix)]
    assert sorted(name for move in found for name in move.ours) == sorted(names)
    return found


def resolve_mapping(mapping: TensorMapping, names: Iterable[str], omitted_prefix: str) -> Iterator[ResolvedMapping]:
    for i in itertools.count():
        ours = [name.format(i=i) for name in ([mapping.ours] if isinstance(mapping.ours, str) else mapping.ours)]
        theirs = mapping.theirs.removeprefix(omitted_prefix).format(i=i)
        leaves = [leaf for leaf in ("", ".weight", ".bias") if ours[0] + leaf in names]
        yield from (
            ResolvedMapping(tuple(name + leaf for name in ours), theirs + leaf, mapping.layout) for leaf in leaves
        )
        if not leaves or "{i}" not in mapping.theirs + "".join(mapping.ours):
            return


def find_omitted_prefix(stored: Mapping[str, LazyTensor], prefix: str) -> str:
    """The prefix, if a file leaves it out: weights of a model without its head are published so."""
    return "" if any(name.startswith(prefix) for name in stored) else prefix


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """As such weights are written."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def drop_ignored(stored: Mapping[str, LazyTensor], ignored: Mapping[str, Sequence[str]]) -> dict[str, LazyTensor]:
    """Tensors but for those that we compute or do without: why -> their names, with `{i}` for a number."""
    patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for names in ignored.values() for name in names]
    pattern = re.compile("|".join(patterns) or "(?!)")
    return {name: tensor for name, tensor in stored.items() if not pattern.fullmatch(name)}


def resolve_ties(
    stored: Mapping[str, LazyTensor], groups: Iterable[Sequence[str]], where: Path, tie_keys: str
) -> dict[str, LazyTensor]:
    """The tensors, with each name of a group of tied ones: a file may hold any of them, or several that are equal.

    `keys` are those of config.json that tell what is tied, for whoever has to correct them.
    """
    resolved = dict(stored)
    for group in groups:
        resolved |= dict.fromkeys(group, resolve_tied_group(group, stored, where, tie_keys))
    return resolved


def resolve_tied_group(
    group: Sequence[str], stored: Mapping[str, LazyTensor], where: Path, tie_keys: str
) -> LazyTensor:
    found = [name for name in group if name in stored]
    if not found:
        wanted = " or ".join(f"`{name}`" for name in group)
        raise FolderError(f"{where}: missing: {wanted}; get the model again")
    first = stored[found[0]]
    for name in found[1:]:
        if first.shape != stored[name].shape or not torch.equal(first.read(), stored[name].read()):
            raise FolderError(
                f"{where}: `{found[0]}` and `{name}` must be equal, as {hf_folder.CONFIG_FILE} ties them, but differ; "
                f"correct {tie_keys} there"
            )
    return first


# --- in -------------------------------------------------------------------------------------------------------------


def load_weights(
    model: M,
    mappings: Iterable[TensorMapping],
    stored: Mapping[str, LazyTensor],
    where: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    omitted_prefix: str = "",
) -> M:
    """An empty model with the tensors of a file, each converted on its way to its place. In eval mode."""
    todo = resolve_mappings(mappings, model, omitted_prefix=omitted_prefix)
    check_tensors(compute_hf_shapes(model, todo), {name: tensor.to_meta() for name, tensor in stored.items()}, where)
    dtype, ties = choose_dtype(stored, dtype, where), find_tied_names(model)
    tensors: dict[str, Tensor] = {}
    for move in todo:
        if ties.keys().isdisjoint(move.ours):
            parts = move.layout.split(stored[move.theirs].read())
            tensors |= {name: copy_converted(part, dtype, device) for name, part in zip(move.ours, parts, strict=True)}
    return assign_weights(model, tensors | {name: tensors[first] for name, first in ties.items()}, where)


def copy_converted(view: Tensor, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """A view of a file as a tensor of its own: one pass over it, whatever changes on the way."""
    return torch.empty(view.shape, dtype=dtype, device=device or "cpu").copy_(view)


def compute_hf_shapes(model: nn.Module, mappings: Iterable[ResolvedMapping]) -> dict[str, torch.Size]:
    """What a file must hold for an empty model, under their names."""
    ours = model.state_dict()
    return {move.theirs: move.layout.join([ours[name] for name in move.ours]).shape for move in mappings}


def choose_dtype(stored: Mapping[str, LazyTensor], requested: torch.dtype | None, where: Path) -> torch.dtype:
    """In which precision a model is to be: as asked for, or the one that all its tensors have, or of several the one
    that config.json tells: a T5 of float16 keeps some layers in float32 there."""
    check_dtype(requested)
    if requested is None and len({tensor.stored_dtype for tensor in stored.values()}) > 1:
        requested = read_config_dtype(where.parent / hf_folder.CONFIG_FILE)
    first = next(iter(stored.values()))
    for tensor in stored.values():
        if tensor.dtype not in WEIGHT_DTYPES or (requested is None and tensor.dtype != first.dtype):
            raise FolderError(
                f"{where}: all tensors must be of one floating type, but `{first.name}` is {first.stored_dtype} and "
                f"`{tensor.name}` is {tensor.stored_dtype}; save the model in one precision first"
                + (", or load it with a `dtype` of your choice" if tensor.dtype in WEIGHT_DTYPES else "")
            )
    assert first.dtype is not None
    return requested or first.dtype


def read_config_dtype(config: Path) -> torch.dtype | None:
    data = hf_folder.read_json(config)
    told = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}
    name = data.get("dtype") or data.get("torch_dtype")
    return told.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(map(str, WEIGHT_DTYPES))}, but is {dtype!r}")


def check_layer_count(stored: Mapping[str, LazyTensor], layers: Mapping[str, int], where: Path) -> None:
    """Refuses more layers than there are tensors, before a model of so many is built."""
    for key, count in layers.items():
        if count > len(stored):
            raise FolderError(f"{where}: holds {len(stored)} tensors, too few for `{key}`={count}; get the model again")


def build_config(build: Callable[[], T], where: Path, field_to_key: Mapping[str, str]) -> T:
    """What `make` gives; what it refuses is told of the file that said so, in its words: our field -> its key."""
    try:
        return build()
    except FolderError:
        raise
    except ValueError as error:
        raise FolderError(f"{where}: {translate_field_names(str(error), field_to_key)}") from error


def translate_field_names(message: str, field_to_key: Mapping[str, str]) -> str:
    if "head_width" not in field_to_key:
        message = message.replace(", or give `head_width`", "")
    return re.sub(r"(?<=`)([\w.]+)(?=[`=])", lambda name: field_to_key.get(name[0], name[0]), message)


# --- out ------------------------------------------------------------------------------------------------------------


def collect_cpu_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is to be written of a model, on the CPU; tied tensors are one under several names."""
    return {name: tensor.detach().cpu() for name, tensor in collect_tensors(model, build_empty_like(model)).items()}


def rename_tensors(
    tensors: Mapping[str, Tensor], model: nn.Module, mappings: Iterable[TensorMapping]
) -> dict[str, Tensor]:
    """Our tensors as theirs."""
    todo = resolve_mappings(mappings, build_empty_like(model))
    return {move.theirs: move.layout.join([tensors[name] for name in move.ours]).contiguous() for move in todo}


def export_tensors(model: nn.Module, mappings: Iterable[TensorMapping]) -> dict[str, Tensor]:
    """What is to be written of a model under their names: of tensors that are one, only the first."""
    like = build_empty_like(model)
    further = {
        move.theirs
        for move in resolve_mappings(mappings, like)
        if not find_tied_names(like).keys().isdisjoint(move.ours)
    }
    theirs = rename_tensors(collect_cpu_tensors(model), model, mappings)
    return {name: tensor for name, tensor in theirs.items() if name not in further}


def get_dtype_name(model: nn.Module) -> str:
    """The precision of a model as their configs call it."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def check_stack(
    stack: StackConfig,
    family: str,
    *,
    side: str,
    expressed_fields: set[str],
    required_values: Mapping[str, tuple[object, ...]],
) -> None:
    """Refuses a stack that a family has no words for: `said` are the fields that its config tells, `wanted` are the
    values that the others must have, the usual one first."""
    assert expressed_fields | required_values.keys() == {field.name for field in fields(StackConfig)}, (
        "a field that is not thought of"
    )
    for name, values in required_values.items():
        if not any(is_same_value(getattr(stack, name), value) for value in values):
            reject_field(family, f"{side}.{name}", getattr(stack, name), f"{values[0]!r}")


def reject_field(family: str, name: str, value: object, required: str) -> NoReturn:
    raise ValueError(
        f"`{name}` must be {required} for a {family} model, but is {value!r}; this model cannot be written as "
        f"one: keep it as an attent folder (`model.save(folder)`)"
    )
