"""Benchmarks; README.md describes how to run each of them."""
