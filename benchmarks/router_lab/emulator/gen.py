# ruff: noqa
# mypy: ignore-errors
import re
R = __import__("pathlib").Path(__file__).resolve().parents[3] / "brakecheck/kernels/cuda"
def conv(s):
    s=s.replace('#pragma once','')
    s=re.sub(r'#include "[^"]*"','',s)
    s=s.replace('extern __shared__ __align__(16) unsigned dynamic[];','static unsigned dynamic[1 << 16] __attribute__((aligned(16)));')
    # asm -> calls
    table={'max.bf16x2':'d = emu_max(a, b);','max.NaN.bf16x2':'d = emu_maxnan(a, b);','min.bf16x2':'d = emu_min(a, b);','set.ge.u32.bf16x2':'d = emu_ge(a, b);',
      'prmt.b32':'d = emu_prmt(a, b, how);','cvt.rn.bf16.f32':'h = emu_bf(x);','cvt.rn.bf16x2.f32':'pair = emu_bf(low) | emu_bf(high) << 16;',
      'ld.relaxed.gpu.global.u64':'v = emu_look(word);','st.relaxed.gpu.global.u64':'__atomic_store_n(word, v, __ATOMIC_RELAXED);','red.relaxed.gpu.global.add.u64':'__atomic_fetch_add(word, v, __ATOMIC_RELAXED);'}
    def f(m):
        op=re.search(r'"([\w.]+)',m[0])[1]
        return table[op]
    return re.sub(r'asm(?: volatile)?\(.*?\);',f,s,flags=re.S)
out='#include "cuda_emu.h"\n'
for n in ('warp.cuh','router.cuh','router.cu'): out+=conv((R / n).read_text())
one=conv((R / 'router_one.cu').read_text())
out+='\nnamespace one {\n'+one+'\n}\n'
open('emu_kernels.h','w').write(out)
