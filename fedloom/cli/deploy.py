"""`fedloom deploy …`: a federation of organisations, over Flower."""

import logging
import os
import signal
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import flags
from fedloom.cli.base import app, err, say, show, show_json
from fedloom.core import trusted_code
from fedloom.core.errors import UserError

EVALUATION, LIMITS = "Evaluation", "Limits of a job"
deploy_app = typer.Typer(
    help="Run a real federation between organisations, over Flower (docs/how-to/deploy.md).", no_args_is_help=True
)
app.add_typer(deploy_app, name="deploy")

Folder = Annotated[Path, typer.Option("--folder", help="A folder that `fedloom deploy init` wrote.")]


@deploy_app.callback()
def _needs_flower() -> None:
    from fedloom.deploy.launch import quiet

    if find_spec("flwr") is None and "--help" not in sys.argv:
        raise UserError("fedloom deploy: needs Flower; pip install 'fedloom[flower]'")
    os.environ.update(quiet())  # before anything of Flower's is imported


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    organisations: Annotated[str, typer.Option("--organisations", help="Comma-separated names, such as a,b,c.")],
    host: Annotated[str, typer.Option("--host", help="Name or address under which the server is reached.")],
    recipe: Annotated[str, typer.Option("--recipe", help="A recipe file, or the name of a shipped one.")],
    data_like: Annotated[
        str | None, typer.Option("--data-like", help="Images (a folder, .npz or dataset) with everybody's classes.")
    ] = None,
    classes: Annotated[str | None, typer.Option("--classes", help="Comma-separated, instead of --data-like.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Such as 3x32x32, instead of --data-like.")] = None,
    port: Annotated[int, typer.Option("--port", help="Where organisations reach the server.")] = 9092,
    control_port: Annotated[int, typer.Option("--control-port", help="For control, on its own machine.")] = 9093,
    set_: flags.Set = None,
    trust_code: flags.TrustCode = False,
) -> None:
    """Write the folder of a federation: recipe, certificates, a key pair per organisation, start scripts.

    FOLDER/server stays with the server; each FOLDER/organisations/NAME goes to that organisation, over a safe way;
    FOLDER/ca.key is needed only for new certificates: keep it offline.

    Example: fedloom deploy init hospitals --host fl.example.org --organisations north,south --recipe my.yaml
    --data-like samples/
    """
    from fedloom.config.recipe import Recipe
    from fedloom.deploy.init import like, parse_shape, write_federation
    from fedloom.deploy.terms import FederationTerms

    if (data_like is None) == (classes is None or shape is None):
        raise UserError("--data-like: give it, or both --classes and --shape: the server itself has no images")
    named, measured = like(data_like) if data_like else (_list(classes), parse_shape(shape or ""))
    federation = FederationTerms(
        name=folder.name, host=host, port=port, control_port=control_port, organisations=_list(organisations),
        classes=named, shape=measured,
    )  # fmt: skip
    write_federation(folder, federation, Recipe.load(recipe).with_(*(set_ or [])))
    say(f"written: {folder}")
    say(f"  the server:       {folder}/server/start.sh")
    for name in federation.organisations:
        say(f"  for {name}: {folder}/organisations/{name} (give it to them; it holds their private key)")


@deploy_app.command()
def server(
    folder: Folder = Path("."),
    listen: Annotated[
        str | None, typer.Option("--listen", help="Address for organisations; default: all, or loopback if --host was.")
    ] = None,
    control: Annotated[str, typer.Option("--control", help="Address for control.")] = "127.0.0.1",
    have_proxy: Annotated[
        bool, typer.Option("--i-have-a-proxy", help="An authenticating proxy guards a --control beyond this machine.")
    ] = False,
) -> None:
    """Start the server; it runs till Ctrl-C. Organisations can then join, and runs be started.

    Example: fedloom deploy server --folder hospitals/server
    """
    from fedloom.deploy.serving import serve

    serve(
        folder, listen=listen, control=control, have_proxy=have_proxy,
        ready=lambda federation: say(
            f"ready: '{federation.name}' on port {federation.port}, for {', '.join(federation.organisations)}"
        ),
    )  # fmt: skip


