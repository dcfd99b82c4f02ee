"""Run configs shipped in the package, with their prompts, rewards and tokenizer."""
