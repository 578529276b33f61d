"""What fewer bits change: `promoe quality` for the demo model in every form, on text that it was not trained on.

    python benchmarks/quality.py [--tokens 102400] [--json FILE]

Prints the table of `promoe quality`. The demo's experts are 72 wide; zeros make them 128 wide here, which changes no
answer, because quantised sizes are multiples of 64. The counts of the mixed forms come from one answer of 400 tokens.
Takes ten minutes on two cores. Downloads ShareGPT unless `sharegpt_moe/corpus.py` finds it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from common import OUT, make_parser
from safetensors.torch import load_file, save_file

from promoe.cli import main as promoe
from promoe.commands.bench.example import find_example
from promoe.model.tokenizer import load_tokenizer

WIDTH = 128
PROMPT = "Tell me how to learn a language, cook a meal and write a program."
# Names of folders, best first, and what `promoe quantize` is asked for.
FORMS = {
    "int8": "--bits 8",
    "int4-hqq-hot8": "--bits 4 --method hqq --hot 8",
    "int4-g32": "--bits 4 --group 32",
    "int4": "--bits 4",
    "int4-hqq": "--bits 4 --method hqq",
    "int3-hqq-hot4": "--bits 3 --method hqq --hot 4",
    "int3-hqq": "--bits 3 --method hqq",
    "int2-hqq-g32": "--bits 2 --method hqq --group 32",
}


def padded_demo(source: Path, folder: Path) -> None:
    """Write the demo model with zeros in its experts, which then are `WIDTH` wide and compute the same."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            missing = WIDTH - tensor.shape[1 if "down_proj" in name else 0]
            where = (0, missing) if "down_proj" in name else (0, 0, 0, missing)
            tensors[name] = torch.nn.functional.pad(tensor, where).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": WIDTH}))


def write_heldout(model: Path, path: Path) -> None:
    """Write the conversations that the demo model was not trained on, one per line."""
    sys.path.insert(0, str(find_example().folder))
    from corpus import MAX_TOKENS, split_conversations

    tokenizer = load_tokenizer(str(model))
    _, heldout = split_conversations(None)
    with path.open("w") as file:
        for text in heldout:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:MAX_TOKENS]
            file.write(json.dumps({"text": tokenizer.decode(ids, skip_special_tokens=False)}) + "\n")


def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--tokens", type=int, default=102_400, help="tokens that each form reads (default: 102400)")
    options = parser.parse_args()
    folder = OUT / "quality"
    model, data, counts = folder / "padded", folder / "heldout.jsonl", folder / "counts"
    padded_demo(find_example().checkpoint, model)
    write_heldout(model, data)
    run = ["run", str(model), PROMPT, "--cache", "50%", "--max-new-tokens", "400"]
    assert promoe([*run, "--report", f"{counts}.html"]) == 0
    for name, bits in FORMS.items():
        hot = ["--counts", f"{counts}.json"] if "--hot" in bits else []
        assert promoe(["quantize", str(model), *bits.split(), *hot, "--out", str(folder / name)]) == 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    quality = ["quality", str(model), "--data", str(data), "--tokens", str(options.tokens), "--cache", "100%"]
    forms = [str(folder / name) for name in FORMS]
    assert promoe([*quality, "--experts", *forms, "--json", str(options.json)]) == 0


if __name__ == "__main__":
    main()
