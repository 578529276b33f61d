"""How fast weights in fewer bits become bf16 ones, with one core: here, and by Transformers' own functions.

    python benchmarks/decoding.py [--formats FP8 MXFP4 Q4_K ...] [--rounds 9] [--json FILE]

Prints GB of bf16 weights per second for each format, in the median of all rounds; the ratio of both with its 95% bootstrap
interval; and the bits that a weight has in the file. In each round both decode the same matrices in turn. There are so
many that caches do not hold them. Results are compared first, bit by bit. FP8 has blocks of 128 x 128, AWQ, GPTQ and
W4A16 groups of 128. "-": Transformers has no function for the format. GGUF blocks are random bytes, as times do not
depend on values.

Takes three minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common import DTYPE, make_parser, print_table, save

from promoe.commands.measure import estimate, paired_speedup
from promoe.stores.encodings.awq import Awq
from promoe.stores.encodings.base import Encoding, Integers
from promoe.stores.encodings.compressed_tensors import IntegerRows
from promoe.stores.encodings.fp8 import Fp8
from promoe.stores.encodings.gguf_blocks import GgufBlocks, block_encoding
from promoe.stores.encodings.gptq import Gptq
from promoe.stores.encodings.mxfp4 import Mxfp4

OUT_SIZE, IN_SIZE, MATRICES = 1536, 2048, 8
GROUP = 128
LAST_GGUF_TYPE = 64
Parts = list[torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format to measure.

    Attributes:
        name: as it is printed.
        shape: of the decoded matrices.
        encoding: how promoe decodes it.
        make: returns the parts of a matrix.
        other: returns the matrix as Transformers decodes it; None: it does not.
    """

    name: str
    shape: tuple[int, int]
    encoding: Encoding
    make: Callable[[], Parts]
    other: Callable[[Parts], torch.Tensor] | None


def random_bytes(*shape: int, least: int = 0, most: int = 255) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, dtype=torch.uint8)


def gguf_format(encoding: GgufBlocks) -> Format:
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    row_bytes = IN_SIZE // encoding.block_elements * encoding.block_bytes

    def other(parts: Parts) -> torch.Tensor:
        return dequantize(parts[0].view(-1), encoding.type_id, torch.float32).view(OUT_SIZE, IN_SIZE).to(DTYPE)

    known = encoding.type_id in GGML_BLOCK
    return Format(
        encoding.name,
        (OUT_SIZE, IN_SIZE),
        encoding,
        lambda: [random_bytes(OUT_SIZE, row_bytes)],
        other if known else None,
    )


