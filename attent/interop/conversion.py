"""Conversion between Hugging Face folders and our models: the parts that all families share.

A family is a dataclass of the config keys that describe the model and, in `families.toml`, tables of its tensor names
and of the keys that must have one value or change nothing; any other key or tensor is rejected by name.
Errors are found before a tensor is read; then each is read straight into its final dtype and device.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from attent import settings
from attent.interop import hf_folder
from attent.interop.hf_folder import Device, LazyTensor, StrPath, make_key_error, quote_value
from attent.models.folder import check_tensors
from attent.models.weights import WEIGHT_DTYPES, assign_weights, build_empty_like, collect_tensors, find_tied_names
from attent.nn import StackConfig
from attent.nn.argument_checks import MAX_SIZE
from attent.nn.config import Activation
from attent.storage.errors import AttentError, FolderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Values = Mapping[str, tuple[object, ...]]  # name -> allowed values, the usual one first

# --- config.json: every key is accounted for -------------------------------------------------------------------------


@cache
def read_family_tables() -> dict[str, Any]:
    path = Path(__file__).with_name("families.toml")
    return settings.parse_toml(path.read_bytes(), path.name)


@dataclass(frozen=True, kw_only=True)
class ConfigKeys(Generic[F]):
    """A family's table of `families.toml`, with the keys of all families."""

    family: str
    schema: type[F]  # the keys that describe the model
    field_to_key: Mapping[str, str]
    required_values: Values
    ignored: Set[str]
    aliases: Mapping[str, str]
    token_keys: tuple[str, ...]
    generation_overrides: tuple[str, ...]

    @classmethod
    def read(cls, name: str, schema: type[F]) -> "ConfigKeys[F]":
        common, table = read_family_tables()["common"], read_family_tables()[name]
        required = common["required"] | table["required"]
        return cls(
            family=table["family"],
            schema=schema,
            field_to_key=table["fields"],
            required_values={
                key: tuple(None if v == "null" else v for v in values) for key, values in required.items()
            },
            ignored={key for keys in (common["ignored"] | table["ignored"]).values() for key in keys.split()},
            aliases=table.get("aliases", {}),
            token_keys=tuple(table.get("tokens", ())),
            generation_overrides=tuple(table.get("overrides", ())),
        )

    @property
    def schema_keys(self) -> set[str]:
        return {field.name for field in fields(self.schema)}


REFUSAL_HINTS = {
    "auto_map": "it names code of the folder, which is never run here",
    "trust_remote_code": "code of a folder is never run here",
    "quantization_config": "quantized weights are not supported; use weights in float32, bfloat16 or float16",
}


