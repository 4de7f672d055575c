"""Where the recorded evidence of the tests lies, and how to damage it."""

import gzip
from pathlib import Path

DATA = Path(__file__).parent / "data"


def unpacked(name: str, folder: Path) -> Path:
    """tests/data/NAME.gz unpacked into `folder`."""
    out = folder / Path(name).name
    out.write_bytes(gzip.decompress((DATA / f"{name}.gz").read_bytes()))
    return out


def damaged(data: bytes, cut: int, flips) -> bytes:
    """`data` cut off after `cut` bytes, with bits flipped: flips are (position, bit), taken modulo the length."""
    out = bytearray(data[:cut])
    for position, bit in flips:
        if out:
            out[position % len(out)] ^= 1 << bit
    return bytes(out)
