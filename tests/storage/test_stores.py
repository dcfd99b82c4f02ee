"""Slices of safetensors files are read alike from every store."""

import pytest
import torch
from safetensors.torch import save

from storage.safetensors_file import SafetensorsFile
from storage.slices import TensorSlice
from storage.small_files import replace_file


def test_slices(store_url):
    weights = torch.randn(3000, 2000)  # 24 MB: several blocks of several ranges
    replace_file(f"{store_url}/x.safetensors", save({"w": weights}))
    with SafetensorsFile(f"{store_url}/x.safetensors") as file:
        for starts, sizes in (((0, 0), (3000, 2000)), ((17, 0), (2500, 2000)), ((0, 700), (3000, 300))):
            out = torch.empty(sizes)
            file.read(TensorSlice("w", starts, sizes), out)
            assert torch.equal(out, weights[starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]])


def test_missing_file(store_url):
    with pytest.raises(OSError):
        SafetensorsFile(f"{store_url}/nothing.safetensors")
