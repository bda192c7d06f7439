"""Formats of a paper's results table: text, Markdown, LaTeX, CSV, JSON, rows of plain values."""

import csv
import json
from collections.abc import Callable, Sequence
from io import StringIO
from textwrap import fill
from typing import Any

from fedloom.report.paper.measures import Quantity
from fedloom.report.paper.table import PaperCell, PaperTable

WIDTH = 100
"""Width of a text table's caption."""
ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", "*": "$^{*}$",
    "±": r"$\pm$", "−": "$-$", "–": "--", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "ε": r"$\epsilon$",
    "λ": r"$\lambda$", "μ": r"$\mu$", "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$",
}  # fmt: skip
LATEX = str.maketrans(ESCAPES)
MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_<|["})


def escape(text: str) -> str:
    """Return text for LaTeX, with special characters escaped."""
    return text.translate(LATEX)


def as_text(table: PaperTable) -> str:
    """Return a table of aligned columns with its caption below."""
    heads, body = _grid(table, _plain)
    lines = [*heads, *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def joined(line: Sequence[str]) -> str:
        right = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join([line[0].ljust(widths[0]), *right]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*map(joined, heads), rule, *map(joined, body), rule, _filled(table.caption)])


def as_markdown(table: PaperTable) -> str:
    """Return a Markdown table; the best of a column is bold, the second is underlined."""

    def shown(measure: Quantity, cell: PaperCell, spread: float | None) -> str:
        text = _plain(measure, cell, spread).translate(MARKDOWN)
        return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(cell.rank or 0, text)

    heads, body = _grid(table, shown)
    head = [" ".join(filter(None, parts)).translate(MARKDOWN) for parts in zip(*heads, strict=True)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([row.translate(MARKDOWN), *cells] for row, *cells in body)]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*rows, "", " ".join([*table.caption, table.ranked]).strip().replace("*:", r"\*:")])


def as_latex(table: PaperTable) -> str:
    """Return a LaTeX table for the package booktabs; the best mean of a column is bold, the second is underlined."""

    def shown(measure: Quantity, cell: PaperCell, spread: float | None) -> str:
        mean = _number(measure, cell.mean)
        mean = {1: rf"\mathbf{{{mean}}}", 2: rf"\underline{{{mean}}}"}.get(cell.rank or 0, mean)
        mark = "^{*}" if cell.marked else ""
        return f"${mean}{mark}$" if spread is None else rf"${mean}{mark} \pm {_number(measure, spread)}$"

    heads, body = _grid(table, shown)
    columns, each = len(heads[-1]), len(table.measures)
    lines = [
        r"% needs \usepackage{booktabs}", r"\begin{table}", r"  \centering",
        rf"  \caption{{{escape(' '.join([*table.caption, table.ranked]).strip())}}}", rf"  \label{{{table.label}}}",
        r"  \vspace{4pt}",  # classes that expect captions below leave no space between this one and the rule
        rf"  \begin{{tabular}}{{l{'r' * (columns - 1)}}}", r"    \toprule",
    ]  # fmt: skip
    if len(heads) > 1:
        groups = [rf"\multicolumn{{{each}}}{{c}}{{{escape(column)}}}" for column in table.columns]
        lines.append("    " + " & ".join(["", *groups]).strip() + r" \\")
        rules = [rf"\cmidrule(lr){{{2 + i * each}-{1 + (i + 1) * each}}}" for i in range(len(table.columns))]
        lines.append("    " + " ".join(rules))
    lines += [_latex_row([escape(text) for text in heads[-1]]), r"    \midrule"]
    lines += [_latex_row([escape(row[0]), *(cell.replace("–", "--") for cell in row[1:])]) for row in body]
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"])


def as_records(table: PaperTable) -> list[dict[str, Any]]:
    """Return a row of plain values per cell and measure; figures have the units of run folders, shares are 0 to 1."""
    found = []
    for row in table.rows:
        for column in table.columns:
            for measure in table.measures:
                cell = table.cells.get((row, column, measure.name))
                if cell is not None:
                    found.append(
                        {
                            "row": row, "column": column, "measure": measure.name, "mean": cell.mean,
                            "deviation": cell.deviation, "half_width": cell.half_width, "n": len(cell.values),
                            "seeds": " ".join(map(str, cell.values)), "rank": cell.rank, "reference": cell.reference,
                            "pairs": cell.pairs, "p": cell.p, "p_corrected": cell.corrected,
                        }
                    )  # fmt: skip
    return found


def as_csv(table: PaperTable) -> str:
    """Return the records as CSV with a header."""
    records = as_records(table)
    out = StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().rstrip("\n")


def as_json(table: PaperTable) -> str:
    """Return the caption and the records as JSON."""
    return json.dumps({"caption": " ".join(table.caption), "cells": as_records(table)}, indent=2, ensure_ascii=False)


FORMATS: dict[str, Callable[[PaperTable], str]] = {
    "text": as_text, "markdown": as_markdown, "latex": as_latex, "csv": as_csv, "json": as_json,
}  # fmt: skip


def _grid(
    table: PaperTable, shown: Callable[[Quantity, PaperCell, float | None], str]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the header lines and the body as texts.

    The last header has the measures, or the columns if there is one measure for several columns.
    """
    titles = [measure.title for measure in table.measures]
    if not table.columns[1:]:
        heads = [["method", *titles]]
    elif not titles[1:]:
        heads = [["method", *table.columns]]
    else:
        groups = [column if i == 0 else "" for column in table.columns for i in range(len(titles))]
        heads = [["", *groups], ["method", *titles * len(table.columns)]]
    body = []
    for row in table.rows:
        line = [row]
        for column in table.columns:
            for measure in table.measures:
                cell = table.cells.get((row, column, measure.name))
                if cell is None:
                    line.append("–")
                else:
                    line.append(shown(measure, cell, cell.half_width if table.interval else cell.deviation))
        body.append(line)
    return heads, body


def _plain(measure: Quantity, cell: PaperCell, spread: float | None) -> str:
    mean = _number(measure, cell.mean) + ("*" if cell.marked else "")
    return mean if spread is None else f"{mean} ± {_number(measure, spread)}"


def _filled(sentences: Sequence[str]) -> str:
    return fill(" ".join(sentences), WIDTH, break_on_hyphens=False)


def _number(measure: Quantity, value: float) -> str:
    return f"{measure.scale * value:.{measure.digits}f}"


def _latex_row(cells: Sequence[str]) -> str:
    return "    " + " & ".join(cells) + r" \\"
