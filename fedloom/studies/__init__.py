"""Reproduction of the papers' tables: recipes with the papers' figures, stored results, and a report of both."""
