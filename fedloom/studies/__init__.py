"""The papers' tables: recipes with the papers' own figures, what was run of them, and a report of both side by side."""
