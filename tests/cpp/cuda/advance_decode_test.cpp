// SPDX-License-Identifier: Apache-2.0

// advance_decode on the device against its CPU twin over random decodes. The arenas of a call lie
// in one slab between guards; both sides start from the same slab, poison where the op writes, and
// must leave the same bytes in all of it.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <random>
#include <string_view>
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
constexpr size_t kGuardBytes = kArenaAlignment;  // before, between and after the arenas
constexpr int32_t kMask = 39;
constexpr int32_t kVocab = 40;

/// The arenas of one call in host memory, poison around them; a twin of the same bytes is on the
/// device.
class Slab final {
 public:
  explicit Slab(const PlanLayout& layout)
      : plan_fields_(PlanArrays::fields(layout)),
        output_fields_(OutputArrays::fields(layout)),
        batch_fields_(BatchArrays::fields(layout)) {
    const std::array<const std::vector<ArenaField>*, 3> arenas = {&plan_fields_, &output_fields_,
                                                                  &batch_fields_};
    for (size_t i = 0; i < arenas.size(); ++i) {
      offsets_[i] = bytes_.size() + kGuardBytes;
      sizes_[i] = Arena::arena_bytes(*arenas[i]);
      bytes_.resize(offsets_[i] + sizes_[i] + kGuardBytes, kPoison);
    }
    bind(bytes_.data());
  }
  /// Points the arenas of the call into memory that starts at `base`.
  void bind(uint8_t* base) {
    const std::array<TensorRef*, 3> arenas = {&params.plan, &params.output, &params.batch};
    for (size_t i = 0; i < arenas.size(); ++i) {
      TensorRef& arena = *arenas[i];
      arena.data = base + offsets_[i];
      arena.dtype = DType::kU8;
      arena.rank = 1;
      arena.size[0] = static_cast<int64_t>(sizes_[i]);
      arena.stride[0] = 1;
    }
    plan = PlanArrays::at(params.plan.data, plan_fields_);
    output = OutputArrays::at(params.output.data, output_fields_);
    batch = BatchArrays::at(params.batch.data, batch_fields_);
  }
  /// Poisons all of the plan but what the op reads; the arenas must be bound to the host.
  void poison_plan() {
    for (const ArenaField& field : plan_fields_) {
      const std::string_view name = field.name;
      if (name != "page_tables" && name != "blk_prev_argmax") {
        std::memset(params.plan.as<uint8_t>() + field.offset, kPoison, field.bytes());
      }
    }
  }
  [[nodiscard]] std::vector<uint8_t>& bytes() { return bytes_; }

  AdvanceDecodeParams params;
  PlanArrays plan;
  OutputArrays output;
  BatchArrays batch;

 private:
  std::vector<ArenaField> plan_fields_;
  std::vector<ArenaField> output_fields_;
  std::vector<ArenaField> batch_fields_;
  std::array<size_t, 3> offsets_ = {};
  std::array<size_t, 3> sizes_ = {};
  std::vector<uint8_t> bytes_;
};

