"""Hostile and failing clients, and protection of clients' data: robust rules, attacks, faults, privacy, ledger."""