def parse_section(data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> F:
    """Return the schema keys of a model's section in the config.json of a larger one, after checking every key."""
    return build_schema(select_schema_keys(data, keys, where), keys, where)


def select_schema_keys(data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> dict[str, Any]:
    for key, value in data.items():
        check_key(key, value, data, keys, where)
    known = {key: value for key, value in data.items() if key in keys.schema_keys}
    sizes = {field.name for field in fields(keys.schema) if "float" not in str(field.type)}
    for key, value in known.items():
        if key in sizes and isinstance(value, int) and value > MAX_SIZE:
            raise FolderError(f"{where}: `{key}` must be at most {MAX_SIZE}, but is {value:.3g}; correct it")
    return known


def build_schema(data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> F:
    try:
        return settings.from_dict(keys.schema, data, where=str(where))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def check_key(key: str, value: object, data: Mapping[str, Any], keys: ConfigKeys[F], where: Path) -> None:
    required = keys.required_values.get(key)
    if required is not None and not any(is_same_value(value, allowed) for allowed in required):
        raise make_key_error(where, key, repr(required[0]), f"{keys.family} model", value)
    alias_of = keys.aliases.get(key)
    if alias_of is not None and not is_same_value(value, data.get(alias_of)):
        problem = f"`{key}` must equal `{alias_of}`={data.get(alias_of)!r}, but is {quote_value(value)}"
        raise FolderError(f"{where}: {problem}; find out which one is true of the weights, and give both that value")
    if required is None and alias_of is None and key not in keys.schema_keys | keys.ignored:
        near = get_close_matches(key, [*keys.schema_keys, *keys.required_values], cutoff=0.8)
        hint = f" ({REFUSAL_HINTS[key]})" if key in REFUSAL_HINTS else f" (did you mean `{near[0]}`?)" if near else ""
        problem = f"is not a key of a {keys.family} config that attent knows{hint}, and might change the model's output"
        advice = "use a version of the model without it, or remove the key if it does not"
        raise FolderError(f"{where}: {quote_value(key)} {problem}; {advice}")


def is_same_value(value: object, expected: object) -> bool:
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def merge_generation_tokens(data: dict[str, Any], root: Path, keys: ConfigKeys[F]) -> dict[str, Any]:
    """Add the token ids of generation_config.json, if there is one."""
    path = root / hf_folder.GENERATION_FILE
    generation = hf_folder.read_json(path) if path.exists() else {}
    for key in keys.token_keys:
        here, in_generation = data.get(key), generation.get(key)
        is_same = here in (in_generation, [in_generation]) or in_generation == [here]
        if here is not None and in_generation is not None and not is_same:
            required, actual = f"that of {hf_folder.CONFIG_FILE}, {quote_value(here)}", quote_value(in_generation)
            advice = "give both files the one that the model was trained with"
            raise FolderError(f"{path}: `{key}` must be {required}, but is {actual}; {advice}")
    added = {key: generation[key] for key in keys.token_keys if data.get(key) is None and key in generation}
    overrides = {key: generation[key] for key in keys.generation_overrides if key in generation}
    return data | {key: value for key, value in (added | overrides).items() if value is not None}


def drop_invalid_ids(tokens: int | tuple[int, ...] | None, vocab: int) -> tuple[int, ...]:
    """Return the token ids inside the vocabulary: transformers' defaults are beyond small vocabularies."""
    ids = tokens if isinstance(tokens, tuple) else (tokens,)
    return tuple(token for token in ids if token is not None and 0 <= token < vocab)


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


def read_fields(keys: "DataclassInstance", field_to_key: Mapping[str, str]) -> dict[str, Any]:
    names = field_to_key.keys() & {field.name for field in fields(StackConfig)}
    values = {name: getattr(keys, field_to_key[name]) for name in names}
    return values | {"activation": ACTIVATION_FROM_HF[values["activation"]]} if "activation" in names else values


def write_fields(field_to_key: Mapping[str, str], *configs: object) -> dict[str, Any]:
    """Return a family's keys for fields of ours, each from the first of the configs that has it."""
    written = {}
    for name, key in field_to_key.items():
        config = next((config for config in configs if hasattr(config, name)), None)
        if config is not None:
            value = getattr(config, name)
            written[key] = ACTIVATION_TO_HF[value] if name == "activation" else value
    return written


def get_start_id(start: int | None, default: int | None, where: Path) -> int:
    """Return the decoder's start token; translators start with the padding token by default."""
    start = default if start is None else start
    if start is None:
        raise FolderError(f"{where}: missing key `decoder_start_token_id`, the decoder's first; add it")
    return start


def get_end_id(end: int | tuple[int, ...] | None, where: Path) -> int:
    ids = end if isinstance(end, tuple) else (end,)
    if len(ids) != 1 or ids[0] is None:
        required = "one token id, the one that ends a sentence"
        raise FolderError(f"{where}: `eos_token_id` must be {required}, but is {quote_value(end)}; give that one")
    return ids[0]


@contextmanager
def explain_config_errors(where: Path, field_to_key: Mapping[str, str]) -> Iterator[None]:
    """An error of our config names the file, and the file's keys in place of our fields."""
    try:
        yield
    except FolderError:
        raise
    except ValueError as error:
        message = str(error)
        if "head_width" not in field_to_key:
            message = message.replace(", or give `head_width`", "")
        message = re.sub(r"(?<=`)([\w.]+)(?=[`=])", lambda name: field_to_key.get(name[0], name[0]), message)
        raise FolderError(f"{where}: {message}") from error


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

    ours: tuple[str, ...]  # theirs contains all of them
    theirs: str
    layout: TensorLayout = IDENTICAL


def read_mappings(family: str, table: str = "tensors") -> list[TensorMapping]:
    """Read a family's table of `families.toml`."""
    tables = read_family_tables()[family]
    transposed = tables.get("transposed", {}).items() if table == "tensors" else ()
    return [
        *(TensorMapping((ours,), theirs) for ours, theirs in tables[table].items()),
        *(TensorMapping((ours,), theirs, TRANSPOSED) for ours, theirs in transposed),
    ]


def resolve_mappings(
    mappings: Iterable[TensorMapping], model: nn.Module, *, omitted_prefix: str = ""
) -> list[TensorMapping]:
    """Return a line for each tensor of a model. `omitted_prefix` is one that the file leaves out of its names."""
    names = model.state_dict().keys()
    resolved = [each for mapping in mappings for each in resolve_mapping(mapping, names, omitted_prefix)]
    assert sorted(name for each in resolved for name in each.ours) == sorted(names)
    return resolved


def resolve_mapping(mapping: TensorMapping, names: Iterable[str], omitted_prefix: str) -> Iterator[TensorMapping]:
    for i in itertools.count():
        ours = [name.format(i=i) for name in mapping.ours]
        theirs = mapping.theirs.removeprefix(omitted_prefix).format(i=i)
        leaves = [leaf for leaf in ("", ".weight", ".bias") if ours[0] + leaf in names]
        yield from (
            TensorMapping(tuple(name + leaf for name in ours), theirs + leaf, mapping.layout) for leaf in leaves
        )
        if not leaves or "{i}" not in mapping.theirs + "".join(mapping.ours):
            return


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
            problem = f"must be equal, as {hf_folder.CONFIG_FILE} ties them, but differ; correct {tie_keys} there"
            raise FolderError(f"{where}: `{present[0]}` and `{name}` {problem}")
    return first


# --- in --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OpenFolder(Generic[F]):
    """A folder with a checked config.json and the headers of its tensors."""

    root: Path
    keys: F
    stored: dict[str, LazyTensor]
    omitted_prefix: str  # of the family's tensor names; files of models without a head leave it out

    @classmethod
    def open(
        cls,
        folder: StrPath,
        keys: ConfigKeys[F],
        layer_keys: Sequence[str],
        *,
        prefix: str = "",
        ignored_tensors: Sequence[str] = (),
    ) -> "OpenFolder[F]":
        """`ignored_tensors` are those that we compute or do not need: with `{i}` for a number, the prefix optional."""
        root = hf_folder.resolve_folder(folder)
        where = root / hf_folder.CONFIG_FILE
        known = select_schema_keys(hf_folder.read_json(where), keys, where)
        build_schema(known, keys, where)  # alone first, so that any other error is one of generation_config.json
        config = build_schema(merge_generation_tokens(known, root, keys), keys, root / hf_folder.GENERATION_FILE)
        stored = hf_folder.open_tensors(root)
        names = [*ignored_tensors, *(name.removeprefix(prefix) for name in ignored_tensors)]
        patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for name in names]
        ignored = re.compile("|".join(patterns) or "(?!)")
        stored = {name: tensor for name, tensor in stored.items() if not ignored.fullmatch(name)}
        omitted = "" if any(name.startswith(prefix) for name in stored) else prefix
        opened = cls(root, config, stored, omitted)
        for key in layer_keys:
            opened.check_layer_count(config, key)
        return opened

    @property
    def config_path(self) -> Path:
        return self.root / hf_folder.CONFIG_FILE

    @property
    def weights_path(self) -> Path:
        files = (hf_folder.WEIGHTS_FILE, hf_folder.INDEX_FILE)
        return next((path for path in (self.root / name for name in files) if path.is_file()), self.root / files[0])

    def check_layer_count(self, keys: "DataclassInstance", name: str) -> None:
        """Reject more layers than tensors, before a model of that many is built."""
        count = getattr(keys, name) or 0
        if count > len(self.stored):
            problem = f"holds {len(self.stored)} tensors, too few for `{name}`={count}"
            raise FolderError(f"{self.weights_path}: {problem}; get the model again")

    def resolve_ties(self, groups: Iterable[Sequence[str]], tie_keys: str) -> "OpenFolder[F]":
        """Add every name of each group of tied tensors: a file may hold any of them, or several that are equal."""
        resolved = dict(self.stored)
        for group in groups:
            names = [name.removeprefix(self.omitted_prefix) for name in group]
            resolved |= dict.fromkeys(names, resolve_tied_group(names, self.stored, self.weights_path, tie_keys))
        return replace(self, stored=resolved)

    def load_into(
        self, model: M, mappings: Iterable[TensorMapping], dtype: torch.dtype | None, device: Device | None
    ) -> M:
        """Load the tensors into an empty model, converting each while it is read. In eval mode."""
        where, ties = self.weights_path, find_tied_names(model)
        resolved = resolve_mappings(mappings, model, omitted_prefix=self.omitted_prefix)
        ours = model.state_dict()
        shapes = {each.theirs: each.layout.join([ours[name] for name in each.ours]).shape for each in resolved}
        stored_shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self.stored.items()}
        check_tensors(shapes, stored_shapes, where)
        dtype = choose_dtype(self.stored, dtype, where)
        tensors: dict[str, Tensor] = {}
        for mapping in resolved:
            if ties.keys().isdisjoint(mapping.ours):
                parts = mapping.layout.split(self.stored[mapping.theirs].read())
                for name, part in zip(mapping.ours, parts, strict=True):  # copied in one pass, whatever changes
                    tensors[name] = torch.empty(part.shape, dtype=dtype, device=device or "cpu").copy_(part)
        return assign_weights(model, tensors | {name: tensors[first] for name, first in ties.items()}, where)


def choose_dtype(stored: Mapping[str, LazyTensor], requested: torch.dtype | None, where: Path) -> torch.dtype:
    """Return the requested dtype, or that of all tensors, or config.json's: a float16 T5 has some layers in float32."""
    check_dtype(requested)
    if requested is None and len({tensor.stored_dtype for tensor in stored.values()}) > 1:
        data = hf_folder.read_json(where.parent / hf_folder.CONFIG_FILE)
        name = str(data.get("dtype") or data.get("torch_dtype")).removeprefix("torch.")
        requested = next((dtype for dtype in WEIGHT_DTYPES if str(dtype) == f"torch.{name}"), None)
    first = next(iter(stored.values()))
    for tensor in stored.values():
        if tensor.dtype not in WEIGHT_DTYPES or (requested is None and tensor.dtype != first.dtype):
            actual = " and ".join(f"`{each.name}` is {each.stored_dtype}" for each in (first, tensor))
            advice = ", or load it with a `dtype` of your choice" if tensor.dtype in WEIGHT_DTYPES else ""
            problem = f"all tensors must be of one floating type, but {actual}"
            raise FolderError(f"{where}: {problem}; save the model in one precision first{advice}")
    assert first.dtype is not None
    return requested or first.dtype


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise AttentError(f"`dtype` must be one of {', '.join(map(str, WEIGHT_DTYPES))}, but is {dtype!r}")


# --- out -------------------------------------------------------------------------------------------------------------


def collect_cpu_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model on the CPU; tied tensors have several names."""
    return {name: t.detach().cpu() for name, t in collect_tensors(model, build_empty_like(model)).items()}


def export_tensors(
    model: nn.Module, mappings: Sequence[TensorMapping], tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a model, or others in their place, by their names, tied ones once."""
    empty = build_empty_like(model)
    tied, tensors = find_tied_names(empty).keys(), tensors or collect_cpu_tensors(model)
    return {
        mapping.theirs: mapping.layout.join([tensors[name] for name in mapping.ours]).contiguous()
        for mapping in resolve_mappings(mappings, empty)
        if tied.isdisjoint(mapping.ours)
    }


def get_dtype_name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


ALWAYS_EXPRESSED = {  # fields of StackConfig that every family's config has
    "layers", "width", "heads", "ffn_width", "activation", "positions", "norm_eps", "dropout", "attention_dropout",
}  # fmt: skip


def check_stack(
    stack: StackConfig,
    family: str,
    *,
    expressed: Set[str] = frozenset(),
    required: Values | None = None,
    side: str = "stack",
) -> None:
    """Reject a stack with values that neither `expressed` fields have nor the `required` or default values are."""
    values: dict[str, tuple[object, ...]] = {  # those of the paper's encoder, unless the family differs
        "kv_heads": (None, stack.heads), "head_width": (None, stack.width // stack.heads),
        "remaining_heads": (None,), "compatibility": ("dot",), "gated": (False,), "causal": (False,),
        "cross_attention": (False,), "window": (None, (None, None)), "norm": ("layer",), "norm_order": ("post",),
        "bias": (True,), "scale": (None, (stack.head_width or stack.width // stack.heads) ** -0.5),
        "scale_by_layer": (False,), "embedding_norm": (False,), "embedding_dropout": (None, stack.dropout),
        "output_dropout": (0,), "activation_dropout": (0,), **(required or {}),
    }  # fmt: skip
    assert ALWAYS_EXPRESSED | values.keys() == {field.name for field in fields(StackConfig)}, "a new field"
    for name, allowed in values.items():
        if name not in expressed and not any(is_same_value(getattr(stack, name), value) for value in allowed):
            reject_field(family, f"{side}.{name}", getattr(stack, name), f"{allowed[0]!r}")


def reject_field(family: str, name: str, value: object, required: str) -> NoReturn:
    advice = "this model cannot be written as one: keep it as an attent folder (`model.save(folder)`)"
    raise AttentError(f"`{name}` must be {required} for a {family} model, but is {value!r}; {advice}")


def check_fields(config: object, family: str, required: Mapping[str, object]) -> None:
    for name, expected in required.items():
        if getattr(config, name) != expected:
            reject_field(family, name, getattr(config, name), repr(expected))


def choose_pad(pad: int | None, default: int, vocab: int) -> int:
    pad = default if pad is None else pad
    if not 0 <= pad < vocab:
        raise AttentError(f"`pad` must be a token id, from 0 to {vocab - 1}, but is {pad}; give one, or none")
    return pad
