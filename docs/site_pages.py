"""Write the sources of the documentation site: the Markdown pages, the notebooks, and the generated reference.

docs/*.md, docs/*.ipynb    copied; links to other files of the repository lead to pages that show them
README.md and its like     copied to the same folder
docs/index.md              its lists of links are also the navigation
reference/                 commands by their --help, settings by their dataclasses, Python by docstrings
"""

import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attent
import attent.nn
from attent.cli import COMMANDS, make_app
from docs.docstrings import convert_text, is_generated, read_field_comments

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages outside of docs/, by their path in the repository.
OTHER_PAGES = {name: name.lower() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
SITE_ONLY = re.compile(r"<!-- (reference/\S+) -->([^:]+)")  # in index.md: the page of an entry that only the site has
SITE_PAGE = {".md", ".ipynb", ".png", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".conf": "nginx", ".html": "html", ".css": "css"}
ORPHAN = "---\norphan: true\n---\n"
HIDDEN = "---\norphan: true\nnosearch: true\n---\n"


def write_pages(folder: Path) -> None:
    """Write all pages; those that have not changed keep their time, so that Sphinx does not read them again."""
    if folder.resolve() in (DOCS, ROOT):
        raise ValueError(f"the source folder must be one to generate, but is {folder}; use `make docs`")
    pages = dict(iterate_pages())
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        if file.relative_to(folder).as_posix() not in pages:
            file.unlink()
    for name, content in pages.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def iterate_pages() -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file of the site's sources."""
    shown: set[str] = set()  # files and folders of the repository that pages link to
    sources = {f"docs/{path.relative_to(DOCS).as_posix()}": path for path in DOCS.rglob("*") if path.is_file()}
    sources |= {name: ROOT / name for name in OTHER_PAGES}
    for name, path in sources.items():
        page = get_page(name)
        if page is None or ".ipynb_checkpoints" in name:
            continue
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            text = format_index(text) if page == "index.md" else text
            text = text.replace("# attent\n", "# Getting started\n", 1) if name == "README.md" else text
            header = ORPHAN if "/" in page else ""  # reports that another page links to
            yield page, "".join([header, *rewrite_page(text, name, shown)]).encode()
        elif path.suffix == ".ipynb":
            yield page, rewrite_notebook(path, name, shown)
        else:
            yield page, path.read_bytes()
    for name, text in (*iterate_source_pages(shown), *iterate_reference()):
        yield name, text.encode()


def get_page(name: str) -> str | None:
    """Return the site's path of a file of the repository; None: it is no page."""
    if name.startswith("docs/") and Path(name).suffix in SITE_PAGE:
        return name.removeprefix("docs/")
    return OTHER_PAGES.get(name)


# ---- pages of the repository --------------------------------------------------------------------------------------


def rewrite_page(text: str, name: str, shown: set[str]) -> Iterator[str]:
    """Yield the parts of a page, with the links outside of code blocks rewritten."""
    for index, part in enumerate(FENCE.split(text)):
        yield part if index % 2 else rewrite_links(part, name, shown)


def rewrite_links(text: str, name: str, shown: set[str]) -> str:
    """Rewrite the relative links of a page of the repository for the site."""
    page = get_page(name) or name

    def rewrite(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(name), link[1])).replace(os.sep, "/")
        destination = get_page(target)
        if destination is None and (ROOT / target).exists():
            shown.add(target)
            destination = get_source_page(target)
        relative = os.path.relpath(destination or link[1], os.path.dirname(page) or ".") if destination else link[1]
        return relative.replace(os.sep, "/") + (link[2] or "")

    return LINK.sub(rewrite, text)


def rewrite_notebook(path: Path, name: str, shown: set[str]) -> bytes:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewrite_links("".join(cell["source"]), name, shown)
    return json.dumps(notebook, ensure_ascii=False).encode()


def get_source_page(target: str) -> str:
    return f"source/{target}{'/index' if (ROOT / target).is_dir() else ''}.md"


def iterate_source_pages(shown: set[str]) -> Iterator[tuple[str, str]]:
    """Yield pages with the files of the repository that other pages link to, and lists of the files of folders."""
    folders = {name for name in shown if (ROOT / name).is_dir()}
    files = {name: sorted(path.name for path in (ROOT / name).iterdir() if path.is_file()) for name in folders}
    for folder, names in files.items():
        listed = "\n".join(f"- [{name}]({name}.md)" for name in names)
        yield get_source_page(folder), f"{HIDDEN}# {folder}/\n\n{listed}\n"
    for name in sorted(shown - folders | {f"{folder}/{name}" for folder, names in files.items() for name in names}):
        text = (ROOT / name).read_text(encoding="utf-8")
        language = LANGUAGES.get(Path(name).suffix, "text")
        yield get_source_page(name), f"{HIDDEN}# {name}\n\n{fence(text, language)}"


