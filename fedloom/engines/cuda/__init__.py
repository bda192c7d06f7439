"""The engine `lanes`: many clients at once on one GPU, with training steps as CUDA graphs."""
