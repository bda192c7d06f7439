"""Building blocks of method files and the data types that clients and server exchange; the lowest layer."""
