"""Writes the prompts of the shipped recipes; they are checked in, so this runs only when they change.

python -m nereus.recipes.prompts
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Words that the character tokenizer can spell.
_WORDS = "sun moon rain stone sea lane train note tune lime mint salt melon lemon onion mist nest east tree lion"
NUM_ARITHMETIC = 512


def build_words() -> Iterator[dict[str, Any]]:
    """Yield every ordered pair of different words as a prompt for the tiny model."""
    for first, second in itertools.permutations(_WORDS.split(), 2):
        yield {"prompt": f"{first} {second}.", "vowels": 48}


def build_arithmetic() -> Iterator[dict[str, Any]]:
    """Yield additions, subtractions and products of small numbers, drawn from a fixed seed, as chat messages."""
    draw = random.Random(0)
    for _ in range(NUM_ARITHMETIC):
        sign = draw.choice("+-*")
        left, right = draw.randint(2, 12 if sign == "*" else 50), draw.randint(2, 12 if sign == "*" else 50)
        left, right = (max(left, right), min(left, right)) if sign == "-" else (left, right)
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
        question = f"What is {left} {sign} {right}? Reply with the number only."
        yield {"prompt": [{"role": "user", "content": question}], "answer": answer}


def main() -> None:
    """Write words.jsonl and arithmetic.jsonl beside this file."""
    for name, rows in (("words", build_words()), ("arithmetic", build_arithmetic())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(__file__).with_name(f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
