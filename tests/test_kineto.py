"""The Kineto reader: what real traces say, old and odd layouts, damage, and fuzz."""

import gzip
import json
import sys
import zlib
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brakecheck.evidence import kineto
from brakecheck.evidence.kineto import nest, ranks, repair, source, spawn
from brakecheck.model import BrakecheckError, UsageError

DATA = Path(__file__).parent / "data" / "kineto"
CPU = {"pid": 10, "tid": 11}


def op(name, ts, dur, external, **args):
    return {"ph": "X", "cat": "cpu_op", "name": name, **CPU, "ts": ts, "dur": dur,
            "args": {"External id": external, **args}}


def launch(ts, correlation, name="cudaLaunchKernel", cat="cuda_runtime"):
    return {"ph": "X", "cat": cat, "name": name, **CPU, "ts": ts, "dur": 2,
            "args": {"cbid": 211, "correlation": correlation}}


def kernel(ts, dur, correlation, name="gemm", **args):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": {"device": 0, "stream": 7, "correlation": correlation, "grid": [4, 2, 1], "block": [128, 1, 1],
                     "registers per thread": 40, "shared memory": 1024, **args}}


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", **CPU, "ts": 100, "dur": 900, "args": {}},
    {"ph": "X", "cat": "user_annotation", "name": "forward", **CPU, "ts": 110, "dur": 500, "args": {}},
    {"ph": "X", "cat": "python_function", "name": "nn.Module: Linear_0", **CPU, "ts": 115, "dur": 400, "args": {}},
    {"ph": "X", "cat": "python_function", "name": "model.py(3): forward", **CPU, "ts": 116, "dur": 390, "args": {}},
    op("aten::linear", 120, 100, 1, **{"Input Dims": [[2, 3], [3, 3]], "Input type": ["float", "float"]}),
    op("aten::mm", 130, 50.4, 2, **{"Input Dims": [[2, 3], [3, 3]], "Input type": ["float", "float"],
                                    "Input Strides": [[3, 1], [1, 3]]}),
    launch(140, 77), launch(150, 78),
    {"ph": "s", "id": 77, "pid": 10, "tid": 11, "ts": 140, "cat": "ac2g", "name": "ac2g"},
    kernel(300, 20.5, 77), kernel(330, 10, 78, "splitk"),
]


def write(tmp_path, events=EVENTS, name="trace.json", **top):
    path = tmp_path / name
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "displayTimeUnit": "ms", **top}, indent=1))
    return path


def codes(recording):
    return {p.code: p.count for p in recording.problems}


def same(left, right):
    return left.kernels.equals(right.kernels) and left.operators.equals(right.operators)


# --- what real traces say ---

def test_h100_trace():
    found = kineto.read(DATA / "qwen-0.5b-h100.json.gz")
    assert found.metadata["gpus"] == [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "memory": 85018279936, "sms": 132,
                                       "warp": 32, "capability": "9.0"}]
    assert found.metadata["versions"]["cuda_runtime"] == "12.4"
    assert found.metadata["versions"]["cuda_driver"] == "12.9"
    assert found.kernels["kind"].value_counts(sort=True).rows() == [("kernel", 1465), ("memset", 241), ("memcpy", 1)]
    assert codes(found) == {"kernel-without-launch": 436, "no-rank": 1}
    assert found.metadata["coverage"]["dropped_share"] == 0
    lost = found.kernels.filter(pl.col("launch").is_null() & (pl.col("kind") == "kernel"))
    assert lost.height == 436 and lost["path"].null_count() == 436 and lost["step"].null_count() == 436
    rest = found.kernels.filter(pl.col("launch").is_not_null())
    assert rest["path"].null_count() == 0 and rest["shapes"].null_count() == 0
    assert rest["step"].unique().to_list() == [6]
    assert found.operators.filter(pl.col("kind") == "operator").height == 4186


