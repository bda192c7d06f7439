"""`fedloom deploy watch`: a status page of a federation, on this machine only."""

from collections.abc import Callable, Iterable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.deploy.events import sentence
from fedloom.deploy.status import FederationState, ago, federation_state, size

HOST = "127.0.0.1"
REFRESH_SECONDS = 5
NUMBERS = ("answers", "left")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; } .muted { color: #666; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: #555; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
.state { white-space: nowrap; } .state::before { content: "●"; margin-right: .4rem; color: #999; }
.online::before { color: #2a8a3e; } .refused::before, .revoked::before { color: #c0392b; }
.warning { background: #fff4d6; border-left: 4px solid #d99a00; padding: .4rem .7rem; }
progress { width: 14rem; vertical-align: middle; } .number { text-align: right; }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #ddd; } th, .muted { color: #aaa; } th, td { border-color: #33373d; }
  .warning { background: #3d3212; }
}
"""


def page(state: FederationState) -> str:
    """Return the page of a federation's state as HTML."""
    running = state.server == "running"
    warnings = [*([] if running else [f"server: {state.server}"]), *state.warnings]
    members = (
        (
            f'<td>{escape(one.name)}</td><td class="state {escape(one.state)}">{escape(one.state)}</td>'
            f"<td>{escape(ago(one.contact) if one.contact else 'never')}</td><td>{escape(one.address or '')}</td>"
            f'<td class="number">{one.updates}</td><td class="number">{escape(size(one.bytes_sent))}</td>'
            f"<td>{escape(one.refusal or '')}</td>"
        )
        for one in state.members
    )
    events = (
        f'<td class="muted">{escape(one["at"])}</td><td>{escape(sentence(one))}</td>' for one in state.events[::-1]
    )
    certificates = ", ".join(f"{name} until {end}" for name, end in state.certificates.items())
    progress = f'<progress value="{state.round}" max="{max(state.rounds, 1)}"></progress>'
    run = f"<b>{escape(state.run)}</b>: round {state.round} of {state.rounds} {progress}" if state.run else "none yet"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_SECONDS}">
<meta name="viewport" content="width=device-width"><title>{escape(state.name)}</title><style>{STYLE}</style></head>
<body><h1>{escape(state.name)}</h1>
<p class="muted">Federation of {len(state.members)} organisations. This page reloads every {REFRESH_SECONDS} s.</p>
{"".join(f'<p class="warning">{escape(why)}</p>' for why in warnings)}
<h2>Members</h2>
{_table(("organisation", "state", "last contact", "address", "answers", "left", "last refusal"), members)}
<p class="muted">Answers and bytes that left are those of the run below, evaluations and joins included.</p>
<h2>Run</h2><p>{run}</p>
<h2>Certificates</h2><p>{escape(certificates)}</p>
<h2>Last events</h2>{_table(("time", "event"), events)}
</body></html>
"""


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    top = "".join(f'<th class="number">{head}</th>' if head in NUMBERS else f"<th>{head}</th>" for head in heads)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def watch(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve the status page until the process is interrupted.

    Args:
        folder: The server's folder.
        port: Port on 127.0.0.1; 0 chooses a free one.
        ready: Called with the page's address.

    Raises:
        UserError: If the folder is not a server's folder, or the port is in use.
    """
    federation_state(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            if host not in (HOST, "localhost"):  # a page elsewhere that resolves its name to this machine
                self.send_error(403)
            elif self.path != "/":
                self.send_error(404)
            else:
                body = page(federation_state(folder)).encode()
                self.send_response(200)
                for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body)))):
                    self.send_header(name, value)
                self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no line per request."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: cannot be used ({error.strerror}); choose another") from None
    with server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()
