"""The code in a cubin, to compare it, or to list that of many kernels by one process of nvdisasm:
its start takes longer than many a compilation."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from steps.compile.compiler import MachineCode, _disassembler, opcodes

INSTRUCTION_BYTES = 16


def text_of(cubin: bytes) -> bytes:
    """The instructions in a cubin, an ELF file with one section of them."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    (text,) = (
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    )
    assert len(text) > 0
    return text


def opcodes_of(codes: Sequence[MachineCode]) -> list[Counter[str]]:
    """Those of each kernel, `MachineCode.instructions`, of one architecture."""
    texts = [text_of(code.cubin) for code in codes]
    (arch,) = {code.arch for code in codes}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        file.write_bytes(b"".join(texts))
        call = [_disassembler(), "-b", arch.replace("sm_", "SM"), "-ndf", str(file)]
        sass = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    lines = iter(line for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line))
    found = [opcodes("\n".join(islice(lines, len(one) // INSTRUCTION_BYTES))) for one in texts]
    assert next(lines, None) is None
    return found