def test_mi300_trace():
    found = kineto.read(DATA / "qwen-0.5b-mi300.json.gz")
    assert found.metadata["gpus"][0]["name"] == "AMD Instinct MI300X VF"
    assert found.metadata["versions"]["hip_runtime"] == "6.4.43483"
    assert found.kernels["kind"].value_counts(sort=True).rows() == [("kernel", 1516), ("memcpy", 1)]
    flash = found.kernels.filter((pl.col("name") == "attn_fwd") & pl.col("path").is_not_null())
    assert flash["operator"].unique().to_list() == ["aten::_flash_attention_forward"]
    assert set(flash["launch_name"]) == {"hipModuleLaunchKernel"}
    assert flash["grid_x"].null_count() == 0


def test_collectives():
    found = kineto.read(DATA / "nccl.json.gz")
    collectives = found.kernels.filter(pl.col("kind") == "collective")
    assert collectives.height == 21
    assert collectives["group_size"].unique().to_list() == [2]
    first = collectives.row(0, named=True)
    assert (first["collective"], first["elements_in"], first["message_dtype"], first["bytes"]) == \
        ("broadcast", 53120, "Float", 212480)
    assert found.metadata["rank"] == 0 and found.kernels["rank"].unique().to_list() == [0]
    assert [s["step"] for s in found.metadata["steps"]] == [4, 5, 6]
    assert found.kernels["step"].null_count() == 0
    assert found.problems == []


def test_old_trace_in_whole_microseconds():
    found = kineto.read([DATA / "tiny-base.json.gz", DATA / "tiny-candidate.json.gz"])
    assert found.kernels.height == 35
    assert found.kernels["start"].min() == 1661938466265125000
    assert "rank-twice" in codes(found)


def test_columns(tmp_path):
    found = kineto.read(write(tmp_path, distributedInfo={"rank": 5}))
    assert found.problems == []
    first, second = found.kernels.to_dicts()
    assert first | {"raw_name": "gemm"} == {
        **dict.fromkeys(found.kernels.columns), "kind": "kernel", "name": "gemm", "raw_name": "gemm",
        "path": "aten::linear > aten::mm", "operator": "aten::mm", "nvtx": "forward", "position": 0, "step": 3,
        "rank": 5, "device": 0, "stream": 7, "thread": 11, "start": 300_000, "duration": 20_500, "launch": 140_000,
        "launch_duration": 2_000, "correlation": 77, "grid_x": 4, "grid_y": 2, "grid_z": 1, "block_x": 128,
        "block_y": 1, "block_z": 1, "registers": 40, "shared": 1024, "shapes": "[[2,3],[3,3]]",
        "dtypes": '["float","float"]', "call": 1, "module": "Linear_0", "launch_name": "cudaLaunchKernel"}
    assert (second["name"], second["position"]) == ("splitk", 1)
    mm = found.operators.row(1, named=True)
    assert (mm["name"], mm["depth"], mm["strides"], mm["step"]) == ("aten::mm", 1, "[[3,1],[1,3]]", 3)


# --- layouts ---

def compact(events):
    return json.dumps({"traceEvents": events}, separators=(",", ":"))


def text_times(events):
    return json.dumps({"traceEvents": [{**e, "ts": str(e["ts"])} for e in events]})


def begin_end(events):
    out = []
    for event in events:
        if event.get("cat") == "cpu_op":
            out.append((event["ts"], {**{k: v for k, v in event.items() if k != "dur"}, "ph": "B"}))
            end = event["ts"] + event["dur"]
            out.append((end, {"ph": "E", "cat": "cpu_op", **CPU, "ts": end}))
        else:
            out.append((event["ts"], event))
    return json.dumps({"traceEvents": [e for _, e in sorted(out, key=lambda p: p[0])]})


@pytest.mark.parametrize("layout", [compact, text_times, begin_end, json.dumps, lambda e: json.dumps(e)[:-1] + "\n",
                                    lambda e: "\ufeff" + compact(e), lambda e: compact(e).replace("]}", ",]}"),
                                    lambda e: json.dumps({"traceEvents": [dict(reversed(x.items())) for x in e]})])
