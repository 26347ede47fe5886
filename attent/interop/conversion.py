"""Conversion between Hugging Face folders and our models: the parts that all families share.

A family is a table of tensor names (`TensorMapping`), a dataclass of the config keys that describe the model, and lists
of the keys that must have one value or change nothing (`ConfigKeys`). Any other key is rejected by name, and so is any
tensor without a mapping. Errors are found in the headers of the files, before a tensor is read; then each tensor is
read straight into its final dtype and device, one by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from attent import settings
from attent.interop import hf_folder
from attent.interop.hf_folder import LazyTensor, quote_value
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
Values = Mapping[str, tuple[object, ...]]  # name -> allowed values, the usual one first

# --- config.json: every key is accounted for -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigKeys(Generic[F]):
    """The keys that a family's config.json may have."""

    family: str
    schema: type[F]  # the keys that describe the model
    required_values: Values  # keys with values that we compute
    aliases: Mapping[str, str]  # another name -> the key that it must equal
    ignored: Mapping[str, Sequence[str]]  # why a key cannot change the model's output -> such keys
    token_keys: tuple[str, ...] = ()  # keys that generation_config.json may repeat, with the same value
    generation_overrides: tuple[str, ...] = ()  # keys for which generation_config.json takes precedence
    field_to_key: Mapping[str, str] = field(default_factory=dict)  # field of our config -> the key that it comes from

    @property
    def schema_keys(self) -> set[str]:
        return {field.name for field in fields(self.schema)}

    def is_ignored(self, key: str) -> bool:
        return any(key in keys for keys in self.ignored.values())


