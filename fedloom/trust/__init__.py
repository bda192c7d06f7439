"""Clients that lie, and what is learnt of those that do not: robust rules, attacks, privacy, the ledger."""
