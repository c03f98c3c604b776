"""ltd_kernel.cu: its device half run on the CPU bit for bit against torch, its build, its loader, and a real GPU."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENV, ROOT, command

import ltd

SOURCE, SHIM = ROOT / "ltd_kernel.cu", ROOT / "tests" / "kernel_shim.cpp"
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
CUDA_HOME = os.environ.get("CUDA_HOME") or next((p for p in ("/usr/local/cuda",) if os.path.exists(p)), None)
needs_nvcc = pytest.mark.skipif(torch.version.cuda is None or not CUDA_HOME or not shutil.which("nvcc") or not shutil.which("g++"),
                                reason="needs nvcc and a CUDA build of torch")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# -----------------------------------------------------------------------------
# the device half on the CPU


def compile_shim(folder, source=SOURCE, *flags):
    out = folder / f"shim{len(list(folder.iterdir()))}"
    subprocess.run(["g++", "-std=c++17", "-O1", "-DLTD_SHIM", f'-DKERNEL="{source}"', *flags, str(SHIM), "-o", str(out)], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compile_shim(tmp_path_factory.mktemp("shim"))


def run(shim, cases):
    """cases: [(kind, numbers, [arrays], bytes of the result)] -> the results as bytes."""
    stream = b"".join(" ".join(map(str, (kind, *numbers))).encode() + b"\n" + b"".join(a.tobytes() for a in arrays) for kind, numbers, arrays, _ in cases)
    p = subprocess.run([str(shim)], input=stream, capture_output=True, timeout=200)
    assert p.returncode == 0, (p.returncode, p.stderr[-2000:].decode())
    sizes = [0, *np.cumsum([size for *_, size in cases])]
    assert len(p.stdout) == sizes[-1]
    return [p.stdout[a:b] for a, b in zip(sizes, sizes[1:])]


def draw_case(seed, step, rows, layers, T, K, order=0):
    rows, layers = np.asarray(rows, np.int64), np.asarray(layers, np.int64)
    want = ltd.draw(seed, step, torch.from_numpy(rows), torch.from_numpy(layers), T, K).numpy()
    return ("draw", (seed, step, len(rows), len(layers), T, K, order, 0), [rows, layers], want.nbytes), want.tobytes()


def move_case(gather, row_bytes, B, T, K, shift_x=0, shift_y=0, order=0, seed=0):
    r = np.random.default_rng((seed, row_bytes, B, T, K))
    x, y = r.integers(0, 256, (B, T, row_bytes), np.uint8), r.integers(0, 256, (B, K, row_bytes), np.uint8)
    keep = ltd.draw(seed, 0, torch.arange(B), [1], T, K)[:, 0]
    want = (ltd.gather(torch.from_numpy(x), keep) if gather else ltd.scatter(torch.from_numpy(x), torch.from_numpy(y), keep)).numpy()
    return ("move", (int(gather), row_bytes, B, T, K, shift_x, shift_y, order), [x, y, keep.numpy()], want.nbytes), want.tobytes()


def failures(shim, cases):
    """Which cases differ from torch (all of them, where the program itself broke)."""
    try:
        results = run(shim, [c for c, _ in cases])
    except (AssertionError, subprocess.TimeoutExpired):
        return list(range(len(cases)))
    return [i for i, (got, (_, want)) in enumerate(zip(results, cases)) if got != want]


EDGES = [(T, K) for T in (1, 31, 32, 33, 2047, 2048, 2049, 4097) for K in sorted({1, T // 3, T - 1, T}) if K >= 1]
DRAWS = [draw_case(1337, 7, [0, 12345678901], [1], T, K, order=T + K) for T, K in EDGES] + \
        [draw_case(5, 0, [3], [2], 65_536, K, order=K) for K in (1, 20_000, 65_535)]
# random shapes; each drawn in three thread orders
RANDOM = [draw_case(int(s), int(t), r.integers(0, 1 << 40, 2), r.integers(0, 99, 2), T, int(r.integers(1, T + 1)), order)
          for r in [np.random.default_rng(0)] for T in r.integers(1, 3000, 12).tolist() for s, t in [r.integers(-(1 << 62), 1 << 62, 2) & 0x7FFFFFFF] for order in range(3)]
# widths 1, 3, 33, 768 in elements of 1 to 8 bytes; addresses aligned and not
MOVES = [move_case(g, C * size, 2, T, K, sx, sy) for g in (True, False) for C in (1, 3, 33, 768) for size in (1, 2, 4, 8) for T, K in ((1, 1), (7, 1), (33, 32), (33, 33), (40, 10))
         for sx, sy in ((0, 0), (size, 0), (0, 3), (1, 1))]


@needs_compiler
def test_draw_is_bit_identical_to_torch_at_the_edges(shim):
    assert failures(shim, DRAWS) == []


@needs_compiler
def test_draw_is_bit_identical_to_torch_for_random_shapes_in_any_thread_order(shim):
    assert failures(shim, RANDOM) == []


@needs_compiler
def test_gather_and_scatter_are_bit_identical_to_torch_for_any_width_and_alignment(shim):
    assert failures(shim, MOVES) == []


def coarse(text):
    """The source with hashes of 3 bits instead of 32, so that nearly all are ties."""
    assert text.count("1)) >> 32)") == 2
    return text.replace("1)) >> 32)", "1)) >> 61)")


def tie_cases():
    """Draws of the coarse source, and what the rule says: the K smallest, equal ones by position."""
    cases = []
    for T, K in ((33, 10), (2049, 700), (5000, 4999)):
        case, _ = draw_case(1, 2, [3], [4], T, K, order=T)
        s = torch.full((1, 1), 1, dtype=torch.int64)
        for word in (2, 4, 3):
            s = ltd.mix(s + ltd.GOLDEN) ^ word
        key = ltd.mix(ltd.mix(s + ltd.GOLDEN) + ltd.GOLDEN * (torch.arange(T) + 1))[0] >> 61 & 7
        cases.append((case, np.sort(np.argsort(key.numpy(), kind="stable")[:K]).astype(np.int32).tobytes()))
    return cases


@needs_compiler
def test_equal_hashes_are_taken_by_position(tmp_path):
    source = tmp_path / "coarse.cu"
    source.write_text(coarse(SOURCE.read_text()))
    assert failures(compile_shim(tmp_path, source), tie_cases()) == []


@needs_compiler
def test_offsets_pass_2_to_the_31(shim):
    """L08: 65,536 rows of 33,001 bytes, an odd address: 2.16 G words, of which the last rows are moved."""
    assert run(shim, [("large", (0, 33_001, 1, 65_536, 3, 0, 0, 0), [], 4)]) == [b"\1\0\0\0"]


@needs_compiler
def test_the_kernel_is_clean_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    clean = compile_shim(tmp_path, SOURCE, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    cases = DRAWS[:-2] + RANDOM[:6] + MOVES[::3]
    assert [got == want for got, (_, want) in zip(run(clean, [c for c, _ in cases]), cases)] == [True] * len(cases)


FAULTS = {  # name: (text in the source, its replacement, the suite that must fail)
    "a barrier of the prefix sum removed": ("        __syncthreads();\n        sums[from ^ 1]", "        sums[from ^ 1]", "draw"),
    "the barrier behind the prefix sum removed": ("    __syncthreads();\n    const int all_below", "    const int all_below", "ties"),
    "one buffer for the prefix sum": ("d *= 2, from ^= 1", "d *= 2", "draw"),
    "K off by one in the selection": ("if (below <= K) v = below < K", "if (below <= K + 1) v = below < K + 1", "draw"),
    "the last bit never looked at": ("bit >= 0 &&", "bit >= 1 &&", "ties"),
    "ties kept beyond K": ("equal++ < ties", "equal++ < ties + 1", "ties"),
    "an offset of 32 bits": ("(row / K * T + keep[row]) * words", "(int)((row / K * T + keep[row]) * words)", "large"),
    "the wrong batch row": ("row / K * T", "row / T * K", "move"),
    "words wider than the alignment": ("while (bits % width) width /= 2;", "while (bits % width > 8) width /= 2;", "move"),
    "rows past the end written": ("if (row >= moved) return;", "", "sanitized move"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path):
    old, new, suite = FAULTS[fault]
    text = SOURCE.read_text()
    assert old in text, "the fault is no longer where this test plants it"
    broken = tmp_path / "broken.cu"
    broken.write_text(text.replace(old, new))
    if suite == "ties":
        broken.write_text(coarse(broken.read_text()))
        assert failures(compile_shim(tmp_path, broken), tie_cases())
    elif suite == "large":
        p = subprocess.run([str(compile_shim(tmp_path, broken))], input=b"large 0 33001 1 65536 3 0 0 0\n", capture_output=True)
        assert p.returncode != 0 or p.stdout != b"\1\0\0\0"
    else:
        flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if suite == "sanitized move" else []
        cases = DRAWS[:20] if suite == "draw" else MOVES
        assert failures(compile_shim(tmp_path, broken, *flags), cases)


# -----------------------------------------------------------------------------
# torch.ops.ltd.*


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_operators_pass_opcheck(device):
    if device == "cuda":
        ltd.load_kernel("cuda")
    keep = ltd.draw(0, 0, torch.arange(3, device=device), [1], 10, 4)[:, 0].contiguous()
    x, y = torch.randn(3, 10, 5, device=device), torch.randn(3, 4, 5, device=device)
    torch.library.opcheck(torch.ops.ltd.draw, (1, 2, torch.arange(3, device=device), torch.tensor([1, 2], device=device), 10, 4))
    torch.library.opcheck(torch.ops.ltd.scatter_, (x.clone(), y, keep))
    torch.library.opcheck(torch.ops.ltd.gather, (x.clone().requires_grad_(), keep))
    torch.library.opcheck(torch.ops.ltd.scatter, (x.clone().requires_grad_(), y.clone().requires_grad_(), keep))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_operators_pass_gradcheck(device):
    if device == "cuda":
        ltd.load_kernel("cuda")
    keep = ltd.draw(0, 0, torch.arange(2, device=device), [1], 6, 3)[:, 0].contiguous()
    x, y = (torch.randn(2, n, 3, dtype=torch.float64, device=device, requires_grad=True) for n in (6, 3))
    assert torch.autograd.gradcheck(lambda x: ltd.gather(x, keep), x)
    assert torch.autograd.gradcheck(lambda x, y: ltd.scatter(x, y, keep), (x, y))


def test_operators_compile_whole_with_two_graphs_over_a_growing_k(monkeypatch):
    """As the compiled model uses them once the kernel is loaded: opaque operators, K a dynamic size."""
    import torch._dynamo.testing
    torch._dynamo.reset()
    monkeypatch.setattr(ltd, "_loaded", "as if")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    w = torch.randn(5, 5, requires_grad=True)
    step = torch.compile(lambda x, keep: ltd.drop(lambda h: torch.tanh(h @ w), x, keep), backend=counter, fullgraph=True)
    for i, K in enumerate((2, 4, 6, 8, 10, 12)):
        x, keep = torch.randn(3, 16, 5, requires_grad=True), ltd.draw(0, i, torch.arange(3), [1], 16, K)[:, 0].contiguous()
        got = torch.autograd.grad(step(x, keep).square().sum(), (x, w))
        want = torch.autograd.grad(ltd.drop(lambda h: torch.tanh(h @ w), x, keep).square().sum(), (x, w))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)      # float32, other order of sums
    assert counter.frame_count == 2


# -----------------------------------------------------------------------------
# the build and the loader


def clean_env(folder, **extra):
    path = f"{Path(sys.executable).parent}:{ENV['PATH']}"
    return {**ENV, "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder), "CUDA_HOME": CUDA_HOME or "", "MAX_JOBS": "2", **extra}


BUILD = "import ltd; print('seconds', ltd.build_and_load('ltd_kernel.cu', '9.0'))"


@needs_nvcc
def test_the_kernel_compiles_links_and_loads_and_ptxas_finds_no_spills(tmp_path):
    """For sm_80 and sm_90 in one build through torch.utils.cpp_extension.load; then again from the cache in under 1 s."""
    code = ("import ltd, torch, pathlib; t = ltd.library_path('ltd_kernel.cu', '8.0;9.0'); t.parent.mkdir(parents=True);"
            "ltd._build(pathlib.Path('ltd_kernel.cu').resolve(), t, '8.0;9.0', verbose=True);"
            "print('kernels for CUDA:', [torch._C._dispatch_has_kernel_for_dispatch_key('ltd::' + n, 'CUDA') for n in ('draw', 'gather', 'scatter_')])")
    p = command("-c", code, env=clean_env(tmp_path))
    assert p.returncode == 0 and "kernels for CUDA: [True, True, True]" in p.stdout, p.stdout[-3000:] + p.stderr[-3000:]
    text = p.stdout + p.stderr
    for arch in ("sm_80", "sm_90"):
        assert len(set(re.findall(rf"Compiling entry function '(\w+)' for '{arch}'", text))) == 11      # draw, and 2 x 5 widths
    reports = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert len(reports) >= 22 and set(reports) == {("0", "0", "0")}
    assert max(map(int, re.findall(r"(\d+) bytes smem", text))) < 48 * 1024
    seconds = float(command("-c", "import ltd; print(ltd.build_and_load('ltd_kernel.cu', '8.0;9.0'))", env=clean_env(tmp_path)).stdout)
    assert seconds < 1


@needs_nvcc
def test_a_killed_build_stands_in_nobodys_way_and_ranks_build_once(tmp_path):
    """K01, K02, K03: SIGKILL in mid-build, then four processes at once on what it left: all load, one builds."""
    p = subprocess.Popen([sys.executable, "-c", BUILD], cwd=ROOT, env=clean_env(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while p.poll() is None and not list((tmp_path / "winnow").glob("build-*/*.cu*")) and not list((tmp_path / "winnow").glob("build-*/build.ninja")):
        time.sleep(.02)
    time.sleep(.5)
    p.kill()
    p.wait()
    assert list((tmp_path / "winnow").glob("build-*")), "the kill came too late"
    start = time.time()
    four = [subprocess.Popen([sys.executable, "-c", BUILD], cwd=ROOT, env=clean_env(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    out = [p.communicate(timeout=180) for p in four]
    assert all(p.returncode == 0 for p in four), out
    assert time.time() - start < 180 and len(list((tmp_path / "winnow").glob("*.so"))) == 1 and not list((tmp_path / "winnow").glob("build-*"))


def test_a_live_builder_is_waited_for_with_a_timeout_that_names_its_lock(tmp_path, monkeypatch):
    """K01: a lock held by a living process is respected; one left by a dead process is none."""
    import fcntl
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = ltd.library_path(SOURCE, "9.0").with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=re.escape(str(lock))):
            ltd.build_and_load(SOURCE, "9.0", timeout=.5)


AUTO = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda d: (9, 0); import ltd; print(ltd.load_kernel('auto'))"


@pytest.mark.parametrize("broken", ["folder", "ninja", "compiler", "toolkit"])
def test_what_is_missing_means_the_torch_path_with_one_line(tmp_path, broken):
    """K05, K08, K09, K10: as on a machine with a GPU whose folder, ninja, compiler or toolkit is missing. (Only the question
    "is there a GPU" is answered for it: there is none here to ask.)"""
    env = clean_env(tmp_path)
    if broken == "folder":
        env["TORCH_EXTENSIONS_DIR"] = "/proc/none"
    elif broken == "ninja":
        env["PATH"] = "/nonexistent"
    elif broken == "compiler":
        env["CXX"] = "/nonexistent/c++"
    else:
        env["CUDA_HOME"] = str(tmp_path / "none")
    p = command("-c", AUTO, env=env)
    assert p.returncode == 0 and p.stdout.startswith("torch path (") and p.stdout.count("\n") == 1, p.stdout + p.stderr[-1500:]
    if broken == "compiler":        # nvcc works for a quarter of a minute before the host compiler is missed: once is enough
        return
    forced = command("-c", AUTO.replace("'auto'", "'cuda'"), env=env)
    assert forced.returncode != 0 and "--ltd_kernel=torch" in forced.stderr


def test_without_a_gpu_auto_says_so_and_cuda_is_refused():
    """K06, and the fall-back of a plain CPU machine."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ltd.load_kernel("auto", "cpu") == "torch path (no GPU)" and ltd.load_kernel("torch", "cpu") == "torch path (asked for)"
    with pytest.raises(ValueError, match="no GPU.*--ltd_kernel=torch"):
        ltd.load_kernel("cuda", "cpu")
    with pytest.raises(ValueError, match="auto, cuda or torch"):
        ltd.load_kernel("triton", "cpu")


