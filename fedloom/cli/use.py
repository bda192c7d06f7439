"""`fedloom newcomers`, `adapt`, `predict`, `export`: what a trained federation is good for."""

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedloom.cli import flags, offers
from fedloom.cli.base import app, err, out, say, show_json
from fedloom.core.errors import UserError, nearest

if TYPE_CHECKING:
    from fedloom.inference.adapt import Adaptation
    from fedloom.inference.pictures import Pictures
    from fedloom.inference.trained_model import TrainedModel

SOME_SKIPPED = 3
"""Exit code when some pictures could not be read; the others were answered."""

FORMATS = r"onnx (needs fedloom\[export]), torchscript or safetensors."

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or a model that adapt or export wrote.")]
ClientFlag = Annotated[int | None, typer.Option("--client", help="Whose model of a run; else everybody's.")]
Style = Annotated[str | None, typer.Option("--style", help="Which style's classifier (runs without labels).")]


@app.command()
def newcomers(
    folder: Run,
    data: Annotated[str | None, typer.Option("--data", help="Another dataset: newcomers with other classes.")] = None,
    data_dir: flags.DataDir = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="How many newcomers --data is dealt out to.")] = 20,
    partition: Annotated[str, typer.Option("--partition", help="How --data is dealt out.")] = "dirichlet:1",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many images of --data.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="How --data is dealt out at random.")] = 0,
    heads: Annotated[str, typer.Option("--heads", help="Comma-separated.")] = "linear,mlp,svm,logreg",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of linear and mlp heads, at least.")] = 100,
    alone_epochs: Annotated[
        int | None, typer.Option("--alone-epochs", min=0, help="Of training alone; 0: leave it out.")
    ] = None,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Test a run on clients that never took part: heads on its frozen representation, against training alone.

    Without --data they are those that data.newcomers held out; then the global model is tested on them too, as it is
    (FedCRC's Table II). With --data they come from another dataset, with its own classes (RepPer's Fig. 6).

    Examples:

      fedloom run --method fedcrc --data digits --clients 100 --set data.newcomers=40 --out runs/crc

      fedloom newcomers runs/crc

      fedloom newcomers runs/repper-cifar100 --data cifar10 --clients 20 --partition dirichlet:1 --heads linear,svm
    """
    from fedloom.inference.adapt import HEADS
    from fedloom.inference.newcomers import evaluate_newcomers, from_dataset, held_out
    from fedloom.inference.trained_run import load

    run = load(folder)
    chosen = [name.strip() for name in heads.split(",") if name.strip()]
    for name in chosen:
        if name not in HEADS:
            raise UserError(f"--heads {name}: {nearest(name, HEADS)}")
    found = (
        held_out(run)
        if data is None
        else from_dataset(run, data, folder=data_dir, clients=clients, partition=partition, most=limit, seed=seed)
    )
    with err.status(f"0 of {len(found.clients)} newcomers") as status:
        done = iter(range(1, len(found.clients) + 1))
        results = evaluate_newcomers(
            run, found, chosen, steps=steps, alone_epochs=alone_epochs,  # type: ignore[arg-type]
            on_client=lambda _: status.update(f"{next(done)} of {len(found.clients)} newcomers"),
        )  # fmt: skip
    if results["representation"] != "shared":
        what = "newcomers build on the average of the clients' extractors"
        say(f"note: {results['method']} shares no extractor: {what}", err)
    if as_json:
        show_json(results)
        return
    table = Table(title=f"{results['method']}: {results['newcomers']} newcomers of {results['data']}")
    for column in ("way", "mean", "std", "worst"):
        table.add_column(column, justify="left" if column == "way" else "right")
    names = {"global": results["global"], "alone": f"alone, {results['alone_epochs']} epochs"}
    for way, values in results["ways"].items():
        table.add_row(
            names.get(way, f"{way} head"),
            *("–" if (value := values[name]) is None else f"{value:.2%}" for name in ("mean", "std", "worst")),
        )
    out.print(table)


@app.command(name="adapt")
def adapt_run(
    folder: Run,
    images: Annotated[Path, typer.Option("--images", help="A folder with a folder of pictures for each class.")],
    head: Annotated[
        str, typer.Option("--head", help="linear, mlp, svm or logreg.", autocompletion=offers.heads)
    ] = "logreg",
    shots: Annotated[int | None, typer.Option("--shots", min=1, help="Fit on so many of each class only.")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="A folder; default: adapted/ and the images' name.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of folds, shots and heads.")] = 0,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Give a new client its own model in seconds: the run's representation, frozen, and a classifier on it.

    The accuracy is on pictures that the tested classifier had not seen: stratified cross-validation or, with --shots,
    all the others. The model is one file, model.safetensors, for fedloom predict and export.

    Examples:

      fedloom adapt runs/mine --images my-pictures --head svm

      fedloom adapt runs/mine --images my-pictures --head linear --shots 5 --to models/clinic

      fedloom predict models/clinic/model.safetensors new-pictures/
    """
    from fedloom.inference.adapt import adapt
    from fedloom.inference.pictures import labelled_pictures
    from fedloom.inference.trained_model import AVERAGED
    from fedloom.inference.trained_run import load

    run = load(folder)
    base = run.representation()
    if base.client == AVERAGED:
        what = "the model builds on the average of the clients' extractors"
        say(f"note: {run.method.name} shares no extractor: {what}", err)
    pictures, labels, classes = labelled_pictures(images, base.form.shape)
    base.about = {"run": folder.resolve().name, "method": run.method.name}
    model, adaptation = adapt(base, pictures.images, labels, classes, head=head, shots=shots, seed=seed)  # type: ignore[arg-type]
    adaptation.warnings += [f"left out: {path} ({why})" for path, why in pictures.skipped.items()]
    path = (to or Path("adapted") / images.resolve().name) / "model.safetensors"
    model.about["adapted"] = adaptation.to_json()
    model.save(path)
    for warning in adaptation.warnings:
        say(f"warning: {warning}", err)
    if as_json:
        show_json(adaptation.to_json() | {"model": str(path)})
        return
    _show(adaptation)
    say(f"model: {path}")


