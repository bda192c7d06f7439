"""One measurement in a separate process, started by gpu.py: `python -m benchmarks.contest.part SPECIFICATION FILE`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contest import crowd, floor, ours, peers, pfl_research, plain
from benchmarks.contest.works import WORKS
from fedloom import Recipe
from fedloom.studies.cost import passes


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    device, scale = spec["device"], spec["scale"]
    if spec["kind"] == "floor":
        return floor.run([WORKS[letter].scaled(scale) for letter in spec["works"]], device)
    if spec["kind"] == "crowd":
        return crowd.run(spec["method"], spec["clients"], spec["name"], device, spec["lanes"], scale)
    work = WORKS[spec["work"]].scaled(scale)
    warmup, rounds, name = spec["warmup"], spec["rounds"], spec["name"]
    if name == "plain":
        return plain.run(work, device, warmup, rounds)
    if name == "pfllib":
        return peers.pfllib(work, device, warmup, rounds, spec["pfllib"])
    if name == "pfl":
        return pfl_research.run(work, device, warmup, rounds, spec["pfl"])
    if name in peers.PEERS:
        return peers.PEERS[name](work, device, warmup, rounds)
    if method := spec.get("method"):
        work = replace(work, method=method)
        forward, backward = passes(Recipe.parse({"method": work.method}))
        return ours.run(work, name, device, spec["lanes"], warmup, rounds) | {"passes": forward, "backward": backward}
    return ours.run(work, name, device, spec["lanes"], warmup, rounds)


def main() -> None:
    spec, file = json.loads(sys.argv[1]), Path(sys.argv[2]).resolve()
    try:
        found = measure(spec)
    except peers.MissingError as reason:
        found = {"skipped": str(reason)}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
