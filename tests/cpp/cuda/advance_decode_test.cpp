// SPDX-License-Identifier: Apache-2.0

// advance_decode on the device against its CPU twin over random decodes. Every tensor of a call
// lies in one slab between guards; both sides start from the same slab, poison where the op writes,
// and must leave the same bytes in all of it.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_mirror.h"
#include "diffulex/core/decode_rules.h"
#include "diffulex/core/sampler_flags.h"
#include "diffulex/ops/advance.h"
#include "ops/advance/row.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr uint8_t kPoison = 0xA5;
constexpr size_t kGuardBytes = 64;  // before, between and after the tensors
constexpr int32_t kMask = 39;
constexpr int32_t kVocab = 40;

/// One call's tensors in host memory, with their places; a twin of the same bytes is on the device.
class Slab final {
 public:
  /// Reserves a tensor; `gap` leaves that many poisoned elements at the end of each row.
  TensorRef* add(TensorRef* tensor, DType dtype, const std::vector<int64_t>& shape,
                 int64_t gap = 0) {
    tensor->dtype = dtype;
    tensor->rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      tensor->size[dim] = shape[dim];
      tensor->stride[dim] = stride;
      stride *= shape[dim] + (dim + 1 == shape.size() ? gap : 0);
    }
    places_.push_back({tensor, bytes_.size() + kGuardBytes});
    const auto size = static_cast<size_t>(stride * dtype_bytes(dtype));
    bytes_.resize((places_.back().offset + size + kGuardBytes + 63) / 64 * 64, kPoison);
    return tensor;
  }
  /// Points the tensors into memory that starts at `base`.
  void bind(uint8_t* base) const {
    for (const Place& place : places_) {
      place.tensor->data = base + place.offset;
    }
  }
  /// Poisons what the op writes; the tensors must be bound to the host.
  static void poison(const TensorRef& tensor) {
    if (tensor.present()) {
      std::memset(tensor.data, kPoison, span_bytes(tensor));
    }
  }
  [[nodiscard]] std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  struct Place {
    TensorRef* tensor;
    size_t offset;
  };
  std::vector<Place> places_;
  std::vector<uint8_t> bytes_;
};

/// A batch of requests that decode, one advance_decode call per step.
class Decode final {
 public:
  explicit Decode(uint64_t seed) : random_(seed) {
    block_size_ = static_cast<int32_t>(pick(&random_, {1, 4, 8, 32}));
    buffer_size_ = static_cast<int32_t>(pick(&random_, {1, 2, 4, 7, kMaxBufferBlocks}));
    num_reqs_ = static_cast<int32_t>(uniform(&random_, 1, 6));
    params_.page_size = static_cast<int32_t>(pick(&random_, {1, 4, 16, 32}));
    params_.masked_rows_only = uniform(&random_, 0, 1) == 0;
    is_dual_ = buffer_size_ > 1 && uniform(&random_, 0, 2) == 0;
    is_canvas_ = buffer_size_ == 1 && uniform(&random_, 0, 1) == 0;
    is_editing_ = !is_dual_ && !is_canvas_ && uniform(&random_, 0, 3) == 0;
    const int64_t longest = 3 * block_size_ + 70 + 2 * num_rows() + block_size_;
    reserve(!is_dual_ && !is_canvas_ && uniform(&random_, 0, 1) == 0,
            longest / params_.page_size + 1);
    slab_.bind(slab_.bytes().data());
    for (int32_t r = 0; r < num_reqs_; ++r) {
      begin(r);
    }
  }

  /// The entry call, then `num_steps` steps, on both sides; stops at the first difference.
  void run(int num_steps) {
    params_.is_entry = true;
    for (int step = 0; step <= num_steps && !testing::Test::HasFatalFailure(); ++step) {
      advance_both(step);
      params_.is_entry = false;
    }
  }