def test_any_layout_gives_the_same(tmp_path, layout):
    wanted = kineto.read(write(tmp_path))
    path = tmp_path / "other.json"
    path.write_text(layout(EVENTS), encoding="utf-8")
    assert same(kineto.read(path), wanted)


def test_names_of_2021(tmp_path):
    names = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    events = []
    for event in EVENTS:
        if event.get("cat") in ("user_annotation", "python_function"):
            continue
        old = {"Input Dims": "Input dims", "External id": "external id"}
        args = {old.get(k, k): v for k, v in event.get("args", {}).items()}
        events.append({**event, **({"cat": names[event["cat"]]} if event.get("cat") in names else {}), "args": args})
    found = kineto.read(write(tmp_path, events))
    assert found.kernels["path"].to_list() == ["aten::linear > aten::mm"] * 2
    assert found.kernels["shapes"][0] == "[[2,3],[3,3]]"


def test_fractions_beside_an_absolute_epoch_are_exact(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [kernel(1.5, 1, 1)]}).replace('"ts": 1.5', '"ts": 1711964646123456.789'))
    assert kineto.read(path).kernels["start"].to_list() == [1711964646123456789]


def test_graph_kernels_share_a_launch(tmp_path):
    events = [op("graph", 100, 50, 1), launch(110, 9, "cudaGraphLaunch"),
              kernel(200, 5, 9, "a"), kernel(210, 5, 9, "b")]
    found = kineto.read(write(tmp_path, events))
    assert found.kernels.select("name", "path", "position", "launch_name").rows() == [
        ("a", "graph", 0, "cudaGraphLaunch"), ("b", "graph", 1, "cudaGraphLaunch")]


def test_a_kernel_without_launch_finds_its_operator_by_external_id(tmp_path):
    events = [op("aten::mm", 100, 50, 4), kernel(200, 5, 9, **{"External id": 4})]
    assert kineto.read(write(tmp_path, events)).kernels["path"].to_list() == ["aten::mm"]


@pytest.mark.parametrize("suffix", ["json", "json.gz", "json.zst"])
def test_compression(tmp_path, suffix):
    plain = write(tmp_path)
    path = tmp_path / f"x.{suffix}"
    data = plain.read_bytes()
    if suffix == "json.gz":
        data = gzip.compress(data[:500]) + gzip.compress(data[500:])
    elif suffix == "json.zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    assert same(kineto.read(path), kineto.read(plain))


@pytest.mark.parametrize("small", [64 << 20, 0], ids=["here", "processes"])
def test_ranks_from_a_folder(tmp_path, monkeypatch, small):
    monkeypatch.setattr(ranks, "_SMALL", small)
    write(tmp_path, name="rank0.json")
    write(tmp_path, name="trace_rank-1.json")
    (tmp_path / "rank2.json").write_text("hello")
    found = kineto.read(tmp_path, workers=2)
    assert found.kernels["rank"].to_list() == [0, 0, 1, 1]
    assert found.kernels["call"].to_list() == [1, 1, 3, 3]
    assert found.operators["name"][3] == "aten::mm"
    assert codes(found) == {"unreadable": 1}
    assert found.metadata["coverage"]["kernels"] == 4


def test_what_is_absent_among_ranks_is_said(tmp_path):
    for rank in (0, 2):
        write(tmp_path, name=f"rank{rank}.json", distributedInfo={"rank": rank, "world_size": 3})
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = kineto.read(tmp_path)
    said = {p.code: (p.count, p.text, p.where) for p in found.problems}
    assert said["rank-absent"][0] == 1 and "1 of 3 ranks are absent (1)" in said["rank-absent"][1]
    assert said["unreadable"][2].endswith("gone.json") and found.kernels.height == 4


def test_recognise():
    assert kineto.recognise(b'\xef\xbb\xbf {"schemaVersion": 1, "traceEvents": [')
    assert kineto.recognise(b'[{"ph": "X", "ts": 1')
    assert not kineto.recognise(b'{"version": 3, "runs": []}')
    assert not kineto.recognise(b"ID,Process ID,Kernel Name")


