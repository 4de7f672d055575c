"""Static verdicts on evidence built by hand, so that the truth is known."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brakecheck.evidence.buildlog import parse_log
from brakecheck.evidence.names import base_name, short_name
from brakecheck.model import (
    Arm,
    Comparison,
    Component,
    KernelCode,
    Limit,
    Note,
    Occupancy,
    Resources,
    Source,
    Stack,
    State,
    Unit,
    UsageError,
    Verdict,
)
from brakecheck.verdict import Policy, compare_static, load_policy, verdicts_of
from brakecheck.verdict.changes import suspicion
from brakecheck.verdict.match import match_kernels
from brakecheck.verdict.policy import Scope, StaticRules

MIX = {"load.global.b128": 8, "store.global.b128": 4, "fp32": 64, "int": 40, "barrier": 2, "control": 10}
WGMMA = Note("info", "wgmma.mma_async instructions are serialized due to function boundary", "C7510",
             cause="wgmma serialised: a call crosses the pipeline", advice="make the called function inline")


def arm(release, ptxas=None, name=None):
    spec = f"cuda=={release}" + (f"+ptxas=={ptxas}" if ptxas else "")
    parts = {"nvrtc": release, "ptxas": ptxas or release, "headers": release, "cccl": release, "nvdisasm": "13.5"}
    stack = Stack(spec, f"cuda {release}" + (f" + ptxas {ptxas}" if ptxas else ""),
                  tuple(Component(n, f"{v}.0") for n, v in parts.items()))
    return Arm(name or spec, stack)


def kernel(name="softmax_warp", code="A", text=None, arch="sm_90a", registers=40, mix=None, threads=256, warps=48,
           demangled=None, **more):
    resources = Resources(registers, stack=0, shared=more.pop("shared", 1024), spill_stores=more.pop("spills", 0),
                          spill_loads=0, barriers=1, code=more.pop("size", 2048))
    mix = dict(MIX if mix is None else mix)
    return KernelCode(name, demangled or name, arch, resources, f"code-{code}", f"text-{text or code}",
                      more.pop("instructions", sum(mix.values())), mix,
                      occupancy=Occupancy(threads, 0, warps, 64, "registers"), **more)


def unit(*kernels, source="softmax.cu", arch="sm_90a", ptx="p", cubin=None, **more):
    fresh = tuple(replace(k, arch=arch) for k in kernels)
    return Unit(source, arch, "stack", "ok", ptx_sha256=ptx,
                cubin_sha256=cubin or f"cubin-{[k.code_sha256 for k in fresh]}", kernels=fresh, **more)


def failed(message="softmax.cu(3): error: identifier \"x\" is undefined", source="softmax.cu", arch="sm_90a", **more):
    return Unit(source, arch, "stack", "failed", message=f"compiling\n{message}\n1 error", **more)


def no_arch(arch, source="softmax.cu", message="sm_70 was dropped in CUDA 13.0"):
    return Unit(source, arch, "stack", "missing", message=message)


def compare(*units, arms=None, policy=None, sources=()):
    arms = arms or [arm(r) for r in ("12.9", "13.0", "13.2", "13.5")[:len(units)]]
    made = [list(u) if isinstance(u, (list, tuple)) else [u] for u in units]
    return compare_static(arms, made, sources, policy)


def only(comparison):
    (delta,) = comparison.deltas
    return delta


# --- two stacks ----------------------------------------------------------------------------------------------------

def test_identical_code_is_go():
    result = compare(unit(kernel()), unit(kernel()))
    assert (result.verdict, only(result).state, only(result).reason) == (Verdict.GO, State.SAME, "identical-sass")
    assert result.coverage == {"compared": 1, "same": 1, "changed": 0, "broken": 0, "fixed": 0, "missing": 0, "new": 0}
    assert "identical machine code with CUDA 13.0" in result.headline
    assert result.causes == () and result.mitigations == ()


def test_changed_code_is_withheld_and_ranked():
    names = ["a", "b", "c", "d"]
    base = unit(*(kernel(n, code=n) for n in names))
    worse = unit(kernel("a", code="a"), kernel("b", code="b2", text="b"), kernel("c", code="c2", local_ops=64),
                 kernel("d", code="d2", warps=16))
    result = compare(unit(*(kernel(n, code=n, text=n) for n in names)), worse)
    assert result.verdict is Verdict.WITHHELD
    assert [d.case for d in result.deltas] == ["c", "d", "b", "a"]
    assert [d.reason for d in result.deltas][2] == "schedule-only"
    assert result.headline == ("WITHHELD: 3 of 4 kernels changed; static evidence cannot tell whether they got slower. "
                               "Measure these first: c (sm_90a), d (sm_90a), b (sm_90a).")
    assert [r.scope["case"] for r in result.reasons if r.code == "measure"] == ["c", "d", "b"]
    assert compare(base, base).verdict is Verdict.GO


def test_no_longer_compiles_is_a_brake_that_names_kernel_stack_and_message():
    result = compare([unit(kernel()), unit(kernel(), arch="sm_80")], [failed(), unit(kernel(), arch="sm_80")])
    assert result.verdict is Verdict.BRAKE
    assert result.headline == "BRAKE: softmax_warp no longer compiles with CUDA 13.0 for sm_90a (not so for sm_80)."
    broken = result.deltas[0]
    assert (broken.state, broken.reason, broken.component) == (State.BROKEN, "does-not-compile", "nvrtc")
    assert 'identifier "x" is undefined' in broken.text and broken.candidate["message"].startswith("compiling")
    assert result.reasons[0].scope == {"operator": "softmax", "case": "softmax_warp", "arch": "sm_90a"}


def test_compiles_now_is_fixed_and_go():
    result = compare(failed(), unit(kernel()))
    assert (result.verdict, only(result).state, only(result).reason) == (Verdict.GO, State.FIXED, "compiles-now")
    assert result.coverage["fixed"] == 1


def test_fails_everywhere_is_missing_and_never_go_alone():
    result = compare(failed(), failed())
    assert (result.verdict, only(result).state, only(result).reason) == (
        Verdict.WITHHELD, State.MISSING, "fails-everywhere")
    beside = compare([failed(), unit(kernel(), source="other.cu")], [failed(), unit(kernel(), source="other.cu")])
    assert beside.verdict is Verdict.GO and beside.coverage["missing"] == 1 and "1 missing" in beside.headline
    assert any(r.code == "fails-everywhere" for r in beside.reasons)


def test_nothing_compared_is_withheld():
    for result in (compare([], []), compare(unit(), unit()), compare(no_arch("sm_90a"), unit(kernel()))):
        assert result.verdict is Verdict.WITHHELD and "nothing was compared" in result.headline


def test_architecture_dropped_by_the_candidate():
    base = [unit(kernel()), unit(kernel(), arch="sm_70")]
    result = compare(base, [unit(kernel()), no_arch("sm_70")])
    missing = next(d for d in result.deltas if d.arch == "sm_70")
    assert (missing.state, missing.reason) == (State.MISSING, "arch-unknown")
    assert "dropped in CUDA 13.0" in missing.text and missing.component is None
    assert result.verdict is Verdict.WITHHELD and "cannot build for sm_70" in result.headline
    assert next(r for r in result.reasons if r.code == "arch-unknown").scope["arch"] == "sm_70"
    allowed = Policy(scope=Scope(allow_missing_archs=("sm_70",)))
    assert compare(base, [unit(kernel()), no_arch("sm_70")], policy=allowed).verdict is Verdict.GO


def test_missing_kernels_share_a_reason_with_its_scope():
    base = [unit(kernel("a"), kernel("b", "B")), unit(kernel("a"), kernel("b", "B"), arch="sm_70")]
    result = compare(base, [base[0], no_arch("sm_70")])
    (reason,) = [r for r in result.reasons if r.code == "arch-unknown"]
    assert reason.scope == {"arch": "sm_70"} and "and 1 more kernel" in reason.text
    assert result.headline == ("WITHHELD: CUDA 13.0 cannot build for sm_70, so nothing tells what happens there; "
                               "the rest is the same.")


def test_architecture_new_in_the_candidate_is_no_obstacle():
    result = compare([unit(kernel()), no_arch("sm_103a")], [unit(kernel()), unit(kernel(), arch="sm_103a")])
    assert result.verdict is Verdict.GO and result.coverage["new"] == 1
    assert {d.reason for d in result.deltas} == {"identical-sass", "arch-new"}


def test_kernel_that_is_gone_withholds():
    result = compare(unit(kernel("a"), kernel("b", code="B")), unit(kernel("a")))
    assert result.verdict is Verdict.WITHHELD
    assert next(d for d in result.deltas if d.case == "b").reason == "kernel-gone"


def test_source_one_arm_did_not_build_withholds():
    result = compare([unit(kernel()), unit(kernel(), source="b.cu")], [unit(kernel())])
    assert result.verdict is Verdict.WITHHELD
    assert next(d for d in result.deltas if d.source == "b.cu").reason == "not-built"


# --- field reports -------------------------------------------------------------------------------------------------

def limit(arch, resource="shared memory", asked=104_448, available=101_376):
    return Limit(arch, resource, asked, available, f"{asked:,} bytes of {resource}, {available:,} available")


def test_launch_limit_on_an_architecture_that_was_not_compiled_for():
    before, after = kernel(shared=90_000), kernel(code="B", shared=104_448, limits=(limit("sm_89"),))
    result = compare(unit(before), unit(after))
    assert result.verdict is Verdict.HOLD
    assert result.headline == "HOLD: softmax_warp would no longer launch on sm_89 with CUDA 13.0 (not so for sm_90a)."
    predicted = result.deltas[0]
    assert (predicted.arch, predicted.state, predicted.reason) == ("sm_89", State.BROKEN, "cannot-launch-elsewhere")
    assert "104,448" in predicted.text and "predicted from the code for sm_90a" in predicted.text
    assert [r.scope["arch"] for r in result.reasons if r.code == "cannot-launch-elsewhere"] == ["sm_89"]
    assert next(d for d in result.deltas if d.arch == "sm_90a").state is State.UNDECIDED
    strict = Policy(static=StaticRules(brake_on=("cannot-launch-elsewhere",)))
    assert compare(unit(before), unit(after), policy=strict).verdict is Verdict.BRAKE
    elsewhere = Policy(scope=Scope(ignore_archs=("sm_89",)))
    assert compare(unit(before), unit(after), policy=elsewhere).verdict is Verdict.WITHHELD
    old = kernel(limits=(limit("sm_89"),))
    assert compare(unit(old), unit(replace(after))).verdict is Verdict.WITHHELD  # it never launched there


def test_compiled_architectures_speak_for_themselves():
    after = kernel(code="B", limits=(limit("sm_89"),))
    result = compare([unit(kernel()), unit(kernel(), arch="sm_89")], [unit(after), unit(kernel(), arch="sm_89")])
    assert all(d.reason != "cannot-launch-elsewhere" for d in result.deltas)


def test_prediction_is_made_once_from_the_nearest_lower_architecture():
    after = kernel(code="B", limits=(limit("sm_89"),))
    archs = ("sm_80", "sm_90a")
    result = compare([unit(kernel(), arch=a) for a in archs], [unit(after, arch=a) for a in archs])
    (predicted,) = [d for d in result.deltas if d.reason == "cannot-launch-elsewhere"]
    assert "code for sm_80" in predicted.text


def test_registers_times_threads_over_the_limit_is_predicted():
    over = Limit("sm_90", "registers", 87_040, 65_536, "512 threads x 170 registers take 87,040 of 65,536")
    result = compare(unit(kernel(registers=60, threads=512)),
                     unit(kernel(code="B", registers=170, threads=512, warps=0, limits=(over,))))
    assert result.verdict is Verdict.BRAKE
    assert result.headline == "BRAKE: softmax_warp can no longer launch on sm_90a with CUDA 13.0."
    assert only(result).reason == "cannot-launch" and "170 registers" in only(result).text
    assert next(c for c in only(result).changes if c.what == "registers").text == "registers 60 -> 170"
    assert any("__launch_bounds__" in m.action and m.guard and not m.measured for m in result.mitigations)
    assert only(compare(unit(kernel(limits=(over,))), unit(kernel(code="B")))).reason == "launches-now"


def test_wgmma_serialised_now_is_a_brake_with_advice():
    mangled = "_Z" + "x" * 1200
    base = kernel(mangled, demangled="gemm")
    result = compare(unit(base), unit(replace(base, code_sha256="code-B", text_sha256="text-B", notes=(WGMMA,))))
    assert result.verdict is Verdict.BRAKE and only(result).reason == "wgmma-serialised"
    assert "C7510" in next(c for c in only(result).changes if c.what == "note:C7510").text
    assert any("make the called function inline" in m.action for m in result.mitigations)
    both = replace(base, notes=(WGMMA,))
    assert compare(unit(both), unit(replace(both, code_sha256="B"))).verdict is Verdict.WITHHELD  # it was before, too
    by_unit = replace(unit(base), notes=(replace(WGMMA, kernel=mangled),))
    assert only(compare(unit(base), by_unit)).reason == "wgmma-serialised"


def test_injected_waits_ask_for_a_correctness_check():
    (note,) = parse_log("ptxas info    : (C7519) warpgroup.arrive is injected in order to allow use of registers in "
                        "GMMA in function 'k'").notes
    result = compare(unit(kernel()), unit(kernel(code="B", notes=(note,))))
    assert result.verdict is Verdict.WITHHELD
    assert any("Compare the kernel's results with a reference" in m.action for m in result.mitigations)


def test_spill_stores_alone_never_rank():
    calm = suspicion(kernel(), kernel(code="B"))
    assert suspicion(kernel(), kernel(code="B", spills=4096)) == calm
    fewer_spills_more_local = kernel(code="B", spills=60, local_ops=208)
    more_spills_fewer_local = kernel(code="B", spills=640, local_ops=12)
    assert suspicion(kernel(), fewer_spills_more_local) > suspicion(kernel(), more_spills_fewer_local) > calm


def test_equal_ptx_and_another_cubin_names_the_assembler():
    result = compare(unit(kernel(), ptx="p"), unit(kernel(code="B"), ptx="p"))
    assert only(result).component == "ptxas" and "PTX is identical" in only(result).attribution
    (cause,) = result.causes
    assert (cause.component, cause.share) == ("ptxas", 1.0) and "softmax_warp (sm_90a)" in cause.evidence[0]
    assert cause.refute.startswith("brakecheck compare cuda==12.9 cuda==12.9+ptxas==13.0:")


def test_other_ptx_names_the_front_end_and_mentions_headers():
    result = compare(unit(kernel(), ptx="p"), unit(kernel(code="B"), ptx="q"))
    assert only(result).component == "nvrtc" and "cccl, headers differ" in only(result).attribution
    assert result.causes[0].refute.startswith("brakecheck compare cuda==12.9+ptxas==13.0 cuda==13.0 (both")
    nvcc = compare(unit(kernel(), ptx="p", front="nvcc"), unit(kernel(code="B"), ptx="q", front="nvcc"))
    assert only(nvcc).component == "nvcc" and "--front nvcc" in nvcc.causes[0].refute
    unknown = compare(unit(kernel(), ptx=None), unit(kernel(code="B"), ptx=None))
    assert only(unknown).component is None and unknown.causes[0].component == "unattributed"


def test_going_back_to_an_older_release_refutes_with_legal_stacks():
    result = compare(unit(kernel()), unit(kernel(code="B")), arms=[arm("13.2"), arm("12.9")])
    assert result.causes[0].refute.startswith("brakecheck compare cuda==12.9+ptxas==13.2 cuda==12.9:")


def test_overlay_of_one_component_is_named():
    arms = [arm("12.6"), arm("12.6", ptxas="12.8")]
    result = compare(unit(kernel()), unit(kernel(code="B")), arms=arms)
    assert only(result).component == "ptxas" and "only component that differs" in only(result).attribution
    assert result.causes[0].refute.startswith("brakecheck compare cuda==12.6 cuda==12.6:")


def test_broken_by_ptxas_is_mitigated_by_a_ptxas_that_can_read_the_ptx():
    rejected = failed("ptxas fatal : Ptx assembly aborted due to errors", ptx_sha256="p")
    result = compare(unit(kernel()), rejected, arms=[arm("12.6", ptxas="12.8"), arm("12.6", ptxas="12.9")])
    assert only(result).component == "ptxas"
    assert result.mitigations[0].action == "pin ptxas: cuda==12.6+ptxas==12.8 for softmax_warp"
    assert result.mitigations[0].measured is False and result.mitigations[0].recovers is None
    result = compare(unit(kernel()), rejected, arms=[arm("12.9"), arm("13.2")])
    assert only(result).component == "ptxas" and "made PTX, and ptxas rejected it" in only(result).attribution
    assert result.mitigations[0].action.startswith("build softmax_warp with cuda==12.9 and keep those cubins")
    assert "cannot read PTX" in result.mitigations[0].guard


def test_ptx_sources_are_ptxas_work():
    result = compare(unit(kernel(), front="ptx"), unit(kernel(code="B"), front="ptx"))
    assert only(result).component == "ptxas"


# --- what changed --------------------------------------------------------------------------------------------------

def test_changes_in_words():
    base = kernel(mix={"tensor.hgmma": 64, "load.global.b128": 8, "tma": 4, "fp32": 10})
    after = kernel(code="B", registers=168, warps=16, local_ops=64, shared=2048, size=4096, spills=8,
                   mix={"tensor.hmma": 256, "load.global.b32": 32, "fp32": 12})
    result = compare(unit(base), unit(after))
    said = {c.what: c.text for c in only(result).changes}
    assert said["tensor"] == "tensor-core instructions HGMMA x 64 -> HMMA x 256: an older kind"
    assert said["occupancy"] == "occupancy 75% -> 25% (limited by registers)"
    assert said["registers"] == "registers 40 -> 168"
    assert said["local_ops"] == "local-memory operations 0 -> 64"
    assert said["global_load"] == "global loads b128 x 8 -> b32 x 32"
    assert said["tma"] == "TMA copies 4 -> 0: lost"
    assert said["mix:fp32"] == "fp32 instructions 10 -> 12"
    assert {"shared", "code", "spill_stores", "instructions"} <= said.keys()
    assert next(iter(said)) == "tensor"


def test_tensor_downgrade_outranks_everything_small():
    wgmma = kernel(mix={**MIX, "tensor.hgmma": 64})
    downgraded = suspicion(wgmma, kernel(code="B", mix={**MIX, "tensor.hmma": 64}))
    assert downgraded > suspicion(wgmma, kernel(code="B", mix={**MIX, "tensor.hgmma": 64}, warps=24, local_ops=4))
    assert suspicion(kernel(mix={**MIX, "tensor.hmma": 64}), replace(wgmma, code_sha256="B")) < 20  # an upgrade


def test_schedule_only_is_lowest():
    assert suspicion(kernel(), kernel(code="B", text="A")) < suspicion(kernel(), kernel(code="B"))


WORSE = {
    "local": lambda k, n: replace(k, local_ops=k.local_ops + n),
    "occupancy": lambda k, n: replace(k, occupancy=replace(k.occupancy, warps=max(0, k.occupancy.warps - n))),
    "instructions": lambda k, n: replace(k, instructions=k.instructions + n),
    "memory": lambda k, n: replace(k, mix={**k.mix, "load.global.b128": k.mix["load.global.b128"] + n}),
    "narrower": lambda k, n: replace(k, mix={**k.mix, "load.global.b32": k.mix.get("load.global.b32", 0) + n}),
    "barriers": lambda k, n: replace(k, mix={**k.mix, "barrier": k.mix["barrier"] + n}),
}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(WORSE)), st.integers(1, 40)), min_size=1, max_size=6))
def test_suspicion_never_falls_when_things_get_worse(damage):
    current = kernel(code="B")
    score = suspicion(kernel(), current)
    for what, amount in damage:
        if what == "memory" and "load.global.b32" in current.mix:
            continue  # more wide loads among narrow ones widen the mean
        current = WORSE[what](current, amount)
        after = suspicion(kernel(), current)
        assert after >= score
        score = after


# --- more than two stacks ------------------------------------------------------------------------------------------

ARMS4 = [arm(r, name=n) for r, n in (("12.4", "A"), ("12.9", "B"), ("13.0", "C"), ("13.5", "D"))]


def sequence(*codes):
    return compare(*(failed() if c == "!" else no_arch("sm_90a") if c == "-" else unit(kernel(code=c)) for c in codes),
                   arms=ARMS4[:len(codes)])


def steps(result):
    return [(d.step, d.since, d.state.value) for d in sorted(result.deltas, key=lambda d: d.step[1])]


@pytest.mark.parametrize("codes, expected, verdict", [
    ("AAAA", [(("A", "B"), ("C", "D"), "same")], "GO"),
    ("AABB", [(("B", "C"), ("D",), "undecided")], "WITHHELD"),
    ("ABBB", [(("A", "B"), ("C", "D"), "undecided")], "WITHHELD"),
    ("ABAA", [(("A", "B"), (), "undecided"), (("B", "C"), ("D",), "undecided")], "GO"),
    ("ABCD", [(("A", "B"), (), "undecided"), (("B", "C"), (), "undecided"), (("C", "D"), (), "undecided")], "WITHHELD"),
    ("AA!!", [(("B", "C"), ("D",), "broken")], "BRAKE"),
    ("A!!A", [(("A", "B"), ("C",), "broken"), (("C", "D"), (), "fixed")], "GO"),
    ("!!AA", [(("B", "C"), ("D",), "fixed")], "GO"),
    ("A-AA", [(("A", "B"), (), "missing"), (("A", "C"), ("D",), "same")], "GO"),
    ("A-BB", [(("A", "B"), (), "missing"), (("A", "C"), ("D",), "undecided")], "WITHHELD"),
    ("--AA", [(("B", "C"), ("D",), "new")], "WITHHELD"),
    ("A---", [(("A", "B"), ("C", "D"), "missing")], "WITHHELD"),
    ("!!!!", [(("A", "B"), ("C", "D"), "missing")], "WITHHELD"),
])
def test_a_change_is_one_step(codes, expected, verdict):
    result = sequence(*codes)
    assert steps(result) == expected
    verdicts = verdicts_of(result)
    assert verdicts[result.arms[-1].name].value == verdict
    assert result.verdict is max(verdicts.values(), key=lambda v: v.rank)


def test_of_several_candidates_the_worst_decides_and_the_headline_says_which_are_go():
    broken = sequence(*"A!A")
    assert broken.verdict is Verdict.BRAKE and broken.headline.startswith("BRAKE: B: ")
    assert broken.headline.endswith(" | GO: C.") and broken.reasons[0].code == "does-not-compile"
    assert sequence(*"AAA").headline.endswith(" | GO: B, C.") and sequence(*"ABC").headline.endswith(" | GO: none.")


def test_each_candidate_has_a_verdict():
    result = sequence("A", "A", "B", "!")
    assert verdicts_of(result) == {"B": Verdict.GO, "C": Verdict.WITHHELD, "D": Verdict.BRAKE}
    assert result.verdict is Verdict.BRAKE and "CUDA 13.5" in result.headline


def test_rename_is_followed_through_four_stacks():
    made = [unit(kernel("k1", "A")), unit(kernel("k2", "A")), unit(kernel("k2", "B")), unit(kernel("k3", "B"))]
    result = compare(*made, arms=ARMS4)
    assert steps(result) == [(("B", "C"), ("D",), "undecided")]
    assert only(result).kernel == "k3" and only(result).base["kernel"] == "k2"
    renamed = compare(unit(kernel("k1", "A", demangled="k")), unit(kernel("k2", "B", demangled="k")))
    assert only(renamed).changes[-1].what == "name" and only(renamed).reason == "changed-sass"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("ABC!-"), min_size=2, max_size=4))
def test_steps_cover_every_change_once(codes):
    result = sequence(*codes)
    arms = [a.name for a in ARMS4[:len(codes)]]
    starts = [d.step[1] for d in result.deltas]
    assert len(set(starts)) == len(starts)
    covered = [name for d in result.deltas for name in (d.step[1], *d.since)]
    assert len(covered) == len(set(covered)) and set(covered) <= set(arms[1:])
    for before, after, name in zip(codes, codes[1:], arms[1:]):
        if before != after and {before, after} & set("ABC"):
            assert name in starts
    assert set(verdicts_of(result)) == set(arms[1:])
    if result.verdict is Verdict.GO:
        assert codes[-1] in "ABC" and (codes[0] == codes[-1] or codes[0] == "!")


# --- matching ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("demangled, expected", [
    ("softmax", "softmax"), ("void ns::softmax<float, 4>(float*, int)", "softmax"),
    ("void (anonymous namespace)::k<a::b<int>>(c<d>)", "k"), ("void cub::Agent<int>::run<(bool)1>(int)", "run"),
])
def test_base_name(demangled, expected):
    assert base_name(demangled) == expected


def test_short_name_keeps_template_arguments():
    assert short_name("void (anonymous namespace)::softmax<float, 4>(float*, int)") == "softmax<float, 4>"


def test_matching_in_turn():
    base = [kernel("same", "1"), kernel("moved", "2"), kernel("edited", "3", demangled="void f<1>(int)"),
            kernel("lost", "4", demangled="g", mix={"fp64": 900})]
    after = [kernel("same", "9"), kernel("renamed", "2"), kernel("edited2", "5", demangled="void f<1>(long)"),
             kernel("fresh", "6", demangled="g", mix={"int": 5})]
    found = {(m.base.name if m.base else None, m.candidate.name if m.candidate else None): m.how
             for m in match_kernels(base, after)}
    assert found == {("same", "same"): "name", ("moved", "renamed"): "code", ("edited", "edited2"): "similar",
                     ("lost", None): "missing", (None, "fresh"): "new"}


def test_schedule_only_rename_matches_by_text():
    (match,) = match_kernels([kernel("a", "1", text="t")], [kernel("b", "2", text="t")])
    assert match.how == "text"


def test_no_unique_partner_no_match():
    base = [kernel("a", "1", demangled="f")]
    after = [kernel("b", "2", demangled="f"), kernel("c", "3", demangled="f")]
    assert sorted(m.how for m in match_kernels(base, after)) == ["missing", "new", "new"]


NAMES = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("12345"), st.sampled_from(["f", "g"])),
                 unique_by=lambda t: t[0], max_size=6)


@settings(max_examples=40, deadline=None)
@given(NAMES, NAMES, st.randoms())
def test_matching_loses_nothing_and_ignores_order(left, right, rng):
    base, after = ([kernel(n, c, demangled=d) for n, c, d in side] for side in (left, right))
    found = match_kernels(base, after)
    assert sorted(m.base.name for m in found if m.base) == sorted(k.name for k in base)
    assert sorted(m.candidate.name for m in found if m.candidate) == sorted(k.name for k in after)
    rng.shuffle(base)
    rng.shuffle(after)
    key = [(m.base and m.base.name, m.candidate and m.candidate.name, m.how) for m in match_kernels(base, after)]
    assert key == [(m.base and m.base.name, m.candidate and m.candidate.name, m.how) for m in found]


# --- properties of the whole ---------------------------------------------------------------------------------------

KERNELS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("123456"), st.integers(16, 255),
                             st.integers(0, 50)), unique_by=lambda t: t[0], min_size=1, max_size=6)


def build(rows, arch="sm_90a"):
    return unit(*(kernel(n, c, registers=r, local_ops=o) for n, c, r, o in rows), arch=arch)


@settings(max_examples=25, deadline=None)
@given(KERNELS, st.sets(st.sampled_from(["sm_80", "sm_89", "sm_90a"]), min_size=1), st.integers(2, 4))
def test_a_against_a_is_go(rows, archs, arms):
    result = compare(*([build(rows, a) for a in archs] for _ in range(arms)), arms=ARMS4[:arms])
    assert result.verdict is Verdict.GO and set(verdicts_of(result).values()) == {Verdict.GO}
    assert {d.state for d in result.deltas} == {State.SAME} and len(result.deltas) == len(rows) * len(archs)


@settings(max_examples=25, deadline=None)
@given(KERNELS, KERNELS, st.randoms())
def test_order_of_kernels_and_units_does_not_matter(left, right, rng):
    archs = ["sm_80", "sm_90a"]
    first = compare([build(left, a) for a in archs], [build(right, a) for a in archs])
    for rows in (left, right, archs):
        rng.shuffle(rows)
    again = compare([build(left, a) for a in archs], [build(right, a) for a in archs])
    told = [replace(c, deltas=tuple(replace(d, base={}, candidate={}) for d in c.deltas)) for c in (first, again)]
    assert told[0] == told[1]


@settings(max_examples=25, deadline=None)
@given(KERNELS, KERNELS)
def test_go_only_when_all_that_was_there_is_the_same(left, right):
    result = compare(build(left), build(right))
    names = {d.case for d in result.deltas}
    assert names <= {r[0] for r in left} | {r[0] for r in right}
    if result.verdict is Verdict.GO:
        assert {r[1] for r in left} <= {r[1] for r in right}
    else:
        assert result.verdict is Verdict.WITHHELD
    assert result.coverage["compared"] + result.coverage["missing"] + result.coverage["new"] == len(result.deltas)


def test_json_round_trip():
    result = sequence("A", "B", "!", "A")
    again = Comparison.from_json(json.loads(json.dumps(result.to_json())))
    assert again.verdict is result.verdict and again.deltas == result.deltas and again.to_json() == result.to_json()


def test_operator_of_the_source_and_of_a_file_without_one():
    sources = [Source("softmax.cu", "fused softmax")]
    assert only(compare(unit(kernel()), unit(kernel()), sources=sources)).operator == "fused softmax"
    assert only(compare(unit(kernel(), source="mine/x.cu"), unit(kernel(), source="mine/x.cu"))).operator == "x"


def test_a_source_that_is_not_meant_for_an_architecture_is_not_missing():
    sources = [Source("softmax.cu", "gemm", min_arch=90)]
    low = no_arch("sm_80", message="softmax.cu needs sm_90 or newer")
    result = compare([unit(kernel()), low], [unit(kernel()), low], sources=sources)
    assert result.verdict is Verdict.GO and result.coverage["missing"] == 0 and len(result.deltas) == 1


def test_one_source_with_different_defines_is_two():
    sources = [Source("s.cu", "plain"), Source("s.cu", "restrict", defines=("R",))]
    two = [unit(kernel(), source="s.cu"), unit(kernel(code="R"), source="s.cu")]
    changed = [two[0], unit(kernel(code="S"), source="s.cu")]
    result = compare(two, changed, sources=sources)
    assert {(d.operator, d.state) for d in result.deltas} == {("plain", State.SAME), ("restrict", State.UNDECIDED)}


def test_variants_of_one_source_are_told_apart():
    """The catalogue compiles softmax with and without __restrict__: two rows of one name would say nothing."""
    sources = [Source("s.cu", "s", defines=("N=4",)), Source("s.cu", "s", defines=("N=4", "PAD=0"))]
    made = [unit(kernel(demangled="void f<2>(int)"), source="s.cu") for _ in sources]
    result = compare(made, made, sources=sources)
    assert [d.case for d in result.deltas] == ["void f<2>(int)", "void f<2>(int) -DPAD=0"]
    assert short_name(result.deltas[1].case) == "f<2> -DPAD=0"


def test_largest_block_is_said_where_the_launch_is_not_known():
    """F17: 60 -> 170 registers, and nobody said how the kernel is launched."""
    base, candidate = (replace(kernel(code=c, registers=r), occupancy=None) for c, r in (("A", 60), ("B", 170)))
    result = compare(unit(base), unit(candidate))
    assert "threads that the registers allow a block 1024 -> 256" in [c.text for c in only(result).changes]


def test_a_kernel_that_neither_stack_can_launch_is_not_to_be_measured():
    over = Limit("sm_90", "registers", 262_144, 65_536, "1,024 threads x 254 registers")
    for code in "AB":
        result = compare(*(unit(kernel(code=c, limits=(over,))) for c in ("A", code, "A")))
        assert result.verdict is Verdict.WITHHELD and only(result).reason == "launches-nowhere"
        assert "with neither stack: 1,024 threads x 254 registers" in result.headline
    beside = compare(unit(kernel(limits=(over,)), kernel("b")), unit(kernel(limits=(over,)), kernel("b")))
    assert beside.verdict is Verdict.GO and beside.coverage["missing"] == 1


def test_a_source_without_kernels_says_so():
    """The usual case: a template that nothing instantiates."""
    result = compare(unit(source="scale.cu"), unit(source="scale.cu"))
    assert result.verdict is Verdict.WITHHELD and only(result).reason == "no-kernel"
    assert "scale.cu holds no kernel for sm_90a" in result.headline and "instantiated" in result.headline


def test_code_that_cannot_be_read_is_no_source_without_kernels():
    """The newest disassembler does not know sm_70, and CUDA 13 dropped it: a loss, though no kernel was seen."""
    note = Note("error", "nvdisasm cannot disassemble code for sm_70")
    unread = replace(unit(arch="sm_70"), notes=(note,))
    both = compare(unread, unread)
    assert both.verdict is Verdict.WITHHELD and only(both).reason == "not-read"
    assert "softmax.cu was compiled for sm_70, and its code cannot be read: nvdisasm" in both.headline
    beside = compare([unread, unit(kernel())], [no_arch("sm_70"), unit(kernel())])
    assert beside.verdict is Verdict.WITHHELD and "cannot build for sm_70" in beside.headline
    steps = compare(no_arch("sm_70"), unread, unread, no_arch("sm_70")).deltas
    assert [(d.step[1], d.reason, d.since) for d in sorted(steps, key=lambda d: d.step)] == [
        ("cuda==13.0", "arch-new", ("cuda==13.2",)), ("cuda==13.5", "arch-unknown", ())]
    broke, fixed = compare(unread, failed(arch="sm_70")), compare(failed(arch="sm_70"), unread)
    assert broke.verdict is Verdict.BRAKE and only(broke).reason == "does-not-compile"
    assert only(fixed).state is State.FIXED


def test_one_stack_is_a_usage_error():
    with pytest.raises(UsageError):
        compare(unit(kernel()))


# --- policy --------------------------------------------------------------------------------------------------------

def test_ignored_kernels_are_counted_and_do_not_decide():
    made = [unit(kernel("old_a", "1"), kernel("b", "2"))], [unit(kernel("old_a", "9"), kernel("b", "2"))]
    for rule in ("old_*", "operator:softmax"):
        result = compare(*made, policy=Policy(scope=Scope(ignore=(rule,))))
        assert len(result.deltas) == 2
        if rule == "old_*":
            assert result.verdict is Verdict.GO and result.coverage["ignored"] == 1
        else:
            assert result.verdict is Verdict.WITHHELD and "policy ignores everything" in result.headline


@pytest.mark.parametrize("rules, part", [
    (StaticRules(max_registers=1.25), "registers 40 -> 60"),
    (StaticRules(max_occupancy_drop=0.2), "occupancy 75% -> 50%"),
    (StaticRules(max_local_ops=8), "0 -> 12 local-memory operations"), (StaticRules(max_code=1.5), "code 2048 -> 4096"),
])
def test_growth_over_a_limit_holds(rules, part):
    after = kernel(code="B", registers=60, warps=32, local_ops=12, size=4096)
    result = compare(unit(kernel()), unit(after), policy=Policy(static=rules))
    assert result.verdict is Verdict.HOLD and part in result.headline
    assert result.environment["policy"]["static"]
    fine = replace(kernel(code="B"), resources=Resources(40))
    assert compare(unit(kernel()), unit(fine), policy=Policy(static=rules)).verdict is Verdict.WITHHELD


def test_broken_is_never_go_whatever_the_policy():
    lax = Policy(static=StaticRules(brake_on=(), hold_on=()))
    fine = unit(kernel(), arch="sm_80")
    result = compare([unit(kernel()), fine], [failed(), fine], policy=lax)
    assert result.verdict is Verdict.WITHHELD and "no longer compiles" in result.headline


def test_policy_file(tmp_path):
    assert load_policy(directory=tmp_path) == Policy()
    path = tmp_path / "brakecheck.toml"
    path.write_text('[scope]\nignore = ["operator:old"]\n\n[static]\nmax_registers = 2\nmax_local_ops = 4\n'
                    'brake_on = ["does-not-compile"]\n\n[measured]\nmargin = 0.02\n')
    policy = load_policy(directory=tmp_path)
    assert policy.scope.ignore == ("operator:old",) and policy.measured.margin == 0.02
    assert policy.static.max_registers == 2.0 and policy.static.brake_on == ("does-not-compile",)
    assert policy.source == str(path) and load_policy(path) == policy
    path.write_text("[measured.weights]\nmm = 1\n[measured.alternatives]\nmm = [\"bmm\", \"batches\"]\n")
    assert load_policy(path).measured.weights == {"mm": 1.0}
    assert load_policy(path).measured.alternatives == {"mm": ("bmm", "batches")}


@pytest.mark.parametrize("text, line, part", [
    ("[scope]\nignored = []\n", 2, "did you mean ignore?"), ("[statik]\nx = 1\n", 1, "did you mean static?"),
    ("[static]\n\nmax_registers = \"2\"\n", 3, "max_registers = 1.25"), ("scope = 1\n", 1, "[scope]"),
    ("[scope]\nignore = \"x\"\n", 2, "ignore = ["), ("[static]\nmax_local_ops = 1.5\n", 2, "max_local_ops = 10"),
    ("[static]\nbrake_on = [\"does-not-compil\"]\n", 2, "did you mean does-not-compile?"),
    ("[measured.weights]\nmm = \"much\"\n", 2, "mm = 1.25"), ("[measured]\nweights = 1\n", 2, "[measured.weights]"),
    ("[measured.alternatives]\nbmm = [\"mm\"]\n", 2, "batch 1"),
    ("[measured]\nmargin = true\n", 2, "margin = "), ("[measured]\nmargin = -0.1\n", 2, "0 or more"),
])
def test_policy_errors_name_line_and_remedy(tmp_path, text, line, part):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_policy(path)
    assert error.value.where.startswith(f"{path}:{line} ") and part in error.value.todo


def test_the_documented_file_is_the_defaults(tmp_path):
    text = (Path(__file__).parent.parent / "docs/policy.md").read_text().split("```toml\n")[1].split("```")[0]
    path = tmp_path / "p.toml"
    path.write_text(text)
    assert replace(load_policy(path), source=None) == Policy()
    path.write_text(text.replace("# max_", "max_"))
    assert None not in vars(load_policy(path).static).values()
    for part in ("scope", "static", "measured"):
        for field in vars(getattr(Policy(), part)):
            assert field in text


def test_policy_that_cannot_be_read(tmp_path):
    for path, content in ((tmp_path / "absent.toml", None), (tmp_path / "bad.toml", b"[scope\n"),
                          (tmp_path / "binary.toml", b"\xff\xfe")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError) as error:
            load_policy(path)
        assert str(path) in error.value.where


def test_shuffled_sources_give_the_same_answer():
    units = [unit(kernel(code=c), source=f"{s}.cu", arch=a)
             for (s, c), a in itertools.product([("x", "1"), ("y", "2")], ["sm_80", "sm_90a"])]
    mixed = units[:]
    random.Random(5).shuffle(mixed)
    assert compare(units, units).deltas == compare(mixed, units).deltas
