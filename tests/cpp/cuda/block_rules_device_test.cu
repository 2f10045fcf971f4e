// SPDX-License-Identifier: Apache-2.0
// The block rules run in a kernel and on the host over the same scripts; the states, tokens and
// decisions after every step must be equal byte for byte.

#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "diffulex/core/block_rules.h"

namespace diffulex {
namespace {

constexpr int32_t kMaxTokens = 512;  // token store of one script
constexpr int32_t kMaxSteps = 400;
constexpr int32_t kNumScripts = 64;

/// One scripted request: everything its steps depend on.
struct Script {
  BlockRules rules;
  int32_t prompt_len = 0;
  int32_t limit_end = 0;
  uint32_t seed = 0;
};

/// What is compared after every step.
struct StepRecord {
  int32_t activated = 0;
  int32_t num_frozen = 0;
  int32_t num_stored = 0;
  int32_t reason = 0;
  int32_t settled_end = 0;
  int32_t stop_pos = 0;
  int32_t run_len = 0;
  int32_t context_len = 0;
  uint32_t state_hash = 0;
};

DIFFULEX_HOST_DEVICE inline uint32_t next_random(uint32_t& state) {
  state = state * 1664525U + 1013904223U;
  return state >> 8;
}

DIFFULEX_HOST_DEVICE inline uint32_t hash_state(const BlockRules& rules, const BufferState& state) {
  uint32_t hash = 2166136261U;
  const auto add = [&hash](int32_t value) {
    hash = (hash ^ static_cast<uint32_t>(value)) * 16777619U;
  };
  for (int32_t i = 0; i < rules.buffer_size; ++i) {
    const Block& block = state.blocks[i];
    add(block.block_id);
    add(static_cast<int32_t>(block.status));
    add(block.num_masks);
    add(block.editable_start);
    add(block.total_steps);
    add(block.open_steps);
    add(block.stored_this_step ? 1 : 0);
    add(block.commit_ready ? 1 : 0);
  }
  add(state.num_valid);
  add(state.num_held);
  return hash;
}

/// A sampler that accepts each open position with probability 1/4, and one at least where the gate
/// is open.
DIFFULEX_HOST_DEVICE inline void sample(const BlockRules& rules, BufferState& state, int32_t index,
                                        uint32_t& random, int32_t* tokens) {
  const bool gate = force_top1(rules, state, index);
  Block& block = state.blocks[index];
  bool has_written = false;
  for (int32_t rel = 0; rel < rules.block_size; ++rel) {
    const int32_t position = block.block_id * rules.block_size + rel;
    const bool wanted = next_random(random) % 4U == 0U || (gate && !has_written);
    const int32_t token = 1 + static_cast<int32_t>(next_random(random) % 90U);
    if (wanted && check_write(rules, block, rel, tokens[position], token) == WriteCheck::kOk) {
      apply_write(rules, state, index, rel, token, tokens);
      has_written = true;
    }
  }
  block.commit_ready = block.num_masks == 0;
}

/// Runs one script; returns the number of steps.
DIFFULEX_HOST_DEVICE inline int32_t run_script(const Script& script, int32_t* tokens,
                                               StepRecord* records) {
  const BlockRules& rules = script.rules;
  uint32_t random = script.seed;
  for (int32_t i = 0; i < kMaxTokens; ++i) {
    tokens[i] = rules.mask_token_id;
  }
  for (int32_t i = 0; i < script.prompt_len; ++i) {
    tokens[i] = 1 + static_cast<int32_t>(next_random(random) % 90U);
  }
  BufferState state;
  state.num_stop_ids = 1;
  state.stop_ids[0] = 13;
  init_buffer(rules, state, script.prompt_len, script.limit_end);
  mark_cached(rules, state, buffer_start(rules, state));
  const int32_t num_prefill = 1;
  for (int32_t step = 0; step < kMaxSteps; ++step) {
    StepRecord& record = records[step];
    record = StepRecord{};
    if (next_random(random) % 16U == 0U) {
      // A preemption: the KV is lost and rebuilt by a resume forward.
      const int32_t resume_until = drop_cached(rules, state);
      mark_stored(rules, state, 0, resume_until);
      mark_cached(rules, state, buffer_start(rules, state));
      count_held(state, false, scan_transitions(rules, state));
    }
    record.activated = begin_buffer_step(rules, state) ? 1 : 0;
    if (next_random(random) % 16U == 0U) {
      undo_buffer_step(rules, state, record.activated != 0);
      record.activated += begin_buffer_step(rules, state) ? 2 : 0;
    }
    mark_stored(rules, state, state.context_len, storable_end(rules, state));
    count_sampler_steps(rules, state);
    for (int32_t i = 0; i < state.num_valid; ++i) {
      if (state.blocks[i].status == BlockStatus::kActive) {
        sample(rules, state, i, random, tokens);
      }
    }
    const Transitions transitions = scan_transitions(rules, state);
    count_held(state, true, transitions);
    advance_settled(rules, state, tokens);
    StopLimits limits;
    limits.max_tokens = script.limit_end - script.prompt_len;
    limits.nfe = num_prefill + step;
    limits.max_nfe = 300;
    limits.max_repetition_run = 5;
    record.num_frozen = transitions.num_frozen;
    record.num_stored = transitions.num_stored;
    record.reason = static_cast<int32_t>(check_stop(state, limits));
    record.settled_end = state.settled_end;
    record.stop_pos = state.stop_pos;
    record.run_len = state.run_len;
    record.context_len = state.context_len;
    record.state_hash = hash_state(rules, state);
    if (record.reason != static_cast<int32_t>(FinishReason::kNone)) {
      return step + 1;
    }
  }
  return kMaxSteps;
}

__global__ void run_scripts_kernel(const Script* scripts, int32_t* tokens, StepRecord* records,
                                   int32_t* num_steps) {
  const int32_t index = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < kNumScripts) {
    num_steps[index] =
        run_script(scripts[index], tokens + index * kMaxTokens, records + index * kMaxSteps);
  }
}

std::vector<Script> make_scripts() {
  std::vector<Script> scripts;
  uint32_t random = 12345U;
  for (int32_t i = 0; i < kNumScripts; ++i) {
    Script script;
    script.rules.block_size = 4 << (next_random(random) % 4U);
    script.rules.buffer_size = 1 + static_cast<int32_t>(next_random(random) % 6U);
    script.rules.mask_token_id = 99;
    script.rules.vocab_size = 100;
    script.rules.add_block_threshold = static_cast<float>(next_random(random) % 5U) * 0.25F;
    script.rules.semi_complete_threshold = static_cast<float>(next_random(random) % 5U) * 0.25F;
    script.prompt_len = 1 + static_cast<int32_t>(next_random(random) % 70U);
    script.limit_end = script.prompt_len + 1 + static_cast<int32_t>(next_random(random) % 120U);
    script.seed = next_random(random);
    scripts.push_back(script);
  }
  return scripts;
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : bytes_(count * sizeof(T)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0, bytes_), cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() { return static_cast<T*>(data_); }
  void read(std::vector<T>& host) {
    ASSERT_EQ(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  void write(const std::vector<T>& host) {
    ASSERT_EQ(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

TEST(BlockRulesDevice, EqualsTheHost) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    GTEST_SKIP() << "no CUDA device";
  }
  const std::vector<Script> scripts = make_scripts();
  DeviceArray<Script> device_scripts(kNumScripts);
  DeviceArray<int32_t> device_tokens(kNumScripts * kMaxTokens);
  DeviceArray<StepRecord> device_records(kNumScripts * kMaxSteps);
  DeviceArray<int32_t> device_steps(kNumScripts);
  device_scripts.write(scripts);
  run_scripts_kernel<<<kNumScripts / 32, 32>>>(device_scripts.get(), device_tokens.get(),
                                               device_records.get(), device_steps.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<int32_t> tokens(kNumScripts * kMaxTokens);
  std::vector<StepRecord> records(kNumScripts * kMaxSteps);
  std::vector<int32_t> num_steps(kNumScripts);
  device_tokens.read(tokens);
  device_records.read(records);
  device_steps.read(num_steps);

  int32_t total_steps = 0;
  for (int32_t i = 0; i < kNumScripts; ++i) {
    SCOPED_TRACE(i);
    std::vector<int32_t> host_tokens(kMaxTokens);
    std::vector<StepRecord> host_records(kMaxSteps);
    const auto index = static_cast<size_t>(i);
    const int32_t steps = run_script(scripts[index], host_tokens.data(), host_records.data());
    ASSERT_EQ(num_steps[index], steps);
    ASSERT_LT(steps, kMaxSteps);  // every script ends
    total_steps += steps;
    for (int32_t step = 0; step < steps; ++step) {
      const StepRecord& device = records[index * kMaxSteps + static_cast<size_t>(step)];
      ASSERT_EQ(std::memcmp(&device, &host_records[static_cast<size_t>(step)], sizeof(StepRecord)),
                0)
          << "step " << step;
    }
    EXPECT_EQ(std::memcmp(tokens.data() + index * kMaxTokens, host_tokens.data(),
                          kMaxTokens * sizeof(int32_t)),
              0);
  }
  EXPECT_GT(total_steps, kNumScripts * 5);
}

}  // namespace
}  // namespace diffulex