  [[nodiscard]] int num_slid() const { return num_slid_; }
  [[nodiscard]] int num_ended() const { return num_ended_; }
  [[nodiscard]] int num_failed() const { return num_failed_; }
  [[nodiscard]] int num_saved() const { return num_saved_; }
  [[nodiscard]] int num_seeded() const { return num_seeded_; }

 private:
  [[nodiscard]] int32_t num_rows() const { return block_size_ * buffer_size_; }

  void reserve(bool with_merge, int64_t num_pages) {
    const int64_t reqs = num_reqs_;
    const int64_t blocks = reqs * buffer_size_;
    const int64_t rows = reqs * num_rows();
    const int64_t width = block_size_;
    AdvanceDecodeParams& p = params_;
    slab_.add(&p.requests, DType::kU8, {reqs, static_cast<int64_t>(sizeof(DecodeRequest))});
    slab_.add(&p.windows, DType::kI32, {reqs, window_len(num_rows())});
    slab_.add(&p.page_tables, DType::kI32, {reqs, num_pages}, uniform(&random_, 0, 3));
    slab_.add(&p.write_ids, DType::kI64, {blocks, width});
    slab_.add(&p.flags, DType::kI32, {blocks});
    slab_.add(&p.same_token_ratio, DType::kF32, {blocks});
    const auto add_output = [&](TensorRef* tensor, DType dtype, const std::vector<int64_t>& shape) {
      outputs_.push_back(slab_.add(tensor, dtype, shape));
    };
    add_output(&p.input_ids, DType::kI64, {rows});
    add_output(&p.positions, DType::kI64, {rows});
    add_output(&p.slot_mapping, DType::kI32, {rows});
    add_output(&p.context_lens, DType::kI32, {reqs});
    add_output(&p.valid_slices, DType::kI32, {reqs});
    add_output(&p.tokens, DType::kI64, {blocks, width});
    add_output(&p.row_index, DType::kI32, {blocks, width});
    add_output(&p.editable_start, DType::kI32, {blocks});
    add_output(&p.valid_len, DType::kI32, {blocks});
    add_output(&p.gate, DType::kU8, {blocks});
    add_output(&p.accept_threshold, DType::kF32, {blocks});
    if (is_editing_) {
      add_output(&p.edit_threshold, DType::kF32, {blocks});
    }
    add_output(&p.open_steps, DType::kI32, {blocks});
    add_output(&p.total_steps, DType::kI32, {blocks});
    add_output(&p.post_edit_steps, DType::kI32, {blocks});
    add_output(&p.inv_temperature, DType::kF32, {rows});
    add_output(&p.uniforms, DType::kF64, {rows});
    add_output(&p.top_k, DType::kI32, {rows});
    add_output(&p.top_p, DType::kF32, {rows});
    add_output(&p.min_p, DType::kF32, {rows});
    if (with_merge) {
      const int64_t top_k = uniform(&random_, 1, 5);
      slab_.add(&p.merge_valid, DType::kU8, {blocks, width});
      slab_.add(&p.merge_ids, DType::kI64, {blocks, width, top_k});
      slab_.add(&p.merge_probs, DType::kF32, {blocks, width, top_k});
      slab_.add(&p.merge_residual, DType::kF32, {blocks, width});
      add_output(&p.row_merge_mask, DType::kU8, {rows});
      add_output(&p.row_merge_ids, DType::kI64, {rows, top_k});
      add_output(&p.row_merge_probs, DType::kF32, {rows, top_k});
      add_output(&p.row_merge_residual, DType::kF32, {rows});
    }
    if (is_dual_) {
      slab_.add(&p.pending_next_token, DType::kI64, {reqs});
      add_output(&p.seed_row, DType::kI32, {reqs});
      add_output(&p.mask_kinds, DType::kI32, {reqs});
      p.has_block_cache = uniform(&random_, 0, 3) > 0;
    } else if (is_canvas_) {
      slab_.add(&p.prev_argmax, DType::kI64, {blocks, width});
      slab_.add(&p.canvas_argmax, DType::kI64, {blocks, width});
      add_output(&p.stable_run, DType::kI32, {blocks});
      add_output(&p.steps_left, DType::kI32, {blocks});
      add_output(&p.renoise_ids, DType::kI64, {blocks, width});
      add_output(&p.block_slot, DType::kI32, {blocks});
      add_output(&p.row_pass_kind, DType::kU8, {rows});
      add_output(&p.row_self_cond, DType::kI32, {rows});
      add_output(&p.mask_kinds, DType::kI32, {reqs});
    } else if (uniform(&random_, 0, 1) == 0) {
      add_output(&p.last_row_index, DType::kI32, {reqs});
      add_output(&p.logits_source, DType::kI32, {rows});
      p.first_saved_row = static_cast<int32_t>(rows + uniform(&random_, 0, 9));
    }
  }

