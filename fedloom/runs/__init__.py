"""Runs around the round loop: prepared, interrupted, resumed, several in a folder."""