def format_index(text: str) -> str:
    """Return index.md with a toctree for each of its sections: the pages that its list links to."""
    text = SITE_ONLY.sub(r"[\2](\1)", text)
    trees = []
    for section in text.split("\n## ")[1:]:
        pages = re.findall(r"^- \[([^]]+)\]\(([^)#]+)\)", section, re.MULTILINE)
        entries = [f"{title} <{get_page(os.path.normpath(f'docs/{target}')) or target}>" for title, target in pages]
        caption = section.partition("\n")[0]
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]))
    return "\n\n".join([text.rstrip(), *trees, ""])


def fence(text: str, language: str) -> str:
    marks = "`" * (2 + max((len(run) for run in re.findall("`+", text)), default=1))
    return f"{marks}{language}\n{text.rstrip()}\n{marks}\n"


# ---- reference ----------------------------------------------------------------------------------------------------


def iterate_reference() -> Iterator[tuple[str, str]]:
    yield from iterate_commands()
    yield "reference/settings.md", format_settings()
    yield from iterate_modules()


def iterate_commands() -> Iterator[tuple[str, str]]:
    """Yield a page for each command, with its arguments and flags as in its `--help`."""
    app = make_app()
    rows = [f"[attent {name}]({name}.md)\n: {escape(text)}\n" for name, text in COMMANDS.items()]
    tree = "\n".join(["\n```{toctree}", ":hidden:", "", *COMMANDS, "```\n"])
    yield (
        "reference/commands/index.md",
        "# Commands\n\nThese pages are what `attent --help` and `attent COMMAND --help` print. Results go to standard "
        "output, messages to standard error. Exit codes: 0 success, 1 failure, 2 usage error, 130 Ctrl-C.\n\n"
        + "\n".join(rows)
        + tree,
    )
    for name in COMMANDS:
        yield f"reference/commands/{name}.md", format_command(name, app[name].generate_docs())


def format_command(name: str, help_text: str) -> str:
    """Return the page of a command; a flag is a definition, so that it wraps on a narrow screen."""
    lines = [f"# attent {name}", ""]
    body = help_text.partition("\n")[2]  # without the title
    for line in body.replace(f"```console\n{name}", f"```text\nattent {name}").splitlines():
        if flag := re.fullmatch(r"\* `([^`]+)`(?:: (.*))?", line):
            *names, last = flag[1].split(", ")
            last_name, _, kind = last.partition(" ")
            terms = ", ".join(f"`{term}`" for term in (*names, last_name))
            lines += [f"{terms} {kind}".rstrip(), f": {escape(flag[2] or '')}", ""]
        elif group := re.fullmatch(r"\*\*(.+)\*\*:", line):
            lines += [f"## {group[1]}"]
        else:
            lines += [line]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Escape text of a help message for Markdown, except for code and for the emphasis of defaults and choices."""
    parts = re.split(r"(`[^`]*`|\*+\[[^]]*\]\*+)", text)
    return "".join(part if index % 2 else re.sub(r"([<*_\[\]$])", r"\\\1", part) for index, part in enumerate(parts))


def format_settings() -> str:
    """Return the page of all settings of a run file, from the dataclasses that read it."""
    from attent.training.config import RUN_CLASSES

    run_class = next(iter(RUN_CLASSES.values()))  # of translation models
    text = (
        "# Settings of a run\n\nThe settings of `run.toml`, for a translation model. `--set data.max_tokens=100` gives "
        "one to `attent train`, and most have a flag of the same name ([commands](commands/train.md)). "
        "A setting without a default is chosen from the data and the machine.\n"
    )
    return text + "\n".join(iterate_tables(run_class, ""))


def iterate_tables(cls: type, prefix: str) -> Iterator[str]:
    """Yield a section for a table of settings, then those of the tables in it."""
    comments, hints = read_field_comments(cls), get_type_hints(cls)
    tables = {field.name: find_dataclass(hints[field.name]) for field in fields(cls)}
    yield f"\n## {f'[{prefix}]' if prefix else 'Run'}\n"
    for field in fields(cls):
        if tables[field.name] is None:
            kind = format_type(hints[field.name])
            default = "" if field.default in (None, MISSING, ()) else f"*[default: {escape(str(field.default))}]*"
            text = " ".join(filter(None, (escape(comments.get(field.name, "")), kind, default)))
            yield f"`{field.name}`\n: {text}\n"
    for name, table in tables.items():
        if table is not None:
            yield from iterate_tables(table, f"{prefix}.{name}" if prefix else name)


def find_dataclass(hint: Any) -> type | None:
    """Return the first dataclass of a type, such as that of `Config | None`."""
    return next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)


def format_type(hint: Any) -> str:
    """Describe the values of a setting as the command line does: choices, or a type."""
    choices = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    if choices:
        return f"*[choices: {', '.join(str(choice) for choice in get_args(choices[0]))}]*"
    if get_origin(hint) is tuple:
        return f"*[list of {get_args(hint)[0].__name__}]*"
    return f"*[{inspect.formatannotation(hint).removesuffix(' | None')}]*"


def iterate_modules() -> Iterator[tuple[str, str]]:
    """Yield the pages of the Python reference: one per name of `attent`, one per module of `attent.nn`."""
    names = [name for name in attent.__all__ if name != "__version__"]
    entries = [line for name in names for line in format_entry("attent", name)]
    names = [name for name in names if name != "nn"]  # has pages of its own
    yield "reference/attent/index.rst", format_page("Python: attent", [*entries, *format_rst_tree(names)])
    documented = {getattr(attent, name) for name in names}
    for name in names:
        objects = [("attent", name)]
        for cls in iterate_result_types(getattr(attent, name)):
            if cls not in documented:
                documented.add(cls)
                objects.append((cls.__module__, cls.__name__))
        yield f"reference/attent/{name}.rst", format_page(f"attent.{name}", format_objects(objects))
    modules: dict[str, list[str]] = {}
    for name in attent.nn.__all__:
        modules.setdefault(find_module(name), []).append(name)
    entries = []
    for module, members in sorted(modules.items()):
        entries += [module.removeprefix("attent.nn."), "-" * len(module), ""]
        entries += [line for name in members for line in format_entry("attent.nn", name)]
    pages = sorted(module.removeprefix("attent.nn.") for module in modules)
    header = format_docstring("attent.nn")
    yield "reference/nn/index.rst", format_page("Python: attent.nn", [*header, *entries, *format_rst_tree(pages)])
    for module, members in modules.items():
        objects = [("attent.nn", name) for name in members]
        lines = [*format_docstring(module), *format_objects(objects)]
        yield f"reference/nn/{module.removeprefix('attent.nn.')}.rst", format_page(module, lines)


def find_module(name: str) -> str:
    """Return the module of `attent.nn` that defines a name."""
    value = getattr(attent.nn, name)
    modules = (module for module in vars(attent.nn).values() if isinstance(module, ModuleType))
    return getattr(value, "__module__", None) or next(m.__name__ for m in modules if getattr(m, name, None) is value)


def iterate_result_types(value: object) -> Iterator[type]:
    """Yield attent's classes in the results of a function, or of the public methods of a class."""
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value):
        functions = [member for name, member in inspect.getmembers(value) if name[0] != "_" and is_method(member)]
    for function in functions:
        try:
            hint = get_type_hints(function).get("return")
        except NameError:  # a type that is imported for type checkers only
            continue
        yield from iterate_classes(hint)