/// A batch of requests that decode, one advance_decode call per step.
class Decode final {
 public:
  explicit Decode(uint64_t seed) : random_(seed), layout_(random_layout()), slab_(layout_) {
    const auto ints = layout_.to_ints();
    params_.layout.assign(ints.begin(), ints.end());
    params_.num_reqs = num_reqs_;
    params_.masked_rows_only = uniform(&random_, 0, 1) == 0;
    params_.has_block_cache = uniform(&random_, 0, 3) > 0;
    params_.packs_rows = !is_dual_ && !is_canvas_ && uniform(&random_, 0, 1) == 0;
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
  [[nodiscard]] int num_packed() const { return num_packed_; }

 private:
  [[nodiscard]] int32_t num_rows() const { return block_size_ * buffer_size_; }

  PlanLayout random_layout() {
    block_size_ = static_cast<int32_t>(pick(&random_, {1, 4, 8, 32}));
    buffer_size_ = static_cast<int32_t>(pick(&random_, {1, 2, 4, 7, kMaxBufferBlocks}));
    num_reqs_ = static_cast<int32_t>(uniform(&random_, 1, 6));
    is_dual_ = buffer_size_ > 1 && uniform(&random_, 0, 2) == 0;
    is_canvas_ = buffer_size_ == 1 && uniform(&random_, 0, 1) == 0;
    const bool is_plain = !is_dual_ && !is_canvas_;
    is_editing_ = is_plain && uniform(&random_, 0, 3) == 0;
    PlanLayout layout;
    layout.block_size = block_size_;
    layout.buffer_size = buffer_size_;
    layout.page_size = static_cast<int32_t>(pick(&random_, {1, 4, 16, 32}));
    const int32_t longest = 3 * block_size_ + 70 + 2 * num_rows() + block_size_;
    layout.max_pages_per_req = longest / layout.page_size + 1;
    layout.max_num_reqs = num_reqs_ + static_cast<int32_t>(uniform(&random_, 0, 2));
    layout.max_num_rows =
        layout.max_num_reqs * num_rows() + static_cast<int32_t>(uniform(&random_, 0, 9));
    layout.att_block_size = block_size_;
    if (is_plain && uniform(&random_, 0, 1) == 0) {
      layout.merge_top_k = static_cast<int32_t>(uniform(&random_, 1, 5));
    }
    layout.has_saved_rows = is_plain && uniform(&random_, 0, 1) == 0;
    layout.has_edits = is_editing_;
    layout.has_dual_cache = is_dual_;
    layout.has_canvas = is_canvas_;
    return layout;
  }

  [[nodiscard]] int64_t num_places() const { return int64_t{num_reqs_} * num_rows(); }
  [[nodiscard]] int64_t num_blocks() const { return int64_t{num_reqs_} * buffer_size_; }

  DecodeRequest& request(int32_t r) {
    return reinterpret_cast<DecodeRequest*>(slab_.batch.requests)[r];
  }

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
    request.max_post_edit_steps = r + 1;
    request.penalty = 0.5F * static_cast<float>(r);
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
      std::fill_n(slab_.plan.blk_prev_argmax + int64_t{r} * block_size_, block_size_, 12);
    } else {
      init_buffer(rules, request.state, prompt_len, prompt_len + max_tokens);
      mark_cached(rules, request.state, buffer_start(rules, request.state));
      count_held(request.state, true, Transitions());
    }
    auto* window = slab_.batch.windows + int64_t{r} * window_len(num_rows());
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
    for (int64_t i = 0; i < layout_.max_pages_per_req; ++i) {
      slab_.plan.page_tables[int64_t{r} * layout_.max_pages_per_req + i] =
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
    auto* writes = slab_.output.write_ids;
    for (int64_t i = 0; i < num_places(); ++i) {
      writes[i] = -1;
      const bool is_wanted = !params_.is_entry && slab_.plan.blk_row_index[i] >= 0 &&
                             slab_.plan.blk_tokens[i] == kMask;
      if (is_wanted && uniform(&random_, 0, 2) > 0) {
        writes[i] = uniform(&random_, 12, kMask - 1);
      }
      if (uniform(&random_, 0, 4000) == 0) {
        writes[i] = pick(&random_, {kMask, kVocab, -2, int64_t{1} << 40, 3});
      }
    }
    for (int64_t i = 0; i < num_blocks(); ++i) {
      int32_t flags = uniform(&random_, 0, 5) > 0 ? kSamplerCommittable : 0;
      for (const int32_t other : {kSamplerSameAsPrevious, kSamplerAllConfident}) {
        flags |= uniform(&random_, 0, 1) == 0 ? other : 0;
      }
      flags |= uniform(&random_, 0, 9) == 0 ? kSamplerSkipped : 0;
      flags |= uniform(&random_, 0, 500) == 0 ? kSamplerBadLogits : 0;
      slab_.output.flags[i] = flags;
      slab_.output.same_token_ratio[i] = 0.25F * static_cast<float>(random_() % 5);
    }
    if (is_canvas_) {
      answer_canvases();
    }
    if (is_dual_) {
      for (int32_t r = 0; r < num_reqs_; ++r) {
        const int64_t seed = uniform(&random_, 12, kMask - 1);
        slab_.output.pending_next_token[r] = uniform(&random_, 0, 40) > 0 ? seed : -1;
      }
    }
    if (layout_.merge_top_k > 0) {
      for (int64_t i = 0; i < num_places(); ++i) {
        slab_.output.merge_valid[i] = static_cast<uint8_t>(random_() % 2);
        slab_.output.merge_residual[i] = static_cast<float>(random_() % 100);
      }
      for (int64_t i = 0; i < num_places() * layout_.merge_top_k; ++i) {
        slab_.output.merge_topk_ids[i] = static_cast<int64_t>(random_() % kVocab);
        slab_.output.merge_topk_probs[i] = static_cast<float>(random_() % 100);
      }
    }
  }

