"""Staged state side by side with other ways to move the same bytes: written by two tp ranks, read by two pp ranks.

Run `python -m tests.benchmarks.staged_state [--parts NAME ...] [--model DIR] [--quick] [--json FILE]`. Parts:

memory, disk: SmolLM2's parameters and Adam moments (1.6 GB, float32) on tmpfs and on a disk, against
    torch.distributed.checkpoint with its defaults, and against one raw sequential write of as many bytes, synced.
s3: the same on a SeaweedFS server of this machine, against s3fs that moves as many bytes in objects of the same sizes.
pause: steps of the recipe smollm2-135m beside the commit of the step before, against steps with none beside them.

All sides of a part take turns in one run. Reads find what was just written in the page cache, on all sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_job import pin_to_cores
from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, describe_run, print_table, require_model, write_record
from tests.benchmarks.staged_pause import measure_pause
from tests.benchmarks.staged_peers import Peers
from tests.benchmarks.staged_sides import Ours, raw_write

PARTS = ("memory", "disk", "s3", "pause")
# As fractions of the other side's time; of a raw write: writing and reading together, and the rate of a commit.
GOALS = {"memory": 0.5, "disk_against_raw": 1.35, "commit_rate": 0.8, "s3": 1.0, "pause": 0.05}
QUICK_MODEL = {"tiny": {"hidden": 384, "layers": 8, "heads": 6, "kv_heads": 3, "intermediate": 768, "vocab": 4096}}
Sample = dict[str, float]


def measure_local(ours: Ours, peers: Peers, place: Path, *, repeats: int) -> dict[str, Any]:
    """Return medians of one place: seconds of either side and of a raw write, extra memory of either side."""
    samples: list[Sample] = []
    for _ in range(repeats + 1):  # the first warms up
        with tempfile.TemporaryDirectory(dir=place) as folder:
            sample = ours.write(f"{folder}/state")
            sample |= ours.read(f"{folder}/state")
            shutil.rmtree(f"{folder}/state")
            for method in ("save", "load"):
                seconds, extra = peers.order(method, folder=f"{folder}/dcp")
                sample |= {f"dcp_{method}_s": seconds, f"dcp_{method}_extra_bytes": max(extra)}
            shutil.rmtree(f"{folder}/dcp")
            sample["raw_write_s"] = raw_write(f"{folder}/raw", ours.bytes_written)
        samples.append(sample)
    ours.check()
    peers.order("check")
    medians = _medians(samples[1:])
    both = medians["write_s"] + medians["read_s"]
    return {
        "seconds": medians,
        "bytes_written": ours.bytes_written,
        "bytes_read": ours.bytes_read,
        "ratio_to_dcp": both / (medians["dcp_save_s"] + medians["dcp_load_s"]),
        "ratio_to_raw_write": both / medians["raw_write_s"],
        "commit_rate_to_raw_write": medians["raw_write_s"] / medians["write_s"],
        "samples": samples,
    }


def measure_s3(model: str | Mapping[str, Any], folder: Path, *, repeats: int) -> dict[str, Any]:
    """Return medians on an S3 server: seconds of our writes and reads, and of s3fs alone."""
    from nereus.limits import REMOTE_SHARDS_IN_FLIGHT
    from storage.urls import open_filesystem
    from tests.services.seaweed import run_seaweed

    samples: list[Sample] = []
    with run_seaweed(str(folder)) as server:
        os.environ.update(server.env)  # of the workers, too
        with Ours(model, remote=True) as ours:
            spec = {"sizes": ours.shard_sizes(), "streams": REMOTE_SHARDS_IN_FLIGHT}
            with Peers("s3fs", spec, folder) as peers:
                for turn in range(repeats + 1):
                    url = f"{server.url}/{turn}"
                    sample = ours.write(f"{url}/state") | ours.read(f"{url}/state")
                    for method in ("save", "load"):
                        seconds, extra = peers.order(method, folder=f"{server.bucket}/{turn}/plain")
                        sample |= {f"s3fs_{method}_s": seconds, f"s3fs_{method}_extra_bytes": max(extra)}
                    samples.append(sample)
                    filesystem, path = open_filesystem(url)
                    filesystem.rm(path, recursive=True)
            ours.check()
    medians = _medians(samples[1:])
    return {
        "seconds": medians,
        "bytes_written": ours.bytes_written,
        "bytes_read": ours.bytes_read,
        "write_ratio_to_s3fs": medians["write_s"] / medians["s3fs_save_s"],
        # s3fs reads each byte once; two pipeline stages both read what they share, such as a tied embedding.
        "read_ratio_to_s3fs": medians["read_s"] / ours.bytes_read / (medians["s3fs_load_s"] / ours.bytes_written),
        "samples": samples,
    }


def _medians(samples: Sequence[Sample]) -> Sample:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one part."""
    repeats = 1 if options.quick else options.repeats
    if part == "pause":
        pairs = 1 if options.quick else options.pairs
        return measure_pause(options.model, options.folder, pairs=pairs, quick=options.quick)
    model = QUICK_MODEL if options.quick else options.model
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if part == "s3":
            return measure_s3(model, Path(folder), repeats=min(repeats, 3))
        place = Path("/dev/shm") if part == "memory" else Path(folder)
        with Ours(model) as ours, Peers("dcp", ours.describe(f"{folder}/store"), Path(folder)) as peers:
            return measure_local(ours, peers, place, repeats=repeats)


