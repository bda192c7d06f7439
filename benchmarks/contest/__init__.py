"""Components of `python -m benchmarks.gpu`: workloads, contestants, the lower bound and the tables."""
