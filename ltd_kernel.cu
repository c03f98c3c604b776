// CUDA kernels of random layerwise token dropping: draw, gather, scatter. Built at first use by ltd.py through
// torch.utils.cpp_extension.load; what they mean, and the same in torch, stands in ltd.py.
//
//   draw     all dropped layers and rows in one launch; bit-identical to the torch draw; T up to 65,536
//   gather   y[b, k] = x[b, keep[b, k]]          scatter   x[b, keep[b, k]] = y[b, k], in place
//
// B batch, T tokens, K kept tokens, C channels, n dropped layers.
//
// The forward pass of a dropped layer moves 4K rows (gather reads and writes K, scatter reads and writes K), where a
// scatter into a copy would move 2T more. No atomics: the indices of a row are distinct, so that no two threads write
// the same bytes. Offsets are 64 bits wide: B * T * C may pass 2^31.
//
// The device half includes nothing, so that tests/test_kernel.py can compile this very file with a host compiler
// (LTD_SHIM) and run it thread by thread against torch.

// -----------------------------------------------------------------------------
// device half

typedef unsigned int u32;
typedef unsigned long long u64;

// SplitMix64's finaliser, as ltd.mix
__device__ inline u64 ltd_mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

#define LTD_GOLDEN 0x9E3779B97F4A7C15ull
#define LTD_DRAW_THREADS 1024
#define LTD_CACHED 4        // keys a thread holds in registers; beyond T = 4,096 the rest is hashed anew in each pass

// One block draws one (row, layer): the K positions with the smallest (hash, position), ascending.
//   1. v = the K-th smallest hash, bit by bit from the top: with a bit set, do fewer than K hashes lie below? A pass is
//      one hash compare a position and one counting barrier a stripe; it ends early once exactly K lie below (after
//      about log2(T) + 2 of the 32 passes). No sort, no histogram, no float.
//   2. Each thread counts the kept among its own run of positions, a prefix sum gives it its place, and it writes them:
//      ascending by construction. Equal hashes (1 in 2^32) are taken by position.
// Threads own runs of `per` neighbouring positions, so that one prefix sum orders the whole row.
__global__ void __launch_bounds__(LTD_DRAW_THREADS)
ltd_draw(u64 seed, u64 step, const long long* rows, const long long* layers, int n, int T, int K, int* keep) {
    __shared__ u64 sums[2][LTD_DRAW_THREADS];           // 16 KB
    const int t = threadIdx.x, threads = blockDim.x, b = blockIdx.x / n, layer = blockIdx.x % n;
    u64 s = ltd_mix(seed + LTD_GOLDEN) ^ step;
    s = ltd_mix(s + LTD_GOLDEN) ^ (u64)layers[layer];
    s = ltd_mix(s + LTD_GOLDEN) ^ (u64)rows[b];
    s = ltd_mix(s + LTD_GOLDEN);

    const int per = (T + threads - 1) / threads, begin = t * per;
    const int end = begin + per < T ? begin + per : T;  // may lie before begin for the last threads: they own nothing
    u32 cached[LTD_CACHED];
#pragma unroll
    for (int j = 0; j < LTD_CACHED; j++) cached[j] = (u32)(ltd_mix(s + LTD_GOLDEN * (u64)(begin + j + 1)) >> 32);
    // every index into `cached` is a constant after unrolling, so that it stays in registers
#define LTD_HASH(j, p) \
    ((j) < LTD_CACHED ? cached[(j) < LTD_CACHED ? (j) : 0] : (u32)(ltd_mix(s + LTD_GOLDEN * (u64)((p) + 1)) >> 32))

    u32 v = 0;
    bool exact = false;                                 // the kept are those below v, no ties to settle
    for (int bit = 31; bit >= 0 && !exact && K < T; bit--) {
        const u32 candidate = v | 1u << bit;
        int below = 0;
#pragma unroll
        for (int j = 0; j < LTD_CACHED; j++)
            if (j < per) below += __syncthreads_count(begin + j < end && LTD_HASH(j, begin + j) < candidate);
        for (int j = LTD_CACHED; j < per; j++)
            below += __syncthreads_count(begin + j < end && LTD_HASH(LTD_CACHED, begin + j) < candidate);
        if (below <= K) v = below < K ? candidate : (exact = true, candidate);
    }

    u64 mine = 0;                                       // upper half: hashes equal to v; lower half: below it
#pragma unroll
    for (int j = 0; j < LTD_CACHED; j++)
        if (begin + j < end) mine += (LTD_HASH(j, begin + j) < v) + ((u64)(LTD_HASH(j, begin + j) == v) << 32);
    for (int p = begin + LTD_CACHED; p < end; p++)
        mine += (LTD_HASH(LTD_CACHED, p) < v) + ((u64)(LTD_HASH(LTD_CACHED, p) == v) << 32);
    int from = 0;
    sums[0][t] = mine;
    for (int d = 1; d < threads; d *= 2, from ^= 1) {   // inclusive prefix sum; two buffers, so one barrier a round
        __syncthreads();
        sums[from ^ 1][t] = sums[from][t] + (t >= d ? sums[from][t - d] : 0);
    }
    __syncthreads();
    const int all_below = (int)(u32)sums[from][threads - 1];
    const u64 before = sums[from][t] - mine;
    const int ties = K < T && !exact ? K - all_below : 0;   // how many equal to v are kept, the first by position
    int equal = (int)(before >> 32), at = (int)(u32)before + (equal < ties ? equal : ties);
    int* out = keep + (long long)blockIdx.x * K;
    if (K == T) {
        for (int p = begin; p < end; p++) out[p] = p;
        return;
    }
#pragma unroll
    for (int j = 0; j < LTD_CACHED; j++)
        if (begin + j < end) {
            const u32 h = LTD_HASH(j, begin + j);
            if (h < v || (h == v && equal++ < ties)) out[at++] = begin + j;
        }
    for (int p = begin + LTD_CACHED; p < end; p++) {
        const u32 h = LTD_HASH(LTD_CACHED, p);
        if (h < v || (h == v && equal++ < ties)) out[at++] = p;
    }
}

