"""What `python -m benchmarks.gpu` is made of: works, contestants, the floor and the tables."""
