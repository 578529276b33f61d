"""NumPy archives of expert ids: arrays of any kind, archives of any kind, never unpickled, never larger than they say."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from promoe.training.routing_traces import RoutingTrace, TraceError, load_npz

from .inputs import fuzzed, outcome
from .mutations import damaged

EXPERTS = np.array([[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[1, 2], [3, 0]], [[2, 0], [1, 3]]])
WHOLE = {"experts": EXPERTS, "prompt_lengths": np.array([1, 2, 1]), "token_index": np.array([5, 6, 7, 5])}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.npz"


def npy(array: Any, allow_pickle: bool = True) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=allow_pickle)
    return stream.getvalue()


def header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """An array whose header says anything."""
    content = text.encode("latin1", "replace") + b"\n"
    return (
        b"\x93NUMPY" + bytes((version, 0)) + len(content).to_bytes(2 if version == 1 else 4, "little") + content + data
    )


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return stream.getvalue()


def saved(**changes: Any) -> bytes:
    arrays = WHOLE | changes
    return archive({f"{name}.npy": one if isinstance(one, bytes) else npy(one) for name, one in arrays.items()})


def check(target: str, path: Path, content: bytes, truth: dict[str, Any] | None = None) -> None:
    path.write_bytes(content)
    trace = outcome(target, lambda: load_npz(path))
    if trace is None:
        return
    check_usable(trace)
    for name, array in (truth or {}).items():
        found = {"experts": trace.experts, "prompt_lengths": trace.prompt_lengths, "token_index": trace.token_ids}[name]
        assert np.array_equal(found, array), (name, found, array)


def check_usable(trace: RoutingTrace) -> None:
    """What its class promises, and what is done with every trace."""
    tokens, layers, top_k = trace.experts.shape
    assert tokens >= 1
    assert layers >= 1
    assert top_k >= 1
    assert trace.prompt_lengths.sum(dtype=object) == tokens == len(trace.token_ids)
    assert 0 <= trace.experts.min() <= trace.experts.max() < trace.num_experts <= 2**15
    assert all(len(set(ids)) == top_k for _, _, ids in trace.visits())
    ends = (trace.prompt_starts + trace.prompt_lengths).tolist()
    assert ends == np.cumsum(trace.prompt_lengths).tolist()
    for count in (1, tokens, 10**30):
        first = trace.first(count)
        assert first.prompt_lengths.sum() == first.num_tokens == min(count, tokens)
    if len(trace.prompt_lengths) > 1:
        left, right = trace.split(0.5)
        assert left.num_tokens + right.num_tokens == tokens
        assert np.array_equal(np.concatenate([left.token_ids, right.token_ids]), trace.token_ids)


dtypes = st.sampled_from(
    ("u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u8", ">i8", "<f8", "<f2", "?", "<m8[s]", "<M8[s]", "<c16", "O", "S3", "<U2",
     "V4", "<i4,<i4")
)  # fmt: skip
numbers = st.sampled_from((0, 1, -1, 3, 127, 255, 2**15, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1)) | st.integers(0, 8)


@st.composite
def arrays(draw: st.DrawFn, array: Any) -> Any:
    """The array in another dtype, shape, order, or with other numbers in it."""
    result = np.array(array)
    how = draw(st.integers(0, 5))
    if how <= 1:
        dtype = np.dtype(draw(dtypes))
        with np.errstate(all="ignore"):
            result = np.zeros(result.shape, dtype) if dtype.names else result.astype(dtype)
    elif how == 2:
        result = result.astype(np.uint64)
        for _ in range(draw(st.integers(1, 3))):
            result.reshape(-1)[draw(st.integers(0, result.size - 1))] = draw(numbers) % 2**64
        result = result.view(draw(st.sampled_from(("<i8", "<u8"))))
    elif how == 3:
        result = np.resize(result, draw(st.lists(st.integers(0, 5), max_size=4).map(tuple)))
    elif how == 4:
        result = np.asfortranarray(result)
    else:
        result = result[: draw(st.integers(0, len(result)))]
    return result


@st.composite
def archives(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """Some arrays changed; and those that are what they were."""
    names = draw(st.sets(st.sampled_from(tuple(WHOLE)), min_size=1, max_size=2))
    return saved(**{name: draw(arrays(WHOLE[name])) for name in sorted(names)}), {
        n: a for n, a in WHOLE.items() if n not in names
    }


LENGTHS_THAT_WRAP = np.array([2**63 - 1, 2**63 - 1, 6])
assert LENGTHS_THAT_WRAP.sum() == len(EXPERTS)


@fuzzed(120)
@given(drawn=archives())
@example(drawn=(saved(prompt_lengths=LENGTHS_THAT_WRAP), {}))
@example(drawn=(saved(prompt_lengths=np.array([1, 2, 1], np.uint8)), WHOLE))
@example(drawn=(saved(experts=EXPERTS.astype(">i2")), WHOLE))
@example(drawn=(saved(experts=EXPERTS.astype("m8[s]")), {}))
@example(drawn=(saved(experts=EXPERTS.astype(np.uint64) + 2**63), {}))
@example(drawn=(saved(experts=EXPERTS + 10**9), {}))
@example(drawn=(saved(token_index=np.array([2**64 - 1] * 4, np.uint64)), {}))
def test_arrays(path: Path, drawn: tuple[bytes, dict[str, Any]]) -> None:
    check("routing trace: arrays", path, *drawn)


HEADERS = (
    "{'descr': '<i8', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776, 1099511627776)}",
    "{'descr': '|i1', 'fortran_order': False, 'shape': (-1,)}",
    "{'descr': '|S1000000000', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '<i8', 'fortran_order': 1, 'shape': (4,)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': 4}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (4L,)}",
    "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (4,)}",
    "{'descr': ('<i8', (2,)), 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<i8', 1: 2}", "{[]: 1}", "{1: 2, 'a': 3, None: 4}", "(" * 3000, "[" * 9000,
    "-" * 9000 + "1", "'''", "{'a' 1L", "",
    "x" * 70000, "__import__('os').system('true')", "\\", "{'descr': '\\ud800'}", "9" * 5000,
)  # fmt: skip


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from(HEADERS))
    if draw(st.booleans()):
        text = draw(damaged(text.encode())).decode("latin1")
    data = draw(st.sampled_from((b"", b"\1\0\0\0\0\0\0\0" * 4, b"\x80\x04N.")))
    # Version 1 cannot say more than 64 KiB.
    version = 2 if len(text) > 60000 else draw(st.sampled_from((1, 2, 3, 9)))
    return saved(**{draw(st.sampled_from(tuple(WHOLE))): header(text, data, version)})


@fuzzed(120)
@given(content=headers())
@example(content=saved(token_index=header(HEADERS[1])))
@example(content=saved(token_index=header("{[]: 1}")))
@example(content=saved(token_index=header("{'a' 1L")))
@example(content=saved(token_index=header("[" * 9000)))
@example(content=saved(token_index=b"no array at all"))
def test_headers(path: Path, content: bytes) -> None:
    check("routing trace: headers", path, content)


COMPRESSED = archive({f"{name}.npy": npy(one) for name, one in WHOLE.items()}, zipfile.ZIP_DEFLATED)


def with_fields(offset: int, value: bytes) -> bytes:
    """Both kinds of the archive's own headers changed at an offset into the local one."""
    content = bytearray(saved())
    for start, shift in ((content.find(b"PK\3\4"), 0), (content.find(b"PK\1\2"), 2)):
        content[start + shift + offset : start + shift + offset + len(value)] = value
    return bytes(content)