def test_the_library_is_keyed_by_source_architecture_and_versions(tmp_path):
    """K07: another card, another source, another torch: another file."""
    other = tmp_path / "k.cu"
    other.write_text("// other")
    assert len({ltd.library_path(SOURCE, "9.0"), ltd.library_path(SOURCE, "8.0"), ltd.library_path(other, "9.0")}) == 3


# -----------------------------------------------------------------------------
# a real device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGPU:
    @pytest.fixture(autouse=True)
    def kernel(self):
        assert ltd.load_kernel("cuda").startswith("CUDA kernel")

    @pytest.mark.parametrize("T,K", [*EDGES, (65_536, 20_000), (65_536, 65_535)])
    def test_draw_is_bit_identical_to_the_cpu(self, T, K):
        rows = torch.arange(5)
        assert torch.equal(ltd.draw(3, 9, rows.cuda(), [1, 2, 7], T, K).cpu(), ltd.draw(3, 9, rows, [1, 2, 7], T, K))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8])
    @pytest.mark.parametrize("C", [1, 3, 33, 768])
    @pytest.mark.parametrize("shift", [0, 1])
    def test_moves_are_bit_identical_to_the_cpu(self, dtype, C, shift):
        B, T, K = 3, 65, 20
        x = torch.randint(0, 255, (B * T * C + shift,)).to(dtype)[shift:].view(B, T, C)      # shift: an address that is not aligned
        y, keep = torch.randint(0, 255, (B, K, C)).to(dtype), ltd.draw(0, 0, torch.arange(B), [1], T, K)[:, 0]
        device = torch.empty(B * T * C + shift, dtype=dtype, device="cuda")[shift:].view(B, T, C).copy_(x)
        assert torch.equal(ltd.gather(device, keep.cuda()).cpu(), ltd.gather(x, keep))
        assert torch.equal(ltd.scatter(device, y.cuda(), keep.cuda()).cpu(), ltd.scatter(x, y, keep))

    def test_work_goes_to_the_current_stream_and_the_tensors_device(self):
        """L06."""
        side = torch.cuda.Stream()
        x, keep = torch.zeros(4, 2048, 1024, device="cuda"), ltd.draw(0, 0, torch.arange(4, device="cuda"), [1], 2048, 512)[:, 0].contiguous()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)          # the kernel must wait behind this, and the sum behind the kernel
            x.fill_(1)
            assert ltd.gather(x, keep).sum().item() == 4 * 512 * 1024
        if torch.cuda.device_count() > 1:
            assert torch.equal(ltd.gather(x.to("cuda:1"), keep.to("cuda:1")).cpu(), ltd.gather(x.cpu(), keep.cpu()))

    def test_more_than_2_to_the_31_elements(self):
        """L08."""
        B, T, C = 2, 65_536, 16_500
        x = torch.empty(B, T, C, dtype=torch.uint8, device="cuda")
        keep = torch.tensor([[5, T - 1], [6, T - 1]], dtype=torch.int32, device="cuda")
        x[:, -1] = 7
        assert (ltd.gather(x, keep)[:, 1] == 7).all()
        torch.ops.ltd.scatter_(x, torch.full((B, 2, C), 9, dtype=torch.uint8, device="cuda"), keep)
        assert (x[1, -1] == 9).all() and (x[0, 5] == 9).all()

    def test_a_compiled_training_step_equals_the_eager_one(self):
        from model import GPT
        torch.manual_seed(0)
        model = GPT(97, 64, 4, 4, 64).cuda()
        x = torch.randint(97, (4, 64), device="cuda")
        keep, grads = ltd.draw(0, 0, torch.arange(4, device="cuda"), model.ltd_layers, 64, 32), []
        for compiled in (False, True):
            model.zero_grad()
            (torch.compile(model, fullgraph=True) if compiled else model)(x, x, keep).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)      # float32 sums in another order, TF32 off