  DecodeRequest& request(int32_t r) { return params_.requests.as<DecodeRequest>()[r]; }

  /// Request r with its prompt cached, the forward of its first decode step entered.
  void begin(int32_t r) {
    DecodeRequest& request = this->request(r);
    request = DecodeRequest{};
    request.rules.block_size = block_size_;
    request.rules.buffer_size = buffer_size_;
    request.rules.mask_token_id = kMask;
    request.rules.vocab_size = kVocab;
    request.rules.add_block_threshold = 0.25F * static_cast<float>(uniform(&random_, 0, 4));
    request.rules.semi_complete_threshold = 0.25F * static_cast<float>(uniform(&random_, 0, 4));
    request.rules.is_editing = is_editing_;
    request.seed = random_();
    request.inv_temperature = uniform(&random_, 0, 1) == 0 ? 0.0F : 1.25F;
    request.accept_threshold = 0.9F;
    request.edit_threshold = 0.5F;
    request.top_p = 0.75F;
    request.min_p = 0.125F;
    request.top_k = 12;
    request.is_running = uniform(&random_, 0, 4) != 0;
    const auto prompt_len = static_cast<int32_t>(uniform(&random_, 1, 3 * block_size_));
    const auto max_tokens = static_cast<int32_t>(uniform(&random_, 1, 70));
    request.state.num_stop_ids = 1;
    request.state.stop_ids[0] = 13;
    request.limits.max_tokens = max_tokens;
    request.limits.max_nfe = uniform(&random_, 0, 3) == 0 ? 9 : 0;
    request.limits.max_repetition_run = uniform(&random_, 0, 3) == 0 ? 3 : 0;
    const BlockRules& rules = request.rules;
    if (is_dual_) {
      init_dual_cache(rules, request.state, request.dual_cache, prompt_len,
                      prompt_len + max_tokens);
      request.state.context_len = buffer_start(rules, request.state);
    } else if (is_canvas_) {
      begin_canvas(&request, prompt_len, prompt_len + max_tokens);
      std::fill_n(params_.prev_argmax.as<int64_t>() + int64_t{r} * block_size_, block_size_, 12);
    } else {
      init_buffer(rules, request.state, prompt_len, prompt_len + max_tokens);
      mark_cached(rules, request.state, buffer_start(rules, request.state));
      count_held(request.state, true, Transitions());
    }
    auto* window = params_.windows.as<int32_t>() + int64_t{r} * window_len(num_rows());
    const int32_t first = buffer_start(rules, request.state) - 1;
    for (int32_t i = 0; i < window_len(num_rows()); ++i) {
      window[i] = first + i < prompt_len ? static_cast<int32_t>(uniform(&random_, 20, 30)) : kMask;
    }
    if (is_dual_) {
      enter_dual_block(&request, TokenWindow{window, first});
    } else if (is_canvas_) {
      enter_canvas(&request, TokenWindow{window, first});
    } else {
      request.forward = enter_buffer(rules, request.state);
    }
    request.request_slot = num_reqs_ - 1 - r;
    // Without the saved row the first position is not sampled.
    request.carry_pos = uniform(&random_, 0, 9) > 0 ? request.forward.first_pos - 1 : -1;
    const int64_t num_pages = params_.page_tables.size[1];
    for (int64_t i = 0; i < num_pages; ++i) {
      params_.page_tables.as<int32_t>()[r * params_.page_tables.stride[0] + i] =
          uniform(&random_, 0, 9) == 0 ? -1 : static_cast<int32_t>(uniform(&random_, 0, 999));
    }
  }

