"""The mathematics of PPO: tensors and numbers in, tensors and numbers out."""
