"""Translation of the flags of PFLlib's main.py into a fedloom command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fedloom.core.errors import UserError, nearest

PFLLIB_FLAGS = (
    "go goal", "dev device", "did device_id", "data dataset", "ncl num_classes", "m model", "lbs batch_size",
    "lr local_learning_rate", "ld learning_rate_decay", "ldg learning_rate_decay_gamma", "gr global_rounds",
    "tc top_cnt", "ls local_epochs", "algo algorithm", "jr join_ratio", "rjr random_join_ratio", "nc num_clients",
    "pv prev", "t times", "eg eval_gap", "sfn save_folder_name", "ab auto_break", "dlg dlg_eval", "dlgg dlg_gap",
    "bnpc batch_num_per_client", "nnc num_new_clients", "ften fine_tuning_epoch_new", "fd feature_dim",
    "vs vocab_size", "ml max_len", "fs few_shot", "cdr client_drop_rate", "tsr train_slow_rate", "ssr send_slow_rate",
    "ts time_select", "tth time_threthold", "bt beta", "lam lamda", "mu mu", "K K", "lrp p_learning_rate", "M M",
    "itk itk", "alk alphaK", "sg sigma", "al alpha", "pls plocal_epochs", "tau tau", "fte fine_tuning_epochs",
    "dlr dr_learning_rate", "L L", "nd noise_dim", "glr generator_learning_rate", "hd hidden_dim", "se server_epochs",
    "lf localize_feature_extractor", "slr server_learning_rate", "et eta", "s rand_percent", "p layer_idx",
    "mlr mentee_learning_rate", "Ts T_start", "Te T_end", "mo momentum", "klw kl_weight", "fsb first_stage_bound",
    "ca fedcross_alpha", "cmss collaberative_model_select_strategy",
)  # fmt: skip
"""All flags of PFLlib's system/main.py (commit d832e76), short and long. Some are misspelt there."""
DATASETS = {
    "MNIST": "mnist", "FashionMNIST": "fashion-mnist", "Cifar10": "cifar10", "Cifar100": "cifar100",
    "EMNIST": "emnist-digits", "Omniglot": "omniglot", "FEMNIST": "femnist",
}  # fmt: skip
MODELS = {"CNN": None, "ResNet18": "resnet18", "ResNet34": "resnet34"}
"""Networks; None: the one of pfllib/setting. PFLlib's MobileNet is version 2, and its DNN has one layer less."""
METHODS = {
    "FedAvg": "fedavg", "Local": "local", "PerAvg": "perfedavg", "pFedMe": "pfedme", "FedProx": "fedprox",
    "FedAMP": "fedamp", "APFL": "apfl", "FedPer": "fedper", "Ditto": "ditto", "FedRep": "fedrep", "FedBN": "fedbn",
    "FedROD": "fedrod", "FedProto": "fedproto", "FedDyn": "feddyn", "MOON": "moon", "FedBABU": "fedbabu",
    "SCAFFOLD": "scaffold", "FedALA": "fedala", "FedPAC": "fedpac", "LG-FedAvg": "lgfedavg", "FedCP": "fedcp",
    "GPFL": "gpfl", "FedGH": "fedgh", "FedDBE": "feddbe", "FedLC": "fedlc", "FedAS": "fedas",
}  # fmt: skip
OPTIONS: dict[str, dict[str, str]] = {
    "FedProx": {"mu": "mu"}, "MOON": {"mu": "mu", "tau": "tau"}, "Ditto": {"mu": "lam"},
    "FedRep": {"plocal_epochs": "personal_epochs"}, "FedPAC": {"lamda": "lam"}, "FedProto": {"lamda": "lam"},
    "pFedMe": {"lamda": "lam", "K": "inner", "p_learning_rate": "personal_lr", "beta": "beta"},
    "FedAMP": {"lamda": "lam", "alphaK": "alpha_k", "sigma": "sigma"}, "APFL": {"alpha": "alpha"},
    "FedBABU": {"fine_tuning_epochs": "ft_epochs"}, "FedGH": {"server_learning_rate": "server_lr"},
    "SCAFFOLD": {"server_learning_rate": "global_lr"}, "FedALA": {"eta": "eta"}, "FedDyn": {"alpha": "alpha"},
    "FedLC": {"tau": "tau"}, "FedCP": {"lamda": "lam"}, "GPFL": {"lamda": "lam", "mu": "mu"},
    "FedDBE": {"momentum": "momentum", "kl_weight": "kappa"},
}  # fmt: skip
"""Hyperparameters that an algorithm reads, with the names that they have here."""
HYPERPARAMETERS = {name for of in OPTIONS.values() for name in of} | {"layer_idx", "rand_percent"}
FIELDS = {
    "global_rounds": "--rounds", "local_epochs": "--epochs", "batch_size": "--batch-size",
    "local_learning_rate": "--lr", "join_ratio": "--fraction",
}  # fmt: skip
SETTINGS = {"device": "engine.device", "eval_gap": "evaluation.every", "client_drop_rate": "faults.lost"}
FOLLOWS = {"num_classes": "follows from the data", "goal": "only a name of log files"}
"""Flags that are not needed."""
INSTEAD = {
    "device_id": "set the environment variable CUDA_VISIBLE_DEVICES",
    "times": "use fedloom compare … --seeds 0,1,2", "prev": "fedloom resume continues runs",
    "save_folder_name": "--out names the run folder", "few_shot": "data.limit limits the samples of all clients",
    "auto_break": "training.patience stops early, by validation samples",
    "top_cnt": "training.patience stops early, by validation samples",
    "fine_tuning_epoch_new": "fedloom newcomers fits heads for newcomers after the run",
    "time_threthold": "engine.client_timeout leaves out clients that really take longer",
    "train_slow_rate": "faults.slow delays clients", "send_slow_rate": "faults.slow delays clients",
}  # fmt: skip
"""What comes next to a flag that has no equivalent."""
TRUTHS = (
    "learning_rate_decay",
    "random_join_ratio",
    "auto_break",
    "dlg_eval",
    "time_select",
    "localize_feature_extractor",
)
"""Flags of `type=bool`: every text but the empty one is true there, also `False`."""


