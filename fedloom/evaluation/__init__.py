"""Accuracy over clients and classes, and how it spreads."""
