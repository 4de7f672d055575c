"""What this environment's Triton makes of our Triton kernels, as cubins, without a GPU.

    OLD/bin/python benchmarks/triton_cubins.py old
    NEW/bin/python benchmarks/triton_cubins.py new
    brakecheck diff old new

Needs torch and Triton 3.3 or newer. One aligned line a kernel and architecture: registers, bytes spilled a thread
(stack), shared memory, bytes of machine code.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from brakecheck.evidence.cubin import read_cubin  # noqa: E402

ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def plans() -> dict[str, Any]:
    """Plans of tensors without memory, by name: each kernel in each of its configurations."""
    from brakecheck.kernels import triton_kernels as kernels

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    row, (narrow, wide) = empty(8192), (empty(16, 2048, dim) for dim in (64, 128))
    return {
        "softmax": kernels.softmax(empty(4096, 8192, dtype=torch.float32)),
        "softmax-long": kernels.softmax(empty(512, 131072, dtype=torch.float32)),
        "layernorm": kernels.layer_norm(empty(4096, 8192), row, row, 1e-5),
        "rmsnorm": kernels.rms_norm(empty(4096, 8192), row, 1e-5),
        "elementwise": kernels.elementwise_chain(row, row, row),
        "matmul-1": kernels.matmul(empty(1, 4096), empty(4096, 4096).T),
        "matmul-64": kernels.matmul(empty(64, 4096), empty(4096, 4096)),
        "matmul-4096": kernels.matmul(empty(4096, 4096), empty(4096, 4096).T),
        "matmul-odd": kernels.matmul(empty(131, 77), empty(66, 77).T),
        "attention-64": kernels.attention(narrow, narrow, narrow, False),
        "attention-128-causal": kernels.attention(wide, wide, wide, True),
    }


def compiled(plan: Any, arch: int) -> Any:
    """What a launch of the plan compiles, for sm_<arch>: with the same alignments, and ones as constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, divisible, ones = {}, dict(plan.constants), [], []
    for i, (name, value) in enumerate(zip(plan.kernel.arg_names, plan.arguments)):
        tensor = isinstance(value, torch.Tensor)
        types[name] = ELEMENTS[value.dtype] if tensor else "i32" if isinstance(value, int) else "fp32"
        if not tensor and value == 1:
            constants[name] = 1
            ones.append(i)
        if tensor or value % 16 == 0:
            divisible.append(i)
    if "constexprs" in inspect.signature(ASTSource).parameters:
        signature = {name: "constexpr" if name in constants else types[name] for name in plan.kernel.arg_names}
        attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
        source = ASTSource(plan.kernel, signature, constexprs=constants, attrs=attributes)
    else:  # Triton 3.2
        from triton.backends.compiler import AttrsDescriptor

        properties = {"tt.divisibility": divisible, "tt.equal_to": ones}
        source = ASTSource(plan.kernel, types, constants,
                           AttrsDescriptor.from_dict({"arg_properties": properties, "cls": "AttrsDescriptor"}))
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=plan.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="80,90", help="comma-separated compute capabilities")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:  # what is there already would be returned, whoever made it
        os.environ["TRITON_CACHE_DIR"] = cache
        for name, plan in plans().items():
            for arch in map(int, arguments.arch.split(",")):
                made = compiled(plan, arch)
                (arguments.folder / f"{name}-sm{arch}.cubin").write_bytes(made.asm["cubin"])
                (kernel,) = read_cubin(made.asm["cubin"]).kernels
                print(f"{name:<22} sm{arch}  {kernel.registers:4} registers  {kernel.frame or 0:4} stack  "
                      f"{made.metadata.shared:7} shared  {len(kernel.code):6} code", flush=True)


if __name__ == "__main__":
    main()
