"""Other libraries on the same workload: the same images, split and network, FedAvg with SGD.

Each library is used as in its documentation or main program, with unmodified files, and without evaluation in the
measured rounds. Libraries that are not installed are skipped.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contest.plain import client_tensors, network
from benchmarks.contest.works import Clock, Work, steps_and_images
from fedloom import Task

AT_ONCE = 8
"""Largest number of Flower clients (processes) that share the GPU, each with two CPU cores."""


class MissingError(Exception):
    """Raised if a library is not available."""


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingError(f"{module} is not installed")


def result(work: Work, task: Task, *, drop_last: bool, **values: Any) -> dict[str, Any]:
    steps, images = steps_and_images(task, [list(range(work.clients))], work.batch, drop_last=drop_last)
    return {"steps": steps, "images": images} | values


def pfllib(work: Work, device: str, warmup: int, rounds: int, path: str | None) -> dict[str, Any]:
    """Run PFLlib's FedAvg.train() with its own timing; its first round evaluates, the others only train.

    Its clients read their .npz files in each round, which its time includes. `training` is the time by its clients'
    counters, which excludes reading.
    """
    if path is None:
        raise MissingError("--pfllib PATH is not given")
    source = Path(path).resolve() / "system"
    if not (source / "flcore").is_dir():
        raise MissingError(f"{source} does not contain PFLlib")
    task = work.task()
    if importlib.util.find_spec("h5py") is None:  # for its results file, which is not written here
        sys.modules["h5py"] = ModuleType("h5py")
    sys.path.insert(0, str(source))
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        write_npz(task, Path(folder) / "dataset" / "bench")
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # it reads ../dataset/bench
        from flcore.servers.serveravg import FedAvg

        clock = Clock(device)
        server = FedAvg(pfllib_options(work, device, warmup + rounds - 1, network(work).to(device)), 0)
        server.save_results = server.save_global_model = lambda: None
        counted = count_training(server)
        server.train()
        whole = clock.now() - clock.begin
        server.select_clients()  # once more, to read the counters
        _, samples, losses = server.train_metrics()
        os.chdir("/")
    seconds = server.Budget[warmup:]
    return result(
        work, task, drop_last=True, seconds=seconds, warmup=whole - sum(seconds), memory=clock.memory(),
        loss=sum(losses) / sum(samples), training=np.diff(counted)[warmup:].tolist(),
    )  # fmt: skip


def count_training(server: Any) -> list[float]:
    """Return a list that receives the sum of its clients' counters of training time at the start of each round."""
    counted: list[float] = []
    select = server.select_clients

    def counting() -> Any:
        counted.append(sum(client.train_time_cost["total_cost"] for client in server.clients))
        return select()

    server.select_clients = counting
    return counted


def write_npz(task: Task, folder: Path, tested: int | None = 64) -> None:
    """Write the clients' data like PFLlib's dataset_utils.save_file, with at most `tested` test samples each."""
    for kind, held in (("train", task.federation.train), ("test", task.federation.test)):
        (folder / kind).mkdir(parents=True)
        for client, positions in enumerate(held):
            positions = positions[:tested] if kind == "test" else positions
            index = torch.from_numpy(np.asarray(positions))
            data: Any = {"x": task.stored.plain(index).numpy(), "y": task.dataset.labels[index].numpy()}
            with open(folder / kind / f"{client}.npz", "wb") as file:
                np.savez_compressed(file, data=data)


def pfllib_options(work: Work, device: str, last_round: int, model: torch.nn.Module) -> SimpleNamespace:
    """Return the options that its main.py would parse: the defaults, with our batch size, learning rate and network."""
    return SimpleNamespace(
        model=model, device=device, dataset="bench", num_classes=work.classes, algorithm="FedAvg", goal="bench",
        batch_size=work.batch, local_learning_rate=work.lr, local_epochs=1, num_clients=work.clients,
        global_rounds=last_round, eval_gap=10**6, learning_rate_decay=False, learning_rate_decay_gamma=0.99,
        join_ratio=1.0, random_join_ratio=False, few_shot=0, time_select=False, time_threthold=10_000,
        save_folder_name="items", top_cnt=100, auto_break=False, client_drop_rate=0.0, train_slow_rate=0.0,
        send_slow_rate=0.0, dlg_eval=False, dlg_gap=100, batch_num_per_client=2, num_new_clients=0,
        fine_tuning_epoch_new=0,
    )  # fmt: skip


