"""NCCL and watchdog logs, and recognition of evidence by content."""

import gzip
import json
import time

import pytest
from evidence_files import DATA, damaged, unpacked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brakecheck.evidence import nccl_log
from brakecheck.evidence.recognise import ACCEPTED, open_evidence, recognise
from brakecheck.model import BrakecheckError

WATCHDOG = ("[rank{rank}]:[E1016 03:31:38.928019586 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n_in}, NumelOut={n_out}, "
            "Timeout(ms)=1800000) ran for 1800071 milliseconds before timing out.")
INFO = """node1:531:1762 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
node1:531:1762 [0] NCCL INFO ncclCommInitRank comm 0x7f1 rank 0 nranks 2 cudaDev 0 - Init COMPLETE
node1:532:1763 [1] NCCL INFO ncclCommInitRank comm 0x7f2 rank 1 nranks 2 cudaDev 1 - Init COMPLETE
node1:531:1762 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:531:1762 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:532:1763 [1] NCCL INFO Channel 03/0 : 1[1] -> 0[0] [send] via NET/IB/3/GDRDMA
node1:531:1762 [0] NCCL INFO 16 coll channels, 0 collnet channels, 8 nvls channels, 16 p2p channels, 2 p2p channels each
node1:531:1762 [0] NCCL INFO AllReduce: 262144 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..7}
node1:531:1762 [0] NCCL INFO 4096 Bytes -> Algo 0 proto 1 time 54.707825
"""


def collective(gpu, op, count, n=64):
    return (f"node1:{531 + gpu}:176 [{gpu}] NCCL INFO {op}: opCount {count:x} sendbuff 0x1 recvbuff 0x2 count {n} "
            f"datatype 9 op 0 root 0 comm 0x7f{gpu} [nranks=2] stream 0x5\n")


def findings(text):
    return {f["code"]: f for f in nccl_log.parse(text).metadata.get("findings", [])}


def test_watchdog_line_of_a_gather_tells_the_group():
    line = WATCHDOG.format(rank=3, seq=211067, op="_ALLGATHER_BASE", n_in=2359296, n_out=18874368)
    timeout, = nccl_log.parse(line).metadata["timeouts"]
    assert timeout == {"operation": "_ALLGATHER_BASE", "sequence": 211067, "line": 1, "rank": 3, "elements_in": 2359296,
                       "elements_out": 18874368, "timeout_ms": 1800000, "ranks": 8}
    bare = nccl_log.parse("hang in _ALLGATHER_BASE, SeqNum=211067, NumelIn=2359296, NumelOut=18874368, "
                          "Timeout(ms)=1800000").metadata["timeouts"][0]
    assert (bare["operation"], bare["ranks"]) == ("_ALLGATHER_BASE", 8) and "rank" not in bare


def test_group_size_is_known_for_gather_and_scatter_only():
    assert nccl_log.group_size("_REDUCE_SCATTER_BASE", 544997376, 68124672) == 8
    assert nccl_log.group_size("ALLREDUCE", 100, 100) is None
    assert nccl_log.group_size("_ALLGATHER_BASE", 3, 8) is None
    assert nccl_log.group_size("_ALLGATHER_BASE", 0, 8) is None


def test_old_watchdog_line_without_sizes():
    timeout, = nccl_log.parse("[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
                              "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran").metadata["timeouts"]
    assert timeout == {"operation": "ALLREDUCE", "sequence": 469508, "line": 1, "rank": 1, "timeout_ms": 1800000}


def test_ranks_in_different_collectives_are_the_program_not_nccl():
    same = [WATCHDOG.format(rank=r, seq=7, op="_ALLGATHER_BASE", n_in=10, n_out=80) for r in range(2)]
    other = WATCHDOG.format(rank=2, seq=7, op="_ALLGATHER_BASE", n_in=12, n_out=96)
    finding = findings("\n".join([*same, other]))["order-of-collectives"]
    assert finding["component"] == "program" and "not NCCL" in finding["text"]
    assert finding["where"] == "lines 1, 2, 3" and "rank 2" in finding["text"]
    agreed = findings("\n".join(same))
    assert set(agreed) == {"collective-timeout"} and "ranks 2, 3, 4, 5, 6, 7" in agreed["collective-timeout"]["text"]


def test_order_of_collectives_from_the_collective_log():
    good = INFO + collective(0, "AllReduce", 26) + collective(1, "AllReduce", 26)
    recording = nccl_log.parse(good)
    assert "findings" not in recording.metadata
    assert recording.kernels.select("name", "rank", "device", "bytes", "correlation").rows() == [
        ("AllReduce", 0, 0, 128, 26), ("AllReduce", 1, 1, 128, 26)]
    assert recording.kernels["duration"].null_count() == 2
    bad = findings(good + collective(0, "AllReduce", 27) + collective(1, "Broadcast", 27))["order-of-collectives"]
    assert bad["component"] == "program" and "number 27" in bad["text"]
    assert not findings(good + collective(0, "AllReduce", 27))  # the other rank may just not have come there yet


def test_info_lines():
    metadata = nccl_log.parse(INFO).metadata
    assert metadata["versions"] == {"nccl": "2.21.5", "nccl_cuda": "12.4"}
    assert metadata["transports"] == {"P2P/CUMEM": 2, "NET/IB/GDRDMA": 1}
    assert (metadata["ranks"], metadata["world"], metadata["channels"]) == ([0, 1], 2, 3)
    assert metadata["channel_counts"] == {"collective": 16, "collnet": 0, "nvls": 8, "p2p": 16}
    assert metadata["tuner"] == [
        {"bytes": 4096, "algorithm": "0", "protocol": "1", "count": 1},
        {"operation": "AllReduce", "bytes": 262144, "algorithm": "RING", "protocol": "SIMPLE", "count": 1}]
    mixed = nccl_log.parse(INFO + "node2:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n").metadata["versions"]
    assert mixed["nccl"] == "2.21.5, 2.27.3"


