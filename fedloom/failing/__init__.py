"""Clients that fail: on purpose, by accident, and whose answers count."""
