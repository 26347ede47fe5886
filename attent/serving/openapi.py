"""The OpenAPI document of the endpoints, and a page that shows it without scripts."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from attent.serving.endpoints import Endpoint

ERROR_STATUSES = {
    400: "The request is not valid.",
    401: "The API key is missing or not valid (OpenAI's API).",
    403: "The API key is missing or not valid (other APIs), or the request comes from another site.",
    404: "Not found.",
    405: "The method is not allowed.",
    408: "The body did not arrive in time.",
    413: "The text or the file is too long.",
    415: "The content type is not supported.",
    421: "The host name is not served.",
    429: "The client sent too many requests; see the header Retry-After.",
    431: "The headers are too long.",
    503: "The server is busy or stopping, and has the header Retry-After; without it, the text takes too long.",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; } pre { overflow: auto; padding: .7rem; background: #8881; }
summary { cursor: pointer; padding: .3rem 0; } summary code { font-weight: 600; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } a { color: #8ab4f8; } }
"""


def build_openapi(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    kinds = {(i, side): getattr(each, side) for i, each in enumerate(endpoints) for side in ("body", "response")}
    adapters: Any = [(key, "validation", TypeAdapter(kind)) for key, kind in kinds.items() if kind is not None]
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for index, endpoint in enumerate(endpoints):
        body, response = (schemas.get(((index, side), "validation"), {}) for side in ("body", "response"))
        operation = build_operation(endpoint, body) | {"responses": build_responses(endpoint, response)}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "attent", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def build_operation(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    path_names = [part.strip("{}") for part in endpoint.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_names
    ]
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": parameters,
    }
    if endpoint.body is not None and endpoint.method == "GET":
        schema = endpoint.body.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
            for name, field in schema["properties"].items()
        ]
    elif endpoint.body is not None:
        content = {kind: {"schema": body} for kind in endpoint.content_types}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def build_responses(endpoint: Endpoint, schema: Mapping[str, Any]) -> dict[str, Any]:
    content = {} if endpoint.status == 204 else {endpoint.media_type: {"schema": schema}}
    content |= {"text/event-stream": {}} if endpoint.can_stream else {}
    success = {"description": "Success.", "content": content}
    errors = {str(status): {"description": text} for status, text in ERROR_STATUSES.items()}
    return {str(endpoint.status): success, **errors}


def render_documentation(endpoints: Sequence[Endpoint], document: dict[str, Any]) -> str:
    """Return a page that lists the endpoints by API; it has no scripts and loads nothing."""
    sections: dict[str, list[str]] = {}
    for endpoint in endpoints:
        parts = [f"<p>{html.escape(endpoint.summary)}</p>"]
        if endpoint.body is not None:
            schema = document["components"]["schemas"][endpoint.body.__name__]
            text = json.dumps(schema.get("properties", {}), indent=2, ensure_ascii=False)
            parts.append(f"<p>{'Query' if endpoint.method == 'GET' else 'Body'}</p><pre>{html.escape(text)}</pre>")
        title = f"<summary><code>{endpoint.method} {html.escape(endpoint.path)}</code></summary>"
        sections.setdefault(endpoint.tag, []).append(f"<details>{title}{''.join(parts)}</details>")
    body = "".join(f"<h2>{html.escape(tag)}</h2>{''.join(items)}" for tag, items in sections.items())
    intro = '<p>The machine-readable description is <a href="openapi.json">openapi.json</a>.</p>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>attent API</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>attent API</h1>{intro}{body}</body></html>'
