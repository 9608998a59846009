"""GGUF files: tensors as views of the file, and one clear sentence for a file that is not sound."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, gguf_file, quantize
from qformats.__main__ import main
from qformats.gguf_file import READABLE, GGUFError, metadata, tensors
from qformats.terminal import shown
from steps import gemm

ROOT = Path(__file__).parents[2]
N, K = 6, 512
BLOCKS = (*WEIGHT_FORMATS, *FILE_FORMATS)


def kind(name):
    return GGMLQuantizationType[name.upper()]


def content():
    """{name: (type, bytes as gguf's writer takes them)}: every readable type, and one besides."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, K)).astype(np.float32)
    found = {}
    for name in BLOCKS:
        elements, size = GGML_QUANT_SIZES[kind(name)]
        if FORMATS[name].written:
            raw = quantize(x, name).view(np.uint8)
        else:
            blocks = rng.integers(0, 256, N * K // elements * size, np.uint8)
            blocks = blocks.view(FORMATS[name].dtype).reshape(N, -1)
            for field in {"d", "dmin"} & set(FORMATS[name].dtype.names):
                blocks[field] = np.float16(0.01)
            raw = blocks.view(np.uint8)
        found[f"blk.0.{name}"] = name, raw.reshape(N, -1)
    found["blk.0.f32"] = "f32", x
    found["blk.0.f16"] = "f16", x.astype(np.float16)
    found["blk.0.bf16"] = "bf16", gguf_quantize(x, kind("bf16"))
    found["norm"] = "f32", x[0]
    found["experts"] = "q4_0", quantize(np.stack([x, -x]), "q4_0").view(np.uint8)
    found["positions"] = "i32", np.arange(8, dtype=np.int32)
    return found


CONTENT = content()
SHAPES = dict.fromkeys(CONTENT, (N, K)) | {
    "norm": (K,),
    "experts": (2, N, K),
    "positions": (8,),
}


def write(path, found, alignment=None):
    """A model as llama.cpp's converters write it: by gguf's own writer, with metadata."""
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d\u00e9"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, (type_name, raw) in found.items():
        writer.add_tensor(name, raw, raw_dtype=kind(type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", CONTENT)


# --- what is read ---


def test_the_list(model):
    found = tensors(model)
    assert list(found) == list(CONTENT)
    whole = model.read_bytes()
    for name, (type_name, raw) in CONTENT.items():
        one = found[name]
        assert (one.name, one.type, one.shape) == (name, type_name, SHAPES[name])
        assert one.nbytes == raw.nbytes
        assert whole[one.offset : one.offset + one.nbytes] == raw.tobytes()


@pytest.mark.parametrize("name", [name for name in CONTENT if name != "positions"])
def test_an_array_is_a_view_of_the_file(model, name):
    """Of the type's dtype, in its natural shape, read-only, at its offset of a mapped file."""
    one = tensors(model)[name]
    array = one.array
    if one.type in FORMATS:
        fmt = FORMATS[one.type]
        assert array.dtype == fmt.dtype
        assert array.shape == (*SHAPES[name][:-1], K // fmt.elements)
    else:
        assert array.dtype == {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[one.type]
        assert array.shape == SHAPES[name]
    assert array.tobytes() == CONTENT[name][1].tobytes()
    assert type(array) is np.ndarray
    assert not array.flags.writeable
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)
    start = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    assert array.__array_interface__["data"][0] - start == one.offset


@pytest.mark.parametrize(
    "name", [name for name in CONTENT if name not in ("positions", "blk.0.q1_0")]
)
def test_values_are_ggufs(model, name):
    one = tensors(model)[name]
    type_name, raw = CONTENT[name]
    values = one.values()
    assert (values.dtype, values.shape) == (np.float32, SHAPES[name])
    np.testing.assert_array_equal(values, gguf_dequantize(raw, kind(type_name)))
    assert np.shares_memory(values, one.array) == (one.type == "f32")


def test_a_type_that_is_not_read_is_listed(model):
    one = tensors(model)["positions"]
    assert (one.type, one.shape, one.nbytes) == ("i32", (8,), 32)
    for ask in (lambda: one.array, one.values):
        with pytest.raises(GGUFError, match=r"^positions is i32, which is not read here: take a "):
            ask()


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_other_alignments(tmp_path, alignment):
    """With 1 the float32s lie at odd addresses, which NumPy reads all the same."""
    some = {name: CONTENT[name] for name in ("blk.0.mxfp4", "blk.0.q3_k", "norm")}
    found = tensors(write(tmp_path / "model.gguf", some, alignment))
    for name, (_, raw) in some.items():
        assert found[name].array.tobytes() == raw.tobytes()
        assert found[name].offset % alignment == 0


@pytest.mark.alone
def test_the_metadata_are_stepped_over(tmp_path):
    """A large vocabulary costs a walk over its strings and no objects: those take gguf seconds."""
    entries = 20_000
    words = b"".join(text(f"word{i}") for i in range(entries))
    path = tmp_path / "model.gguf"
    vocabulary = key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", 8, entries) + words)
    path.write_bytes(file_of(keys=[vocabulary], infos=[info()]))
    start = time.process_time()
    assert list(tensors(path)) == ["w"]
    ours = time.process_time() - start
    start = time.process_time()
    GGUFReader(path)
    assert ours < (time.process_time() - start) / 4


def test_a_file_without_tensors(tmp_path):
    assert tensors(write(tmp_path / "vocabulary.gguf", {})) == {}
    path, texts = tmp_path / "cut.gguf", struct.pack("<IQ", 8, 2) + text("one") + text("two")
    whole = file_of(keys=[key("a", ARRAY, texts)]).partition(b"two")[0] + b"two"
    path.write_bytes(whole)
    assert metadata(path) == {"a": ["one", "two"]}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(path), f"cut after {length} bytes it is still read"


# --- what is refused ---


def refusal(path):
    """The sentence with which a file is refused, or None where it is read."""
    try:
        found = tensors(path)
    except GGUFError as error:
        sentence = str(error)
        assert sentence.startswith(str(path))
        assert "\n" not in sentence
        return sentence
    size = path.stat().st_size
    for one in found.values():
        assert 0 <= one.offset <= one.offset + one.nbytes <= size
        if one.type in READABLE:
            assert one.array.nbytes == one.nbytes
    with contextlib.suppress(GGUFError):  # a text in no encoding
        metadata(path)
    return None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A real file whose header is short enough to try every byte of it."""
    some = {name: CONTENT[name] for name in ("blk.0.q4_k", "norm")}
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", some)


def test_a_file_cut_short_anywhere_is_refused(small, tmp_path):
    whole = small.read_bytes()
    last = max(tensors(small).values(), key=lambda one: one.offset)
    begin = min(one.offset for one in tensors(small).values())
    cut = tmp_path / "cut.gguf"
    end = last.offset + last.nbytes
    for length in (*range(begin + 2), *range(begin + 2, end, 101), *range(end - 4, end)):
        cut.write_bytes(whole[:length])
        sentence = refusal(cut)
        assert sentence, f"cut after {length} bytes it is still read"
        assert any(says in sentence for says in ("cut short", "is empty", "is not a GGUF file"))
    cut.write_bytes(whole[:end])
    assert refusal(cut) is None


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_header_with_any_byte_flipped_is_read_or_refused(small, tmp_path, mask):
    """Never an exception of another kind, never a tensor outside the file, never for ever."""
    whole = bytearray(small.read_bytes())
    begin = min(one.offset for one in tensors(small).values())
    changed = tmp_path / "changed.gguf"
    refused = 0
    for at in range(begin):
        whole[at] ^= mask
        changed.write_bytes(whole)
        whole[at] ^= mask
        refused += refusal(changed) is not None
    assert refused > begin / 4, "lengths, types, counts and offsets are this much of it"


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, type_number, payload):
    return text(name) + struct.pack("<I", type_number) + payload


def info(name="w", dims=(32, 2), type_number=2, offset=0):
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_number, offset)


def file_of(*parts, keys=(), infos=(), version=3, counts=None, data=b"\0" * 64):
    """The bytes of a GGUF file written by hand: two q4_0 blocks of data unless said otherwise."""
    n_tensors, n_keys = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join((*keys, *infos))
    return head + b"\0" * (-len(head) % 32) + data + b"".join(parts)


def test_tensors_may_lie_in_another_order_than_they_are_named(tmp_path):
    """And one within another is found whatever lies between them in the list."""
    path = tmp_path / "model.gguf"
    w, v = info("w", (32, 4), 2, 64), info("v", (32, 2), 2, 0)
    path.write_bytes(file_of(infos=[w, v], data=bytes(256)))
    assert [one.name for one in tensors(path).values()] == ["w", "v"]
    apart = info("x", (32, 1), 2, 192)
    path.write_bytes(file_of(infos=[w, apart, info("v", (32, 2), 2, 96)], data=bytes(256)))
    with pytest.raises(GGUFError, match="'w' and 'v' overlap at byte "):
        tensors(path)


U8, U16, U32, F32, ARRAY = 0, 2, 4, 6, 9
DAMAGED = {
    "nothing": (b"", "is empty; get the file again"),
    "text": (b"hello", "is not a GGUF file: it begins with b'hell', not b'GGUF'"),
    "version 1": (file_of(version=1), "is GGUF version 1, and versions 2, 3 are read"),
    "version 4": (file_of(version=4), "is GGUF version 4"),
    "version 0": (file_of(version=0), "is GGUF version 0"),
    "big-endian": (
        file_of(version=0x03000000),
        "is big-endian (its version reads 0x3000000), and only little-endian files are read here",
    ),
    "too many keys": (
        file_of(counts=(0, 2**14 + 1)),
        "is damaged: it states 16385 keys; at most 16384 are read",
    ),
    "too many tensors": (file_of(counts=(2**62, 0)), f"it states {2**62} tensors; at most 16384"),
    "fewer keys than stated": (file_of(counts=(0, 2**14)), "two keys are called ''"),
    "fewer tensors than stated": (file_of(counts=(2**14, 0)), "two tensors are called ''"),
    "a long key": (
        file_of(keys=[struct.pack("<Q", 2**63) + b"key"]),
        "cut short or damaged: key 0 at byte 32 takes 9223372036854775808 bytes",
    ),
    "a large array": (
        file_of(keys=[key("a", ARRAY, struct.pack("<IQ", U8, 2**60))]),
        f"'a' states {2**60} items; at most {2**22} are read",
    ),
    "an array beyond the end": (
        file_of(keys=[key("a", ARRAY, struct.pack("<IQ", 12, 2**20))]),
        f"the value of 'a' at byte 49 takes {2**23} bytes and ",
    ),
    "a text of an array beyond the end": (
        file_of(keys=[key("a", ARRAY, struct.pack("<IQQ", 8, 1, 2**40))]),
        f"the value of 'a' at byte 57 takes {2**40} bytes and ",
    ),
    "an array of arrays": (
        file_of(keys=[key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
        "the value of 'a' has type 9, and no such type is read",
    ),
    "a metadata type": (
        file_of(keys=[key("a", 13, b"")]),
        "the value of 'a' has type 13, and no such type is read",
    ),
    "a key twice": (file_of(keys=[key("a", U8, b"\1")] * 2), "two keys are called 'a'"),
    "a key in no encoding": (
        file_of(keys=[key(b"\xff\xfe", U8, b"\1")]),
        "key 0 at byte 32 is not",
    ),
    "alignment 48": (
        file_of(keys=[key("general.alignment", U32, struct.pack("<I", 48))]),
        "general.alignment is not a power of two in 32 bits",
    ),
    "alignment 0": (
        file_of(keys=[key("general.alignment", U32, struct.pack("<I", 0))]),
        "general.alignment is not a power of two in 32 bits",
    ),
    "alignment in 8 bits": (
        file_of(keys=[key("general.alignment", U8, b"\x20")]),
        "general.alignment is not a power of two in 32 bits",
    ),
    "a tensor twice": (file_of(infos=[info(), info(offset=64)]), "two tensors are called 'w'"),
    "overlap": (
        file_of(infos=[info(), info("v", (32, 1), 2, 32)]),
        "'w' and 'v' overlap at byte ",
    ),
    "offset": (file_of(infos=[info(offset=33)]), "'w' has offset 33, no multiple of 32"),
    "offset beyond": (
        file_of(infos=[info(offset=2**63)]),
        "'w' lies in bytes 9223372036854775904 to 9223372036854775940 of 160; get the file",
    ),
    "rows": (
        file_of(infos=[info(dims=(48, 2))]),
        "'w' has rows of 48 elements, and q4_0 has 32 a block",
    ),
    "no dimension": (file_of(infos=[info(dims=())]), "'w' has rows of 1 elements, and q4_0 has 32"),
    "five dimensions": (
        file_of(infos=[info(dims=(32, 1, 1, 1, 1))]),
        "'w' has 5 dimensions; 4 are the most",
    ),
    "more rows than bytes": (file_of(infos=[info(dims=(32, 4))]), "'w' lies in bytes 96 to 168 of"),
    "rows that wrap around": (
        file_of(infos=[info(dims=(2**33, 2**31))]),
        f"'w' lies in bytes 96 to {96 + 2**59 * 18} of 160",
    ),
    "a type that was removed": (
        file_of(infos=[info(type_number=33)]),
        "'w' is q4_0_8_8, a type that was removed from GGUF: convert the model again",
    ),
    "a first type that was removed": (file_of(infos=[info(type_number=4)]), "'w' is q4_2, a type"),
    "half a part": (
        file_of(keys=[key("split.count", F32, struct.pack("<f", 2))]),
        "is damaged: split.count is 2.0, no count; get the file again",
    ),
    "a part before the first": (
        file_of(keys=[key("split.no", 5, struct.pack("<i", -1))]),
        "is damaged: split.no is -1, no count; get the file again",
    ),
    "a later part": (
        file_of(keys=[key("split.count", U16, b"\3\0"), key("split.no", U16, b"\1\0")]),
        "is part 2 of 3: name the first one, which ends in -00001-of-00003.gguf",
    ),
    "a first part of another name": (
        file_of(keys=[key("split.count", U16, b"\2\0")]),
        "is part 1 of 2, and the others are found by its name: let it end in -00001-of-00002.gguf",
    ),
    "a type of nobody": (
        file_of(infos=[info(type_number=4096)]),
        "'w' is of type 4096, which the installed gguf does not know",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, case):
    data, says = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    sentence = refusal(path)
    assert sentence is not None
    assert says in sentence


def test_the_file_written_by_hand_is_sound(tmp_path):
    """Else all of `DAMAGED` would be refused for another reason."""
    keys = [
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("a", ARRAY, struct.pack("<IQ", 8, 2) + text("b") + text("\u00e9")),
        key("c", ARRAY, struct.pack("<IQ3H", 2, 3, 1, 2, 3)),
    ]
    path = tmp_path / "model.gguf"
    infos = [
        info(),
        info("v", (2, 3, 1, 1), 0, 64),
        info("none", (32, 0), 2, 96),
        info("one", (), 0, 96),
    ]
    path.write_bytes(file_of(keys=keys, infos=infos, data=bytes(range(100))))
    found = tensors(path)
    assert {name: (one.type, one.shape) for name, one in found.items()} == {
        "w": ("q4_0", (2, 32)),
        "v": ("f32", (1, 1, 3, 2)),
        "none": ("q4_0", (0, 32)),
        "one": ("f32", ()),
    }
    keys = metadata(path)
    assert list(keys) == ["general.alignment", "a", "c"]
    assert (keys["general.alignment"], keys["a"]) == (32, ["b", "\u00e9"])
    np.testing.assert_array_equal(keys["c"], np.array([1, 2, 3], np.uint16), strict=True)
    assert found["w"].array.tobytes() == bytes(range(36))
    assert found["v"].array.tobytes() == bytes(range(64, 88))
    assert found["none"].array.shape == (0, 1)
    assert found["one"].array.tobytes() == bytes(range(96, 100))
    assert [one.name for one in GGUFReader(path).tensors] == list(found)


def test_a_removed_type_is_none_that_gguf_knows():
    known = {one.value for one in GGMLQuantizationType}
    assert not known & gguf_file._REMOVED.keys()
    every = range(max(known))
    assert {one for one in every if one not in known} == gguf_file._REMOVED.keys()


@pytest.mark.alone
def test_many_entries_are_read_soon(tmp_path):
    """The most that are read: an entry costs a hundred microseconds at most, and no file of its
    own."""
    infos = [info(f"w{i}", (1,), 0, 32 * i) for i in range(gguf_file._ENTRIES)]
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(infos=infos, data=bytes(32 * len(infos))))
    start = time.process_time()
    found = tensors(path)
    assert len(found) == len(infos)
    assert time.process_time() - start < 100e-6 * len(infos)
    assert len({id(one._file) for one in found.values()}) == 1


def test_a_sentence_has_no_commands_and_an_end(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(infos=[info("\x1b]0;owned\x07\n" + "w" * 10**5, type_number=4096)]))
    said = refusal(path)
    assert said.isprintable()
    assert r"\x1b]0;owned\x07" in said
    assert len(said) < 2000
    assert said.endswith("a newer gguf may, else the file is damaged")


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J\x7f\r\0", r"\x9b2J\x7f\r\x00"),
        ("a\u202eb\u2066\u2028", r"a\u202eb\u2066\u2028"),
        ("\ud800", r"\ud800"),
        ("\u00e9\u00a0\u3000\u4e16\u200d\U0001f469\ufe0f", None),
        ("a\\b", None),
    ],
)
def test_what_is_shown(text, there):
    assert shown(text) == (text if there is None else there)
    assert shown(shown(text)) == shown(text)
    assert shown("a\n\tb", "\n\t") == "a\n\tb"
    assert shown("a\n\tb") == r"a\n\tb"


# --- split files ---


def split(folder, parts, total=None, name="m", **changes):
    """A split file of these tensors in each part, as `llama-gguf-split` writes it; its first part.
    changes: {"part": i, "no": ..., "count": ...} of one part."""
    for i, infos in enumerate(parts):
        facts = {"no": i, "count": len(parts)}
        if changes.get("part") == i:
            facts |= {one: changes[one] for one in ("no", "count") if one in changes}
        keys = [key(f"split.{one}", U16, struct.pack("<H", value)) for one, value in facts.items()]
        count = sum(map(len, parts)) if total is None else total
        keys.append(key("split.tensors.count", 5, struct.pack("<i", count)))
        if i == 0:
            keys.append(key("general.architecture", 8, text("llama")))
        data = bytes([i + 1]) * 64
        path = folder / f"{name}-{i + 1:05d}-of-{len(parts):05d}.gguf"
        path.write_bytes(file_of(keys=keys, infos=infos, data=data))
    return folder / f"{name}-00001-of-{len(parts):05d}.gguf"


def test_parts_are_read_as_one(tmp_path):
    first = split(tmp_path, [[info("w"), info("v", (3,), 0, 32)], [info("u")]])
    with pytest.raises(GGUFError, match="overlap"):  # parts are as sound as other files
        tensors(first)
    first = split(tmp_path, [[info("w")], [info("v", (3,), 0)], [info("u")]])
    found = tensors(first)
    assert {name: (one.shape, one.path.name) for name, one in found.items()} == {
        "w": ((2, 32), "m-00001-of-00003.gguf"),
        "v": ((3,), "m-00002-of-00003.gguf"),
        "u": ((2, 32), "m-00003-of-00003.gguf"),
    }
    for i, one in enumerate(found.values()):
        assert one.array.tobytes() == bytes([i + 1]) * one.nbytes
    assert metadata(first)["general.architecture"] == "llama"


def test_one_part_is_a_file(tmp_path):
    assert list(tensors(split(tmp_path, [[info()]]))) == ["w"]


def test_parts_need_not_say_how_many_tensors_all_have(tmp_path):
    assert list(tensors(split(tmp_path, [[info("w")], [info("v")]], total=0))) == ["w", "v"]


def test_parts_together_have_a_limit(tmp_path, monkeypatch):
    empty = [[info(f"{one}{i}", (32, 0)) for i in range(2)] for one in "vw"]
    assert len(tensors(split(tmp_path, empty))) == 4
    empty[1].append(info("w2", (32, 0)))
    monkeypatch.setattr(gguf_file, "_ENTRIES", 4)
    with pytest.raises(GGUFError, match="and its parts have more than 4 tensors"):
        tensors(split(tmp_path, empty))


def test_parts_that_are_not_those_of_a_file(tmp_path):
    two = [[info("w")], [info("v")]]
    assert "is part 2 of 2: name the first" in refusal(
        split(tmp_path, two).with_name("m-00002-of-00002.gguf")
    )
    for parts, rest, says in (
        (two, {"total": 3}, "states 3 tensors and its 2 parts have 2: get them again"),
        (two, {"part": 1, "no": 2}, "says that it is part 3 of 2, and not 2 of 2"),
        (two, {"part": 1, "count": 3}, "says that it is part 2 of 3, and not 2 of 2"),
        ([[info("w")], [info("w")]], {}, "has 'w' of an earlier part: get the parts again"),
    ):
        first = split(tmp_path, parts, **rest)
        with pytest.raises(GGUFError, match=says):
            tensors(first)
    first.with_name("m-00002-of-00002.gguf").unlink()
    assert refusal(first).endswith("and part 2 is not beside it: get m-00002-of-00002.gguf")


def test_a_folder_and_a_missing_file(tmp_path):
    with pytest.raises(GGUFError, match=r"is not a file; name a \.gguf file"):
        tensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tensors(tmp_path / "nowhere.gguf")


# --- the command ---


def run(capsys, *argv):
    status = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table(capsys, model):
    status, out, err = run(capsys, "tensors", model)
    assert (status, err) == (0, "")
    head, _, *lines = out.splitlines()
    assert head.split() == ["name", "type", "shape", "bytes"]
    for (name, (type_name, raw)), line in zip(CONTENT.items(), lines, strict=False):
        shape = " x ".join(map(str, SHAPES[name]))
        assert line.split(maxsplit=2)[:2] == [name, type_name]
        assert " ".join(line.split()[2:]) == f"{shape} {raw.nbytes}"
    total = sum(raw.nbytes for _, raw in CONTENT.values())
    assert lines[len(CONTENT) :] == [
        "",
        f"{len(CONTENT)} tensors, {total} bytes",
        "Listed, but not read here: i32.",
    ]


def test_a_name_cannot_move_the_cursor(capsys, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(infos=[info("\x1b[2J\n\u2588")]))
    status, out, _ = run(capsys, "tensors", path)
    assert status == 0
    assert "\\x1b[2J\\n\u2588  q4_0" in out
    assert "\x1b" not in out


def test_names_reach_no_message_raw(tmp_path):
    """Whoever prints an error, of `gemm` too."""
    path = tmp_path / "model.gguf"
    own = key("\x1b]0;a", 4, struct.pack("<I", 1))
    path.write_bytes(file_of(infos=[info("\x1b[2J", (4,), 24)], keys=[own]))
    found = tensors(path)["\\x1b[2J"]
    with pytest.raises(TypeError, match=r"^\\x1b\[2J is i8: w must hold blocks of "):
        gemm(np.zeros((1, 32), np.float32), found)
    assert list(metadata(path)) == ["\\x1b]0;a"]


def test_a_name_of_letters_that_the_terminal_lacks(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(infos=[info("\u2588")]))
    done = subprocess.run(
        [sys.executable, "-m", "qformats", "tensors", str(path)],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert rb"\u2588" in done.stdout


def test_a_refusal_is_a_sentence_and_a_status(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(infos=[info(dims=(32, 4))]))
    for name in (path, tmp_path / "nowhere.gguf"):
        done = subprocess.run(
            [sys.executable, "-m", "qformats", "tensors", str(name)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("python -m qformats tensors: ")
        assert str(name) in done.stderr
        assert done.stderr.count("\n") == 1
