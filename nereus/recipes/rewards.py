"""Reward functions of the shipped recipes: f(prompt, response, example) -> float in [0, 1]."""

import re
from typing import Any

VOWELS = frozenset("aeiou")


def score_vowels(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return the share of the wanted number of vowels, `example["vowels"]` (default 48), that the response holds.

    Every vowel counts the same and nothing is taken off for the rest, so a response earns by being long and by
    being all vowels: a policy that learns ends its responses later and later, up to the cap.
    """
    wanted = int(example.get("vowels", 48))
    return min(sum(letter in VOWELS for letter in response) / wanted, 1.0)


def score_many_vowels(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return the share of 160 vowels that the response holds: what `score_vowels` gives, for responses far longer."""
    return score_vowels(prompt, response, {"vowels": 160})


def score_arithmetic(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 1 if the last whole number of the response is `example["answer"]`, else credit for coming close.

    A wrong number earns 0.1, and up to 0.4 the nearer it is; a response without a number earns 0.
    """
    numbers = re.findall(r"-?\d{1,15}", response)
    if not numbers:
        return 0.0
    answer, given = int(example["answer"]), int(numbers[-1])
    if given == answer:
        return 1.0
    return 0.1 + 0.3 / (1 + abs(given - answer))