class _Parser(argparse.ArgumentParser):
    """PFLlib's parser, whose errors are errors of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"PFLlib's arguments: {message}; write them as for its main.py: -data Cifar10 -algo FedAvg")


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate arguments of PFLlib's main.py; return the command and remarks on what differs.

    Raises:
        UserError: PFLlib has no such flag, or fedloom has no such dataset, network or method.
    """
    start = next((i + 1 for i, text in enumerate(arguments) if text.endswith(".py")), 0)
    given, rest = _parser().parse_known_args(list(arguments)[start:])
    flags: dict[str, str] = {name: value for name, value in vars(given).items() if value is not None}
    if rest:
        raise UserError(f"{rest[0]}: PFLlib's main.py has no such flag; write -data Cifar10 -algo FedAvg …")
    algorithm = flags.pop("algorithm", "FedAvg")
    options = _options(algorithm)
    command = [
        "fedloom",
        "run",
        "pfllib/setting",
        "--data",
        _known("data", flags.pop("dataset", "MNIST"), DATASETS) or "",
    ]
    command += ["--method", _known("algo", algorithm, METHODS) or ""]
    if network := _known("m", flags.pop("model", "CNN"), MODELS):
        command += ["--model", network]
    sets = dict(options)
    remarks = _size(flags, command, sets)
    for name, value in flags.items():
        if name in FIELDS:
            command += [FIELDS[name], value]
        elif name in SETTINGS:
            sets[SETTINGS[name]] = value
        elif name in OPTIONS.get(algorithm, {}):
            sets[f"method.{OPTIONS[algorithm][name]}"] = value
        elif (algorithm, name) == ("FedALA", "rand_percent"):
            sets["method.fraction"] = f"{_whole('s', value) / 100:g}"
        elif (algorithm, name, value) != ("FedALA", "layer_idx", "2"):  # the head, as by default
            remarks.append(_remark(name, value, algorithm))
    if algorithm == "PerAvg":
        sets["method.alpha"] = flags.get("local_learning_rate", "0.005")  # its adaptation takes the learning rate
    command += [part for path, value in sets.items() for part in ("--set", f"{path}={value}")]
    return command, [*dict.fromkeys(remarks), _division(command)]