// Move the kept rows between x (B, T, C) and y (B, K, C), in words of V: up to 16 bytes, the widest that divides a row
// and both addresses. threadIdx.x runs along a row, threadIdx.y over rows: neighbouring threads, neighbouring words.
template <typename V, bool GATHER>
__global__ void __launch_bounds__(256)
ltd_move(V* x, V* y, const int* keep, long long T, long long K, long long moved, long long words) {
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;     // of y, flat: b * K + k
    if (row >= moved) return;
    V* from_x = x + (row / K * T + keep[row]) * words;
    V* from_y = y + row * words;
    for (long long w = threadIdx.x; w < words; w += blockDim.x) {
        if (GATHER) from_y[w] = from_x[w];
        else from_x[w] = from_y[w];
    }
}

// the widest word, in bytes, that divides a row and both addresses (their bits or-ed together)
inline int ltd_width(u64 bits) {
    int width = 16;
    while (bits % width) width /= 2;
    return width;
}

// threads of a block for rows of `words` words: along a row, and rows
inline void ltd_shape(long long words, int* along, int* rows) {
    *along = 1;
    while (*along < words && *along < 256) *along *= 2;
    *rows = 256 / *along;
}

// -----------------------------------------------------------------------------
// host half: torch's stable ABI only, so that it builds in seconds and one source serves torch 2.11 and later

#ifndef LTD_SHIM
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

static cudaStream_t current_stream(const Tensor& x) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    return (cudaStream_t)stream;
}

static void check_launch(const char* name) {
    cudaError_t e = cudaGetLastError();
    STD_TORCH_CHECK(e == cudaSuccess, name, ": ", cudaGetErrorString(e));
}

static void check_index(const char* name, const Tensor& keep, const Tensor& x) {
    STD_TORCH_CHECK(keep.is_cuda() && keep.get_device_index() == x.get_device_index(),
                    name, ": keep must be on the device of x");
    STD_TORCH_CHECK(keep.scalar_type() == ScalarType::Int && keep.is_contiguous(),
                    name, ": keep must be contiguous int32");
}

