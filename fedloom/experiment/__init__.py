"""One experiment: building the task, the round loop, evaluation, checkpoints and the run folder."""
