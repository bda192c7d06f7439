"""`fedloom deploy`: a federation between organisations, over Flower."""

import logging
import os
import signal
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import flags
from fedloom.cli.base import Group, app, err, say, show
from fedloom.core import trusted_code
from fedloom.core.errors import UserError

EVALUATION, LIMITS = "Evaluation", "Limits of a job"
deploy_app = typer.Typer(
    cls=Group,
    help="Run a real federation between organisations, over Flower (docs/how-to/deploy.md).",
    no_args_is_help=True,
)
app.add_typer(deploy_app, name="deploy")

Folder = Annotated[Path, typer.Option("--folder", help="Folder written by `fedloom deploy init`.")]


@deploy_app.callback()
def _needs_flower() -> None:
    from fedloom.deploy.launch import quiet

    if find_spec("flwr") is None and "--help" not in sys.argv:
        raise UserError("fedloom deploy: needs Flower; pip install 'fedloom[flower]'")
    os.environ.update(quiet())  # before Flower is imported


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    organisations: Annotated[
        str, typer.Option("--organisations", help="Names of the organisations, comma-separated: a,b,c.")
    ],
    host: Annotated[str, typer.Option("--host", help="Host name or address of the server.")],
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe file, or the name of a shipped recipe.")],
    data_like: Annotated[
        str | None,
        typer.Option(
            "--data-like", help="Sample images (folder, .npz or dataset) with the classes of all organisations."
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Class names, comma-separated, instead of --data-like.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Image shape such as 3x32x32, instead of --data-like.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port for organisations.")] = 9092,
    control_port: Annotated[
        int, typer.Option("--control-port", help="Port for control commands, on the server's machine.")
    ] = 9093,
    set_: flags.Set = None,
    trust_code: flags.TrustCode = False,
) -> None:
    """Create the folder of a federation: recipe, certificates, one key pair per organisation, start scripts.

    FOLDER/server stays on the server. Send each FOLDER/organisations/NAME to that organisation over a secure channel.
    FOLDER/ca.key is needed only to issue new certificates: keep it offline.

    Example: fedloom deploy init hospitals --host fl.example.org --organisations north,south --recipe my.yaml
    --data-like samples/
    """
    from fedloom.config.recipe import Recipe
    from fedloom.deploy.init import like, parse_shape, write_federation
    from fedloom.deploy.terms import FederationTerms

    if (data_like is None) == (classes is None or shape is None):
        raise UserError("--data-like: pass it, or both --classes and --shape; the server has no images")
    named, measured = like(data_like) if data_like else (flags.listed(classes), parse_shape(shape or ""))
    federation = FederationTerms(
        name=folder.name, host=host, port=port, control_port=control_port, classes=named, shape=measured,
        organisations=flags.listed(organisations),
    )  # fmt: skip
    write_federation(folder, federation, Recipe.load(recipe).with_(*(set_ or [])))
    say(f"written: {folder}")
    say(f"  the server:       {folder}/server/start.sh")
    for name in federation.organisations:
        say(f"  for {name}: {folder}/organisations/{name} (send it to them; it contains their private key)")


@deploy_app.command()
def server(
    folder: Folder = Path("."),
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help="Address to listen on for organisations; default: all interfaces (loopback if --host is loopback).",
        ),
    ] = None,
    control: Annotated[str, typer.Option("--control", help="Address to listen on for control commands.")] = "127.0.0.1",
    have_proxy: Annotated[
        bool,
        typer.Option(
            "--i-have-a-proxy",
            help="Confirm that an authenticating proxy protects a --control address beyond this machine.",
        ),
    ] = False,
) -> None:
    """Start the server, so that organisations can join and runs can be started. Ctrl-C stops it.

    Example: fedloom deploy server --folder hospitals/server
    """
    from fedloom.deploy.supervisor import serve

    _log()
    serve(
        folder, listen=listen, control=control, have_proxy=have_proxy,
        ready=lambda federation: say(
            f"ready: '{federation.name}' on port {federation.port}, for {', '.join(federation.organisations)}"
        ),
    )  # fmt: skip


