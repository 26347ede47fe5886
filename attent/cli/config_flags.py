"""Command-line flags of a run, derived from its settings: an annotated field is a flag; None: it was not given."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter


def add_config_flags(tables: Mapping[type, Group]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of settings tables to a command, as its `**flags`: dataclass -> help group."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
        more = [flag for table, group in tables.items() for flag in _iterate_flags(table, group)]
        names = {parameter.name for parameter in own}
        parameters = [*own, *(flag for flag in more if flag.name not in names)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _iterate_flags(table: type, group: Group) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(table, include_extras=True)
    for field in fields(table):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind, help_text = get_args(hint)
            is_list = any(get_origin(option) is tuple for option in (kind, *get_args(kind)))  # also of `tuple | None`
            parameter = Parameter(
                help=help_text,
                group=group,
                consume_multiple=is_list,
                allow_repeating=is_list or None,
                negative_iterable="",
            )
            annotation: Any = Annotated[kind | None, parameter]
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
