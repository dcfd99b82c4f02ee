"""The closed form agrees with the layout function, slice by slice."""

import pytest

from nereus.layout import Layout, slices_of
from nereus.model.spec import ModelSpec
from nereus.transition.overlap import common_elements, held_elements

SPECS = {
    "plain": ModelSpec("llama", 53, 24, 5, 6, 3, 4, 40),
    "tied, with norms and biases": ModelSpec(
        "qwen3", 53, 24, 3, 6, 3, 4, 40, tie_embeddings=True, qkv_bias=True, qk_norm=True
    ),
    "value head": ModelSpec("llama", 53, 24, 4, 6, 3, 4, 40, head="value"),
}


def common(spec: ModelSpec, source: Layout, i: int, target: Layout, j: int) -> int:
    held: dict[str, list] = {}
    for part in slices_of(spec, source, i):
        held.setdefault(part.name, []).append(part)
    parts = (wanted.intersect(have) for wanted in slices_of(spec, target, j) for have in held.get(wanted.name, ()))
    return sum(part.num_elements for part in parts if part is not None)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("source", "target"), [((1, 2), (2, 1)), ((3, 3), (2, 2)), ((2, 3), (2, 3)), ((1, 1), (3, 2))])
def test_equals_the_layout_function(spec: ModelSpec, source: tuple[int, int], target: tuple[int, int]):
    a, b = Layout(*source), Layout(*target)
    expected = [[common(spec, a, i, b, j) for j in range(b.size)] for i in range(a.size)]
    assert common_elements(spec, a, b).tolist() == expected
    assert held_elements(spec, b).tolist() == [
        sum(part.num_elements for part in slices_of(spec, b, j)) for j in range(b.size)
    ]
