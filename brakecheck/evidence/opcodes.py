"""Classes of SASS instructions, sm_75 to sm_121.

Names as in the instruction set tables of NVIDIA's "CUDA Binary Utilities" (Turing, Ampere/Ada, Hopper, Blackwell),
completed by what nvdisasm prints for CUB, wgmma, TMA and tcgen05 kernels.

Classes: tensor.KIND (hmma, imma, dmma, hgmma, utchmma, ...), tensor.memory (tcgen05 loads, stores, copies,
allocation), tma (bulk and tensor copies), cp_async, load/store.SPACE.WIDTH (global, shared, local, generic; b8 to
b256), load.const, atomic.SPACE and reduce.SPACE, barrier (block and cluster), mbarrier, warpsync, shuffle, vote,
special (MUFU), fp32, fp64, fp16, int, convert, move, uniform, texture, fence, control, nop, other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, List

_CLASSES = {
    "fp32": "FADD FADD2 FADD32I FCHK FFMA FFMA2 FFMA32I FHADD FMNMX FMNMX3 FMUL FMUL2 FMUL32I FSEL FSET FSETP FSWZADD",
    "fp64": "DADD DFMA DMNMX DMUL DSETP",
    "fp16": "HADD2 HADD2_32I HFMA2 HFMA2_32I HMNMX2 HMUL2 HMUL2_32I HSET2 HSETP2",
    "special": "MUFU",
    "int": "BMSK BREV FLO IABS IADD IADD2 IADD3 IADD32I IADD64 IDP IDP4A IMAD IMNMX IMUL IMUL32I ISCADD ISCADD32I "
           "ISET ISETP LEA LOP LOP3 LOP32I PLOP3 PSETP POPC SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VHMNMX VIADD VIADDMNMX "
           "VIMNMX VIMNMX3",
    "convert": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "move": "MOV MOV32I MOV64IUR MOVM PRMT SEL P2R R2P CS2R S2R B2R R2B BMOV GETLMEMBASE SETLMEMBASE AL2P",
    "uniform": "R2UR S2UR CS2UR UP2UR UR2UP",
    "load.const": "LDC LDCU ULDC",
    "cp_async": "LDGSTS LDGDEPBAR",
    "tma": "UBLKCP UBLKPF UBLKRED UTMACCTL UTMACMDFLUSH UTMALDG UTMAPF UTMAREDG UTMASTG",
    "atomic.generic": "ATOM",
    "atomic.global": "ATOMG",
    "atomic.shared": "ATOMS",
    "reduce.global": "RED REDG",
    "reduce.shared": "REDAS",
    "reduce.multimem": "LDGMC",
    "barrier": "BAR UCGABAR_ARV UCGABAR_WAIT UCGABAR_GET UCGABAR_SET",
    "mbarrier": "SYNCS ARRIVES UTCBAR",
    "warpsync": "WARPSYNC WARPGROUP WARPGROUPSET ENDCOLLECTIVE",
    "shuffle": "SHFL",
    "vote": "VOTE VOTEU MATCH ELECT REDUX CREDUX",
    "texture": "TEX TLD TLD4 TMML TXD TXQ SULD SUST SUATOM SURED FOOTPRINT PIXLD IPA",
    "fence": "MEMBAR FENCE ERRBAR CCTL CCTLL CCTLT CGAERRBAR QSPC",
    "tensor.memory": "LDT STT LDTM STTM UTCCP UTCSHIFT UTCATOMSWS UTCLDSWS UTCSTSWS",
    "control": "ACQBULK BPT BRA BRX BRXU BREAK BSSY BSYNC CALL DEPBAR EXIT IDE JMP JMX JMXU KILL LEPC NANOSLEEP "
               "PREEXIT PMTRIG RET RPCMOV RTT SETCTAID USETMAXREG UVIRTCOUNT UGETNEXTWORKID VOTE_VTG WARPEXIT "
               "YIELD UBRA",
    "nop": "NOP",
}
_BASE: Dict[str, str] = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
_SPACES = {"LDG": "load.global", "STG": "store.global", "LDL": "load.local", "STL": "store.local", "LD": "load.generic",
           "ST": "store.generic", "LDS": "load.shared", "STS": "store.shared", "LDSM": "load.shared",
           "STSM": "store.shared", "STAS": "store.shared"}
_WIDTHS = {"U8": "b8", "S8": "b8", "U16": "b16", "S16": "b16", "64": "b64", "128": "b128", "256": "b256"}
_TENSOR = {"HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA",
           "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA", "UTCMXQMMA"}


@lru_cache(maxsize=4096)
def class_of(opcode: str) -> str:
    """The class of an opcode with its modifiers (LDG.E.128.CONSTANT is load.global.b128); "other" if it is unknown."""
    base, *modifiers = opcode.split(".")
    if base in _SPACES:
        return f"{_SPACES[base]}.{_width(base, modifiers)}"
    if base in _TENSOR:
        return f"tensor.{base.lower()}"
    known = _BASE.get(base)
    if known:
        return known
    if base.startswith("U") and len(base) > 2 and base[1:] in _BASE:
        return "uniform"  # the scalar pipe's twin of a vector instruction
    return "other"


def _width(base: str, modifiers: List[str]) -> str:
    if base in ("LDSM", "STSM"):  # matrices of 8x8 16-bit elements: one 32-bit register a thread each
        return {"2": "b64", "4": "b128"}.get(modifiers[-1] if modifiers else "", "b32")
    widths = [_WIDTHS[m] for m in modifiers if m in _WIDTHS]
    if "ENL2" in modifiers:
        return "b256"
    return widths[0] if widths else "b32"
