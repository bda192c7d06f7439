"""Report sections with t-SNE maps of representations and their separation scores (RepPer's Fig. 1 and 4)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedloom.report.page.classes import why_missing
from fedloom.report.page.figure import Axis, Cell, Column, Figure, Marks, PageSection, Switch, Table, colour, slug
from fedloom.report.page.insight import Insight
from fedloom.report.page.maps import Map
from fedloom.report.page.runs import Entry

SCORE = (
    "silhouette, from −1 to 1: how much closer a sample is to its own class than to the nearest other class (cosine "
    "distance)"
)


def representations(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> PageSection:
    """Return the section "Representations": one map per network, one colour per class."""
    section = PageSection("representations", "Representations")
    maps = [(i, entry, found) for i, entry in enumerate(entries) for found in _of(entry, insights).maps]
    if not maps:
        section.missing = "There are no t-SNE maps: " + why_missing(entries, insights)
        return section
    section.text = (
        "t-SNE of test samples (in maps of a single client: of all its data). The separation score is measured on the "
        "representation itself, not on its two-dimensional projection."
    )
    order = sorted({label for _, _, found in maps for label in found.labels})
    names = {label: name for _, _, found in maps for label, name in found.names.items()}
    section.legend = [Switch(f"class:{label}", names[label], colour(n)) for n, label in enumerate(order)]
    figures = [_figure(i, entry, found, order, "class") for i, entry, found in maps]
    families = list(dict.fromkeys(figure.family for figure in figures))
    section.figures = sorted(figures, key=lambda figure: families.index(figure.family))
    section.tables = [_scores(entries, insights)]
    if problem := next((p for entry in entries if (p := _of(entry, insights).problem)), ""):
        section.missing = "Some maps are not shown: " + problem
    return section


def layers(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> PageSection | None:
    """Return the section "Layers": similarity of clients' networks by layer; None without such networks."""
    known = [(i, entry, found) for i, entry in enumerate(entries) if (found := _of(entry, insights).layers)]
    if not known:
        return None
    names = list(dict.fromkeys(name for *_, found in known for name in found.names))
    marks = []
    for i, entry, found in known:
        at = [float(names.index(name)) for name in found.names]
        text = [
            f"{entry.label}<br>{name}: {mean:.3f} ± {std:.3f}"
            for name, mean, std in zip(found.names, found.mean, found.std, strict=True)
        ]
        marks.append(Marks("line", entry.label, at, found.mean, colour(i), [entry.group], text=text))
    note = (
        f"Mean over {known[0][2].pairs} pairs of clients. 1: equal up to rotation and scale; 0: unrelated. Methods "
        "whose clients all have the same network are not shown."
    )
    figure = Figure("layers-cka", "Clients' layers", Axis("layer", labels=names), Axis("linear CKA"), marks, note)
    about = "Similarity of clients' personal networks on the same test samples, by linear CKA. For the first seed."
    return PageSection("layers", "Layers", about, figures=[figure])


def styles(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> PageSection | None:
    """Return the section "Styles": maps of style and stylised features, coloured by style or client; None without."""
    maps = [(i, entry, found) for i, entry in enumerate(entries) for found in _of(entry, insights).styles]
    if not maps:
        return None
    section = PageSection(
        "styles", "Styles", "t-SNE of the style features of test samples, and of the features with style."
    )
    order = sorted({label for _, _, found in maps for label in found.labels})
    names = {label: name for _, _, found in maps for label, name in found.names.items()}
    section.legend = [Switch(f"style:{label}", names[label], colour(n)) for n, label in enumerate(order)]
    section.figures = [_figure(i, entry, found, order, "style") for i, entry, found in maps]
    return section


def _of(entry: Entry, insights: Mapping[Path, Insight]) -> Insight:
    return insights.get(entry.first.path) or Insight()


def _figure(i: int, entry: Entry, found: Map, order: Sequence[int], kind: str) -> Figure:
    labels = np.array(found.labels)
    marks = []
    for n, label in enumerate(order):
        mine = np.flatnonzero(labels == label)
        if len(mine):
            x, y = [round(found.x[p], 1) for p in mine], [round(found.y[p], 1) for p in mine]
            groups = [entry.group, f"{kind}:{label}"]
            marks.append(Marks("dots", found.names[label], x, y, colour(n), groups, sizes=[6]))
    plain = Axis(bare=True)
    name = slug("representations" if kind == "class" else "styles", str(i), entry.label, found.what)
    title = found.what if found.what not in ("global", "clients' own", "styles", "stylised") else entry.label
    note = f"separation {_separation(found.separation)}"
    families = {
        "global": "Global network",
        "clients' own": "Personal networks",
        "styles": "Style networks",
        "stylised": "Stylised features",
    }
    family = families.get(found.what, "Networks of single clients")
    return Figure(name, title, plain, plain, marks, note, square=True, family=family)


def _scores(entries: Sequence[Entry], insights: Mapping[Path, Insight]) -> Table:
    """Return a table of separation scores: global network, personal networks, within clients."""
    rows, groups = [], []
    for entry in entries:
        by_name = {found.what: found for found in _of(entry, insights).maps}
        if not by_name:
            continue
        shared = by_name.get("global")
        own = by_name.get("clients' own") or (shared if shared and shared.within is not None else None)
        values = [shared.separation if shared else None, *((own.separation, own.within) if own else (None, None))]
        rows.append([Cell(entry.label, entry.label), *(Cell(_separation(value), value) for value in values)])
        groups.append(entry.group)
    columns = [
        Column("separation of classes"),
        Column("global network", SCORE),
        Column("personal networks", SCORE + "; all clients' samples together, each through its client's network"),
        Column("within clients", SCORE + "; within each client, then the mean over samples"),
    ]
    return Table("separation", columns, rows, groups, f"The {SCORE}. For the first seed.")


def _separation(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".replace("-", "−")