@fuzzed(120)
@given(content=st.sampled_from((saved(), COMPRESSED)).flatmap(damaged))
@example(content=with_fields(6, b"\1\0"))  # encrypted
@example(content=with_fields(6, b"\x40\0"))  # strongly
@example(content=with_fields(8, b"\x0e\0"))  # LZMA, without what it begins with
@example(content=with_fields(8, b"\x63\0"))  # a way of packing that there is not
@example(content=with_fields(4, b"\xff\0"))  # of a later version
def test_bytes(path: Path, content: bytes) -> None:
    check("routing trace: bytes", path, content)


def test_a_small_archive_of_a_large_array_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promoe.training.routing_traces.MAX_ARRAY_BYTES", 2**20)
    path = tmp_path / "bomb.npz"
    experts = np.zeros((2**21, 1, 1), np.uint8)
    path.write_bytes(
        archive({f"{n}.npy": npy(a) for n, a in (WHOLE | {"experts": experts}).items()}, zipfile.ZIP_DEFLATED)
    )
    assert path.stat().st_size < 2**14
    with pytest.raises(TraceError, match=r"experts\.npy is 2097152 bytes, more than"):
        load_npz(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_what_cannot_be_unpacked_in_pieces_is_refused(tmp_path: Path, packing: int) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(archive({f"{name}.npy": npy(array) for name, array in WHOLE.items()}, packing))
    with pytest.raises(TraceError, match="packed in a way that NumPy does not use"):
        load_npz(path)


def test_an_array_that_claims_2_to_the_40_numbers_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(
        saved(experts=header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({2**40}, 1, 1)}}", b"\0" * 64))
    )
    script = f"""
        import resource
        from promoe.training.routing_traces import TraceError, load_npz
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            load_npz({str(path)!r})
        except TraceError as error:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
    """
    limit = 4 << 30

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, preexec_fn=limited
    )
    assert done.returncode == 0, done.stderr
    grown_kib, _, message = done.stdout.partition(" ")
    assert int(grown_kib) < 32 << 10
    assert "holds 64 bytes" in message, message
