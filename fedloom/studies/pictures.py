"""Figures of the papers that are pictures: which command draws them."""

PICTURES = """\
## Figures that are pictures

`fedloom reproduce` leaves its runs in `runs/reproduce/PAPER`; a report draws what the papers draw of theirs (names of runs end in the
recipe's key and the seed).

| figure | drawn by |
|---|---|
| RepPer, Fig. 1: t-SNE of four methods' representations | `fedloom reproduce repper/table2 --only cifar10 --alpha 0.5 --methods fedavg,lgfedavg,fedrep,repper`, then `fedloom report runs/reproduce/repper` (Representations) |
| RepPer, Fig. 4: t-SNE, global and clients' | `fedloom report` of the RepPer run alone |
| RepPer, Fig. 5: two clients class by class | the same report as Fig. 1 (Classes) |
| RepPer, Fig. 6: 20 newcomers of CIFAR-10 on representations of CIFAR-100 | `fedloom reproduce repper/table2 --only cifar100 --alpha 1`, then for each run `fedloom newcomers RUN --data cifar10 --clients 20 --partition dirichlet:1 --heads linear` |
| RepPer, Fig. 3; FedIntR, Fig. 3; FedStyle, Fig. 5: who holds what | `fedloom data plot --data cifar10 --clients 20 --partition dirichlet:0.5`; every report has it too |
| FedCRL, Fig. 4: t-SNE of FedAvg and FedCRL | `fedloom reproduce fedcrl/table2 --only cifar10 --at kind=practical --methods fedavg,fedcrl`, then `fedloom report runs/reproduce/fedcrl` |
| FedStyle, Fig. 4: t-SNE of style features | `fedloom reproduce fedstyle/table1-simclr --first --methods fedstyle`, then `fedloom report` of the run (Styles) |
"""  # noqa: E501
