"""Nereus: PPO post-training of language models on execution plans that follow the world."""
