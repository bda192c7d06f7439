"""Recipes: reading and validation."""
