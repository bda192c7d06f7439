"""The page of a run or a comparison: figures are described once, then drawn by a browser or as PNG files."""
