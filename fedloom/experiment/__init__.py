"""One experiment: build, rounds, evaluation, checkpoints, run folder."""
