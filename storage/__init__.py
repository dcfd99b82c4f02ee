"""Named tensor slices and the files that hold them; knows tensors and URLs, nothing of models or PPO."""
