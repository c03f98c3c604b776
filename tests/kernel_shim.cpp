// Runs the device half of ltd_kernel.cu on the CPU. Every thread of a block is a fiber with a stack of its own that runs
// until its next barrier; a phase runs all of them once, in an order drawn anew each time. So a missing barrier shows as
// a wrong result, and a barrier that not all threads reach shows as one that never opens.
//
//   g++ -std=c++17 -O1 -DLTD_SHIM -DKERNEL='"../ltd_kernel.cu"' kernel_shim.cpp -o shim
//
// Reads cases from standard input, a line of numbers and raw arrays behind it; writes the results as raw arrays.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SWITCH_START(save, stack, size) __sanitizer_start_switch_fiber(save, stack, size)
#define SWITCH_END(save, stack, size) __sanitizer_finish_switch_fiber(save, stack, size)
#else
#define SWITCH_START(save, stack, size)
#define SWITCH_END(save, stack, size)
#endif

struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)

// one block of fibers
static const size_t STACK = 128 << 10;
struct Fiber { ucontext_t context; std::unique_ptr<char[]> stack; void* fake = nullptr; bool waiting, done; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static const void* scheduler_stack;
static size_t scheduler_size;
static unsigned current;
static int arriving, counted;       // of __syncthreads_count: the sum under way, and that of the barrier just passed
static void (*body)(void*);
static void* body_argument;

static void yield_to_scheduler(bool for_ever) {
    Fiber& f = fibers[current];
    void** save = for_ever ? nullptr : &f.fake;
    (void)save;
    SWITCH_START(save, scheduler_stack, scheduler_size);
    swapcontext(&f.context, &scheduler);
    SWITCH_END(f.fake, &scheduler_stack, &scheduler_size);
}
static int __syncthreads_count(int predicate) {
    arriving += predicate != 0;
    fibers[current].waiting = true;
    yield_to_scheduler(false);
    return counted;
}
static void __syncthreads() { __syncthreads_count(0); }

#include KERNEL

static void entry() {
    SWITCH_END(nullptr, &scheduler_stack, &scheduler_size);
    body(body_argument);
    fibers[current].done = true;
    yield_to_scheduler(true);
}

template <typename F> static void launch(unsigned grid, dim3 block, uint64_t order_seed, F kernel) {
    std::mt19937_64 random(order_seed);
    blockDim = block;
    const unsigned n = block.x * block.y;
    if (fibers.size() < n) fibers.resize(n);
    body = [](void* p) { (*(F*)p)(); };
    body_argument = &kernel;
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0u);
    for (unsigned b = 0; b < grid; b++) {
        blockIdx = {b, 0, 0};
        for (unsigned i = 0; i < n; i++) {
            Fiber& f = fibers[i];
            if (!f.stack) f.stack.reset(new char[STACK]);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.get();
            f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            f.done = f.waiting = false;
            makecontext(&f.context, entry, 0);
        }
        for (unsigned alive = n; alive;) {      // one phase: everybody runs to the next barrier or to the end
            std::shuffle(order.begin(), order.end(), random);
            arriving = 0;
            unsigned waiting = 0;
            for (unsigned i : order) {
                if (fibers[i].done) continue;
                current = i;
                threadIdx = {i % block.x, i / block.x, 0};
                fibers[i].waiting = false;
                void* fake = nullptr;
                (void)fake;
                SWITCH_START(&fake, fibers[i].stack.get(), STACK);
                swapcontext(&scheduler, &fibers[i].context);
                SWITCH_END(fake, nullptr, nullptr);
                alive -= fibers[i].done;
                waiting += fibers[i].waiting;
            }
            if (waiting && waiting != n) { fprintf(stderr, "a barrier was reached by %u of %u threads\n", waiting, n); exit(3); }
            counted = arriving;
        }
    }
}