def _show(found: "Adaptation") -> None:
    out.print(f"{found.head} head on {sum(found.classes.values())} images of {len(found.classes)} classes")
    if found.accuracy is not None and found.low is not None and found.high is not None:
        say(
            f"accuracy {found.accuracy:.1%} ({found.how}, {found.tested} images; 95% interval {found.low:.0%} to "
            f"{found.high:.0%}; always the most frequent class: {found.majority:.1%})"
        )


@app.command()
def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Picture files, or folders of them.")],
    client: ClientFlag = None,
    style: Style = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Name what is in pictures: class and probability.

    Pictures that cannot be read are named and skipped; the exit code is then 3.

    Examples:

      fedloom predict adapted/my-pictures/model.safetensors photo.jpg more/

      fedloom predict runs/mine --client 3 pictures/ --csv > answers.csv
    """
    from fedloom.inference.pictures import find_pictures, read_pictures

    chosen = open_model(model, client, style)
    pictures = read_pictures(find_pictures(images), chosen.form.shape)
    rows = answers(chosen, pictures)
    for path, why in pictures.skipped.items():
        say(f"skipped: {path} ({why})", err)
    if as_json:
        skipped = [{"file": path, "why": why} for path, why in pictures.skipped.items()]
        show_json({"predictions": rows, "skipped": skipped})
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["file", "class", "probability"])
        writer.writerows([row["file"], row["class"], f"{row['probability']:.6f}"] for row in rows)
    elif rows:
        table = Table("file", "class", "probability")
        for row in rows:
            table.add_row(row["file"], row["class"], f"{row['probability']:.3f}")
        out.print(table)
    if pictures.skipped:
        raise typer.Exit(SOME_SKIPPED)


def answers(model: "TrainedModel", pictures: "Pictures") -> list[dict[str, Any]]:
    """Return a row for every picture."""
    if not pictures.paths:
        return []
    likely = model.probabilities(pictures.images)
    return [
        {
            "file": str(path),
            "class": model.classes[int(row.argmax())],
            "probability": float(row.max()),
            "probabilities": dict(zip(model.classes, map(float, row), strict=True)),
        }
        for path, row in zip(pictures.paths, likely, strict=True)
    ]


@app.command(name="export")
def export_model(
    model: Model,
    to: Annotated[str, typer.Option("--to", help=FORMATS, autocompletion=offers.formats)],
    client: ClientFlag = None,
    style: Style = None,
    path: Annotated[Path | None, typer.Option("--out", help="The file; default: client-3.onnx and the like.")] = None,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Write a model for other programs, preprocessing included: it takes batches of H × W × C bytes.

    What was written is run once and compared with the model: logits are the same within 1e-4. Class names are in the
    file's metadata.

    Examples:

      fedloom export runs/mine --client 3 --to onnx --out clinic.onnx

      fedloom export adapted/my-pictures/model.safetensors --to torchscript
    """
    from fedloom.inference.export import SUFFIXES, export

    if to not in SUFFIXES:
        raise UserError(f"--to {to}: {nearest(to, SUFFIXES)}")
    chosen = open_model(model, client, style)
    name = model.stem if model.is_file() else "global" if client is None else f"client-{client}"
    path = path or Path(name + SUFFIXES[to])
    if path.exists() and path.resolve() == model.resolve():
        raise UserError(f"--out {path}: that is the model itself; name another file")
    off = export(chosen, to, path)
    if as_json:
        show_json({"file": str(path), "to": to, "classes": list(chosen.classes), "difference": off})
    else:
        say(f"written: {path} ({path.stat().st_size / 2**20:.1f} MiB; logits differ by {off:.1g} at most)")


def open_model(path: Path, client: int | None, style: str | None) -> "TrainedModel":
    """Load a model file, a client's model of a run, or its global one."""
    from fedloom.inference.trained_model import load_model
    from fedloom.inference.trained_run import load

    if path.is_file():
        if client is not None or style is not None:
            raise UserError(f"--client and --style are for run folders; '{path}' is one model")
        return load_model(path)
    run = load(path)
    if client is not None:
        if style is not None:
            raise UserError("--style is for the global model; a client has one of its own")
        return run.personal(client)
    found = run.global_model(style)
    found.refuse_without_classifier()
    return found