# --- several processes ---

def test_processes_give_the_same_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1 << 16)
    monkeypatch.setattr(spawn, "_LARGE", 0)
    events = [{**e, "ts": e["ts"] + 2000 * i, "args": {**e.get("args", {}), **{
        k: e["args"][k] + 100 * i for k in ("correlation", "External id") if k in e.get("args", {})}}}
        for i in range(300) for e in EVENTS]
    path = write(tmp_path, events)
    one, several = kineto.read(path, workers=1), kineto.read(path, workers=2)
    assert same(one, several) and one.problems == several.problems
    assert one.kernels.height == 600 and one.kernels["path"].unique().to_list() == ["aten::linear > aten::mm"]


def test_a_process_that_dies_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(spawn, "_LARGE", 0)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(BrakecheckError, match="ended early"):
        kineto.read(write(tmp_path), workers=2)


def test_modules_in_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(spawn, "_LARGE", 0)
    for name in ("json", "msgspec", "brakecheck"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert kineto.read(write(tmp_path), workers=2).kernels.height == 2


def test_an_error_in_progress_reaches_the_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1 << 12)
    monkeypatch.setattr(spawn, "_LARGE", 0)

    def stop(path, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kineto.read(write(tmp_path, EVENTS * 60), workers=2, progress=stop)


def test_damage_in_a_process_is_reported_with_its_offset(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1 << 14)
    monkeypatch.setattr(spawn, "_LARGE", 0)
    text = compact(EVENTS * 40).replace('"name":"splitk"', '"name":"split"k"x"')
    path = tmp_path / "t.json"
    path.write_text(text)
    found = kineto.read(path, workers=2)
    assert codes(found)["inner-quote"] == 80
    assert found.kernels.height == 80
    where = next(p.where for p in found.problems if p.code == "inner-quote")
    assert text[int(where.rsplit(" ", 1)[1]):].startswith('{"ph":"X","cat":"kernel","name":"split"k')


# --- damage (F32, F33, F34, F35) ---

@pytest.mark.parametrize("old, new, code, count", [
    ('"gemm"', '"ge\x01mm"', "control-character", 1),
    ('"splitk"', '"a "quoted" name"', "inner-quote", 2),
    ('"shared memory":1024', '"shared memory":NaN', "bare-value", 2),
    ('"registers per thread":40', '"occupancy":Infinity', "bare-value", 2),
    ('"registers per thread":40', '"occupancy":N/A', "bare-value", 2),
    ('"grid":[4,2,1]', '"grid":[4,NaN,1]', "bare-value", 2),
    ('"block":[128,1,1]', '"block":[128,1,1,]', "trailing-comma", 2),
    ('},{"ph":"X","cat":"kernel"', '}{"ph":"X","cat":"kernel"', "comma-absent", 2),
    ('"stream":7', '"stream":[7]', "value-unusable", 2),
    ('"dur":10,"args"', '"dur":-1,"args"', "duration-negative", 1),
    ('"dur":10,"args"', '"dur":0,"args"', "duration-zero", 1),
    ('"dur":10,"args"', '"dur":9223372036854775,"args"', "duration-huge", 1),
    ('"dur":10,"args"', '"dur":1e400,"args"', "duration-huge", 1),
    ('"dur":10,"args"', '"durable":10,"args"', "duration-absent", 1),
])
def test_repairs_are_counted(tmp_path, old, new, code, count):
    text = compact(EVENTS)
    assert old in text
    path = tmp_path / "t.json"
    path.write_text(text.replace(old, new))
    found = kineto.read(path)
    assert codes(found)[code] == count
    assert found.kernels.height == 2 and found.operators.height == 2
    assert found.kernels["duration"].sum() in (20_500, 30_500)
    assert found.kernels["path"].to_list() == ["aten::linear > aten::mm"] * 2


def test_unusable_times_are_counted(tmp_path):
    found = kineto.read(write(tmp_path, [*EVENTS, kernel(1e300, 1, 5), {**kernel(0, 1, 5), "ts": None}]))
    assert codes(found)["time-unusable"] == 2 and found.kernels.height == 2


def test_truncated_tail(tmp_path):
    text = compact(EVENTS)
    path = tmp_path / "t.json"
    path.write_text(text[:text.index('"splitk"') + 4])
    found = kineto.read(path)
    assert found.kernels["name"].to_list() == ["gemm"]
    problem = next(p for p in found.problems if p.code == "truncated")
    assert problem.where.endswith(f"byte {len(path.read_text())}")
    path.write_bytes(text[:text.index('"splitk"')].encode() + bytes(5000))
    assert kineto.read(path).kernels["name"].to_list() == ["gemm"]
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(text.encode())[:-30])
    assert "truncated" in codes(kineto.read(packed))


