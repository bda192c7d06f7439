"""What the report says besides stored results: conclusions, data not at hand, speeds of a CPU core."""

# ruff: noqa: E501 prose in tables and paragraphs

FINDINGS = {
    "fedintr": (
        "CIFAR-10 only. Most figures agree. At β = 0.5 FedIntR is above FedAvg, as in the paper (three seeds); the rest of the order "
        "is open: methods differ by about one point, as much as seeds do here. Not reproduced (one seed): uniform layer weights lose 3 points in the paper (Table V), "
        "none here."
    ),
    "fedcrc": (
        "CIFAR-10, β = 0.1 and 0.5. Half of the figures agree, most others are above the paper. FedPer with averaged heads "
        "is 20 points above it at β = 0.1, and FedAvg and FedProx are 11 and 17 above it on newcomers (one seed); the "
        "reason is unknown. FedRep is 5 points below it at β = 0.5; the paper does not say how it divides its epochs. The "
        "paper does not specify the network; with another one of the same description, three methods are 11 to 13 points below at β = 0.1."
    ),
    "fedcrl": (
        "CIFAR-10, practical heterogeneity, six methods. In the stated setting, personal methods are 13 to 21 points below "
        "the paper. Best explanation: the paper's figures are those of another partition (PFLlib's), and Adam with the "
        "stated learning rate makes units die. With that partition and SGD, FedRep, FedPAC and FedProto are within 1.4 points, but FedCRL "
        "is 3 points below the paper and not the best method. The runs that decide between readings have not been done."
    ),
    "repper": (
        "CIFAR-10, α = 0.5, half of the rounds. FedAvg, FedAvg+FT and RepPer are 10 to 15 points above the paper, in its "
        "order. The stem of ResNet-34, which the paper does not specify, explains most of it: with the original one they "
        "are 2 to 7 points above."
    ),
    "fedstyle": (
        "Digits with SimCLR, a fifth of the rounds and at most 6,000 images per style. MNIST and USPS are within 1.5 points "
        "of the paper, SVHN is 8 to 11 below. FedStyle's lead over FedAvg is not visible in runs of this size."
    ),
}
"""What the runs of each paper say so far, in a few sentences; the papers' pages have the details."""
NOT_AT_HAND = {"emnist": "EMNIST", "cinic10": "CINIC-10", "office-home": "Office-Home", "adaptiope": "Adaptiope"}
"""Datasets that were not available for our runs, by their names in recipes."""
GPU = "NVIDIA H200"
"""The machine of the stored GPU runs."""
CORE_SPEEDS: dict[tuple[str, int | None], float] = {
    ("cnn3", 32): 8665,
    ("cnn3", None): 14146,
    ("resnet20", None): 450,
    ("cnn4", None): 1532,
    ("resnet18", None): 48,
    ("cnn2", None): 3114,
    ("resnet34", None): 25,
    ("mobilenet", None): 270,
    ("resnet18", 32): 47,
    ("resnet18", 224): 10,
}
"""Images forward and backward per second of CPU time on one core (AMD EPYC), by network and image size:
`python -m benchmarks.core_speed`."""
FROM_RUN_FOLDERS = """\
These need the models of run folders. `fedloom reproduce` keeps runs in `runs/reproduce/PAPER`, and `fedloom report` draws the figures;
`--png figures` also writes each as a file. `--again` repeats runs whose results are stored, and
`--set storage.personal_models=true` keeps clients' networks. None of these figures has been drawn from a run of the paper's size yet.

| figure | commands |
|---|---|
| RepPer, Fig. 1: t-SNE of four methods' representations | `fedloom reproduce repper/table2 --only cifar10 --alpha 0.5 --methods fedavg,lgfedavg,fedrep,repper --again --set storage.personal_models=true`, then `fedloom report runs/reproduce/repper --png figures` (Representations) |
| RepPer, Fig. 4: t-SNE through the global and the personal networks | `fedloom report` with only the RepPer run |
| RepPer, Fig. 5: accuracy per class of two clients | the same report as Fig. 1 (Classes) |
| RepPer, Fig. 6: 20 newcomers of CIFAR-10 on representations of CIFAR-100 | `fedloom reproduce repper/table2 --only cifar100 --alpha 1`, then for each run `fedloom newcomers RUN --data cifar10 --clients 20 --partition dirichlet:1 --heads linear` |
| RepPer, Fig. 3; FedIntR, Fig. 3; FedStyle, Fig. 5: data of the clients | `fedloom data plot --data cifar10 --clients 20 --partition dirichlet:0.5`, or any report |
| FedCRL, Fig. 4: t-SNE of FedAvg and FedCRL | `fedloom reproduce fedcrl/table2 --only cifar10 --at kind=practical --methods fedavg,fedcrl --again --set storage.personal_models=true`, then `fedloom report runs/reproduce/fedcrl --png figures` |
| FedStyle, Fig. 4: t-SNE of style features | `fedloom reproduce fedstyle/table1-simclr --first --methods fedstyle --again --set storage.personal_models=true`, then `fedloom report runs/reproduce/fedstyle --png figures` (Styles) |
| CKA between clients' layers | the report of any run with personal models (Layers) |
"""