  /// The next canvas of every request, and its most likely ids, which repeat now and then.
  void answer_canvases() {
    for (int32_t r = 0; r < num_reqs_; ++r) {
      const bool repeats = uniform(&random_, 0, 1) == 0;
      for (int64_t i = int64_t{r} * block_size_; i < int64_t{r + 1} * block_size_; ++i) {
        int64_t& argmax = slab_.output.canvas_argmax[i];
        argmax = repeats ? slab_.plan.blk_prev_argmax[i] : uniform(&random_, 12, 30);
        argmax = uniform(&random_, 0, 2000) == 0 ? pick(&random_, {-1, kVocab}) : argmax;
        int64_t& write = slab_.output.write_ids[i];
        write = uniform(&random_, 0, 2000) == 0 ? -1 : uniform(&random_, 12, kVocab - 1);
      }
      if (uniform(&random_, 0, 3) == 0) {
        slab_.output.flags[r] |= kSamplerConverged;
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

  /// Packed requests lie one after another, and so do the logits rows of those that are read.
  void check_packed_rows() {
    int32_t row = 0;
    int32_t num_read = 0;
    for (int32_t r = 0; r < num_reqs_; ++r) {
      EXPECT_EQ(slab_.plan.cu_seqlens_q[r], row);
      row += slab_.batch.num_rows[r];
      EXPECT_EQ(slab_.plan.cu_seqlens_q[r + 1], row);
      EXPECT_EQ(slab_.plan.valid_slices[r], row);
      num_read += slab_.batch.num_logits_rows[r];
    }
    std::vector<int32_t> read;
    const auto note = [&](int32_t index) {
      if (index >= 0 && index < layout_.max_logits_rows()) {
        read.push_back(index);
      }
    };
    for (int64_t i = 0; i < num_places(); ++i) {
      note(slab_.plan.blk_row_index[i]);
      EXPECT_GE(slab_.plan.logits_rows[i], 0);
      EXPECT_LT(slab_.plan.logits_rows[i], std::max(row, 1));
    }
    for (int32_t r = 0; layout_.has_saved_rows && r < num_reqs_; ++r) {
      note(slab_.plan.last_row_index[r]);
    }
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    ASSERT_EQ(static_cast<int32_t>(read.size()), num_read);
    for (int32_t i = 0; i < num_read; ++i) {
      EXPECT_EQ(read[static_cast<size_t>(i)], i);
    }
    num_packed_ += row < num_places() && num_read > 0 ? 1 : 0;
  }

  /// What decides a position, is saved or seeds a D-block is a row of the request that has logits.
  void check_logits_rows() {
    const int32_t per_request = is_dual_ ? block_size_ : num_rows();
    const auto expect_own = [&](int32_t r, int32_t index) {
      if (index < 0 || index >= layout_.max_logits_rows()) {
        return;  // none, or the record of a slot
      }
      EXPECT_EQ(index / per_request, r);
      EXPECT_GE(slab_.plan.logits_rows[index], r * num_rows()) << index;
      EXPECT_LT(slab_.plan.logits_rows[index], (r + 1) * num_rows()) << index;
    };
    for (int32_t r = 0; r < num_reqs_; ++r) {
      for (int32_t i = 0; i < num_rows(); ++i) {
        expect_own(r, slab_.plan.blk_row_index[r * num_rows() + i]);
      }
      expect_own(r, is_dual_ ? slab_.plan.seed_row[r] : -1);
      expect_own(r, layout_.has_saved_rows ? slab_.plan.last_row_index[r] : -1);
    }
  }

  void advance_both(int step) {
    answer();
    slab_.poison_plan();
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
    const auto offset = static_cast<size_t>(slab_.batch.requests - host.data());
    if (params_.packs_rows) {
      check_packed_rows();
    } else {
      check_logits_rows();
    }
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
      num_seeded_ += is_dual_ && slab_.plan.seed_row[r] >= 0 ? 1 : 0;
      num_saved_ += layout_.has_saved_rows && slab_.plan.last_row_index[r] >= 0 ? 1 : 0;
      num_slid_ += buffer_start(after.rules, after.state) > starts[static_cast<size_t>(r)] ? 1 : 0;
    }
  }

  std::mt19937_64 random_;
  int32_t block_size_ = 0;   // B, as all until `layout_` drawn by random_layout
  int32_t buffer_size_ = 0;  // N
  int32_t num_reqs_ = 0;     // R
  bool is_editing_ = false;
  bool is_dual_ = false;
  bool is_canvas_ = false;
  PlanLayout layout_;
  Slab slab_;  // bound to the host between calls
  AdvanceDecodeParams& params_ = slab_.params;
  int num_slid_ = 0;  // steps in which a request's buffer slid
  int num_ended_ = 0;
  int num_failed_ = 0;
  int num_seeded_ = 0;  // steps that seed a D-block
  int num_saved_ = 0;   // steps that save the row of a request
  int num_packed_ = 0;  // steps that leave out void rows
};

TEST(CudaAdvanceDecodeTest, LeavesTheBytesOfTheCpuTwin) {
  DIFFULEX_REQUIRE_DEVICE();
  const uint64_t seeds = num_seeds(120);
  int num_slid = 0;
  int num_ended = 0;
  int num_failed = 0;
  int num_saved = 0;
  int num_seeded = 0;
  int num_packed = 0;
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
    num_packed += decode.num_packed();
  }
  if (seeds == 120) {  // the scripts reach what they are for
    EXPECT_GT(num_slid, 100);
    EXPECT_GT(num_ended, 100);
    EXPECT_GT(num_failed, 5);
    EXPECT_LT(num_failed, num_ended);
    EXPECT_GT(num_saved, 50);
    EXPECT_GT(num_seeded, 10);
    EXPECT_GT(num_packed, 50);
  }
}

}  // namespace
}  // namespace diffulex::test