def test_a_late_child_is_inside(tmp_path):
    events = [op("aten::linear", 100, 50, 1), op("aten::mm", 110, 40.4, 2), launch(120, 7), kernel(200, 5, 7)]
    found = kineto.read(write(tmp_path, events))
    assert found.kernels["path"].to_list() == ["aten::linear > aten::mm"]
    assert codes(found)["late-child"] == 1


def test_siblings_that_touch_are_not_nested(tmp_path):
    found = kineto.read(write(tmp_path, [op("a", 100, 50, 1), op("b", 150, 0.3, 2), op("c", 150.3, 9, 3)]))
    assert found.operators["path"].to_list() == ["a", "b", "c"]


def test_metadata_only(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}]}')
    found = kineto.read(path)
    assert codes(found)["no-events"] == 1 and found.metadata["gpus"] == [{"id": 0, "name": "GPU"}]
    assert found.kernels.height == 0
    assert codes(kineto.read(write(tmp_path, EVENTS[:1])))["no-kernels"] == 1


def test_metadata_before_and_after_the_events(tmp_path):
    properties = [{"name": f"GPU {i}", "id": i} for i in range(3)]
    path = tmp_path / "t.json"
    for text in (json.dumps({"deviceProperties": properties, "distributedInfo": {"rank": 3}, "traceEvents": EVENTS}),
                 json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 3}, "deviceProperties": properties})):
        path.write_text(text)
        found = kineto.read(path)
        assert found.metadata["rank"] == 3
        assert [g["name"] for g in found.metadata["gpus"]] == ["GPU 0", "GPU 1", "GPU 2"]
        assert found.kernels.height == 2 and found.problems == []


def test_dropped_kernels_are_a_share(tmp_path):
    events = [e for e in EVENTS if e.get("name") != "splitk"]
    found = kineto.read(write(tmp_path, events))
    assert found.metadata["coverage"]["dropped_share"] == 0.5
    assert codes(found)["launch-without-kernel"] == 1


@pytest.mark.parametrize("data, where", [(b"", "byte 0"), (b"hello", "byte 0"), (b"\x1f\x8b\x08hello", "byte 0"),
                                         (b'{"traceEvents": [{"ph" nonsense', "byte 31")])
def test_what_is_no_trace_is_refused_with_an_offset(tmp_path, data, where):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(BrakecheckError) as caught:
        kineto.read(path)
    assert where in str(caught.value)


def test_usage(tmp_path):
    with pytest.raises(BrakecheckError, match="cannot read"):
        kineto.read(tmp_path / "absent.json")
    with pytest.raises(BrakecheckError, match="no traces in this folder"):
        kineto.read(tmp_path)
    with pytest.raises(UsageError):
        kineto.read([])


def test_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 1 << 12)
    seen = []
    kineto.read(write(tmp_path, EVENTS * 60), progress=lambda path, share: seen.append(share))
    assert seen and all(0 <= s <= 1 for s in seen)


# --- fuzz ---

