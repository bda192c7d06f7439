"""The public API for running experiments: single runs, comparisons, sweeps, and resuming them."""