def print_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of seconds, one of ratios, and one of memory."""
    moved = {part: row for part, row in rows.items() if part != "pause"}
    if moved:
        other = {part: "s3fs" if part == "s3" else "dcp" for part in moved}
        lines = [
            [
                part,
                row["bytes_written"] / 1e9,
                *(row["seconds"].get(key) for key in ("write_s", "read_s")),
                other[part],
                *(row["seconds"].get(f"{other[part]}_{key}") for key in ("save_s", "load_s")),
                row["seconds"].get("raw_write_s"),
                *(row["seconds"][key] / 2**20 for key in ("write_extra_bytes", "read_extra_bytes")),
                *(row["seconds"][f"{other[part]}_{key}_extra_bytes"] / 2**20 for key in ("save", "load")),
            ]
            for part, row in moved.items()
        ]
        columns = ["place", "GB", "write s", "read s", "other", "write s", "read s", "raw write s"]
        columns += ["ours MiB w", "r", "other MiB w", "r"]
        print_table("written with tp2, read with pp2; MiB: most that a process held beside its tensors", columns, lines)
    print_table("ratios", ["what", "ratio", "goal"], list(_ratios(rows)))


def _ratios(rows: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    wanted: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("memory", "ratio_to_dcp", "tmpfs: write + read, ours / dcp", lambda g: f"at most {g}"),
        ("disk", "ratio_to_dcp", "disk: write + read, ours / dcp", lambda g: ""),
        ("disk", "ratio_to_raw_write", "disk: write + read, ours / raw write", lambda g: f"at most {g}"),
        ("disk", "commit_rate_to_raw_write", "disk: rate of a commit / raw write", lambda g: f"at least {g}"),
        ("s3", "write_ratio_to_s3fs", "S3: write, ours / s3fs", lambda g: f"at most {g}"),
        ("s3", "read_ratio_to_s3fs", "S3: read, ours / s3fs (per byte)", lambda g: f"at most {g}"),
        ("pause", "slower", "step with staging / without, less 1", lambda g: f"at most {g}"),
        ("pause", "paused", "waited for staging / step", lambda g: f"at most {g}"),
    ]
    goals = {"ratio_to_raw_write": "disk_against_raw", "commit_rate_to_raw_write": "commit_rate"}
    return [
        [text, float(rows[part][key]), show(GOALS[goals.get(key, "memory" if part == "disk" else part)])]
        for part, key, text, show in wanted
        if part in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--folder", default=str(OUT_DIR), help="where the disk is that is measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=4, help="steps with and without staging")
    parser.add_argument("--quick", action="store_true", help="a small model, one turn")
    parser.add_argument("--json", default=str(OUT_DIR / "staged_state.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    require_model(options.model)
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    pin_to_cores(2)
    head = describe_run("staged_state", threads=2)
    rows: dict[str, Any] = {}
    for part in options.parts:
        print(f"  {part} ...", flush=True)
        rows[part] = {**measure(part, options), "load_average": os.getloadavg()[0]}
        write_record({**head, "model": options.model, "goals": GOALS, "parts": rows}, options.json)
    print_rows(rows)


if __name__ == "__main__":
    main()
