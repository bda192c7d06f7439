"""HTML report of runs: figures are described as data, then drawn by a browser or written as PNG files."""
