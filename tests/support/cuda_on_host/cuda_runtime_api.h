// Replaces CUDA's header of this name when our kernels are compiled as C++, so that their results can be tested on a
// machine without a GPU. The threads of a block are fibers: each fiber runs up to the next barrier or shuffle, one
// after another, then all fibers continue. Blocks run one after another, too, and a launch returns when its kernel has
// finished.
//
// Faults that these tests find: wrong values and positions; threads at a barrier that other threads never reach; and,
// with warps and threads in another order, reads that no barrier orders after the write. Faults that they do not find:
// speed, and differences in CUDA's arithmetic. Not thread-safe.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__ static

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct CudaIndex {
  unsigned x;
};
inline CudaIndex threadIdx, blockIdx, blockDim, gridDim;

class HostBlock {
 public:
  static inline HostBlock* current = nullptr;
  static inline unsigned order = 0;     // order of warps and threads: 0 by number, else a random seed
  static inline unsigned most = ~0U;    // limit of blocks in a grid, to test grid-stride loops
  static inline bool diverged = false;  // some threads waited for threads that never came

  HostBlock(unsigned threads, const std::function<void()>& body) : exchanged(threads), body_(body), fibers_(threads) {
    for (auto& fiber : fibers_) prepare(fiber);
  }

  void run() {
    current = this;
    std::vector<unsigned> warps((fibers_.size() + kWarpThreads - 1) / kWarpThreads);
    std::iota(warps.begin(), warps.end(), 0U);
    std::mt19937 random(order);
    while (!diverged && !all_are(At::kEnd, 0, fibers_.size())) {
      if (order != 0) std::shuffle(warps.begin(), warps.end(), random);
      for (const unsigned warp : warps) run_warp(warp * kWarpThreads, random);
      diverged = diverged || !(all_are(At::kBarrier, 0, fibers_.size()) || all_are(At::kEnd, 0, fibers_.size()));
    }
  }

  // Wait until the other threads have come to the same point: those of the warp, or all threads.
  void wait_for_warp() { wait(At::kShuffle); }
  void wait_for_all() { wait(At::kBarrier); }

  std::vector<float> exchanged;

 private:
  static constexpr size_t kStack = 32 * 1024, kWarpThreads = 32;
  enum class At { kWork, kShuffle, kBarrier, kEnd };
  struct Fiber {
    ucontext_t context{};
    std::unique_ptr<char[]> stack{new char[kStack]};
    At at = At::kWork;
  };

  // A function of its own, because getcontext() returns twice and must therefore not be in a larger function.
  [[gnu::noinline]] void prepare(Fiber& fiber) {
    ::getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = fiber.stack.get(), .ss_flags = 0, .ss_size = kStack};
    fiber.context.uc_link = &scheduler_;
    ::makecontext(&fiber.context, &HostBlock::enter, 0);
  }
  static void enter() {
    current->body_();
    current->fibers_[threadIdx.x].at = At::kEnd;
  }
  bool all_are(At at, size_t begin, size_t end) const {
    return std::all_of(fibers_.begin() + static_cast<std::ptrdiff_t>(begin),
                       fibers_.begin() + static_cast<std::ptrdiff_t>(end),
                       [at](const Fiber& fiber) { return fiber.at == at; });
  }
  void wait(At at) {
    Fiber& fiber = fibers_[threadIdx.x];
    fiber.at = at;
    ::swapcontext(&fiber.context, &scheduler_);
  }
  // Runs a warp from shuffle to shuffle, up to the barrier or the end.
  void run_warp(size_t begin, std::mt19937& random) {
    const size_t end = std::min(fibers_.size(), begin + kWarpThreads);
    std::vector<unsigned> threads(end - begin);
    std::iota(threads.begin(), threads.end(), static_cast<unsigned>(begin));
    do {
      if (order != 0) std::shuffle(threads.begin(), threads.end(), random);
      for (const unsigned thread : threads) {
        if (fibers_[thread].at == At::kEnd) continue;
        fibers_[thread].at = At::kWork;
        threadIdx.x = thread;
        ::swapcontext(&scheduler_, &fibers_[thread].context);
      }
    } while (all_are(At::kShuffle, begin, end));
    diverged = diverged || !(all_are(At::kBarrier, begin, end) || all_are(At::kEnd, begin, end));
  }

  const std::function<void()>& body_;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_{};
};

inline void run_on_host(cudaStream_t, unsigned blocks, unsigned threads, const std::function<void()>& body) {
  blocks = std::min(blocks, HostBlock::most);
  gridDim = {blocks};
  blockDim = {threads};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block};
    HostBlock(threads, body).run();
  }
}

inline void __syncthreads() { HostBlock::current->wait_for_all(); }

inline float __shfl_xor_sync(unsigned, float value, int other) {
  auto& block = *HostBlock::current;
  const unsigned own = threadIdx.x;
  block.exchanged[own] = value;
  block.wait_for_warp();
  const float given = block.exchanged[own ^ static_cast<unsigned>(other)];
  block.wait_for_warp();
  return given;
}
