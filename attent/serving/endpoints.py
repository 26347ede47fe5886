"""Endpoints: a table of paths with the models of their requests and responses, from which the routes and the OpenAPI
document are built.

A handler gets a `Call`: the validated body, and the gateway to the models. Bodies are JSON or, where an API has them,
forms. Wrong requests are answered with 400 and one sentence, which never repeats the body.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from attent import settings
from attent.serving.limits import ApiError

if TYPE_CHECKING:
    from attent.serving.gateway import Gateway

FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")
MAX_FORM_FIELDS = 1_000
AUTHORIZATION_SCHEMES = ("bearer ", "deepl-auth-key ")


class Body(BaseModel):
    """The base of request bodies: unknown fields are ignored, as other servers do."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


BodyT = TypeVar("BodyT", bound=BaseModel | None)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[BodyT]):
    """One request to an endpoint."""

    gateway: Gateway
    request: Request
    body: BodyT
    client: str  # whose rate and share of the queue it counts for


@dataclass(frozen=True)
class Endpoint:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[[Call[Any]], Awaitable[Response]]
    summary: str
    _: KW_ONLY
    body: type[BaseModel] | None = None  # of the body; of the query for GET
    response: Any = None  # a type that pydantic knows; None: not JSON
    forms: bool = False  # forms are accepted besides JSON
    is_public: bool = False  # needs no key
    tag: str = "attent"  # a group of the documentation
    status: int = 200
    media_type: str = "application/json"
    format_error: Callable[[str, int], Mapping[str, Any]] = field(default=lambda message, status: {"error": message})


def build_route(endpoint: Endpoint, gateway: Gateway) -> Route:
    async def handle(request: Request) -> Response:
        try:
            data = await read_fields(request, endpoint)
            key = find_key(request, data)
            client = gateway.identify(request, key, is_public=endpoint.is_public)
            body = None if endpoint.body is None else validate_body(endpoint.body, data)
            return await endpoint.handler(Call(gateway=gateway, request=request, body=body, client=client))
        except ApiError as error:
            payload = endpoint.format_error(error.clipped_message, error.status)
            return make_json_response(payload, error.status, error.headers)

    return Route(endpoint.path, handle, methods=[endpoint.method])


def make_json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")


def find_key(request: Request, data: Mapping[str, Any]) -> str:
    """Return the API key of a request: from the header Authorization, the body or the query; "" if there is none."""
    header = request.headers.get("authorization", "")
    for scheme in AUTHORIZATION_SCHEMES:
        if header.lower().startswith(scheme):
            return header[len(scheme) :].strip()
    key = data.get("api_key") or request.query_params.get("api_key") or ""
    return key if isinstance(key, str) else ""


# --- bodies ----------------------------------------------------------------------------------------------------------


def check_is_json(request: Request) -> None:
    """Refuse other content types, charsets and compressed bodies."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        content_type = ascii(kind.strip()[:80]) if kind.strip() else "absent"
        raise ApiError(415, f"`Content-Type` must be application/json, but is {content_type}; send JSON")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise ApiError(415, "the charset must be UTF-8")
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "the request must not be compressed")


async def read_fields(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields of the query (GET), or of a JSON or form body. A repeated field of a form is a list."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the request must not be compressed")
    if endpoint.method == "GET":
        fields = collect_fields(request.query_params.multi_items())
        return fields | (await read_form(request) if content_type == FORM_TYPES[0] else {})
    if content_type in FORM_TYPES and endpoint.forms:
        return await read_form(request)
    if endpoint.body is None:
        return {}
    if content_type != "application/json":
        allowed = ", ".join(["application/json", *(FORM_TYPES if endpoint.forms else ())])
        raise ApiError(415, f"`Content-Type` must be {allowed}, but is {ascii(content_type[:80]) or 'absent'}")
    return parse_json_object(await request.body())


async def read_form(request: Request) -> dict[str, Any]:
    try:
        form = await request.form(max_files=1, max_fields=MAX_FORM_FIELDS)
    except (HTTPException, ValueError) as error:
        raise ApiError(400, f"the form cannot be read: {getattr(error, 'detail', error)}") from None
    return collect_fields(form.multi_items())


def collect_fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in items:
        if name in fields:
            previous = fields[name]
            fields[name] = [*previous, value] if isinstance(previous, list) else [previous, value]
        else:
            fields[name] = value
    for value in fields.values():
        check_text(value)
    return fields


def parse_json_object(content: bytes) -> dict[str, Any]:
    try:
        data = settings.decode_strict_json(content.decode("utf-8"))
        check_text(json.dumps(data, ensure_ascii=False))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request must be UTF-8, but byte {error.start} is not") from None
    except RecursionError:
        raise ApiError(400, "the request is nested too deeply; send one flat object") from None
    except ApiError:
        raise
    except ValueError as error:
        raise ApiError(400, f"the request must be JSON, but is not: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the request must be a JSON object")
    return data


def check_text(value: object) -> None:
    """Refuse what UTF-8 cannot encode: half of a surrogate pair."""
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "the request contains half of a surrogate pair, which is no character") from None


def validate_body(kind: type[BaseModel], data: Mapping[str, Any]) -> BaseModel:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        # A field that is a union has one error for each of its types; its name is enough.
        name = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("str", "list", "tuple", "int")))
        raise ApiError(400, f"`{name[:80]}`: {first['msg'][:200]}") from None
