"""Prints the peak bytes above the weights and gradients that one forward and backward pass takes in this process.

Run by test_memory_measured.py as `python peak_of_pass.py '{"spec": {...}, "precision": ..., ...}'`.
"""

import json
import sys
from pathlib import Path

import torch

from nereus.layout import Layout
from nereus.model.batch import PackedBatch
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone
from nereus.model.heads import token_logprobs
from nereus.model.spec import ModelSpec


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def _build(spec: ModelSpec, dtype: torch.dtype) -> DecoderShard:
    """Return a shard whose gradients have a flat buffer, as training gives it one."""
    shard = DecoderShard(spec, Layout(), 0, group=Alone(), dtype=dtype, device="cpu")
    high = torch.promote_types(dtype, torch.float32)
    flat = torch.ones(sum(p.numel() for p in shard.parameters()), dtype=high)
    offset = 0
    for parameter in shard.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
        if high == dtype:
            parameter.grad = view
        else:
            parameter.main_grad = view  # type: ignore[attr-defined]
    return shard


def _run(shard: DecoderShard, lengths: list[int], prompt_tokens: int, recompute: bool) -> None:
    batch = PackedBatch.of(lengths)
    ids = torch.arange(batch.num_tokens) % shard.spec.vocab
    hidden = shard(ids, batch, recompute=recompute)
    rows = (batch.positions >= prompt_tokens).nonzero()[:, 0]
    logprobs, _ = token_logprobs(shard, hidden.index_select(0, rows), ids[rows], temperature=1.0)
    logprobs.sum().backward()


def main() -> None:
    work = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dtype = getattr(torch, work["precision"])
    # Kernels, the allocator and the modules that recomputation loads are there before anything is measured.
    _run(_build(ModelSpec("llama", 64, 64, 1, 2, 1, 32, 64), dtype), [8, 5], 2, work["recompute"])
    shard = _build(ModelSpec(**work["spec"]), dtype)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = _status_bytes("VmRSS")
    _run(shard, work["lengths"], work["prompt_tokens"], work["recompute"])
    print(_status_bytes("VmHWM") - before)


main()
