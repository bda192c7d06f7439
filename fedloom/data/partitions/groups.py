"""Partitions by group: by domain or style, or one client per group."""

from dataclasses import replace

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.options import Count, Positive
from fedloom.data.partitions.base import Pool, partition
from fedloom.data.partitions.dirichlet import equal_dirichlet
from fedloom.data.partitions.samples import iid


def _groups(pool: Pool) -> np.ndarray:
    if pool.groups is None:
        raise UserError(
            f"data.partition = '{pool.spec}': the data have no clients or styles; name the column of the client in a "
            "table (data.client=COLUMN), store each client's files in a separate folder, or use another partition "
            "such as dirichlet:0.1"
        )
    return pool.groups


def _clients_of_domains(pool: Pool, each: int = 0, beta: float = 0.0) -> int:
    """Return the number of clients: `each` per domain, or the recipe's if it is a multiple of the domains."""
    groups = len(np.unique(_groups(pool)))
    if each:
        return groups * each
    if pool.clients % groups:
        raise UserError(
            f"partition 'domain': {pool.clients} clients cannot be spread evenly over {groups} domains; "
            f"use a multiple of {groups}, or domain:{max(1, pool.clients // groups)}"
        )
    return pool.clients


@partition(clients=_clients_of_domains)
def domain(pool: Pool, *, each: Count = 0, beta: Positive = 0.0) -> np.ndarray:
    """Divide each domain among separate clients, at random or (with `beta`) by `equal_dirichlet` within the domain.

    Args:
        pool: The samples, with groups.
        each: Number of clients per domain; by default `pool.clients` divided by the number of domains.
        beta: Dirichlet parameter of the class proportions within a domain; 0 divides at random.

    Returns:
        The client of each sample, int64 [N].

    Raises:
        UserError: The data have no groups, or a domain has fewer samples than clients.
    """
    domains = np.unique(_groups(pool))
    owner = np.empty(len(pool.labels), np.int64)
    each = each or pool.clients // len(domains)
    for index, group in enumerate(domains):
        members = np.flatnonzero(pool.groups == group)
        if len(members) < each:
            raise UserError(
                f"partition 'domain:{each}': domain {group} has only {len(members)} samples; use fewer clients"
            )
        inner = replace(pool, labels=pool.labels[members], clients=each, groups=None)
        local = equal_dirichlet(inner, beta=beta) if beta else iid(inner)
        owner[members] = np.where(local < 0, -1, index * each + local)
    return owner


@partition(clients=lambda pool: len(np.unique(_groups(pool))))
def natural(pool: Pool) -> np.ndarray:
    """Make each group one client; the number of groups replaces the number of clients."""
    return np.unique(_groups(pool), return_inverse=True)[1].astype(np.int64)
