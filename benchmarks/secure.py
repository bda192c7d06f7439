"""Cost of secure aggregation: bytes and seconds of a round beside the plain mean, without training and network.

    python -m benchmarks.secure [--members 4 20] [--parameters 1000000] [--bits 32 64] [--dropouts]

Seconds are of one core: of one client (all its stages), and of the server (all its stages, for all clients). With
`--dropouts` as many clients as the threshold tolerates drop out after they have shared their keys, so that the server
must reconstruct their masks.
"""

import argparse
from time import perf_counter

import torch

from fedloom.core.message import Message, signature
from fedloom.core.server import WeightedMean
from fedloom.trust.access import Averaging
from fedloom.trust.secure.contribution import as_tensor
from fedloom.trust.secure.coordinator import SecureSum
from fedloom.trust.secure.protocol import Terms
from fedloom.trust.secure.settings import SecureSettings
from fedloom.trust.secure.simulation import LocalParties
from fedloom.trust.secure.weighted import WeightedSum

SAMPLES = 100
AVERAGING = Averaging(None, {}, (), uniform=False)


class Meter:
    """Counts the bytes and the seconds that clients take to answer."""

    def __init__(self, parties: LocalParties):
        self._parties, self.scope = parties, parties.scope
        self.up = self.down = 0
        self.seconds = 0.0

    def ask(self, stage, round, requests):
        start = perf_counter()
        answers = self._parties.ask(stage, round, requests)
        self.seconds += perf_counter() - start
        self.down += sum(map(len, requests.values()))
        self.up += sum(map(len, answers.values()))
        return answers

    def relay(self, client, body):
        start = perf_counter()
        self._parties.relay(client, body)
        self.seconds += perf_counter() - start
        self.down += len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", type=int, default=[4, 20])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--bits", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--dropouts", action="store_true")
    options = parser.parse_args()
    print(f"{options.parameters:,} parameters; bytes and seconds per client, and seconds of the server")
    print(
        f"{'members':>7} {'dropped':>7} {'form':<9} {'bytes up':>12} {'keys, shares':>12} {'client s':>9} "
        f"{'server s':>9}"
    )
    for members in options.members:
        plain(members, options.parameters)
        for bits in options.bits:
            secure(members, options.parameters, bits, dropouts=options.dropouts)


def messages(members: int, parameters: int) -> list[Message]:
    values = torch.randn(parameters, generator=torch.Generator().manual_seed(0))
    return [Message({"model.w": values * (c + 1) / members}, client=c, samples=SAMPLES) for c in range(members)]


def plain(members: int, parameters: int) -> None:
    sent = messages(members, parameters)
    start = perf_counter()
    WeightedMean({}, None, {}, ()).of((message, float(message.samples)) for message in sent)
    show(members, 0, "plain", sent[0].nbytes, 0, 0.0, perf_counter() - start)


def secure(members: int, parameters: int, bits: int, *, dropouts: bool) -> None:
    settings = SecureSettings(bits=bits)
    local = LocalParties(settings)
    meter = Meter(local)
    begin = perf_counter()
    total = SecureSum(Terms(*local.scope, 1, 0, settings), meter, range(members), lambda client: SAMPLES)
    server = perf_counter() - begin - meter.seconds
    survivors = settings.needed(members) if dropouts else members
    sent = messages(members, parameters)[:survivors]
    plan = WeightedSum(AVERAGING, signature(sent[0]))
    size, training = 0, 0.0
    for message in sent:
        begin = perf_counter()
        party = local[message.client or 0]
        vector = plan.vector(message, party.largest, party.fixed_point)
        party.mask(vector)
        training += perf_counter() - begin
        begin = perf_counter()
        total.add(message.client or 0, vector)
        server += perf_counter() - begin
        size = as_tensor(vector).nbytes
    before, begin = meter.seconds, perf_counter()
    values = total.unmask()
    server += perf_counter() - begin - (meter.seconds - before)
    weight = len(sent) * SAMPLES / total.largest
    mean, error = plan.result(values, weight, total.largest, {}, total.fixed_point.error(len(sent)))
    exact = WeightedMean({}, None, {}, ()).of((message, float(message.samples)) for message in sent)
    assert (mean["model.w"] - exact["model.w"]).abs().max().item() <= error + 1e-6
    show(
        members, members - survivors, f"{bits} bits", size + meter.up // members, (meter.up + meter.down) // members,
        (training / survivors) + meter.seconds / members, server,
    )  # fmt: skip


def show(members: int, dropped: int, form: str, up: int, extra: int, client: float, server: float) -> None:
    print(f"{members:>7} {dropped:>7} {form:<9} {up:>12,} {extra:>12,} {client:>9.3f} {server:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