  /// The rules of canvases, and the first one behind its prompt.
  void begin_canvas(DecodeRequest* request, int32_t prompt_len, int32_t limit_end) {
    CanvasRules& rules = request->canvas_rules;
    rules.max_denoising_steps = static_cast<int32_t>(pick(&random_, {1, 2, 5}));
    rules.vocab_size = kVocab;
    rules.max_model_len = limit_end + static_cast<int32_t>(uniform(&random_, 0, block_size_));
    request->rules.is_canvas = true;
    init_canvas(request->rules, request->state, request->canvas, prompt_len, limit_end);
    request->state.context_len = prompt_len;
  }

  /// The first denoising step of a canvas.
  void enter_canvas(DecodeRequest* request, const TokenWindow& tokens) {
    open_canvas_block(request->state, request->canvas);
    BufferForward& forward = request->forward;
    forward.first_pos = request->state.context_len;
    forward.num_valid_rows =
        canvas_valid_len(request->rules, request->canvas_rules, forward.first_pos);
    forward.store_end = forward.first_pos;
    forward.has_sampling = true;
    for (int32_t i = 0; i < forward.num_valid_rows; ++i) {
      const int32_t position = forward.first_pos + i;
      tokens[position] = initial_canvas_id(request->canvas_rules, request->seed, position);
    }
  }

  /// The first forward of a D-block: an INIT, or the rebuild of one that a preemption took away.
  void enter_dual_block(DecodeRequest* request, const TokenWindow& tokens) {
    const int32_t base = buffer_start(request->rules, request->state);
    if (tokens[base] == kMask) {
      place_seed(request->rules, request->state, 20, tokens);
    }
    if (uniform(&random_, 0, 3) == 0) {
      request->dual_cache.needs_rebuild = true;
      request->dual_cache.open_at_init = static_cast<uint32_t>(random_());
    }
    request->dual_step = next_dual_step(request->rules, request->state, request->dual_cache, tokens,
                                        params_.has_block_cache);
    begin_dual_step(request->state, request->dual_cache, request->dual_step);
  }

  /// What a sampler might answer to the step in flight, a few illegal writes included.
  void answer() {
    auto* writes = params_.write_ids.as<int64_t>();
    for (int64_t i = 0; i < params_.write_ids.numel(); ++i) {
      writes[i] = -1;
      const bool is_wanted = !params_.is_entry && params_.row_index.as<int32_t>()[i] >= 0 &&
                             params_.tokens.as<int64_t>()[i] == kMask;
      if (is_wanted && uniform(&random_, 0, 2) > 0) {
        writes[i] = uniform(&random_, 12, kMask - 1);
      }
      if (uniform(&random_, 0, 4000) == 0) {
        writes[i] = pick(&random_, {kMask, kVocab, -2, int64_t{1} << 40, 3});
      }
    }
    for (int64_t i = 0; i < params_.flags.size[0]; ++i) {
      int32_t flags = uniform(&random_, 0, 5) > 0 ? kSamplerCommittable : 0;
      for (const int32_t other : {kSamplerSameAsPrevious, kSamplerAllConfident}) {
        flags |= uniform(&random_, 0, 1) == 0 ? other : 0;
      }
      flags |= uniform(&random_, 0, 9) == 0 ? kSamplerSkipped : 0;
      flags |= uniform(&random_, 0, 500) == 0 ? kSamplerBadLogits : 0;
      params_.flags.as<int32_t>()[i] = flags;
      params_.same_token_ratio.as<float>()[i] = 0.25F * static_cast<float>(random_() % 5);
    }
    if (is_canvas_) {
      answer_canvases();
    }
    if (is_dual_) {
      for (int32_t r = 0; r < num_reqs_; ++r) {
        const int64_t seed = uniform(&random_, 12, kMask - 1);
        params_.pending_next_token.as<int64_t>()[r] = uniform(&random_, 0, 40) > 0 ? seed : -1;
      }
    }
    if (params_.merge_valid.present()) {
      for (int64_t i = 0; i < params_.merge_valid.numel(); ++i) {
        params_.merge_valid.as<uint8_t>()[i] = static_cast<uint8_t>(random_() % 2);
        params_.merge_residual.as<float>()[i] = static_cast<float>(random_() % 100);
      }
      for (int64_t i = 0; i < params_.merge_ids.numel(); ++i) {
        params_.merge_ids.as<int64_t>()[i] = static_cast<int64_t>(random_() % kVocab);
        params_.merge_probs.as<float>()[i] = static_cast<float>(random_() % 100);
      }
    }
  }

