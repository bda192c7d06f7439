"""Everything that knows CUDA graphs."""
