"""MkDocs hooks: pages generated from the source, pages copied from the repository, links between them."""

import json
import posixpath
import re
from inspect import cleandoc, getsourcefile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

REPOSITORY_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages that are stored outside docs/, and their place in the site."""

DRAWINGS = {"flowchart": "images/layers.svg", "sequenceDiagram": "images/round.svg"}
"""Drawings that replace Mermaid blocks: Mermaid would load a script from the network."""

API = {
    "fedloom": ("fedloom", "Names that `import fedloom` offers.", "fedloom", None),
    "core": (
        "fedloom.core",
        "Classes and functions that a method file uses.",
        "fedloom.core",
        [
            "method.Method", "client.Client", "server.Server", "task.Task", "batches.Batch", "message.Message",
            "fit.FitResult", "rng.Random", "rng.Dropout", "state.copy_", "state.lerp_", "state.clamp_",
            "state.squared_distance", "state.inner_product", "state.parameters_of", "state.filled", "options.Count",
            "options.Positive", "options.Share",
        ],
    ),
    "losses": ("fedloom.losses", "Functions of tensors that return a scalar loss.", "fedloom.losses", None),
    "models": (
        "fedloom.models",
        "The base class of networks, and functions that build them.",
        "fedloom.models",
        ["SplitModel", "build", "register", "split_model", "tapped"],
    ),
    "data": (
        "fedloom.data",
        "Datasets, and their division among clients.",
        "fedloom.data",
        [
            "load", "Dataset", "Federation", "federate", "Pool", "Partition", "parse_partition", "parse_split",
            "combine", "limit", "resize", "counts",
        ],
    ),
    "engines": (
        "fedloom.engines",
        "The base class of engines, their settings, and the jobs that they run.",
        "fedloom",
        [
            "engines.base.Engine", "engines.base.EngineSettings", "engines.make_engine", "core.job.Job",
            "core.job.Result", "core.execution.launch",
        ],
    ),
}  # fmt: skip
"""API pages: title, introduction, package, and names in it (None: all of `__all__`)."""


def on_config(config: Any) -> Any:
    """Add the generated method pages to the navigation, below the page that compares the methods."""
    for section in config.nav:
        for entry in section.get("Reference", []):
            if "Methods" in entry:
                entry["Methods"] += [{title: uri} for uri, title in method_titles().items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add generated pages and the pages that are copied from the repository."""
    from mkdocs.structure.files import File

    for uri, text in generated().items():
        files.append(File.generated(config, uri, content=text))
    for path, uri in REPOSITORY_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for notebook in notebooks():
        files.append(File.generated(config, f"files/examples/{notebook.name}", abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace Mermaid blocks by drawings, show file names of code blocks, and adapt links that lead out of docs/."""
    from mkdocs.structure.files import File

    uri = page.file.src_uri
    text, assets = relinked(with_titles(with_drawings(markdown, uri)), uri)
    for path in assets:
        if files.get_file_from_path(f"files/{path}") is None:
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return text


def relinked(markdown: str, uri: str) -> tuple[str, list[str]]:
    """Adapt the links of a page to its place in the site; also return the repository files that it links to."""
    outside = {page: path for path, page in REPOSITORY_PAGES.items()}
    outside |= {notebook_uri(path): f"examples/{path.name}" for path in notebooks()}
    source = outside.get(uri, f"docs/{uri}")
    assets: list[str] = []

    def relink(match: re.Match[str]) -> str:
        label, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path.startswith("../") or not (ROOT / path).exists():
            return match[0]  # MkDocs reports it if it is broken
        if (ROOT / path).is_dir():
            return label
        if path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path == "README.md":
            target = "index.md"
        elif path.endswith(".ipynb"):
            target = notebook_uri(Path(path))
        elif path in REPOSITORY_PAGES:
            target = REPOSITORY_PAGES[path]
        else:
            target = f"files/{path}"
            assets.append(path)
        return f"[{label}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(([^)#\s:]+)((?:#[^)\s]*)?)\)", relink, markdown), assets


def with_drawings(markdown: str, uri: str) -> str:
    """Replace each Mermaid block by the drawing of its kind."""

    def drawing(match: re.Match[str]) -> str:
        image = posixpath.relpath(DRAWINGS[match[1]], posixpath.dirname(uri) or ".")
        return f"![{Path(image).stem}]({image})"

    return re.sub(r"^```mermaid\n\s*(\w+).*?^```", drawing, markdown, flags=re.DOTALL | re.MULTILINE)


def with_titles(markdown: str) -> str:
    """Write the file name of a code block in the form that the site shows as a title."""
    return re.sub(r"^```(\w+) ([\w./-]+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def generated() -> dict[str, str]:
    """Return the text of every generated page by its place in the site."""
    pages = {uri: method_page(Path(uri).stem) for uri in method_titles() if not uri.endswith("addons.md")}
    pages["reference/methods/addons.md"] = addons_page()
    pages["reference/command-line.md"] = command_line_page()
    pages["reference/recipe.md"] = recipe_page()
    pages |= {f"reference/api/{name}.md": api_page(name) for name in API}
    pages |= {notebook_uri(path): notebook_page(path) for path in notebooks()}
    return pages


def method_titles() -> dict[str, str]:
    """Return the titles of the method pages by their place in the site."""
    from fedloom.methods import METHODS

    titles = {f"reference/methods/{name}.md": METHODS.find(name).__name__ for name in METHODS.names()}
    return titles | {"reference/methods/addons.md": "Add-ons"}


def method_page(name: str) -> str:
    """Describe a method: what it does, what travels, its hyperparameters and its source."""
    from fedloom.methods import METHODS
    from fedloom.report.methods import method_info

    kind, info = METHODS.find(name), method_info(name)
    source = Path(getsourcefile(kind) or "")
    text = source.read_text(encoding="utf-8")
    verbs = ("shares", "sends", "receives", "keeps", "server_keeps")
    parts = {verb: ", ".join(f"`{part}`" for part in info[verb]) for verb in verbs}
    what = {
        "Shares (both directions, averaged)": parts["shares"],
        "Sends to the server only": parts["sends"],
        "Receives from the server only": parts["receives"],
        "Keeps between rounds": parts["keeps"],
        "Stays at the server": parts["server_keeps"],
        **{f"`{part}` reveals": said for part, said in info["reveals"].items()},
        "Global model": "yes" if info["global"] else "no",
        "Robust aggregation": "yes" if info["robust"] else f"no: it {info['not_robust']}",
        "Differential privacy": "yes" if info["private"] else f"no: it {info['not_private']}",
        "Secure aggregation": "yes" if info["secure"] else f"no: it {info['not_secure']}",
    }
    lines = [
        f"# {kind.__name__}", "", cleandoc(kind.__doc__ or ""), "", f"Reference: {info['paper'] or 'none'}", "",
        f"```\nfedloom run --method {name}\n```", "", "## State and messages", "",
        *table(("Property", "Value"), [(key, value) for key, value in what.items() if value]),
        "", "Values are those of the default hyperparameters.", "",
        "## Hyperparameters", "", *parameters(info["parameters"], kind),
        "", "## Source", "", f"`{_repository_path(source)}`", "", "```python", text.rstrip(), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def addons_page() -> str:
    """Describe what `+ft`, `+svm` and the like add to a method."""
    from fedloom.core.options import field_docs, hyperparameters
    from fedloom.methods import ADDONS

    lines = ["# Add-ons", "", "`METHOD+ADDON` adds behaviour to any method: `fedloom run --method fedavg+ft`.", ""]
    for name in ADDONS.names():
        kind = ADDONS.find(name)
        docs = field_docs(kind)
        rows = [{"name": n, "default": d, "what": docs.get(n, "")} for n, d in hyperparameters(kind).items()]
        lines += [f"## +{name}", "", cleandoc(kind.__doc__ or ""), "", *parameters(rows, kind), ""]
    return "\n".join(lines)


def parameters(rows: list[dict[str, Any]], kind: type) -> list[str]:
    """Return a table of hyperparameters."""
    from fedloom.core.options import declared

    if not rows:
        return ["None."]
    types = {name: _spelled(annotation) for name, (annotation, _) in declared(kind).items()}
    cells = [(f"`{row['name']}`", types[row["name"]], f"`{_yaml(row['default'])}`", row["what"]) for row in rows]
    return table(("Name", "Values", "Default", "Description"), cells)


def command_line_page() -> str:
    """List every command with its help, arguments and options."""
    from typer.main import get_command

    from fedloom.cli.commands import app

    lines = ["# Command line", "", "`fedloom COMMAND --help` prints the same text.", ""]
    for name, command in sorted(get_command(app).commands.items()):  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        if inner is None:
            lines += command_section(f"fedloom {name}", command, 2)
            continue
        lines += [f"## fedloom {name}", "", cleandoc(command.help or ""), ""]
        for sub, one in inner.items():
            lines += command_section(f"fedloom {name} {sub}", one, 3)
    return "\n".join(lines)


def command_section(title: str, command: Any, level: int) -> list[str]:
    """Describe one command."""
    import click

    context = click.Context(command, info_name=title)
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    about, _, examples = cleandoc(command.help or "").partition("Examples:")
    lines = ["#" * level + f" {title}", "", about.strip(), "", f"```\n{usage}\n```", ""]
    if examples:
        shown = [line.strip() for line in examples.splitlines() if line.strip()]
        lines += ["Examples:", "", "```", *shown, "```", ""]
    records = [(known, known.get_help_record(context)) for known in command.params]
    for kind, heading in (("argument", "Argument"), ("option", "Option")):
        rows = [(f"`{r[0]}`", r[1]) for known, r in records if r and known.param_type_name == kind]
        if rows:
            lines += [*table((heading, "Description"), rows), ""]
    return lines


def recipe_page() -> str:
    """List every field of a recipe, section by section."""
    from fedloom.config.recipe import Recipe

    schema, defaults = Recipe.model_json_schema(), Recipe().model_dump(mode="json")
    lines = [
        "# Recipe fields", "",
        "A recipe is a YAML file with these sections. `fedloom recipe` prints one with every field, and "
        "`--set SECTION.FIELD=VALUE` changes a field on the command line.", "",
        "`method`, `model`, `objective`, `data` and `engine` may be written as a name alone: `method: fedprox` means "
        "`method: {name: fedprox}`.", "",
    ]  # fmt: skip
    return "\n".join(lines + recipe_section("", schema, schema["$defs"], defaults))


def recipe_section(path: str, section: dict[str, Any], known: dict[str, Any], defaults: Any) -> list[str]:
    """Describe one section and those inside it."""
    rows, inner = [], []
    for name, field in section["properties"].items():
        whole = f"{path}.{name}".lstrip(".")
        reference = next((one["$ref"] for one in (field, *field.get("anyOf", [])) if "$ref" in one), None)
        value = defaults.get(name) if isinstance(defaults, dict) else field.get("default")
        if reference is None:
            rows.append((f"`{whole}`", _allowed(field), f"`{_yaml(value)}`", field.get("description", "")))
            continue
        below = known[reference.rpartition("/")[2]]
        about = [part for part in (field.get("description"), below.get("description")) if part]
        inner += [f"## {whole}", "", *(f"{one[0].upper()}{one[1:].rstrip('.')}.\n" for one in about)]
        if value is None:
            inner += ["Absent by default.", ""]
        inner += recipe_section(whole, below, known, value)
    return [*(table(("Field", "Values", "Default", "Description"), rows) if rows else []), "", *inner]


def api_page(name: str) -> str:
    """Return a page that mkdocstrings fills."""
    from importlib import import_module

    title, about, package, names = API[name]
    names = names or import_module(package).__all__
    return "\n".join([f"# {title}", "", about, "", *(f"::: {package}.{one}\n{_options(one)}" for one in names)])


def _options(name: str) -> str:
    """Return options of mkdocstrings: `Method` documents class keywords, which are in no signature."""
    allowed = "warn_unknown_params: false, warn_missing_types: false"
    return f"    options:\n      docstring_options: {{{allowed}}}\n" if name.endswith("Method") else ""


def notebooks() -> list[Path]:
    """Return the paths of the notebooks in examples/."""
    return sorted((ROOT / "examples").glob("*.ipynb"))


def notebook_uri(path: Path) -> str:
    """Return the place of a notebook's page in the site."""
    return f"tutorials/{path.stem.replace('_', '-')}.md"


def notebook_page(path: Path) -> str:
    """Turn a notebook's cells into a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    title, *rest = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts]
    notice = f"This page is the notebook [{path.name}](../files/examples/{path.name})."
    return "\n\n".join([title, notice, *rest]) + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def _yaml(value: Any) -> str:
    """Write a default value as in a recipe."""
    return json.dumps(value, ensure_ascii=False).strip('"')


def _allowed(field: dict[str, Any]) -> str:
    """Say which values a field of a JSON schema takes."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_allowed(one) for one in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{_yaml(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{_yaml(field['const'])}`"
    word = {"string": "text", "integer": "integer", "number": "number", "boolean": "`true`, `false`",
            "array": "list", "object": "mapping", "null": "`null`"}.get(field.get("type", ""), "any")  # fmt: skip
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join([word, *(f"{sign} {field[key]}" for key, sign in words.items() if key in field)])


def _spelled(annotation: Any) -> str:
    """Say which values an annotation allows."""
    from pydantic import TypeAdapter

    return _allowed(TypeAdapter(annotation).json_schema())


def _repository_path(path: Path) -> str:
    return path.as_posix().rpartition("/fedloom/")[2].join(("fedloom/", ""))