  /// The next canvas of every request, and its most likely ids, which repeat now and then.
  void answer_canvases() {
    for (int32_t r = 0; r < num_reqs_; ++r) {
      const bool repeats = uniform(&random_, 0, 1) == 0;
      for (int64_t i = int64_t{r} * block_size_; i < int64_t{r + 1} * block_size_; ++i) {
        int64_t& argmax = params_.canvas_argmax.as<int64_t>()[i];
        argmax = repeats ? params_.prev_argmax.as<int64_t>()[i] : uniform(&random_, 12, 30);
        argmax = uniform(&random_, 0, 2000) == 0 ? pick(&random_, {-1, kVocab}) : argmax;
        int64_t& write = params_.write_ids.as<int64_t>()[i];
        write = uniform(&random_, 0, 2000) == 0 ? -1 : uniform(&random_, 12, kVocab - 1);
      }
      if (uniform(&random_, 0, 3) == 0) {
        params_.flags.as<int32_t>()[r] |= kSamplerConverged;
      }
    }
  }

  /// Zeroes the bytes of a request that belong to no field: structs are assigned, and what becomes
  /// of padding then is up to the compiler.
  static void clear_padding(std::vector<uint8_t>* bytes, size_t requests_offset, int32_t count) {
    constexpr size_t kForward = offsetof(DecodeRequest, forward);
    constexpr size_t kCache = offsetof(DecodeRequest, dual_cache);
    constexpr size_t kStep = offsetof(DecodeRequest, dual_step);
    constexpr std::array<std::pair<size_t, size_t>, 4> kGaps = {{
        {kForward + offsetof(BufferForward, has_sampling) + sizeof(bool),
         kForward + sizeof(BufferForward)},
        {kCache + offsetof(DualCacheState, needs_rebuild) + sizeof(bool),
         kCache + offsetof(DualCacheState, open_at_init)},
        {kStep + offsetof(DualCacheStep, is_sampled) + sizeof(bool),
         kStep + offsetof(DualCacheStep, first_pos)},
        {kStep + offsetof(DualCacheStep, is_cache_only) + sizeof(bool),
         kStep + sizeof(DualCacheStep)},
    }};
    for (int32_t r = 0; r < count; ++r) {
      uint8_t* request =
          bytes->data() + requests_offset + static_cast<size_t>(r) * sizeof(DecodeRequest);
      for (const auto& [begin, end] : kGaps) {
        std::memset(request + begin, 0, end - begin);
      }
    }
  }

