"""Hands out a finished run's actor as a Hugging Face checkpoint."""

import fsspec


def export_run(run_dir: str, out: str) -> list[str]:
    """Copy the checkpoint that a run ended with to `out` and return the names of its files.

    Args:
        run_dir: of a finished run; any fsspec URL.
        out: directory or URL; it must not exist or be empty.

    Raises:
        ValueError: no run, no checkpoint in it, or `out` holds files already.
    """
    run_dir, out = run_dir.rstrip("/"), out.rstrip("/")
    source, source_path = fsspec.core.url_to_fs(f"{run_dir}/final")
    target, target_path = fsspec.core.url_to_fs(out)
    if not source.exists(f"{source_path}/config.json"):
        raise ValueError(f"{run_dir} holds no finished run (no final/config.json); give a run that has ended.")
    if target.exists(target_path) and target.find(target_path):
        raise ValueError(f"{out} is not empty; give a new directory.")
    names = [path.removeprefix(source_path).lstrip("/") for path in source.find(source_path)]
    for name in names:
        destination = f"{target_path}/{name}"
        target.makedirs(destination.rsplit("/", 1)[0], exist_ok=True)
        with source.open(f"{source_path}/{name}", "rb") as reader, target.open(destination, "wb") as writer:
            while chunk := reader.read(2**24):
                writer.write(chunk)
    return names
