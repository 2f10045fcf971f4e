// SPDX-License-Identifier: Apache-2.0
// Steady-state steps do not allocate: a counting operator new over the whole program.

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "diffulex/core/engine_core.h"

namespace {
std::atomic<long> g_num_allocations{0};
}  // namespace

// Not inlined: the compiler would take the malloc inside for a mismatch with operator delete.
__attribute__((noinline)) void* operator new(size_t size) {
  ++g_num_allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}
// std::stable_sort asks this way; without it, new and delete would be of two allocators.
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t& /*tag*/) noexcept {
  ++g_num_allocations;
  return std::malloc(size == 0 ? 1 : size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t /*size*/) noexcept {
  std::free(memory);
}

namespace diffulex {
namespace {

/// A canvas of one token, which is never reported as converged.
void accept_canvases(StepPlan& plan, SamplerOutput& output) {
  const auto width = static_cast<size_t>(plan.block_size());
  for (size_t i = 0; i < static_cast<size_t>(plan.num_blocks()) * width; ++i) {
    const bool is_real = plan.blk_row_index()[i] >= 0;
    output.write_ids()[i] = is_real ? 7 : -1;
    output.canvas_argmax()[i] = is_real ? 7 : -1;
  }
}

/// Fills the first open position of every block whose gate is open, and every seed.
void accept_one(StepPlan& plan, SamplerOutput& output) {
  const auto width = static_cast<size_t>(plan.block_size());
  output.clear(plan.num_blocks());
  for (size_t r = 0; r < plan.seed_row().size(); ++r) {
    output.pending_next_token()[r] = plan.seed_row()[r] >= 0 ? 7 : -1;
  }
  if (plan.layout().has_canvas) {
    accept_canvases(plan, output);
    return;
  }
  for (size_t blk = 0; blk < static_cast<size_t>(plan.num_blocks()); ++blk) {
    int32_t num_open = 0;
    for (size_t rel = 0; rel < width; ++rel) {
      if (plan.blk_row_index()[blk * width + rel] >= 0 && ++num_open == 1) {
        output.write_ids()[blk * width + rel] = 7;
      }
    }
    output.flags()[blk] = num_open <= 1 ? kSamplerCommittable : 0;
  }
}

long allocations_in_steady_state(const char* strategy, int32_t buffer_size) {
  EngineOptions options;
  options.strategy = strategy;
  options.max_denoising_steps = 4;
  options.block_size = 8;
  options.buffer_size = buffer_size;
  options.page_size = 8;
  options.num_pages = 64;
  options.max_num_reqs = 4;
  options.max_model_len = 256;
  options.max_num_batched_tokens = 300;
  options.vocab_size = 20;
  options.decode_headroom = false;
  EngineCore core(options);
  StepPlan plan(options);
  SamplerOutput output(options);
  // Four requests of 25 pages do not fit into 64 pages together: preemptions and resumes occur.
  for (int32_t i = 0; i < 4; ++i) {
    SamplingParams params;
    params.max_tokens = 190;
    const std::vector<int32_t> prompt = {2 + i, 3, 4, 5, 6, 7, 8, 9, 2};
    EXPECT_TRUE(core.add_request(Span<const int32_t>(prompt), params).ok());
  }
  long counted = 0;
  int32_t num_steps = 0;
  while (core.has_unfinished() && num_steps < 5000) {
    const long before = g_num_allocations;
    const PlanKind kind = core.schedule(plan);
    const long after_schedule = g_num_allocations;
    accept_one(plan, output);
#ifdef NDEBUG
    const long before_complete = g_num_allocations;
    EXPECT_TRUE(core.complete_step(plan, output).ok());
    const long in_complete = g_num_allocations - before_complete;
#else
    // complete_step checks all invariants in this build, which allocates.
    EXPECT_TRUE(core.complete_step(plan, output).ok());
    const long in_complete = 0;
#endif
    EXPECT_NE(kind, PlanKind::kIdle);
    if (num_steps > 0) {  // the first step takes the requests from the mailbox
      counted += after_schedule - before + in_complete;
    }
    ++num_steps;
  }
  EXPECT_GT(core.stats().num_preemptions, 0);
  EXPECT_GT(num_steps, 60);
  EXPECT_FALSE(core.has_unfinished());
  return counted;
}

TEST(SchedulerAllocations, NoneAfterWarmUp) {
  EXPECT_EQ(allocations_in_steady_state("multi_bd", 1), 0);
  EXPECT_EQ(allocations_in_steady_state("multi_bd", 4), 0);
  EXPECT_EQ(allocations_in_steady_state("fast_dllm_v2", 2), 0);
  EXPECT_EQ(allocations_in_steady_state("fast_dllm_v2", 4), 0);
  EXPECT_EQ(allocations_in_steady_state("diffusion_gemma", 1), 0);
}

}  // namespace
}  // namespace diffulex