def is_method(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def iterate_classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and hint.__module__.startswith("attent.") and inspect.getdoc(hint):
        yield hint
    for kind in get_args(hint):
        yield from iterate_classes(kind)


def format_page(title: str, lines: list[str]) -> str:
    return "\n".join([title, "=" * len(title), "", *lines, ""])


def format_rst_tree(pages: list[str]) -> list[str]:
    return [".. toctree::", "    :hidden:", "", *(f"    {page}" for page in pages)]


def format_docstring(module: str) -> list[str]:
    return [f".. automodule:: {module}", "    :no-members:", ""]


def format_entry(module: str, name: str) -> list[str]:
    """Return a link to an object with the first line of its docstring."""
    value = getattr(import_module(module), name)
    doc = inspect.getdoc(value) or "" if inspect.isroutine(value) or isinstance(value, type | ModuleType) else ""
    lines = [] if is_generated([doc], value) else doc.split("\n\n")[0].splitlines()
    target = value.__name__ if isinstance(value, ModuleType) else f"{module}.{name}"
    return [f":py:obj:`{module}.{name} <{target}>`", f"    {convert_text(' '.join(lines), {})}", ""]


def format_objects(objects: list[tuple[str, str]]) -> list[str]:
    lines = []
    for module, name in objects:
        value = getattr(import_module(module), name)
        if isinstance(value, ModuleType):
            lines += [f".. automodule:: {value.__name__}", "    :members:", ""]
        elif inspect.isclass(value):
            lines += [f".. autoclass:: {module}.{name}", "    :members:", "    :undoc-members:", ""]
        elif callable(value):
            lines += [f".. autofunction:: {module}.{name}", ""]
        else:
            lines += [f".. autodata:: {module}.{name}", "    :no-value:", ""]
    return lines


@cache
def get_documented_names() -> dict[str, str]:
    """Return the full names of the objects in the reference, by every name that a docstring may use for them."""
    full = [f"{module.__name__}.{name}" for module in (attent, attent.nn) for name in module.__all__]
    short = {name.rpartition(".")[2]: name for name in full if name.rpartition(".")[2][0].isupper()}
    return {name: name for name in full} | short