static void move(bool gather, int width, char* x, char* y, const int* keep, int64_t T, int64_t K, int64_t moved, int64_t bytes, uint64_t seed) {
    int along, rows;
    ltd_shape(bytes / width, &along, &rows);
    const unsigned grid = (unsigned)((moved + rows - 1) / rows);
    auto run = [&](auto word) {
        using V = decltype(word);
        launch(grid, {(unsigned)along, (unsigned)rows, 1}, seed, [=] {
            if (gather) ltd_move<V, true>((V*)x, (V*)y, keep, T, K, moved, bytes / width);
            else ltd_move<V, false>((V*)x, (V*)y, keep, T, K, moved, bytes / width);
        });
    };
    switch (width) {
        case 16: run(uint4{}); break;
        case 8: run(uint2{}); break;
        case 4: run((unsigned)0); break;
        case 2: run((unsigned short)0); break;
        default: run((unsigned char)0);
    }
}

static void fill(void* p, size_t n) { if (n && fread(p, 1, n, stdin) != n) { fprintf(stderr, "short input\n"); exit(4); } }

int main() {
    char kind[16];
    long long a[8];
    while (scanf("%15s", kind) == 1) {
        for (auto& v : a) if (scanf("%lld", &v) != 1) return 4;
        getchar();                                          // the line's end
        if (!strcmp(kind, "draw")) {                        // seed step B n T K order -
            const long long B = a[2], n = a[3], T = a[4], K = a[5];
            std::unique_ptr<long long[]> rows(new long long[B]), layers(new long long[n]);
            std::unique_ptr<int[]> keep(new int[B * n * K]);
            fill(rows.get(), B * 8);
            fill(layers.get(), n * 8);
            launch((unsigned)(B * n), {LTD_DRAW_THREADS, 1, 1}, a[6], [&] {
                ltd_draw((u64)a[0], (u64)a[1], rows.get(), layers.get(), (int)n, (int)T, (int)K, keep.get());
            });
            fwrite(keep.get(), 4, B * n * K, stdout);
        } else if (!strcmp(kind, "move")) {                 // gather bytes B T K shift_x shift_y order
            const long long bytes = a[1], B = a[2], T = a[3], K = a[4];
            // allocated to the byte, so that a sanitizer sees the first one too many; `shift` makes an address unaligned
            std::unique_ptr<char, void (*)(void*)> bx((char*)malloc(B * T * bytes + a[5]), free), by((char*)malloc(B * K * bytes + a[6]), free);
            char *x = bx.get() + a[5], *y = by.get() + a[6];
            std::unique_ptr<int[]> keep(new int[B * K]);
            fill(x, B * T * bytes);
            fill(y, B * K * bytes);
            fill(keep.get(), B * K * 4);
            move(a[0], ltd_width((u64)x | (u64)y | (u64)bytes), x, y, keep.get(), T, K, B * K, bytes, a[7]);
            fwrite(a[0] ? y : x, 1, B * (a[0] ? K : T) * bytes, stdout);
        } else if (!strcmp(kind, "large")) {                // - bytes - T K - - order: x is sparse and over 2^31 words
            const long long bytes = a[1], T = a[3], K = a[4];
            char* x = (char*)calloc(T * bytes + 1, 1);
            if (!x) return 5;
            std::vector<char> y(K * bytes + 2);
            std::vector<int> keep(K);
            for (long long k = 0; k < K; k++) {             // the last K rows
                keep[k] = (int)(T - K + k);
                memset(x + 1 + keep[k] * bytes, (int)(k + 1), bytes);
            }
            move(true, 1, x + 1, y.data() + 1, keep.data(), T, K, K, bytes, a[7]);
            int right = 1;
            for (long long i = 0; i < K * bytes; i++) right &= y[1 + i] == (char)(i / bytes + 1);
            for (auto& c : y) c = 77;
            move(false, 1, x + 1, y.data() + 1, keep.data(), T, K, K, bytes, a[7]);
            for (long long i = (T - K) * bytes; i < T * bytes; i++) right &= x[1 + i] == 77;
            for (long long i = 0; i < T * bytes - K * bytes; i += 4096) right &= x[1 + i] == 0;
            free(x);
            fwrite(&right, 4, 1, stdout);
        }
        fflush(stdout);
    }
}
