"""NVTX push/pop ranges as a call path: which ranges were open on a thread when a kernel was launched.

torch.autograd.profiler.emit_nvtx names its ranges `aten::mm, seq = 3, op_id = 7, sizes = [[2, 3], [3, 4]]`: such ranges
are operators, and the path of open ranges is then the operator call path.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Optional, Sequence, Tuple

import polars as pl

EMITTED = re.compile(r"^(?P<name>.*?), (?:seq = \d+|op_id = \d+|sizes = \[)")
SIZES = re.compile(r", sizes = (\[.*?\])(?:, [a-z_]+ = |$)")
STEP = re.compile(r"^(ProfilerStep#|(?:train(?:ing)?[ _]?)?(?:step|iter(?:ation)?)[ _#:=]*)(\d{1,9})$", re.I)
Place = Tuple[int, str]  # parent, name


class Ranges:
    """Ranges by thread, nested by time. Times in ns."""

    def __init__(self, threads: Sequence[int], starts: Sequence[int], ends: Sequence[int],
                 names: Sequence[str]) -> None:
        self.by_thread: Dict[int, List[Tuple[int, int, int]]] = {}
        self.texts = names
        self.nodes: List[Tuple[int, str, bool, Optional[int]]] = [(-1, "", False, None)]  # parent, name, operator, step
        self.index: Dict[Place, int] = {}
        self.words: Dict[int, Tuple[Optional[str], Optional[str], Optional[str], Optional[int]]] = {}
        self.parsed: Dict[str, Tuple[str, bool, Optional[int]]] = {}
        for i, (thread, start, end) in enumerate(zip(threads, starts, ends)):
            self.by_thread.setdefault(thread, []).append((start, -end, i))
        for events in self.by_thread.values():
            events.sort()

    def locate(self, threads: Sequence[Optional[int]],
               times: Sequence[Optional[int]]) -> Dict[str, Tuple[List[Any], Any]]:
        """Columns nvtx, path, operator, position, step, shapes for launches at (thread, time); unknown ones null."""
        count = len(threads)
        node_of: List[Optional[int]] = [None] * count
        event_of: List[Optional[int]] = [None] * count
        queries: Dict[int, List[Tuple[int, int]]] = {}
        for row, (thread, time) in enumerate(zip(threads, times)):
            if thread is not None and time is not None:
                queries.setdefault(thread, []).append((time, row))
        position: List[Optional[int]] = [None] * count
        for thread, wanted in queries.items():
            wanted.sort()
            seen: Dict[int, int] = {}
            for row, node, event in self._sweep(self.by_thread.get(thread, []), wanted):
                node_of[row], event_of[row] = node, event
                if event is not None:
                    position[row] = seen.get(event, 0)
                    seen[event] = position[row] + 1  # type: ignore[operator]
        words = [self._words(n) for n in range(len(self.nodes))]
        found = [words[n] if n else (None, None, None, None) for n in node_of]
        shapes = [_sizes(self.texts[e]) if e is not None else None for e in event_of]
        return {"nvtx": ([f[0] for f in found], pl.String), "path": ([f[1] for f in found], pl.String),
                "operator": ([f[2] for f in found], pl.String), "step": ([f[3] for f in found], pl.Int64),
                "position": (position, pl.Int64), "shapes": (shapes, pl.String)}

    def operators(self, thread_bits: int) -> Dict[str, List[Any]]:
        """Columns of the operator table: one row a range that is an operator. Empty when no range is one."""
        out: Dict[str, List[Any]] = {k: [] for k in ("name", "path", "depth", "step", "thread", "start", "duration",
                                                     "shapes")}
        for thread, events in self.by_thread.items():
            stack: List[Tuple[int, int]] = []
            for start, negative_end, event in events:
                while stack and stack[-1][0] <= start:
                    stack.pop()
                node = self._enter(stack[-1][1] if stack else 0, self.texts[event])
                stack.append((-negative_end, node))
                if not self.nodes[node][2]:
                    continue
                _, path, _, step = self._words(node)
                row = (self.nodes[node][1], path, len(stack) - 1, step, thread & ((1 << thread_bits) - 1), start,
                       -negative_end - start, _sizes(self.texts[event]))
                for values, value in zip(out.values(), row):
                    values.append(value)
        return out if out["name"] else {}

    def _sweep(self, events: List[Tuple[int, int, int]], wanted: List[Tuple[int, int]]) -> Any:
        stack: List[Tuple[int, int, int]] = []  # end, node, event
        at = 0
        for time, row in wanted:
            while at < len(events) and events[at][0] <= time:
                start, negative_end, event = events[at]
                at += 1
                while stack and stack[-1][0] <= start:
                    stack.pop()
                stack.append((-negative_end, self._enter(stack[-1][1] if stack else 0, self.texts[event]), event))
            while stack and stack[-1][0] < time:
                stack.pop()
            yield (row, stack[-1][1], stack[-1][2]) if stack else (row, 0, None)

    def _enter(self, parent: int, text: str) -> int:
        if text not in self.parsed:
            self.parsed[text] = _parse(text)
        name, operator, step = self.parsed[text]
        key = (parent, name if step is None else f"{name}{step}")
        if key not in self.index:
            self.index[key] = len(self.nodes)
            self.nodes.append((parent, name, operator, step if step is not None else self.nodes[parent][3]))
        return self.index[key]

    def _words(self, node: int) -> Tuple[Optional[str], Optional[str], Optional[str], Optional[int]]:
        """NVTX path, operator path (null unless an operator is open), innermost operator, step."""
        if node in self.words:
            return self.words[node]
        names: List[str] = []
        operator, at = None, node
        while at > 0:
            parent, name, is_operator, _ = self.nodes[at]
            names.append(name)
            if is_operator and operator is None:
                operator = name
            at = parent
        path = " > ".join(reversed(names)) or None
        self.words[node] = (path, path if operator else None, operator, self.nodes[node][3])
        return self.words[node]


def around(texts: Sequence[str]) -> Dict[str, Any]:
    """nvtx, path, operator, step and shapes of a kernel from the ranges open around its launch, outermost first."""
    parsed = [_parse(text) for text in texts]
    operators = [(name, text) for (name, is_operator, _), text in zip(parsed, texts) if is_operator]
    path = " > ".join(name for name, _, _ in parsed) or None
    steps = [step for _, _, step in parsed if step is not None]
    return {"nvtx": path, "path": path if operators else None, "operator": operators[-1][0] if operators else None,
            "step": steps[-1] if steps else None, "shapes": _sizes(operators[-1][1]) if operators else None}


def calls_around(texts: Sequence[str]) -> List[Tuple[str, Optional[str]]]:
    """Path and shapes of each operator call among the ranges open around a kernel."""
    parsed = [_parse(text) for text in texts]
    return [(" > ".join(name for name, _, _ in parsed[:i + 1]), _sizes(texts[i]))
            for i, (_, is_operator, _) in enumerate(parsed) if is_operator]


def _sizes(text: str) -> Optional[str]:
    match = SIZES.search(text)
    if not match:
        return None
    try:
        return json.dumps(json.loads(match[1]))
    except (ValueError, RecursionError):
        return None


def _parse(text: str) -> Tuple[str, bool, Optional[int]]:
    """Name without what differs by call, whether it is an operator, and the step number it announces."""
    match = EMITTED.match(text)
    name = match["name"] if match else text
    step = STEP.match(name)
    if step:
        return step[1].rstrip(" _#:="), False, int(step[2])
    return name, match is not None, None