Tensor draw(int64_t seed, int64_t step, Tensor rows, Tensor layers, int64_t T, int64_t K) {
    STD_TORCH_CHECK(1 <= K && K <= T && T <= 65536, "ltd::draw needs 1 <= K <= T <= 65536, not K=", K, ", T=", T);
    STD_TORCH_CHECK(rows.is_contiguous() && layers.is_contiguous() && rows.scalar_type() == ScalarType::Long &&
                    layers.scalar_type() == ScalarType::Long, "ltd::draw needs contiguous int64 rows and layers");
    STD_TORCH_CHECK(layers.is_cuda() && layers.get_device_index() == rows.get_device_index(),
                    "ltd::draw: rows and layers must share a device");
    torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
    const int64_t B = rows.numel(), n = layers.numel();
    Tensor keep = torch::stable::new_empty(rows, {B, n, K}, ScalarType::Int);
    if (B * n) {
        ltd_draw<<<(unsigned)(B * n), LTD_DRAW_THREADS, 0, current_stream(rows)>>>(
            (u64)seed, (u64)step, (const long long*)rows.data_ptr(), (const long long*)layers.data_ptr(),
            (int)n, (int)T, (int)K, (int*)keep.mutable_data_ptr());
        check_launch("ltd::draw");
    }
    return keep;
}

// x (B, T, C), y (B, K, C), both contiguous; GATHER: x -> y, else y -> x
template <bool GATHER>
static void move_rows(const char* name, const Tensor& x, const Tensor& y, const Tensor& keep) {
    STD_TORCH_CHECK(x.is_cuda() && x.dim() == 3 && x.is_contiguous(),
                    name, ": x must be a contiguous CUDA tensor (B, T, C)");
    check_index(name, keep, x);
    const int64_t B = x.size(0), T = x.size(1), C = x.size(2), K = keep.size(1);
    STD_TORCH_CHECK(keep.dim() == 2 && keep.size(0) == B, name, ": keep must be (B, K)");
    STD_TORCH_CHECK(y.dim() == 3 && y.size(0) == B && y.size(1) == K && y.size(2) == C && y.is_contiguous() &&
                    y.scalar_type() == x.scalar_type() && y.is_cuda() && y.get_device_index() == x.get_device_index(),
                    name, ": y must be contiguous (B, K, C) of x's dtype and device");
    const int64_t bytes = C * (int64_t)x.element_size(), moved = B * K;
    if (!moved || !bytes) return;
    STD_TORCH_CHECK(moved < (1ll << 31), name, ": B * K must be below 2^31, not ", moved);
    char *px = (char*)x.data_ptr(), *py = (char*)y.data_ptr();
    const int width = ltd_width((u64)px | (u64)py | (u64)bytes);
    int along, rows;
    ltd_shape(bytes / width, &along, &rows);
    const dim3 block(along, rows);
    const unsigned grid = (unsigned)((moved + rows - 1) / rows);
    cudaStream_t stream = current_stream(x);
#define LTD_MOVE(V) ltd_move<V, GATHER><<<grid, block, 0, stream>>>( \
    (V*)px, (V*)py, (const int*)keep.data_ptr(), T, K, moved, bytes / width)
    switch (width) {
        case 16: LTD_MOVE(uint4); break;
        case 8: LTD_MOVE(uint2); break;
        case 4: LTD_MOVE(unsigned int); break;
        case 2: LTD_MOVE(unsigned short); break;
        default: LTD_MOVE(unsigned char);
    }
    check_launch(name);
}

Tensor gather(Tensor x, Tensor keep) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor y = torch::stable::new_empty(x, {x.size(0), keep.size(1), x.size(2)});
    move_rows<true>("ltd::gather", x, y, keep);
    return y;
}

void scatter_(Tensor x, Tensor y, Tensor keep) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    move_rows<false>("ltd::scatter_", x, y, keep);
}

STABLE_TORCH_LIBRARY_IMPL(ltd, CUDA, m) {       // schemas, fake and autograd formulas are in ltd.py
    m.impl("draw", TORCH_BOX(&draw));
    m.impl("gather", TORCH_BOX(&gather));
    m.impl("scatter_", TORCH_BOX(&scatter_));
}
#endif