def is_pfllib_flag(text: str) -> bool:
    """Return whether an argument is one of PFLlib's flags with one dash."""
    return text.startswith("-") and any(names.startswith(f"{text[1:]} ") for names in PFLLIB_FLAGS)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, prog="main.py")
    for short, name in (names.split() for names in PFLLIB_FLAGS):
        parser.add_argument(*dict.fromkeys((f"-{short}", f"--{name}")), dest=name)
    return parser


def _known(flag: str, value: str, names: Mapping[str, str | None]) -> str | None:
    """Return the name that a dataset, network or method has here."""
    if value not in names:
        raise UserError(f"-{flag} {value}: has no equivalent: {nearest(value, names)}")
    return names[value]


def _options(algorithm: str) -> dict[str, str]:
    """Return the hyperparameters with which fedloom's board runs a method: PFLlib's, where these do not disable it."""
    from fedloom.studies.table import load_table

    row = load_table("pfllib/board").rows.get(METHODS.get(algorithm, ""))
    method = row.method if row is not None and isinstance(row.method, dict) else {}
    return {f"method.{n}": str(v).lower() if isinstance(v, bool) else f"{v}" for n, v in method.items() if n != "name"}


def _size(flags: dict[str, str], command: list[str], sets: dict[str, str]) -> list[str]:
    """Translate the flags that belong together: numbers of clients, and the decay of the learning rate."""
    remarks = [f"{_written(n)} {flags[n]}: counts as true in PFLlib" for n in TRUTHS if flags.get(n) in ("False", "0")]
    clients, new = flags.pop("num_clients", None), flags.pop("num_new_clients", "0")
    if clients is not None or new != "0":
        command += ["--clients", str(_whole("nc", clients or "20") + _whole("nnc", new))]
    if new != "0":
        sets["data.newcomers"] = new
    factor = flags.pop("learning_rate_decay_gamma", "0.99")
    if flags.pop("learning_rate_decay", ""):
        sets["training.schedule"] = f"exponential:{factor}"
    return remarks


def _whole(flag: str, value: str) -> int:
    if not value.isdigit():
        raise UserError(f"-{flag} {value}: must be a whole number")
    return int(value)


def _remark(name: str, value: str, algorithm: str) -> str:
    if name in FOLLOWS:
        return f"{_written(name)} {value}: not needed, {FOLLOWS[name]}"
    if name in HYPERPARAMETERS and name not in OPTIONS.get(algorithm, {}):
        return f"{_written(name)} {value}: {algorithm} does not read it, or fedloom has no equivalent"
    hint = INSTEAD.get(name)
    return f"{_written(name)} {value}: no equivalent{f'; {hint}' if hint else ''}"


def _written(name: str) -> str:
    return next(f"-{short}" for short, long in (names.split() for names in PFLLIB_FLAGS) if long == name)


def _division(command: Sequence[str]) -> str:
    if "femnist" in command:
        return "division: data made by generate_FEMNIST.py have a client per writer: add --partition natural"
    return (
        "division: Dir(0.1), as `generate_….py noniid - dir` makes it; for `noniid - pat`: "
        "--partition grouped-pathological:2; for `iid balance -`: --partition iid"
    )
