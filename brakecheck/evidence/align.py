"""Lines two recordings up: which kernels of one do the work of which kernels of the other.

By operator call path, position and shape, never by name alone, since upgrades rename kernels. Where a recording has no
operator paths: by NVTX path, else by the order of launches (sequence.py) with grid and block.

Kernels that agree in place, shapes, plain name, grid and block are one bucket. Every bucket ends in exactly one pair,
so the times of the pairs add up to the times of the recordings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import polars as pl

from . import kernel_names as names
from .sequence import LONGEST, common, gaps
from .table import Recording

# More kernels than this on a side under one ancestor are not called replaced as one lump; on one side they may be more
# under an operator, whose implementation then is another (attention in one kernel, or in twenty).
LUMP = 8
Dim = Optional[Tuple[int, ...]]
Inputs = Dict[str, Set[Optional[str]]]  # by place of an operator call, the shapes of its inputs


@dataclass(eq=False)
class Bucket:
    """Kernels that are alike. Times in ns; timed: calls with a known duration; variance is of single calls."""

    place: str
    shapes: Optional[str]
    name: str
    kind: str
    grid: Dim
    block: Dim
    calls: int
    timed: int
    total: int
    order: float
    median: Optional[float] = None
    mad: Optional[float] = None
    variance: Optional[float] = None
    registers: Optional[int] = None
    shared: Optional[int] = None
    operator: Optional[str] = None
    rows: List[int] = field(default_factory=list)

    @property
    def plain(self) -> str:
        return names.plain(self.name)

    @property
    def family(self) -> str:
        return names.family(self.name)


@dataclass(frozen=True)
class Pair:
    """Buckets of both sides that do one job. kind: matched, replaced, split, fused, added, removed, other shape,
    unknown place (no launch row, so nobody knows what it belongs to). same_inputs: the call around them had the same
    inputs on both sides, which those of the calls inside cannot tell."""

    kind: str
    base: Tuple[Bucket, ...]
    candidate: Tuple[Bucket, ...]
    same_inputs: bool = False

    @property
    def place(self) -> str:
        """Of all of them: where they differ, the innermost call around all."""
        places = [bucket.place.split(" > ") for bucket in (*self.candidate, *self.base)]
        shared = 0
        while all(len(p) > shared and p[shared] == places[0][shared] for p in places):
            shared += 1
        return " > ".join(places[0][:shared]) or (self.candidate or self.base)[0].place


def choose_key(base: pl.DataFrame, candidate: pl.DataFrame) -> str:
    """path, nvtx or sequence: the best that most of the device time of both sides has."""
    for column in ("path", "nvtx"):
        if all(_share(t, column) > 0.5 for t in (base, candidate)):
            return column
    return "sequence"


def _share(table: pl.DataFrame, column: str) -> float:
    time = table["duration"].fill_null(0).clip(lower_bound=0)
    whole = int(time.sum())
    if not whole:
        return 1 - table[column].null_count() / table.height if table.height else 0.0
    return int(time.filter(table[column].is_not_null()).sum()) / whole


def place_unlaunched(tables: Sequence[pl.DataFrame], key: str) -> Tuple[List[pl.DataFrame], List[int]]:
    """Gives kernels without a launch row the place where their like (name, kind, grid, block) was launched, if all of
    their like on both sides were launched at one place. Returns the tables and how many kernels each gained."""
    if key == "sequence":
        return list(tables), [0] * len(tables)
    alike = ["name", "kind", *(f"{w}_{a}" for w in ("grid", "block") for a in "xyz")]
    carried = [key, *(c for c in ("shapes", "operator") if c != key)]
    known = pl.concat([t.select(*alike, *carried) for t in tables]).filter(pl.col(key).is_not_null())
    known = known.with_columns(_mapped(pl.col(key), names.place).alias("where"))
    single = known.group_by(alike).agg(pl.struct("where", "shapes").n_unique().alias("places"),
                                       *(pl.col(c).first().alias(f"{c}_found") for c in carried))
    single = single.filter(pl.col("places") == 1).drop("places")
    out = []
    for table in tables:
        joined = table.join(single, on=alike, how="left", nulls_equal=True, maintain_order="left")
        lost = pl.col(key).is_null()
        out.append(joined.with_columns(*(pl.when(lost).then(pl.col(f"{c}_found")).otherwise(pl.col(c)).alias(c)
                                         for c in carried)).select(table.columns))
    return out, [a[key].null_count() - b[key].null_count() for a, b in zip(tables, out)]


def inputs_of(recording: Recording) -> Inputs:
    """Shapes of the inputs of every operator call, by place."""
    found: Inputs = defaultdict(set)
    operators = recording.operators
    rows: Iterable[Tuple[Any, ...]] = recording.metadata.get("inputs", ())
    if operators is not None and {"path", "shapes"} <= set(operators.columns):
        rows = operators.select("path", "shapes").unique().drop_nulls("path").iter_rows()
    for path, shapes in rows:
        found[names.place(path)].add(shapes)
    return found


def buckets(table: pl.DataFrame, key: str) -> List[Bucket]:
    """The buckets of a kernel table with a column `row` (its own numbers of rows), in order of first launch."""
    if not table.height:
        return []
    grid, block = ([f"{what}_{axis}" for axis in "xyz"] for what in ("grid", "block"))
    where = pl.lit("") if key == "sequence" else _mapped(pl.col(key).fill_null(""), names.place)
    time = pl.col("duration")
    parts = pl.col("shared_static").fill_null(0) + pl.col("shared_dynamic").fill_null(0)
    unknown = pl.col("shared_static").is_null() & pl.col("shared_dynamic").is_null()
    shared: pl.Expr = pl.when(~unknown).then(parts)
    if "shared" in table.columns:
        shared = pl.coalesce("shared", shared)
    shapes: pl.Expr = pl.col("shapes")
    if "elements_in" in table.columns:  # the shape of a collective is its message
        message = pl.format("{} elements", "elements_in")
        shapes = pl.when(pl.col("elements_in").is_not_null()).then(message).otherwise(shapes)
    table = table.with_columns(
        pl.col("name").fill_null("?"), where.alias("place"),
        _mapped(pl.col("name").fill_null("?"), names.plain).alias("plain"),
        shared.alias("shared"), shapes.alias("shapes"))
    grouped = table.group_by(["place", "shapes", "plain", "kind", *grid, *block], maintain_order=True).agg(
        pl.col("name").first(), pl.len().alias("calls"), time.count().alias("timed"), time.sum().alias("total"),
        pl.col("position").mean(), pl.col("row").first().alias("first"), time.median().alias("median"),
        (time - time.median()).abs().median().alias("mad"), time.var().alias("variance"),
        pl.col("registers").first(), pl.col("shared").first(), pl.col("operator").first(), pl.col("row").alias("rows"))
    out = []
    for row in grouped.iter_rows(named=True):
        order = row["position"] if row["position"] is not None else float(row["first"])
        out.append(Bucket(row["place"], row["shapes"], row["name"], row["kind"] or "kernel", _dim(row, grid),
                          _dim(row, block), row["calls"], row["timed"], int(row["total"] or 0), order, row["median"],
                          row["mad"], row["variance"], row["registers"], row["shared"], row["operator"], row["rows"]))
    return out


def _mapped(column: pl.Expr, function: Callable[[str], str]) -> pl.Expr:
    return column.map_batches(lambda s: pl.Series([function(v) for v in s], dtype=pl.String), return_dtype=pl.String)


def _dim(row: Dict[str, Any], columns: Sequence[str]) -> Dim:
    return tuple(row[c] if row[c] is not None else 1 for c in columns) if row[columns[0]] is not None else None


def align(base: Sequence[Bucket], candidate: Sequence[Bucket],
          sequences: Optional[Tuple[Sequence[Bucket], Sequence[Bucket]]] = None,
          inputs: Tuple[Inputs, Inputs] = ({}, {})) -> List[Pair]:
    """Pairs that hold every bucket once.

    sequences: for recordings without paths, the buckets of both sides in order of launch (with repetition). inputs: of
    the operator calls of both sides, to tell another choice inside a call from a call with other inputs.
    """
    state = Alignment(base, candidate, inputs)
    state.match(lambda b: (b.place, b.shapes, b.plain, b.kind, b.grid, b.block))
    if sequences is not None:
        state.by_sequence(*sequences)
        state.same_kernel(lambda b: b.kind)
    else:
        state.within(lambda b: (b.place, b.shapes) if b.place else None)
        state.within(lambda b: b.place or None)
        depth = max((b.place.count(" > ") for side in state.left for b in side.values()), default=0)
        for level in range(depth, 0, -1):
            state.within(lambda b, level=level: _ancestor(b.place, level))  # type: ignore[misc]
    for left, right in state.groups(lambda b: (b.plain, b.kind, b.grid, b.block, b.shapes)):
        state.take("matched", left, right)  # moved to another place of the program
    return state.finish(known_places=sequences is None)


def _ancestor(place: str, level: int) -> Optional[str]:
    parts = place.split(" > ")
    if len(parts) < level or (level == 1 and "::" not in parts[0]):  # ProfilerStep or a model tells nothing apart
        return None
    return " > ".join(parts[:level])


class Alignment:
    """What is left to be paired of base and candidate, and the pairs so far."""

    def __init__(self, base: Sequence[Bucket], candidate: Sequence[Bucket], inputs: Tuple[Inputs, Inputs]) -> None:
        self.inputs = inputs
        self.left: Tuple[Dict[int, Bucket], Dict[int, Bucket]] = ({id(b): b for b in base},
                                                                  {id(b): b for b in candidate})
        self.pairs: List[Pair] = []

    def take(self, kind: str, base: Iterable[Bucket], candidate: Iterable[Bucket], same_inputs: bool = False) -> None:
        pair = Pair(kind, tuple(base), tuple(candidate), same_inputs)
        self.pairs.append(pair)
        for side, taken in zip(self.left, (pair.base, pair.candidate)):
            for bucket in taken:
                del side[id(bucket)]

    def match(self, key: Callable[[Bucket], Any]) -> None:
        """Pairs buckets with equal keys (a key is unique on each side)."""
        ours = {key(b): b for b in self.left[0].values()}
        for bucket in list(self.left[1].values()):
            if (same := ours.get(key(bucket))) is not None:
                self.take("matched", [same], [bucket])

    def groups(self, key: Callable[[Bucket], Any]) -> List[Tuple[List[Bucket], List[Bucket]]]:
        """Leftovers of both sides by key, where both have some; a key of None takes no part."""
        ours: Dict[Any, List[Bucket]] = defaultdict(list)
        theirs: Dict[Any, List[Bucket]] = defaultdict(list)
        for side, out in zip(self.left, (ours, theirs)):
            for bucket in side.values():
                value = key(bucket)
                if value is not None:
                    out[value].append(bucket)
        return [(ours[k], theirs[k]) for k in ours if k in theirs]

    def same_kernel(self, key: Callable[[Bucket], Any]) -> None:
        """Pairs launches of one kernel (by plain name, then by family) that differ in grid or block: largest first."""
        for attribute in ("plain", "family"):
            for left, right in self.groups(lambda b, attribute=attribute: None if key(b) is None  # type: ignore[misc]
                                           else (key(b), getattr(b, attribute), b.kind)):
                if len(left) == len(right):
                    for a, b in zip(*(sorted(s, key=lambda x: -x.total) for s in (left, right))):
                        self.take(_kind([a], [b], "replaced"), [a], [b])
                else:
                    self.take(_kind(left, right, "replaced"), left, right)

    def within(self, key: Callable[[Bucket], Any]) -> None:
        """Pairs leftovers of one place: first one kernel with another launch, then different kernels in order of
        position, one for one, else several for several as split or fused."""
        self.same_kernel(key)
        for left, right in self.groups(lambda b: None if key(b) is None else (key(b), b.kind == "memcpy")):
            ours, theirs = (_by_name(side) for side in (left, right))
            call = key(left[0])
            operator = isinstance(call, str) and "::" in call.rpartition(" > ")[2]
            if len(ours) == len(theirs):
                for a, b in zip(ours, theirs):
                    self._take_in(call, a, b, "replaced")
            elif (min if operator else max)(len(ours), len(theirs)) <= LUMP:
                self._take_in(call, left, right, "fused" if len(ours) > len(theirs) else "split")

    def _take_in(self, call: Any, base: Sequence[Bucket], candidate: Sequence[Bucket], default: str) -> None:
        """Of kernels of different calls inside one call, that call's inputs tell whether they do the same work."""
        one, other = (side.get(call, {None}) for side in self.inputs) if isinstance(call, str) else ({None}, {None})
        if len({b.place for b in (*base, *candidate)}) > 1 and None not in one | other:
            self.take(default if one == other else "other shape", base, candidate, one == other)
        else:
            self.take(_kind(base, candidate, default), base, candidate)

    def by_sequence(self, ours: Sequence[Bucket], theirs: Sequence[Bucket]) -> None:
        """Pairs buckets that stand between the same matched neighbours, by majority over all such gaps."""
        ours, theirs = ours[:LONGEST], theirs[:LONGEST]
        pairs = common([_token(b) for b in ours], [_token(b) for b in theirs])
        index: Dict[int, Bucket] = {**self.left[0], **self.left[1]}
        votes: Counter[Tuple[Tuple[int, ...], Tuple[int, ...]]] = Counter()
        for left, right in gaps(pairs, len(ours), len(theirs)):
            a = [id(ours[i]) for i in left if id(ours[i]) in index]
            b = [id(theirs[j]) for j in right if id(theirs[j]) in index]
            if a and len(a) == len(b):
                votes.update(((x,), (y,)) for x, y in zip(a, b))
            elif a and b and min(len(set(a)), len(set(b))) == 1 and max(len(a), len(b)) <= LUMP:
                votes[tuple(dict.fromkeys(a)), tuple(dict.fromkeys(b))] += 1
        for (left_ids, right_ids), _ in votes.most_common():
            if all(i in self.left[0] for i in left_ids) and all(i in self.left[1] for i in right_ids):
                one, other = [index[i] for i in left_ids], [index[i] for i in right_ids]
                default = "replaced" if len(one) == len(other) else "fused" if len(one) > len(other) else "split"
                self.take(_kind(one, other, default), one, other)

    def finish(self, known_places: bool) -> List[Pair]:
        """Leftovers: without a place among places that are known they are of unknown place, else removed or added."""
        for bucket in list(self.left[0].values()):
            self.take("unknown place" if known_places and not bucket.place else "removed", [bucket], [])
        for bucket in list(self.left[1].values()):
            self.take("unknown place" if known_places and not bucket.place else "added", [], [bucket])
        return self.pairs


def _kind(base: Sequence[Bucket], candidate: Sequence[Bucket], default: str) -> str:
    """other shape for inputs that are known to differ, or for the same kernels with another grid where inputs are not
    known; otherwise a library's choice: the default. Another name is another choice: its grid says nothing."""
    one, other = ({b.shapes for b in side} for side in (base, candidate))
    if None not in one | other and one != other:
        return "other shape"
    if {b.plain for b in base} != {b.plain for b in candidate}:
        return default
    if {(b.grid, b.block) for b in base} == {(b.grid, b.block) for b in candidate}:
        return "matched"
    return "other shape" if None in one | other else default


def _token(bucket: Bucket) -> Tuple[Any, ...]:
    return (bucket.plain, bucket.kind, bucket.grid, bucket.block)


def _by_name(side: List[Bucket]) -> List[List[Bucket]]:
    groups: Dict[str, List[Bucket]] = {}
    for bucket in sorted(side, key=lambda b: b.order):
        groups.setdefault(bucket.plain, []).append(bucket)
    return list(groups.values())
