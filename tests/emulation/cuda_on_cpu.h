// Runs CUDA kernels on a CPU: the threads of a block are fibers that take turns, in a random order between barriers, so
// that a missing barrier shows. Blocks run one after the other. A warp waits for all of its lanes at a shuffle.
#pragma once
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(x) alignas(x)
#define __shared__ static thread_local
#define __restrict__ __restrict

struct dim3 {
  unsigned x, y, z;
};
struct float2 {
  float x, y;
};
struct double2 {
  double x, y;
};

static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

struct Fiber {
  ucontext_t first;
  jmp_buf place;
  bool begun = false, ended = false;
  int waits = 0;  // 1: for the block, 2: for the warp
  int turn = 0;
  dim3 index;
  char* stack = nullptr;
};

static const size_t STACK_BYTES = 64 << 10;
static thread_local std::vector<Fiber> fibers;
static thread_local int current;
static thread_local jmp_buf scheduler;
static thread_local ucontext_t scheduler_context;
static thread_local const std::function<void()>* body;
static thread_local uint64_t random_state = 0x9e3779b97f4a7c15ull;
// What the lanes of each warp exchange.
static thread_local double exchange_slots[2][64][32];

static inline unsigned random_below(unsigned count) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)((random_state >> 33) % count);
}

static void enter_fiber() {
  (*body)();
  fibers[current].ended = true;
  _longjmp(scheduler, 1);
}

static void pause_fiber(int why) {
  fibers[current].waits = why;
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

static void resume_fiber(int number) {
  Fiber& fiber = fibers[number];
  current = number;
  threadIdx = fiber.index;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack;
  fiber.first.uc_stack.ss_size = STACK_BYTES;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, enter_fiber, 0);
  setcontext(&fiber.first);
}

// Run a warp until all of its lanes have ended or wait for the block; return how many wait.
static int run_warp(int first, int end) {
  int ready[32];
  for (;;) {
    int count = 0, shuffled = 0, at_barrier = 0;
    for (int i = first; i < end; ++i)
      if (!fibers[i].ended && !fibers[i].waits) ready[count++] = i;
    for (int i = count - 1; i > 0; --i) {
      int other = random_below(i + 1), one = ready[i];
      ready[i] = ready[other];
      ready[other] = one;
    }
    for (int i = 0; i < count; ++i) resume_fiber(ready[i]);
    for (int i = first; i < end; ++i) {
      shuffled += !fibers[i].ended && fibers[i].waits == 2;
      at_barrier += !fibers[i].ended && fibers[i].waits == 1;
    }
    if (!shuffled) return at_barrier;
    if (at_barrier) {
      fprintf(stderr, "lanes of a warp wait for each other for ever\n");
      abort();
    }
    for (int i = first; i < end; ++i) fibers[i].waits = 0;
  }
}

static void run_block() {
  int count = (int)fibers.size(), warps = (count + 31) / 32, order[64];
  for (;;) {
    int waiting = 0;
    for (int i = 0; i < warps; ++i) order[i] = i;
    for (int i = warps - 1; i > 0; --i) {
      int other = random_below(i + 1), one = order[i];
      order[i] = order[other];
      order[other] = one;
    }
    for (int i = 0; i < warps; ++i)
      waiting += run_warp(order[i] * 32, order[i] * 32 + 32 < count ? order[i] * 32 + 32 : count);
    if (!waiting) return;
    // Those that have ended are not waited for.
    for (Fiber& fiber : fibers) fiber.waits = 0;
  }
}

static void run_grid(dim3 grid, dim3 block, const std::function<void()>& work) {
  body = &work;
  gridDim = grid;
  blockDim = block;
  int count = block.x * block.y * block.z;
  static thread_local std::vector<char*> stacks;
  while ((int)stacks.size() < count) stacks.push_back((char*)malloc(STACK_BYTES));
  for (unsigned number = 0; number < grid.x; ++number) {
    blockIdx = dim3{number, 0, 0};
    fibers.assign(count, Fiber());
    for (int i = 0; i < count; ++i) {
      fibers[i].stack = stacks[i];
      fibers[i].index = dim3{i % block.x, i / block.x % block.y, i / block.x / block.y};
    }
    run_block();
  }
}

static inline void __syncthreads() { pause_fiber(1); }
static inline void __threadfence_system() { __sync_synchronize(); }

template <class V>
static inline V __shfl_xor_sync(unsigned, V value, int mask) {
  int warp = current / 32, lane = current % 32;
  // Who writes to the same slots again has met all lanes in between.
  int turn = fibers[current].turn ^= 1;
  exchange_slots[turn][warp][lane] = (double)value;
  pause_fiber(2);
  return (V)exchange_slots[turn][warp][lane ^ mask];
}

static inline int atomicCAS(int* p, int expected, int value) { return __sync_val_compare_and_swap(p, expected, value); }
static inline int atomicAdd(int* p, int value) { return __sync_fetch_and_add(p, value); }

template <class V>
static inline V __ldcs(const V* p) {
  return *p;
}

// In place of system.cu.
static inline unsigned load_acquired(const unsigned* p) {
  sched_yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static inline void store_released(unsigned* p, unsigned value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static inline long long now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}
