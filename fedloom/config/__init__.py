"""Recipes: how they are read, and their validation."""
