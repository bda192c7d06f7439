"""What a short run imports: packages that it does not use take longer than the run."""

import subprocess
import sys

UNUSED = {
    "flwr", "matplotlib", "pandas", "plotly", "ray", "scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor",
    "torchvision", "triton",
}  # fmt: skip


def test_a_short_run_imports_only_what_it_uses(tmp_path):
    """On `replay`, which checks steps as lanes do before they are captured."""
    fields = ["--method", "fedavg", "--model", "mlp", "--data", "digits", "--clients", "2", "--rounds", "1"]
    words = ["fedloom", "run", *fields, "--engine", "replay", "--out", str(tmp_path / "run")]
    code = (
        f"import sys; from fedloom.__main__ import main; sys.argv = {words}\n"
        "try: main()\nfinally: print('imported:', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    printed, _, imported = done.stdout.rpartition("imported:")
    assert "run folder:" in printed
    assert UNUSED & set(imported.split()) == set()