TEXT = compact(EVENTS).encode()
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(tmp_path, data):
    path = tmp_path / "fuzz.json"
    path.write_bytes(data)
    try:
        found = kineto.read(path, workers=1)
    except BrakecheckError:
        return
    durations = found.kernels["duration"].drop_nulls()
    assert found.kernels.height <= 4 and (durations > 0).all() and (durations <= 86_400 * 10**9).all()


@FUZZ
@given(cut=st.integers(0, len(TEXT)))
def test_fuzz_truncation(tmp_path, cut):
    survives(tmp_path, TEXT[:cut])


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.integers(0, 255)), max_size=6))
def test_fuzz_bytes(tmp_path, flips):
    data = bytearray(TEXT)
    for at, value in flips:
        data[at] = value
    survives(tmp_path, bytes(data))


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_fuzz_compressed(tmp_path, flips):
    data = bytearray(gzip.compress(TEXT))
    for at, value in flips:
        data[at % len(data)] = value
    survives(tmp_path, bytes(data))


LEAF = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**70)
        | st.just("9" * 400) | st.just("1e999999999"))
ANY = st.recursive(LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=3), c, max_size=3),
                   max_leaves=4)


@FUZZ
@given(row=st.integers(0, len(EVENTS) - 1), value=ANY,
       key=st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]))
def test_fuzz_types(tmp_path, row, key, value):
    events = [dict(e) for e in EVENTS]
    events[row][key] = value
    survives(tmp_path, json.dumps({"traceEvents": events}).encode())


@FUZZ
@given(row=st.sampled_from([6, 7, 10]), key=st.sampled_from(sorted(repair._FIELD_OF)), value=ANY)
def test_fuzz_arguments(tmp_path, row, key, value):
    events = [dict(e) for e in EVENTS]
    events[row]["args"] = {**events[row]["args"], key: value}
    survives(tmp_path, json.dumps({"traceEvents": events}).encode())


@FUZZ
@given(top=st.dictionaries(st.sampled_from(["distributedInfo", "deviceProperties", "schemaVersion", "traceEvents",
                                            "baseTimeNanoseconds", "cuda_runtime_version"]), ANY))
def test_fuzz_metadata(tmp_path, top):
    survives(tmp_path, json.dumps({**top, **({} if "traceEvents" in top else {"traceEvents": EVENTS})}).encode())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60_000), st.integers(0, 40_000)), max_size=30))
def test_nesting_is_what_a_stack_finds(rows):
    thread, start, length = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    order = nest.order_of(thread, start, start + length)
    thread, start, end = thread[order], start[order], (start + length)[order]
    parent, _ = nest.parents_of(thread, start, end)
    for i in range(len(rows)):
        inside = [j for j in range(i) if thread[j] == thread[i] and start[i] < end[j]
                  and end[i] <= end[j] + nest.TOLERANCE]
        assert parent[i] == (inside[-1] if inside else -1)
    depth = nest.depths_of(parent)
    assert all(depth[i] == (depth[parent[i]] + 1 if parent[i] >= 0 else 0) for i in range(len(rows)))


def test_zlib_alone_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_gzip", lambda: lambda: zlib.decompressobj(31))
    assert kineto.read(DATA / "tiny-base.json.gz").kernels.height == 18


@pytest.mark.parametrize("name", ["nccl", "qwen-0.5b-h100"])
def test_joins_are_what_a_plain_program_finds(name):
    """Times and operator path of every 40th device row, by loops over the plain JSON with exact decimals."""
    path = DATA / f"{name}.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    operators = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda o: (o["ts"], -o["dur"]))
    found = set(kineto.read(path).kernels.select("start", "duration", "name", "path").rows())
    rows = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in rows[::40]:
        launched = launches.get(event["args"]["correlation"], {"tid": None})
        around = [o["name"] for o in operators if o["tid"] == launched["tid"] and o["ts"] <= launched["ts"]
                  and launched["ts"] + launched["dur"] <= o["ts"] + o["dur"]]
        assert (int(event["ts"] * 1000), int(event["dur"] * 1000), event["name"], " > ".join(around) or None) in found