@deploy_app.command()
def client(
    data: Annotated[Path, typer.Option("--data", help="This organisation's images: class folders, or an .npz file.")],
    folder: Folder = Path("."),
    allow_methods: Annotated[
        str | None,
        typer.Option("--allow-methods", help="Comma-separated: any recipe of these; default: only recipe.yaml here."),
    ] = None,
    max_rounds: Annotated[
        int | None, typer.Option("--max-rounds", min=1, help="Updates that may leave, in all runs together.")
    ] = None,
    evaluation: Annotated[
        str,
        typer.Option(
            "--evaluation",
            rich_help_panel=EVALUATION,
            help="What an answer says: accuracy (all classes together), classes (each), none (no answer).",
        ),
    ] = "accuracy",
    max_evaluations: Annotated[
        int | None,
        typer.Option(
            "--max-evaluations",
            min=0,
            rich_help_panel=EVALUATION,
            help="Answers in all runs together; default: as many as one run of recipe.yaml has.",
        ),
    ] = None,
    min_test: Annotated[
        int, typer.Option("--min-test", min=0, rich_help_panel=EVALUATION, help="No answer with fewer test images.")
    ] = 50,
    epsilon: Annotated[
        float,
        typer.Option(
            "--evaluation-epsilon",
            rich_help_panel=EVALUATION,
            help="Noise on each answer: ε with respect to one test image; inf: none.",
        ),
    ] = 0.5,
    max_parameters: Annotated[
        int, typer.Option("--max-parameters", min=1, rich_help_panel=LIMITS, help="Of all networks of a method.")
    ] = 100_000_000,
    max_message: Annotated[
        int, typer.Option("--max-message-mb", min=1, rich_help_panel=LIMITS, help="MiB of a message.")
    ] = 1024,
    max_epochs: Annotated[int, typer.Option("--max-epochs", min=1, rich_help_panel=LIMITS, help="Of a job.")] = 100,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=0.001, rich_help_panel=LIMITS, help="Of a job.")
    ] = 3600,
    max_memory: Annotated[
        float | None,
        typer.Option(
            "--max-memory-gb", min=0.001, rich_help_panel=LIMITS, help="Of a job; default: half of the machine's."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    yes: Annotated[bool, typer.Option("--yes", help="Consent without being asked (for scripts).")] = False,
    trust_code: flags.TrustCode = False,
) -> None:
    """Join a federation with one's own images: shows what will leave, asks, then answers the server till Ctrl-C.

    Examples:

      fedloom deploy client --folder north --data /data/xrays --allow-methods repper,fedcrl --max-rounds 100

      fedloom deploy client --folder north --data /data/xrays --evaluation none --max-memory-gb 16
    """
    from fedloom.deploy.evaluation import EvaluationTerms
    from fedloom.deploy.limits import JobLimits
    from fedloom.deploy.member import load_member
    from fedloom.deploy.worker import work

    methods = _list(allow_methods) if allow_methods else ()
    limits = JobLimits(max_parameters, max_message * 2**20, max_epochs, max_seconds, int((max_memory or 0) * 1e9))
    member = load_member(
        folder, data, methods=methods, max_rounds=max_rounds, max_evaluations=max_evaluations,
        evaluation=EvaluationTerms(evaluation, min_test=min_test, epsilon=epsilon),  # type: ignore[arg-type]
        limits=limits, device=device,
    )  # fmt: skip
    say(member.what_images)
    for line in member.consent.lines(member.federation, member.task(member.consent.recipe), member.name):
        say(line)
    trusted_code.settle()
    if not yes and not typer.confirm("join?"):
        raise typer.Exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.basicConfig(format="%(asctime)s %(message)s")
    try:
        work(member)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        member.close()


@deploy_app.command()
def start(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; default: recipe.yaml of the folder.")] = None,
    folder: Folder = Path("."),
    name: Annotated[str | None, typer.Option("--name", help="Of the run; one that is there goes on.")] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds in which organisations may still join.")] = 60.0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Seconds to wait for its end; default: no limit.")
    ] = None,
    client_timeout: Annotated[
        float, typer.Option("--client-timeout", min=1, help="Seconds in which a client answers, or is left out.")
    ] = 600.0,
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it has started.")] = False,
    set_: flags.Set = None,
    trust_code: flags.TrustCode = False,
    as_json: flags.Json = False,
) -> None:
    """Start a run on the server of this folder, wait for it and show its result.

    Stopping this command does not stop the run. The same --name goes on with a run that was stopped.

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
def status(folder: Folder = Path("."), as_json: flags.Json = False) -> None:
    """Show which organisations are there and how runs go.

    Example: fedloom deploy status --folder hospitals/server
    """
    from fedloom.deploy.control import controlling

    with controlling(folder) as flower:
        nodes, runs = flower.nodes(), flower.runs()
    found: dict[str, Any] = {"organisations": nodes, "runs": [vars(run) for run in runs]}
    if as_json:
        show_json(found)
        return
    for name, state in nodes.items():
        say(f"{name}: {state}")
    for run in runs:
        say(f"run {run.number}: {' '.join(filter(None, (run.status, run.outcome, run.details)))}")


@deploy_app.command()
def stop(folder: Folder = Path(".")) -> None:
    """Stop the run that is under way; what was learnt is kept, and `start --name` goes on with it.

    Example: fedloom deploy stop --folder hospitals/server
    """
    from fedloom.deploy.control import controlling

    with controlling(folder) as flower:
        running = [run for run in flower.runs() if not run.over]
        for run in running:
            say(f"run {run.number}: {'stopped' if flower.stop(run.number) else 'was over already'}")
    if not running:
        say("no run is under way")


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
