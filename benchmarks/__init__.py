"""Benchmarks; README.md says how to run each."""
