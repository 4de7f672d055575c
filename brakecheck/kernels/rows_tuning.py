"""Which template instantiation of the row kernels (cuda/rows.cuh) runs a width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

DIRECT, BULK = 0, 1  # rows::Load


def _join(*values: int) -> str:
    return ",".join(str(int(v)) for v in values)


@dataclass(frozen=True)
class Plan:
    """Template arguments of a row kernel (cuda/rows.cuh): team_threads x vectors x cluster vectors cover a row."""

    team_threads: int
    vectors: int
    teams: int = 1
    load: int = DIRECT
    stages: int = 1
    cluster: int = 1
    group: int = 1
    blocks: int = 1
    rows: int = 1        # forward norms: rows a team takes at once
    ahead: bool = False  # forward norms: gamma and beta are asked for before the reduction
    finish: int = 8      # backward norms: float4 columns of a block of norm_rows_finish

    @property
    def persistent(self) -> bool:
        """Teams walk over rows; else the grid has a team for all of them."""
        return self.stages > 1

    @property
    def covers(self) -> int:
        return self.team_threads * self.vectors * self.cluster

    def softmax(self) -> str:
        """Template arguments of softmax_rows and softmax_rows_backward."""
        return _join(self.team_threads, self.vectors, self.teams, self.load, self.stages, self.cluster, self.blocks)

    def norm(self, center: bool, residual: bool) -> str:
        """The kernel of a forward norm."""
        team = (self.team_threads, self.vectors)
        if self.persistent:
            return f"norm_rows_pipe<{_join(center, *team, self.stages, self.cluster, self.blocks)}>"
        rest = (self.teams, self.load, self.cluster, self.rows, self.ahead, self.blocks)
        return f"norm_rows<{_join(center, residual, *team, *rest)}>"

    def norm_backward(self, center: bool) -> str:
        rest = (self.teams, self.load, self.stages, self.cluster, self.group, self.blocks)
        return f"norm_rows_backward<{_join(center, self.team_threads, self.vectors, *rest)}>"

    def shared_bytes(self, n: int, size: int, streams: int, sums: int = 0) -> int:
        """Dynamic shared memory: stages and, for the backward norms with their `sums` (1, or 2 with dbeta), gamma and,
        over the same place at the end, the sums of each team in float."""
        each = 16 // size
        chunk = n if self.cluster == 1 else -(-(n // each) // self.cluster) * each
        stages = self.teams * self.stages * self.rows * streams * chunk * size if self.load == BULK else 0
        gamma = chunk * size if sums else 0
        return max(stages + gamma, sums * self.teams * chunk * 4 if self.teams * self.group > 1 else 0)


# Narrowest first; the first that covers the row is taken. Measured on an H200, 2026-12-01, bfloat16, at 2, 8, 16, 64
# and 256 KiB a row (benchmarks/records/2026-12-01-h200-rows-variants.json, 2026-12-01-h200-norms-variants.json, and
# -rows-own-memory.json, which counts); the widths between follow their neighbours.
_NARROW = (Plan(32, 1, 8, blocks=8), Plan(32, 2, 8, blocks=6))
SOFTMAX = (*_NARROW, Plan(32, 4, 2, blocks=16), Plan(64, 4, 2, blocks=12), Plan(128, 4, blocks=16),
           Plan(512, 2, blocks=4), Plan(256, 8, blocks=4), Plan(1024, 4, blocks=2),
           *(Plan(512, 8, cluster=c, blocks=2) for c in (2, 4, 8, 16)))
RMS_NORM = (*_NARROW, Plan(128, 1, rows=2, ahead=True, blocks=16), Plan(256, 1, rows=2, ahead=True, blocks=8),
            Plan(256, 2, ahead=True, blocks=6), Plan(256, 4, ahead=True, blocks=4), Plan(256, 8, blocks=4),
            *(Plan(512, 4, load=BULK, cluster=c, ahead=True, blocks=3) for c in (2, 4, 8, 16)),
            Plan(512, 8, load=BULK, cluster=16, ahead=True, blocks=2))
LAYER_NORM = (*_NARROW, Plan(128, 1, rows=2, ahead=True, blocks=12), Plan(256, 1, rows=2, ahead=True, blocks=6),
              Plan(256, 2, blocks=8), Plan(256, 4, blocks=6), Plan(256, 8, blocks=4), Plan(512, 8, blocks=2),
              *(Plan(512, 4, load=BULK, stages=3, cluster=c, blocks=2) for c in (4, 8)),
              *(Plan(512, 8, load=BULK, stages=3, cluster=c) for c in (8, 16)))
# Two streams take twice the registers.
NORM_RESIDUAL = (Plan(32, 1, 8, blocks=6), Plan(32, 2, 8, blocks=4), Plan(32, 4, 4, blocks=6), Plan(64, 4, 2, blocks=6),
                 Plan(128, 4, blocks=6), Plan(256, 4, blocks=3), Plan(512, 4, blocks=2), Plan(1024, 4),
                 *(Plan(512, 8, cluster=c) for c in (2, 4, 8, 16)))
SOFTMAX_BACKWARD = (Plan(32, 1, 8, blocks=6), Plan(32, 2, 8, blocks=4), Plan(128, 1, blocks=16), Plan(512, 1, blocks=4),
                    *(Plan(512, 2, cluster=c, blocks=3) for c in (1, 2, 4)),
                    *(Plan(512, 4, cluster=c, blocks=2) for c in (4, 8, 16)), Plan(512, 8, cluster=16))
_BACKWARD = (Plan(32, 1, 8, BULK, 2, 1, 4, 2), Plan(32, 2, 8, BULK, 2, 1, 4, 2))
RMS_NORM_BACKWARD = (*_BACKWARD, Plan(128, 1, 4, BULK, 2, blocks=2), Plan(256, 2, 2, BULK, 3, finish=16),
                     Plan(512, 2, 1, BULK, 3, 1, 4), Plan(512, 4, 1, BULK, 2, 1, 2, finish=16),
                     Plan(512, 2, 1, BULK, 3, 4, 2, finish=16), Plan(512, 4, 1, BULK, 2, 4, 2, finish=16),
                     Plan(1024, 2, 1, BULK, 2, 8, finish=16), Plan(256, 8, 1, BULK, 2, 16, finish=16))
LAYER_NORM_BACKWARD = (*_BACKWARD, Plan(64, 2, 4, BULK, 2, blocks=2), Plan(256, 2, 2, BULK, 3, finish=16),
                       Plan(512, 2, 1, BULK, 3, 1, 2), Plan(512, 4, 1, BULK, 2, 1, 2, finish=16),
                       Plan(512, 4, 1, BULK, 2, 2, 4, finish=16), Plan(512, 4, 1, BULK, 2, 4, 2, finish=16),
                       Plan(256, 8, 1, BULK, 2, 8, finish=16), Plan(256, 8, 1, BULK, 2, 16, finish=16))
FEW_ROWS = Plan(256, 4, cluster=16)
# Before compute capability 9.0: no bulk copies, no clusters. Compiled, not tuned: no such device was at hand.
OLD = (*_NARROW, Plan(32, 4, 4, blocks=8), Plan(64, 4, 2, blocks=12), Plan(128, 4, blocks=12), Plan(128, 8, blocks=8),
       Plan(256, 8, blocks=4), Plan(512, 8, blocks=2))
OLD_TWO = (*NORM_RESIDUAL[:7], Plan(1024, 4))
OLD_NORM_BACKWARD = (Plan(32, 1, 8), Plan(32, 2, 8), Plan(32, 4, 4), Plan(128, 4), Plan(256, 4), Plan(512, 4),
                     Plan(1024, 4))
ALL = (SOFTMAX, RMS_NORM, LAYER_NORM, NORM_RESIDUAL, SOFTMAX_BACKWARD, RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD,
       (FEW_ROWS,), OLD, OLD_TWO, OLD_NORM_BACKWARD)


def _first(plans: Tuple[Plan, ...], vectors: int) -> Optional[Plan]:
    """vectors: 16-byte vectors of a row; 0 for a row that is not a whole number of them. None: no plan covers it."""
    return next((p for p in plans if p.covers >= vectors > 0), None)


def _few(vectors: int, rows: int, processors: int) -> bool:
    """So few long rows that a row should be spread over 16 blocks (4 x 102,400: 3.7 us)."""
    return 1024 < vectors <= FEW_ROWS.covers and rows * FEW_ROWS.cluster <= processors


def softmax(vectors: int, rows: int, processors: int, capability: Tuple[int, int]) -> Optional[Plan]:
    if capability < (9, 0):
        return _first(OLD, vectors)
    return FEW_ROWS if _few(vectors, rows, processors) else _first(SOFTMAX, vectors)


def softmax_backward(vectors: int, rows: int, processors: int, capability: Tuple[int, int]) -> Optional[Plan]:
    if capability < (9, 0):
        return _first(OLD_TWO, vectors)
    return FEW_ROWS if _few(vectors, rows, processors) else _first(SOFTMAX_BACKWARD, vectors)


def norm(vectors: int, capability: Tuple[int, int], center: bool, residual: bool) -> Optional[Plan]:
    if capability < (9, 0):
        return _first(OLD_TWO if residual else OLD, vectors)
    return _first(NORM_RESIDUAL if residual else LAYER_NORM if center else RMS_NORM, vectors)


def norm_backward(vectors: int, capability: Tuple[int, int], center: bool) -> Optional[Plan]:
    if capability < (9, 0):
        return _first(OLD_NORM_BACKWARD, vectors)
    return _first(LAYER_NORM_BACKWARD if center else RMS_NORM_BACKWARD, vectors)
