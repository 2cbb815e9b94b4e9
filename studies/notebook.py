"""The notebook of first steps: run its cells, keep what they show, make a page of it.

``python -m studies.notebook`` runs ``docs/first-steps.ipynb`` and writes what each cell
shows into it. As a hook of mkdocs (see mkdocs.yml) this module makes the notebook a
page of the site, and turns the references of docstrings into links.
"""

import argparse
import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs/first-steps.ipynb"
Notebook = dict[str, Any]

_REFERENCE = re.compile(r":(?:func|class|mod|meth|data|attr):<code>~?([\w.]+)</code>")


def load(path: Path) -> Notebook:
    """Return a notebook, each cell's source as one text."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def run(notebook: Notebook) -> None:
    """Run the code cells in order, as Jupyter does, and keep what each one shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs(cell["source"], number, names)


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    shown: object = None
    where = f"cell {number}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, where, "exec"), names)  # noqa: S102  it is our notebook
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), where, "eval")
            shown = eval(code, names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue()
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if shown is not None:
        data = {"text/plain": repr(shown)}
        if (html := getattr(shown, "_repr_html_", None)) is not None:
            data["text/html"] = html()
        outputs.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": data,
            }
        )
    return outputs


def markdown(notebook: Notebook) -> str:
    """Return a notebook as a page: its text, its code, and what the code showed."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = output.get("text", data.get("text/plain", ""))
            shown = data.get("text/html", f"```text\n{text.rstrip()}\n```")
            parts.append(shown)
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, *, config: Any) -> Any:
    """Put the notebook's page in the place of the notebook (hook of mkdocs)."""
    notebook = files.get_file_from_path(NOTEBOOK.name)
    page = NOTEBOOK.with_suffix(".md").name
    text = markdown(load(NOTEBOOK))
    files.append(type(notebook).generated(config, page, content=text))
    files.remove(notebook)
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Let links to the notebook lead to its page (hook of mkdocs)."""
    return text.replace(NOTEBOOK.name, NOTEBOOK.with_suffix(".md").name)


def on_page_content(html: str, **_: Any) -> str:
    """Make links of references such as ``:func:`~remat.fit` `` (hook of mkdocs)."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        short = name.rpartition(".")[2]
        return f'<autoref optional identifier="{name}"><code>{short}</code></autoref>'

    return _REFERENCE.sub(link, html)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.notebook")
    parser.add_argument("--path", type=Path, default=NOTEBOOK, metavar="FILE")
    path = parser.parse_args(arguments).path
    notebook = load(path)
    run(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