def formats() -> dict[str, Format]:
    """Return all formats by name, those of GGUF last. They need the newest Transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import dequantize_convertops

    values = 100 * torch.randn(OUT_SIZE, IN_SIZE)
    fp8 = Format(
        "FP8",
        (OUT_SIZE, IN_SIZE),
        Fp8(),
        lambda: [values.to(torch.float8_e4m3fn), torch.rand(OUT_SIZE // 128, IN_SIZE // 128).to(DTYPE)],
        lambda parts: Fp8Dequantize(None).convert({"weight": parts[0], "weight_scale_inv": parts[1]})["weight"],
    )
    mxfp4 = Format(
        "MXFP4 (gpt-oss)",
        (IN_SIZE, OUT_SIZE),
        Mxfp4(),
        lambda: [random_bytes(OUT_SIZE, IN_SIZE // 32, 16), random_bytes(OUT_SIZE, IN_SIZE // 32, least=100, most=140)],
        lambda parts: dequantize_convertops(parts[0][None], parts[1][None], DTYPE)[0],
    )
    blocks = [found for found in map(block_encoding, range(LAST_GGUF_TYPE)) if found is not None]
    return {made.name: made for made in (fp8, mxfp4, *integer_formats(), *map(gguf_format, blocks))}


def integer_formats() -> list[Format]:
    """Return the formats of integers in words of 32 bits, in 4 bits, with groups of 128 inputs."""
    integers, groups = Integers(4, GROUP), IN_SIZE // GROUP

    def words(rows: int, codes: int) -> torch.Tensor:
        return random_bytes(rows, codes // 2).view(torch.int32)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape).to(torch.float16)

    def made(name: str, encoding: Encoding, make: Callable[[], Parts]) -> Format:
        return Format(name, (OUT_SIZE, IN_SIZE), encoding, make, None)

    return [
        made(
            "W4A16 (compressed-tensors)",
            IntegerRows(4, GROUP, is_packed=True, has_zeros=False, in_order=True, name="W4A16", integers=integers),
            lambda: [words(OUT_SIZE, IN_SIZE), scales(OUT_SIZE, groups)],
        ),
        made(
            "AWQ",
            Awq(GROUP, integers),
            lambda: [words(IN_SIZE, OUT_SIZE), words(groups, OUT_SIZE), scales(groups, OUT_SIZE)],
        ),
        made(
            "GPTQ",
            Gptq(4, GROUP, plus_one=True, name="GPTQ", integers=integers),
            lambda: [words(OUT_SIZE, IN_SIZE).view(-1, OUT_SIZE), words(groups, OUT_SIZE), scales(groups, OUT_SIZE)],
        ),
    ]


def seconds(run: Callable[[int], object]) -> float:
    """Return the seconds per matrix."""
    start_s = time.perf_counter()
    for idx in range(MATRICES):
        run(idx)
    return (time.perf_counter() - start_s) / MATRICES


def measure(made: Format, rounds: int) -> tuple[float, list[float], list[float]]:
    """Return the bits per weight, and the seconds per matrix in each round, here and by Transformers."""
    matrices = [made.make() for _ in range(MATRICES)]
    outs = [torch.empty(made.shape, dtype=DTYPE) for _ in matrices]
    bits = 8 * sum(part.nbytes for part in matrices[0]) / outs[0].numel()

    def here(idx: int) -> None:
        made.encoding.decode(matrices[idx], outs[idx])

    other = made.other
    here(0)
    if other is not None and not torch.equal(bits_of(other(matrices[0])), bits_of(outs[0])):
        raise SystemExit(f"{made.name}: Transformers' values are others")
    seconds(here)
    own_s, other_s = [], []
    for number in range(rounds):
        turns = [(here, own_s)]
        if other is not None:
            turns.append((lambda idx: other(matrices[idx]), other_s))
        for run, times in turns if number % 2 else reversed(turns):
            times.append(seconds(run))
    return bits, own_s, other_s


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers, with the same ones for every NaN."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int16)


def row(made: Format, rounds: int) -> dict[str, object]:
    """Return what is known about a format."""
    bits, own_s, other_s = measure(made, rounds)
    nbytes = made.shape[0] * made.shape[1] * DTYPE.itemsize
    found: dict[str, object] = {"format": made.name, "bits": bits, "gb_s": nbytes / estimate(own_s).value / 1e9}
    if other_s:
        gain = paired_speedup(other_s, own_s)
        found |= {"transformers_gb_s": nbytes / estimate(other_s).value / 1e9}
        found |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
    return found


def table(rows: Sequence[dict[str, object]]) -> list[list[str]]:
    lines = [["format", "bits per weight", "GB/s", "Transformers, GB/s", "times as fast"]]
    for found in rows:
        other = ["-", "-"]
        if "gain" in found:
            interval = f"({found['gain_low']:.1f} - {found['gain_high']:.1f})"
            other = [f"{found['transformers_gb_s']:.2f}", f"{found['gain']:.1f} {interval}"]
        lines.append([str(found["format"]), f"{found['bits']:.2f}", f"{found['gb_s']:.2f}", *other])
    return lines


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__, __file__)
    parser.add_argument("--formats", nargs="+", help="(default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = formats()
    if unknown := set(options.formats or ()) - set(known):
        parser.error(f"--formats: {', '.join(unknown)}: choose from {', '.join(known)}")
    rows = [row(known[name], options.rounds) for name in options.formats or known]
    print_table(table(rows))
    save(options.json, {"shape": [OUT_SIZE, IN_SIZE], "rounds": options.rounds, "formats": rows})


if __name__ == "__main__":
    main()
