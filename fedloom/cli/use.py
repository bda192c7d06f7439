"""`fedloom newcomers`, `adapt`, `predict`, `export`: use a trained federation."""

import csv
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedloom.cli import flags, offers
from fedloom.cli.base import app, err, out, say, show_json
from fedloom.core.errors import UserError, nearest

if TYPE_CHECKING:
    import numpy as np

    from fedloom.inference.adapt import Adaptation
    from fedloom.inference.pictures import Pictures
    from fedloom.inference.trained_model import TrainedModel

SOME_SKIPPED = 3
"""Exit code when some images could not be read and the others were predicted."""

FORMATS = r"onnx (needs fedloom\[export]), torchscript or safetensors."

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Run folder, or a model file written by adapt or export.")]
ClientFlag = Annotated[
    str | None,
    typer.Option(
        "--client", help="Use the personal model of this client, by name or number; default: the global model."
    ),
]
Style = Annotated[str | None, typer.Option("--style", help="Style whose classifier to use (runs without labels).")]


@app.command()
def newcomers(
    folder: Run,
    data: Annotated[str | None, typer.Option("--data", help="Take newcomers from another dataset.")] = None,
    data_dir: flags.DataDir = None,
    clients: Annotated[
        int, typer.Option("--clients", min=1, help="Number of newcomers that --data is divided among.")
    ] = 20,
    partition: Annotated[str, typer.Option("--partition", help="How --data is divided.")] = "dirichlet:1",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use at most this many images of --data.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for dividing --data.")] = 0,
    heads: Annotated[
        str, typer.Option("--heads", help="Classifier heads to fit, comma-separated.")
    ] = "linear,mlp,svm,logreg",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Minimum training steps of linear and mlp heads.")] = 100,
    alone_epochs: Annotated[
        int | None,
        typer.Option("--alone-epochs", min=0, help="Epochs that newcomers train alone, for comparison; 0: none."),
    ] = None,
    labelled: Annotated[
        int | None, typer.Option("--labelled", min=1, help="Labelled training samples per newcomer; default: all.")
    ] = None,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Test a run on clients that never trained: heads on its frozen representation, compared with training alone.

    Without --data, newcomers are the clients that data.newcomers held out, and the global model is tested on them too
    (FedCRC's Table II). With --data, they come from another dataset with its own classes (RepPer's Fig. 6).

    Examples:

      fedloom run --method fedcrc --data digits --clients 100 --set data.newcomers=40 --out runs/crc

      fedloom newcomers runs/crc

      fedloom newcomers runs/crc --labelled 10 --heads logreg

      fedloom newcomers runs/repper-cifar100 --data cifar10 --clients 20 --partition dirichlet:1 --heads linear,svm
    """
    from fedloom.inference.adapt import HEADS
    from fedloom.inference.newcomers import evaluate_newcomers, from_dataset, held_out
    from fedloom.inference.trained_run import TrainedRun

    run = TrainedRun(folder)
    chosen = flags.listed(heads)
    for name in chosen:
        if name not in HEADS:
            raise UserError(f"--heads {name}: {nearest(name, HEADS)}")
    found = (
        held_out(run)
        if data is None
        else from_dataset(run, data, folder=data_dir, clients=clients, partition=partition, most=limit, seed=seed)
    )
    if labelled is not None:
        found = found.with_labelled(labelled, run.recipe.seed)
    with err.status(f"0 of {len(found.clients)} newcomers") as status:
        done = iter(range(1, len(found.clients) + 1))
        results = evaluate_newcomers(
            run, found, chosen, steps=steps, alone_epochs=alone_epochs,  # type: ignore[arg-type]
            on_client=lambda _: status.update(f"{next(done)} of {len(found.clients)} newcomers"),
        )  # fmt: skip
    if results["representation"] != "shared":
        what = "newcomers use the average of the clients' extractors"
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
    images: Annotated[Path, typer.Option("--images", help="Folder with one folder of images per class.")],
    head: Annotated[
        str, typer.Option("--head", help="Classifier: linear, mlp, svm or logreg.", autocompletion=offers.heads)
    ] = "logreg",
    shots: Annotated[int | None, typer.Option("--shots", min=1, help="Fit on this many images per class.")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write to; default: adapted/NAME.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Make a personal model for a new client in seconds: a classifier on the run's frozen representation.

    The accuracy is measured on images the classifier was not fitted on: by stratified cross-validation or, with
    --shots, on the remaining images. The model is written to model.safetensors, for fedloom predict and export.

    Examples:

      fedloom adapt runs/mine --images my-pictures --head svm

      fedloom adapt runs/mine --images my-pictures --head linear --shots 5 --to models/clinic

      fedloom predict models/clinic/model.safetensors new-pictures/
    """
    from fedloom.inference.adapt import adapt
    from fedloom.inference.pictures import labelled_pictures
    from fedloom.inference.trained_model import AVERAGED
    from fedloom.inference.trained_run import TrainedRun

    run = TrainedRun(folder)
    base = run.representation()
    if base.client == AVERAGED:
        what = "the model uses the average of the clients' extractors"
        say(f"note: {run.method.name} shares no extractor: {what}", err)
    pictures, labels, classes = labelled_pictures(images, base.form.image_shape)
    base.about = {"run": folder.resolve().name, "method": run.method.name}
    model, adaptation = adapt(base, pictures.images, labels, classes, head=head, shots=shots, seed=seed)  # type: ignore[arg-type]
    adaptation.warnings += [f"skipped: {path} ({why})" for path, why in pictures.skipped.items()]
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
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Image files, or folders of them.")],
    client: ClientFlag = None,
    style: Style = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    """Classify images: print the class and its probability.

    Images that cannot be read are reported and skipped, and the exit code is 3.

    Examples:

      fedloom predict adapted/my-pictures/model.safetensors photo.jpg more/

      fedloom predict runs/mine --client 3 pictures/ --csv > answers.csv

      fedloom predict runs/shops --client south pictures/
    """
    from fedloom.inference.pictures import find_pictures, read_pictures

    chosen = open_model(model, client, style)
    pictures = read_pictures(find_pictures(images), chosen.form.image_shape)
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
    """Return one row of predictions per image."""
    if not pictures.paths:
        return []
    likely = model.probabilities(pictures.images)
    return [
        {
            "file": str(path),
            "class": _named(model, row),
            "probability": float(row.max()),
            "probabilities": dict(zip(model.classes, map(float, row), strict=True)),
        }
        for path, row in zip(pictures.paths, likely, strict=True)
    ]


def _named(model: "TrainedModel", probabilities: "np.ndarray") -> str:
    """Return the predicted class, or all labels with a probability above 0.5."""
    if model.multilabel:
        return ", ".join(name for name, p in zip(model.classes, probabilities, strict=True) if p > 0.5)
    return model.classes[int(probabilities.argmax())]


@app.command(name="export")
def export_model(
    model: Model,
    to: Annotated[str, typer.Option("--to", help=FORMATS, autocompletion=offers.formats)],
    client: ClientFlag = None,
    style: Style = None,
    path: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: named after the model, such as client-3.onnx.")
    ] = None,
    trust_code: flags.TrustCodeOrAsk = False,
    as_json: flags.Json = False,
) -> None:
    r"""Export a model with its preprocessing to ONNX, TorchScript or safetensors.

    ONNX and TorchScript models take uint8 images \[batch, H, W, C] and return logits; safetensors files are for fedloom
    predict. The exported model is run on random images first. If its logits differ from the model's by more than 1e-4,
    no file is written. Class names are stored in the file's metadata.

    Examples:

      fedloom export runs/mine --client 3 --to onnx --out clinic.onnx

      fedloom export adapted/my-pictures/model.safetensors --to torchscript
    """
    from fedloom.inference.export import SUFFIXES, export

    if to not in SUFFIXES:
        raise UserError(f"--to {to}: {nearest(to, SUFFIXES)}")
    chosen = open_model(model, client, style)
    name = model.stem if model.is_file() else "global" if client is None else _file_name(f"client-{client}")
    path = path or Path(name + SUFFIXES[to])
    if path.exists() and path.resolve() == model.resolve():
        raise UserError(f"--out {path}: this is the input model; name another file")
    off = export(chosen, to, path)
    if as_json:
        show_json({"file": str(path), "to": to, "classes": list(chosen.classes), "difference": off})
    else:
        say(f"written: {path} ({path.stat().st_size / 2**20:.1f} MiB; logits differ by {off:.1g} at most)")


def _file_name(text: str) -> str:
    """Replace characters that are awkward or impossible in file names."""
    return re.sub(r"[^\w.-]+", "-", text)


def open_model(path: Path, client: str | None, style: str | None) -> "TrainedModel":
    """Load a model file, or the global model or a client's model of a run."""
    from fedloom.inference.trained_model import load_model
    from fedloom.inference.trained_run import TrainedRun

    if path.is_file():
        if client is not None or style is not None:
            raise UserError(f"--client and --style are for run folders; '{path}' is one model")
        return load_model(path)
    run = TrainedRun(path)
    if client is not None:
        if style is not None:
            raise UserError("--style selects a classifier of the global model; leave it out with --client")
        return run.personal(client)
    found = run.global_model(style)
    found.refuse_without_classifier()
    return found