def test_capture_race_is_the_framework():
    race = ("[rank3]:[E421 22:56:09 ProcessGroupNCCL.cpp:2055] [PG ID 5 PG GUID 23 Rank 1] Process group watchdog "
            "thread terminated with exception: CUDA error: operation not permitted when stream is capturing\n")
    finding = findings(race)["capture-watchdog-race"]
    assert finding["component"] == "framework" and "59 at 5 %" in finding["text"]
    with pytest.raises(BrakecheckError):  # a capture error alone is the program's own
        nccl_log.parse("RuntimeError: CUDA error: operation not permitted when stream is capturing")


LOG = INFO + collective(0, "AllReduce", 26) + WATCHDOG.format(rank=3, seq=9, op="_ALLGATHER_BASE", n_in=2, n_out=16)


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, len(LOG)), at=st.integers(0, len(LOG)),
       insert=st.one_of(st.text(max_size=20), st.sampled_from(["9" * 500, "\0", "NCCL INFO ", "SeqNum=", "=)", "[["])))
def test_damaged_log_is_an_error_or_a_recording(cut, at, insert):
    text = LOG[:cut]
    try:
        recording = nccl_log.parse(text[:at] + insert + text[at:])
    except BrakecheckError as error:
        assert error.where and error.todo
    else:
        assert recording.kind == "nccl-log"
        json.dumps(recording.metadata)


def test_long_lines_take_bounded_time():
    start = time.monotonic()
    found = nccl_log.parse(LOG + "\nNCCL INFO " + "a:1:" * 100_000 + "\n" + "Timeout(ms)=" * 20_000)
    assert found.metadata and time.monotonic() - start < 20  # it takes a few milliseconds


ELF = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7) + b"\x02\x00"
CONTENT = {
    "kineto": b'{"schemaVersion": 1, "traceEvents": []}', "ncu": b"NVR\0\x10\0\0\0",
    "cubin": ELF + b"\xbe\x00" + bytes(44),
    "fatbin": b"\x50\xed\x55\xba\x01\x00", "build-log": b"ptxas info    : Used 40 registers, 380 bytes cmem[0]\n",
    "nccl-log": LOG.encode(), "comparison": b'{"schema": "brakecheck/comparison/1", "verdict": "GO"}',
    "ncu-csv": (DATA / "ncu" / "kernel-0001-ncu.details.csv").read_bytes(),
    "nsys-csv": b"Time (%),Total Time (ns),Instances,Avg (ns),Name\n10.0,100,4,25,k\n",
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("packed", [False, True])
def test_kind_comes_from_content_not_from_the_name(tmp_path, kind, packed):
    path = tmp_path / "misleading.sqlite"
    path.write_bytes(gzip.compress(CONTENT[kind], mtime=0) if packed else CONTENT[kind])
    assert recognise(path) == kind
    assert kind in ACCEPTED


def test_real_export_inside_gzip_is_recognised_and_read():
    path = DATA / "nsys" / "graphs-2025.5.sqlite.gz"
    assert recognise(path) == "nsys"
    assert open_evidence(path).kernels.height == 6


@pytest.mark.parametrize(("content", "looks"), [
    (b"", "an empty file"), (b"hello\nworld", "text that starts with 'hello'"), (b"PK\x03\x04" + bytes(9), "zip"),
    (b'{"a": 1}', "JSON that is neither"), (b"\x7fELF\x02\x01\x01" + bytes(60), "ELF file without GPU code"),
    (b"\x00\x01\x02\x03", "binary data"), (b"QDSTRM" + bytes(9), "nsys export"),
    (gzip.compress(b"x" * 99, mtime=0)[:9], "gzip")])
def test_unknown_content_says_what_it_looks_like_and_what_is_accepted(tmp_path, content, looks):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(BrakecheckError, match="looks like") as error:
        recognise(path)
    assert looks in str(error.value) and ACCEPTED["nsys"] in error.value.todo


def test_directories(tmp_path):
    with pytest.raises(BrakecheckError, match="directory without known evidence"):
        recognise(tmp_path)
    (tmp_path / "rank0.json").write_bytes(CONTENT["kineto"])
    assert recognise(tmp_path) == "kineto"
    (tmp_path / "manifest.json").write_text('{"schema": "brakecheck/run/1"}')
    assert recognise(tmp_path) == "run"
    with pytest.raises(BrakecheckError, match="measurements"):
        open_evidence(tmp_path)
    with pytest.raises(BrakecheckError, match="cannot open"):
        recognise(tmp_path / "absent")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["ncu-csv", "nsys-csv", "nccl-log"]), packed=st.booleans(), cut=st.integers(1, 3000),
       flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 7)), max_size=20))
def test_damaged_files_are_errors_or_recordings(tmp_path, kind, packed, cut, flips):
    path = tmp_path / "damaged"
    data = gzip.compress(CONTENT[kind], mtime=0) if packed else CONTENT[kind]
    path.write_bytes(damaged(data, cut, flips))
    try:
        if recognise(path) in ("ncu-csv", "nsys-csv", "nccl-log"):
            open_evidence(path)
    except BrakecheckError as error:
        assert error.where and error.todo


def test_damaged_gzip_of_an_export_is_an_error(tmp_path):
    whole = (DATA / "nsys" / "graphs-2025.5.sqlite.gz").read_bytes()
    path = tmp_path / "cut.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BrakecheckError, match="damaged or cut off"):
        open_evidence(path)
    assert unpacked("nsys/graphs-2025.5.sqlite", tmp_path).exists()