  void advance_both(int step) {
    answer();
    for (const TensorRef* output : outputs_) {
      Slab::poison(*output);
    }
    std::vector<uint8_t>& host = slab_.bytes();
    const DeviceBuffer device(host.size());
    DeviceMirror::check(
        cudaMemcpy(device.data(), host.data(), host.size(), cudaMemcpyHostToDevice));
    slab_.bind(device.data());
    ExecContext context;
    context.device = Device::kCuda;
    Status status = advance_decode(params_, context);
    slab_.bind(host.data());
    ASSERT_TRUE(status.ok()) << status.message();
    DeviceMirror::check(cudaDeviceSynchronize());
    std::vector<uint8_t> got(host.size());
    DeviceMirror::check(cudaMemcpy(got.data(), device.data(), got.size(), cudaMemcpyDeviceToHost));
    std::vector<bool> was_running;
    std::vector<int32_t> starts;
    for (int32_t r = 0; r < num_reqs_; ++r) {
      was_running.push_back(request(r).is_running);
      starts.push_back(buffer_start(request(r).rules, request(r).state));
    }
    status = advance_decode(params_, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    const auto offset = static_cast<size_t>(params_.requests.as<uint8_t>() - host.data());
    clear_padding(&got, offset, num_reqs_);
    clear_padding(&host, offset, num_reqs_);
    const auto place = std::mismatch(host.begin(), host.end(), got.begin());
    ASSERT_EQ(place.first, host.end())
        << "step " << step << ", byte " << place.first - host.begin() << " of the slab";
    for (int32_t r = 0; r < num_reqs_; ++r) {
      const DecodeRequest& after = request(r);
      const bool has_ended = was_running[static_cast<size_t>(r)] && !after.is_running;
      num_ended_ += has_ended ? 1 : 0;
      num_failed_ += has_ended && after.finish_reason == FinishReason::kError ? 1 : 0;
      num_seeded_ += is_dual_ && params_.seed_row.as<const int32_t>()[r] >= 0 ? 1 : 0;
      num_saved_ +=
          params_.last_row_index.present() && params_.last_row_index.as<const int32_t>()[r] >= 0
              ? 1
              : 0;
      num_slid_ += buffer_start(after.rules, after.state) > starts[static_cast<size_t>(r)] ? 1 : 0;
    }
  }

  std::mt19937_64 random_;
  int32_t block_size_ = 0;   // B
  int32_t buffer_size_ = 0;  // N
  int32_t num_reqs_ = 0;     // R
  bool is_editing_ = false;
  bool is_dual_ = false;
  bool is_canvas_ = false;
  Slab slab_;
  AdvanceDecodeParams params_;  // of the host slab between calls
  std::vector<const TensorRef*> outputs_;
  int num_slid_ = 0;  // steps in which a request's buffer slid
  int num_ended_ = 0;
  int num_failed_ = 0;
  int num_seeded_ = 0;  // steps that seed a D-block
  int num_saved_ = 0;   // steps that save the row of a request
};

TEST(CudaAdvanceDecodeTest, LeavesTheBytesOfTheCpuTwin) {
  DIFFULEX_REQUIRE_DEVICE();
  const uint64_t seeds = num_seeds(120);
  int num_slid = 0;
  int num_ended = 0;
  int num_failed = 0;
  int num_saved = 0;
  int num_seeded = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    Decode decode(seed);
    decode.run(12);
    ASSERT_FALSE(HasFatalFailure());
    num_slid += decode.num_slid();
    num_ended += decode.num_ended();
    num_failed += decode.num_failed();
    num_saved += decode.num_saved();
    num_seeded += decode.num_seeded();
  }
  if (seeds == 120) {  // the scripts reach what they are for
    EXPECT_GT(num_slid, 100);
    EXPECT_GT(num_ended, 100);
    EXPECT_GT(num_failed, 5);
    EXPECT_LT(num_failed, num_ended);
    EXPECT_GT(num_saved, 50);
    EXPECT_GT(num_seeded, 10);
  }
}

}  // namespace
}  // namespace diffulex::test