def fluke(work: Work, device: str, warmup: int, rounds: int) -> dict[str, Any]:
    """Run fluke's FedAVG on its FastDataLoaders; an observer times the rounds."""
    needs("fluke")
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
    from fluke.utils import ClientObserver, FederationObserver

    class Watch(FederationObserver, ClientObserver):
        def __init__(self) -> None:
            self.starts: list[float] = []
            self.ends: list[float] = []
            self.losses: list[float] = []

        def start_round(self, round: int, global_model: Any) -> None:
            self.losses.clear()
            self.starts.append(clock.now())

        def end_round(self, round: int) -> None:
            self.ends.append(clock.now())

        def end_fit(self, round: int, client_id: int, model: Any, loss: float, **kwargs: Any) -> None:
            self.losses.append(loss)

    task = work.task()
    loaders = [
        FastDataLoader(*client_tensors(task, c), num_labels=work.classes, batch_size=work.batch, shuffle=True)
        for c in range(work.clients)
    ]
    clock, watch = Clock(device), Watch()
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device(device)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    client = {
        "batch_size": work.batch, "local_epochs": 1, "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": work.lr}, "scheduler": {"gamma": 1, "step_size": 1},
    }  # fmt: skip
    algorithm = FedAVG(
        work.clients,
        DataSplitter(DummyDataContainer(loaders, [None] * work.clients, None, work.classes)),
        DDict(client=DDict(client), server=DDict(weighted=True), model=network(work)),
    )
    algorithm.set_callbacks(watch)
    algorithm.run(warmup + rounds, 1.0)
    seconds = [end - start for start, end in zip(watch.starts, watch.ends, strict=True)]
    return result(
        work, task, drop_last=False, seconds=seconds[warmup:], warmup=watch.ends[warmup - 1] - clock.begin,
        memory=clock.memory(), loss=float(np.mean(watch.losses)),
    )  # fmt: skip


def flower(work: Work, device: str, warmup: int, rounds: int) -> dict[str, Any]:
    """Run Flower's simulation (Ray actors that share the device) with its FedAvg strategy, without evaluation."""
    needs("flwr", "ray")
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    task = work.task()
    clock = Clock("cpu")  # the driver does not touch the device
    starts: list[float] = []
    ends: list[float] = []
    losses: list[float] = []

    class Watched(FedAvg):
        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            starts.append(perf_counter())
            return super().configure_train(*args, **kwargs)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            broken = [reply.error.reason for reply in replies if reply.has_error()]
            if broken or len(replies) < work.clients:
                raise RuntimeError(f"{len(replies)} of {work.clients} clients answered, errors: {broken[:1]}")
            arrays, metrics = super().aggregate_train(server_round, replies)
            ends.append(perf_counter())
            losses.append(float(metrics["loss"]))
            return arrays, metrics

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Watched(fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients)
        strategy.start(grid, ArrayRecord(network(work).state_dict()), num_rounds=warmup + rounds)

    at_once = max(1, min(AT_ONCE, (os.cpu_count() or 1) // 2))
    resources = {"num_cpus": 2, "num_gpus": 1 / at_once if device == "cuda" else 0.0}
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        for client in range(work.clients):
            torch.save(client_tensors(task, client), f"{folder}/{client}.pt")
        run_simulation(
            server, flower_client(work, device, folder), work.clients, backend_config={"client_resources": resources}
        )
    seconds = [end - start for start, end in zip(starts, ends, strict=True)]
    return result(
        work, task, drop_last=False, seconds=seconds[warmup:], warmup=ends[warmup - 1] - clock.begin,
        memory=None, loss=losses[-1], at_once=at_once,
    )  # fmt: skip


def flower_client(work: Work, device: str, folder: str) -> Any:
    """Return the ClientApp of Flower's PyTorch quickstart; an actor caches the data that it has loaded."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        samples = flower_data(f"{folder}/{context.node_config['partition-id']}.pt")
        model = work.network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.to(device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
        total = 0.0
        for x, y in DataLoader(samples, work.batch, shuffle=True):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        metrics = MetricRecord({"loss": total / len(samples), "num-examples": len(samples)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


_loaded: dict[str, TensorDataset] = {}


def flower_data(path: str) -> TensorDataset:
    if path not in _loaded:
        _loaded[path] = TensorDataset(*torch.load(path))
    return _loaded[path]


PEERS: dict[str, Callable[..., dict[str, Any]]] = {"pfllib": pfllib, "fluke": fluke, "flower": flower}