@deploy_app.command()
def client(
    data: Annotated[
        Path, typer.Option("--data", help="This organisation's images: a folder of class folders, or an .npz file.")
    ],
    folder: Folder = Path("."),
    allow_methods: Annotated[
        str | None,
        typer.Option(
            "--allow-methods", help="Accept any recipe with these methods, comma-separated; default: only recipe.yaml."
        ),
    ] = None,
    max_rounds: Annotated[
        int | None, typer.Option("--max-rounds", min=1, help="Maximum number of updates sent, over all runs.")
    ] = None,
    evaluation: Annotated[
        str,
        typer.Option(
            "--evaluation",
            rich_help_panel=EVALUATION,
            help="What an evaluation reveals: accuracy (over all classes), classes (per class), none (declined).",
        ),
    ] = "accuracy",
    max_evaluations: Annotated[
        int | None,
        typer.Option(
            "--max-evaluations",
            min=0,
            rich_help_panel=EVALUATION,
            help="Maximum number of evaluations, over all runs; default: number in one run of recipe.yaml, up to 100.",
        ),
    ] = None,
    min_test: Annotated[
        int,
        typer.Option(
            "--min-test", min=0, rich_help_panel=EVALUATION, help="Minimum number of test images for an evaluation."
        ),
    ] = 50,
    epsilon: Annotated[
        float,
        typer.Option(
            "--evaluation-epsilon",
            rich_help_panel=EVALUATION,
            help="Privacy loss ε of an evaluation for one test image; inf: no noise.",
        ),
    ] = 0.5,
    share_metrics: Annotated[
        str | None,
        typer.Option(
            "--share-metrics",
            rich_help_panel=EVALUATION,
            help="Figures to share without noise if the recipe asks for them, comma-separated: balanced_accuracy, f1, "
            "macro_f1, auc, loss. Each can reveal single images; ece needs no consent, it is sent with noise.",
        ),
    ] = None,
    max_parameters: Annotated[
        int,
        typer.Option(
            "--max-parameters",
            min=1,
            rich_help_panel=LIMITS,
            help="Maximum number of parameters, over all networks of a method.",
        ),
    ] = 100_000_000,
    max_message: Annotated[
        int, typer.Option("--max-message-mb", min=1, rich_help_panel=LIMITS, help="Maximum size of a message in MiB.")
    ] = 1024,
    max_epochs: Annotated[
        int, typer.Option("--max-epochs", min=1, rich_help_panel=LIMITS, help="Maximum number of epochs of a job.")
    ] = 100,
    max_seconds: Annotated[
        float,
        typer.Option("--max-seconds", min=0.001, rich_help_panel=LIMITS, help="Maximum duration of a job in seconds."),
    ] = 3600,
    max_memory: Annotated[
        float | None,
        typer.Option(
            "--max-memory-gb",
            min=0.001,
            rich_help_panel=LIMITS,
            help="Maximum memory of a job in GB; default: half of the machine's memory.",
        ),
    ] = None,
    contact_seconds: Annotated[
        float,
        typer.Option("--contact-seconds", min=5, help="Seconds without contact after which the client reconnects."),
    ] = 20.0,
    device: Annotated[str, typer.Option("--device", help="Device: auto, cpu or cuda.")] = "auto",
    require_secure: Annotated[
        bool,
        typer.Option(
            "--require-secure-aggregation",
            help="Refuse recipes without a secure section, so that updates are sent only masked.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Consent without being asked, for scripts.")] = False,
    trust_code: flags.TrustCode = False,
) -> None:
    """Join a federation with your images: show what will be sent, ask for consent, then serve requests until Ctrl-C.

    Examples:

      fedloom deploy client --folder north --data /data/xrays --allow-methods repper,fedcrl --max-rounds 100

      fedloom deploy client --folder north --data /data/xrays --evaluation none --max-memory-gb 16
    """
    from fedloom.deploy.evaluation import EvaluationTerms
    from fedloom.deploy.limits import JobLimits
    from fedloom.deploy.member import load_member
    from fedloom.deploy.worker import work

    methods = flags.listed(allow_methods)
    limits = JobLimits(max_parameters, max_message * 2**20, max_epochs, max_seconds, int((max_memory or 0) * 1e9))
    member = load_member(
        folder, data, methods=methods, max_rounds=max_rounds, max_evaluations=max_evaluations,
        evaluation=EvaluationTerms(
            evaluation,  # type: ignore[arg-type]
            min_test=min_test, epsilon=epsilon, metrics=flags.listed(share_metrics),
        ),
        limits=limits, device=device, secure_only=require_secure,
    )  # fmt: skip
    say(member.what_images)
    for line in member.consent.lines(member.federation, member.task(member.consent.recipe), member.name):
        say(line)
    trusted_code.settle()
    if not yes and not typer.confirm("join?"):
        raise typer.Exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _log()
    try:
        work(member, contact_seconds)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        member.close()


@deploy_app.command()
def start(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file; default: recipe.yaml in the folder.")] = None,
    folder: Folder = Path("."),
    name: Annotated[str | None, typer.Option("--name", help="Run name; resumes the run if it exists.")] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for organisations to join.")] = 60.0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Seconds to wait for the run to end; default: no limit.")
    ] = None,
    client_timeout: Annotated[
        float,
        typer.Option("--client-timeout", min=1, help="Seconds that a client has to respond before it is skipped."),
    ] = 600.0,
    detach: Annotated[bool, typer.Option("--detach", help="Exit once the run has started.")] = False,
    set_: flags.Set = None,
    trust_code: flags.TrustCode = False,
    as_json: flags.Json = False,
) -> None:
    """Start a run on the server, wait for it to end and print its result.

    Stopping this command does not stop the run. Use the same --name to resume a stopped run.

    Examples:

      fedloom deploy start --folder hospitals/server

      fedloom deploy start my.yaml --folder hospitals/server --name second --set training.rounds=50
    """
    from fedloom.config.recipe import Recipe
    from fedloom.deploy.serving import await_run, begin
    from fedloom.experiment.run_folder import finished

    described = Recipe.load(recipe or folder / "recipe.yaml").with_(*(set_ or []))
    name = name or f"{datetime.now():%Y%m%d-%H%M%S}-{described.method.name}"
    number = begin(folder, described, name, wait=wait, client_timeout=client_timeout)
    say(f"started: {name} (Flower's run {number})", err)
    if detach:
        return
    await_run(folder, number, timeout)
    summary = finished(folder / "runs" / name)
    assert summary is not None
    show([summary], as_json, summary)


@deploy_app.command()
def stop(folder: Folder = Path(".")) -> None:
    """Stop the active run. Its checkpoint is kept; `start --name` resumes it.

    Example: fedloom deploy stop --folder hospitals/server
    """
    from fedloom.deploy.active import ActiveRun
    from fedloom.deploy.control import controlling

    ActiveRun.remove(folder)  # the server does not resume it
    with controlling(folder) as flower:
        running = [run for run in flower.runs() if not run.over]
        for run in running:
            say(f"run {run.number}: {'stopped' if flower.stop(run.number) else 'had already ended'}")
    if not running:
        say("no run is active")


def _log() -> None:
    """Write the events of a server or client to stderr, with times."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("fedloom").setLevel(logging.INFO)