COMMON_IGNORED = {  # in every family
    "how transformers runs it, and where the file came from": """
        _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
        attn_implementation chunk_size_feed_forward dtype finetuning_task gradient_checkpointing
        name_or_path output_attentions output_hidden_states output_past problem_type
        return_dict task_specific_params tokenizer_class torch_dtype torchscript transformers_version
        transformers.js_config use_bfloat16 use_cache xla_device
    """.split(),
    "search options": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty force_bos_token_to_be_generated force_words_ids forced_bos_token_id
        forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
        renormalize_logits repetition_penalty return_dict_in_generate suppress_tokens temperature
        tf_legacy_loss top_k top_p typical_p
    """.split(),
}
COMMON_REQUIRED: dict[str, tuple[object, ...]] = {  # in every family
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
}
LABEL_KEYS = ["id2label", "label2id", "num_labels"]  # ignored where there is no classifier

REFUSAL_HINTS = {
    "auto_map": "it names code of the folder, which is never run here",
    "trust_remote_code": "code of a folder is never run here",
    "quantization_config": "quantized weights are not supported; use weights in float32, bfloat16 or float16",
}


def read_config(root: Path, keys: ConfigKeys[F]) -> F:
    """Read the schema keys of a folder's config.json, after checking every key in it."""
    where = root / hf_folder.CONFIG_FILE
    data = hf_folder.read_json(where)
    for key, value in data.items():
        check_key(key, value, data, keys, where)
    known = {key: value for key, value in data.items() if key in keys.schema_keys}
    sizes = {field.name for field in fields(keys.schema) if "float" not in str(field.type)}
    for key, value in known.items():
        if key in sizes and isinstance(value, int) and value > MAX_SIZE:
            raise FolderError(f"{where}: `{key}` must be at most {MAX_SIZE}, but is {value:.3g}; correct it")
    merged = merge_generation_tokens(known, root, keys)
    try:
        return settings.from_dict(keys.schema, merged, where=str(find_faulty_file(known, merged, root, keys)))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def find_faulty_file(known: dict[str, Any], merged: dict[str, Any], root: Path, keys: ConfigKeys[F]) -> Path:
    """Return the file to blame for an error: generation_config.json if config.json alone is valid."""
    if merged == known:
        return root / hf_folder.CONFIG_FILE
    try:
        settings.from_dict(keys.schema, known, where="")
    except settings.SettingsError:
        return root / hf_folder.CONFIG_FILE
    return root / hf_folder.GENERATION_FILE


def check_key(key: str, value: object, data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> None:
    """Reject an unknown key, or a value that we do not compute."""
    required = keys.required_values.get(key)
    if required is not None and not any(is_same_value(value, allowed) for allowed in required):
        raise FolderError(
            f"{where}: `{key}` must be {required[0]!r} for a {keys.family} model that attent can compute, but is "
            f"{quote_value(value)}"
        )
    alias_of = keys.aliases.get(key)
    if alias_of is not None and not is_same_value(value, data.get(alias_of)):
        raise FolderError(
            f"{where}: `{key}` must equal `{alias_of}`={data.get(alias_of)!r}, but is {quote_value(value)}; find out "
            f"which one is true of the weights, and give both that value"
        )
    if required is None and alias_of is None and key not in keys.schema_keys and not keys.is_ignored(key):
        near = get_close_matches(key, [*keys.schema_keys, *keys.required_values], n=1, cutoff=0.8)
        hint = f" ({REFUSAL_HINTS[key]})" if key in REFUSAL_HINTS else f" (did you mean `{near[0]}`?)" if near else ""
        raise FolderError(
            f"{where}: {quote_value(key)} is not a key of a {keys.family} config that attent knows{hint}, and might "
            f"change the model's output; use a version of the model without it, or remove the key if it does not"
        )


def is_same_value(value: object, expected: object) -> bool:
    """True for equal values that are both booleans, or both not."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def merge_generation_tokens(data: dict[str, Any], root: Path, keys: ConfigKeys[F]) -> dict[str, Any]:
    """Add the token ids of generation_config.json, if there is one."""
    path = root / hf_folder.GENERATION_FILE
    generation = hf_folder.read_json(path) if path.exists() else {}
    for key in keys.token_keys:
        here, in_generation = data.get(key), generation.get(key)
        if (
            here is not None
            and in_generation is not None
            and here not in (in_generation, [in_generation])
            and in_generation != [here]
        ):
            raise FolderError(
                f"{path}: `{key}` must be that of {hf_folder.CONFIG_FILE}, {quote_value(here)}, but is "
                f"{quote_value(in_generation)}; give both files the one that the model was trained with"
            )
    added = {key: generation[key] for key in keys.token_keys if data.get(key) is None and key in generation}
    overrides = {key: generation[key] for key in keys.generation_overrides if key in generation}
    return data | {key: value for key, value in (added | overrides).items() if value is not None}


def drop_invalid_ids(tokens: int | tuple[int, ...] | None, vocab: int) -> tuple[int, ...]:
    """Return the token ids inside the vocabulary: transformers' defaults are beyond small vocabularies."""
    ids = tokens if isinstance(tokens, tuple) else (tokens,)
    return tuple(token for token in ids if token is not None and 0 <= token < vocab)


def drop_invalid_id(token: int | None, vocab: int) -> int | None:
    return next(iter(drop_invalid_ids(token, vocab)), None)


HFActivation = Literal["relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish"]
ACTIVATION_TO_HF: dict[Activation, HFActivation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
}
ACTIVATION_FROM_HF: dict[str, Activation] = {
    **{hf: ours for ours, hf in ACTIVATION_TO_HF.items()},
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}


class Seq2SeqTokens(Protocol):
    """The token keys of an encoder-decoder config."""

    @property
    def decoder_start_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None: ...


def get_start_id(tokens: Seq2SeqTokens, where: Path) -> int:
    """Return the decoder's start token; published models use the padding token."""
    start = tokens.pad_token_id if tokens.decoder_start_token_id is None else tokens.decoder_start_token_id
    if start is None:
        raise FolderError(f"{where}: missing key `decoder_start_token_id`, the decoder's first; add it")
    return start


def get_end_id(tokens: Seq2SeqTokens, where: Path) -> int:
    ids = tokens.eos_token_id if isinstance(tokens.eos_token_id, tuple) else (tokens.eos_token_id,)
    if len(ids) != 1 or ids[0] is None:
        raise FolderError(
            f"{where}: `eos_token_id` must be one token id, the one that ends a sentence, but is "
            f"{quote_value(tokens.eos_token_id)}; give that one"
        )
    return ids[0]


def build_config(build: Callable[[], T], where: Path, field_to_key: Mapping[str, str]) -> T:
    """Build our config; an error of it names the file, and the file's keys in place of our fields."""
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


# --- tensors ---------------------------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """How a Hugging Face tensor relates to ours: `split` returns ours as views of theirs, `join` returns theirs."""

    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


IDENTICAL = TensorLayout(lambda theirs: [theirs], lambda ours: ours[0])
TRANSPOSED = TensorLayout(lambda theirs: [theirs.t()], lambda ours: ours[0].t())  # (inputs, outputs); biases as ours


def add_leading_axes(count: int) -> TensorLayout:
    """Theirs has `count` axes of size 1 in front."""
    return TensorLayout(lambda theirs: [theirs.flatten(0, count)], lambda ours: ours[0][(None,) * count])


def concat_transposed(parts: int) -> TensorLayout:
    """Theirs is (inputs, outputs) with the outputs of several of ours concatenated, and so are its biases."""
    return TensorLayout(
        lambda theirs: [part.t() for part in theirs.chunk(parts, -1)], lambda ours: torch.cat([p.t() for p in ours], -1)
    )


class TensorMapping(NamedTuple):
    """A line of a family's table: a module (its weight and its bias, if any) or one tensor; `{i}` counts layers.

    A line whose tensors a model does not have is skipped, but every tensor of a model needs a line.
    """

    ours: str | tuple[str, ...]  # several: theirs contains all of them
    theirs: str
    layout: TensorLayout = IDENTICAL


def map_attention(ours: str, theirs: str, names: str) -> list[TensorMapping]:
    """Map an attention layer; `names` are theirs for query, key, value and output."""
    parts = zip(("query", "key", "value", "output"), names.split(), strict=True)
    return [TensorMapping(f"{ours}.{part}", f"{theirs}.{name}") for part, name in parts]


class ResolvedMapping(NamedTuple):
    """One tensor of theirs, and the names of ours that it holds."""

    ours: tuple[str, ...]
    theirs: str
    layout: TensorLayout


def resolve_mappings(
    mappings: Iterable[TensorMapping], model: nn.Module, *, omitted_prefix: str = ""
) -> list[ResolvedMapping]:
    """Resolve a table for all tensors of a model. `omitted_prefix` is one that the file leaves out of its names."""
    names = model.state_dict().keys()
    resolved = [each for mapping in mappings for each in resolve_mapping(mapping, names, omitted_prefix)]
    assert sorted(name for each in resolved for name in each.ours) == sorted(names)
    return resolved


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
    """Return the prefix if the file leaves it out, as files of models without a head do."""
    return "" if any(name.startswith(prefix) for name in stored) else prefix


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def drop_ignored(stored: Mapping[str, LazyTensor], ignored: Mapping[str, Sequence[str]]) -> dict[str, LazyTensor]:
    """Drop the tensors that we compute or do not need: reason -> names, with `{i}` for a number."""
    patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for names in ignored.values() for name in names]
    pattern = re.compile("|".join(patterns) or "(?!)")
    return {name: tensor for name, tensor in stored.items() if not pattern.fullmatch(name)}


def resolve_ties(
    stored: Mapping[str, LazyTensor], groups: Iterable[Sequence[str]], where: Path, tie_keys: str
) -> dict[str, LazyTensor]:
    """Add every name of each group of tied tensors: a file may hold any of them, or several that are equal.

    `tie_keys` are the config keys that tell what is tied, for the error message.
    """
    resolved = dict(stored)
    for group in groups:
        resolved |= dict.fromkeys(group, resolve_tied_group(group, stored, where, tie_keys))
    return resolved


def resolve_tied_group(
    group: Sequence[str], stored: Mapping[str, LazyTensor], where: Path, tie_keys: str
) -> LazyTensor:
    present = [name for name in group if name in stored]
    if not present:
        names = " or ".join(f"`{name}`" for name in group)
        raise FolderError(f"{where}: missing: {names}; get the model again")
    first = stored[present[0]]
    for name in present[1:]:
        if first.shape != stored[name].shape or not torch.equal(first.read(), stored[name].read()):
            raise FolderError(
                f"{where}: `{present[0]}` and `{name}` must be equal, as {hf_folder.CONFIG_FILE} ties them, but "
                f"differ; correct {tie_keys} there"
            )
    return first


# --- in --------------------------------------------------------------------------------------------------------------


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
    """Load the tensors of a file into an empty model, converting each while it is read. In eval mode."""
    resolved = resolve_mappings(mappings, model, omitted_prefix=omitted_prefix)
    check_tensors(compute_hf_shapes(model, resolved), {name: t.to_meta() for name, t in stored.items()}, where)
    dtype, ties = choose_dtype(stored, dtype, where), find_tied_names(model)
    tensors: dict[str, Tensor] = {}
    for mapping in resolved:
        if ties.keys().isdisjoint(mapping.ours):
            parts = mapping.layout.split(stored[mapping.theirs].read())
            tensors |= {name: copy_converted(p, dtype, device) for name, p in zip(mapping.ours, parts, strict=True)}
    return assign_weights(model, tensors | {name: tensors[first] for name, first in ties.items()}, where)


def copy_converted(view: Tensor, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Copy a mapped tensor in one pass, whatever changes."""
    return torch.empty(view.shape, dtype=dtype, device=device or "cpu").copy_(view)


def compute_hf_shapes(model: nn.Module, mappings: Iterable[ResolvedMapping]) -> dict[str, torch.Size]:
    """Return the shapes that a file must have for an empty model, by their names."""
    ours = model.state_dict()
    return {mapping.theirs: mapping.layout.join([ours[name] for name in mapping.ours]).shape for mapping in mappings}


def choose_dtype(stored: Mapping[str, LazyTensor], requested: torch.dtype | None, where: Path) -> torch.dtype:
    """Return the requested dtype, or that of all tensors. Where these differ, as in a float16 T5, which keeps some
    layers in float32, config.json decides."""
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
    name = str(data.get("dtype") or data.get("torch_dtype")).removeprefix("torch.")
    return next((dtype for dtype in WEIGHT_DTYPES if str(dtype) == f"torch.{name}"), None)


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(map(str, WEIGHT_DTYPES))}, but is {dtype!r}")


def check_layer_count(stored: Mapping[str, LazyTensor], layers: Mapping[str, int], where: Path) -> None:
    """Reject more layers than there are tensors, before building a model of that many."""
    for key, count in layers.items():
        if count > len(stored):
            raise FolderError(f"{where}: holds {len(stored)} tensors, too few for `{key}`={count}; get the model again")


# --- out -------------------------------------------------------------------------------------------------------------


def collect_cpu_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model on the CPU; tied tensors have several names."""
    return {name: t.detach().cpu() for name, t in collect_tensors(model, build_empty_like(model)).items()}


def rename_tensors(
    tensors: Mapping[str, Tensor], model: nn.Module, mappings: Iterable[TensorMapping]
) -> dict[str, Tensor]:
    return {
        mapping.theirs: mapping.layout.join([tensors[name] for name in mapping.ours]).contiguous()
        for mapping in resolve_mappings(mappings, build_empty_like(model))
    }


def export_tensors(model: nn.Module, mappings: Sequence[TensorMapping]) -> dict[str, Tensor]:
    """Return the tensors of a model by their names, tied ones once."""
    empty = build_empty_like(model)
    tied = find_tied_names(empty).keys()
    copies = {each.theirs for each in resolve_mappings(mappings, empty) if not tied.isdisjoint(each.ours)}
    renamed = rename_tensors(collect_cpu_tensors(model), model, mappings)
    return {name: tensor for name, tensor in renamed.items() if name not in copies}


def get_dtype_name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


ALWAYS_EXPRESSED = {  # fields of StackConfig that every family's config has
    "layers", "width", "heads", "ffn_width", "activation", "positions", "norm_eps", "dropout", "attention_dropout",
}  # fmt: skip


def get_default_values(stack: StackConfig) -> dict[str, tuple[object, ...]]:
    """Return the values of a stack's other fields in the paper's encoder; a family states where it differs."""
    return {
        "kv_heads": (None, stack.heads),
        "head_width": (None, stack.width // stack.heads),
        "remaining_heads": (None,),
        "gated": (False,),
        "causal": (False,),
        "cross_attention": (False,),
        "window": (None, (None, None)),
        "norm": ("layer",),
        "norm_order": ("post",),
        "bias": (True,),
        "scale": (None, (stack.head_width or stack.width // stack.heads) ** -0.5),
        "scale_by_layer": (False,),
        "embedding_norm": (False,),
        "embedding_dropout": (None, stack.dropout),
        "output_dropout": (0,),
        "activation_dropout": (0,),
    }


def check_stack(
    stack: StackConfig,
    family: str,
    *,
    expressed: Set[str] = frozenset(),
    required: Values | None = None,
    side: str = "stack",
) -> None:
    """Reject a stack that a family cannot express: `expressed` fields have a key in its config, and every other field
    must have one of the `required` values, or the default."""
    values = get_default_values(stack) | dict(required or {})
    assert ALWAYS_EXPRESSED | values.keys() == {field.name for field in fields(StackConfig)}, "a new field"
    for name, allowed in values.items():
        if name not in expressed and not any(is_same_value(getattr(stack, name), value) for value in allowed):
            reject_field(family, f"{side}.{name}", getattr(stack, name), f"{allowed[0]!r}")


def reject_field(family: str, name: str, value: object, required: str) -> NoReturn:
    raise ValueError(
        f"`{name}` must be {required} for a {family} model, but is {value!r}; this model cannot be written as "
        f"one: keep it as an attent folder (`model.save(folder)`)"
    )


def check_pad(pad: int, vocab: int) -> None:
    if not 0 <= pad < vocab:
        raise ValueError(f"`pad` must be a token id, from 0 to {vocab - 1}, but is {pad}; give one, or none")
