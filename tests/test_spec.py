"""Stack specs: what is accepted, and what the user is told about the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brakecheck.model import BrakecheckError, UsageError
from brakecheck.stack.spec import COMPONENTS, StackSpec, parse


@pytest.mark.parametrize(("text", "kind", "base", "overlays"), [
    ("cuda==12.9", "cuda", "12.9", ()),
    (" cuda==12.9.1 ", "cuda", "12.9.1", ()),
    ("cuda==13.4.1.0", "cuda", "13.4.1.0", ()),
    ("cuda==12.6+ptxas==12.8", "cuda", "12.6", (("ptxas", "12.8"),)),
    ("cuda==12.6+ptxas==12.8+nvrtc==12.9.1", "cuda", "12.6", (("ptxas", "12.8"), ("nvrtc", "12.9.1"))),
    ("cuda==12.6+cudart==12.8", "cuda", "12.6", (("headers", "12.8"),)),
    ("env:/opt/my+env/bin/python", "env", "/opt/my+env/bin/python", ()),
    ("env:/opt/python+nvidia-cublas==13.5.1.27", "env", "/opt/python", (("nvidia-cublas", "13.5.1.27"),)),
    ("pip:torch==2.9.1+cu130, triton==3.5.1", "pip", "torch==2.9.1+cu130,triton==3.5.1", ()),
    ("pip:torch==2.9.1+cu130+nvidia-cublas==13.5", "pip", "torch==2.9.1+cu130", (("nvidia-cublas", "13.5"),)),
    ("launch:docker run --gpus all -e A==1+B==2 IMAGE python", "launch",
     "docker run --gpus all -e A==1+B==2 IMAGE python", ()),
])
def test_accepted(text, kind, base, overlays):
    assert parse(text) == StackSpec(kind, base, overlays, text)


@pytest.mark.parametrize(("text", "what", "where", "todo"), [
    ("", "empty", "", "cuda==12.9"),
    ("12.9", "not a stack spec", "character 1", "cuda==12.9"),
    ("cuda12.9", "not a stack spec", "character 1", "did you mean cuda==12.9"),
    ("cuda=12.9", "not a stack spec", "character 1", "did you mean cuda==12.9"),
    ("CUDA 12.9", "not a stack spec", "character 1", "did you mean cuda==12.9"),
    ("cuda==12", "'12' is not a CUDA release", "character 7", "12.9"),
    ("cuda==latest", "'latest' is not a CUDA release", "character 7", "12.9"),
    ("torch==2.9", "not a stack spec", "character 1", "pip:"),
    ("cuda==12.6+ptxsa==12.8", "'ptxsa'", "character 12", "did you mean ptxas"),
    ("cuda==12.6+ptxas==new", "'new' is not a CUDA release", "character 19", "ptxas==12.8"),
    ("cuda==12.6+ptxas", "'+ptxas' is not an overlay", "character 11", "+COMPONENT==RELEASE"),
    ("cuda==12.6+ptxas==12.8+ptxas==12.9", "ptxas is given twice", "character 24", "one"),
    ("pip:torch", "'torch' is not PACKAGE==VERSION", "character 5", "torch==2.9.1"),
    ("pip:torch==2.9,triton", "'triton' is not", "character 16", "pin"),
    ("env:", "nothing after", "character 5", "path"),
    ("launch: ", "nothing after", "character 8", "command"),
])
def test_refused_with_position_and_remedy(text, what, where, todo):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert what in caught.value.what
    assert where in (caught.value.where or "")
    assert todo in caught.value.todo


@given(st.text(max_size=40) | st.text("cuda=+.0123456789ptxs:envlih,", max_size=40))
def test_any_text_is_parsed_or_explained(text):
    try:
        spec = parse(text)
    except BrakecheckError as error:
        assert error.what and error.todo
    else:
        assert spec.text == text
        if spec.kind == "cuda":
            assert all(name in COMPONENTS for name, _ in spec.overlays)
