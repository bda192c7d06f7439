"""What a method file may import, and what travels: the lowest layer."""
