"""Additions to a method's name: `+ft`, heads, probes."""
