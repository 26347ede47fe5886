"""Command-line flags of search, generation and devices, derived from the options in `attent.decoding.options`."""

import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from itertools import chain
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import CycloptsError, Group, Parameter

from attent.decoding.options import DeviceOptions, SamplingOptions, SearchKeywords, SearchOptions

GroupName = Literal["Common", "Constraints", "Search", "Sampling", "Output", "Documents", "Device"]
GROUPS: dict[str, Group] = {name: Group(name, sort_key=i) for i, name in enumerate(get_args(GroupName), 1)}
DerivedFlag = tuple[str, Any, Any]  # name, type and default
DEFAULT_BEAM_SIZE = SearchOptions.beam_size


def flag(group: GroupName, help_text: str, *names: str, negative: str = "") -> Parameter:
    return Parameter(name=names or None, group=GROUPS[group], help=help_text, negative=negative, negative_iterable="")


def derive_flags(options: type, unset: Container[str] = (), exclude: Container[str] = ()) -> Iterator[DerivedFlag]:
    """Yield the flag of each `option` field; those in `unset` default to None."""
    hints = get_type_hints(options)
    for field in fields(options):
        if (option := field.metadata.get("option")) and field.name not in exclude:
            names = [f"--{field.name.replace('_', '-')}", *option.aliases]
            parameter = Parameter(name=names, group=GROUPS[option.group], help=option.help, negative="")
            kind, default = hints[field.name], field.default
            if field.name in unset:
                kind, default = kind | None, None
            yield field.name, Annotated[kind, parameter], default


def make_flags_class(*flags: Iterable[DerivedFlag]) -> Any:
    return make_dataclass("DerivedFlags", chain(*flags), frozen=True, kw_only=True)


_SAMPLING_NAMES = tuple(field.name for field in fields(SamplingOptions))
_SAMPLE_FLAG = Annotated[bool, flag("Sampling", "sample the translations; implied by the next four flags")]
SearchFlags: Any = make_flags_class(
    derive_flags(SearchOptions, unset=("beam_size",)),
    [("sample", _SAMPLE_FLAG, False)],
    derive_flags(SamplingOptions, unset=_SAMPLING_NAMES),
)
DeviceFlags: Any = make_flags_class(derive_flags(DeviceOptions))


def build_search_options(flags: Any, min_beam_size: int = 1) -> SearchOptions:
    values = {name: value for name in SearchKeywords.__annotations__ if (value := getattr(flags, name)) is not None}
    if flags.sample:
        values.setdefault("temperature", SamplingOptions.temperature)
    return SearchOptions().change(min_beam_size=min_beam_size, **values)


def build_device_options(flags: Any) -> DeviceOptions:
    return DeviceOptions(**{field.name: getattr(flags, field.name) for field in fields(DeviceOptions)})


@contextmanager
def raise_usage_errors(command: str, options: type = SearchOptions) -> Iterator[None]:
    """Raise a ValueError as a usage error that names flags instead of options."""
    try:
        yield
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error), options), command_chain=(command,)) from error


def use_flag_names(message: str, options: type = SearchOptions) -> str:
    """Replace option names in a message by flags: `beam_size` -> `--beam-size`."""
    names = "|".join(field.name for field in fields(options))
    message = message.replace("`mbr_candidates`", "`--mbr`")
    return re.sub(rf"(?<=`)({names})(?=`)|\b(max_length)\b", lambda name: f"--{name[0].replace('_', '-')}", message)


def check_positive(command: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            problem = f"--{name.replace('_', '-')} must be 1 or more, but is {value}"
            raise CycloptsError(msg=problem, command_chain=(command,))
