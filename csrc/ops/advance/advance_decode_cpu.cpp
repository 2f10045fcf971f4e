// SPDX-License-Identifier: Apache-2.0

// advance_decode: the row function of row.h with teams of one lane.

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/advance/canvas_row.h"
#include "ops/advance/check.h"
#include "ops/advance/dual_row.h"
#include "ops/advance/packed_row.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

struct SingleLane {
  [[nodiscard]] int32_t lane() const noexcept { return 0; }
  [[nodiscard]] int32_t size() const noexcept { return 1; }
  void sync() const noexcept {}
  [[nodiscard]] int32_t count(bool value) const noexcept { return value ? 1 : 0; }
};

/// What the slot of the request keeps between steps has int32 indices.
Status check_slot(const AdvanceArgs& args, int32_t r) {
  const bool has_records = args.is_shifted();
  if (!args.requests[r].is_running || (!has_records && args.plan.blk_prev_argmax == nullptr)) {
    return {};
  }
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const int32_t last = has_records ? kMax - args.first_saved_row : kMax / args.block_size - 1;
  const int32_t slot = args.requests[r].request_slot;
  if (slot >= 0 && slot <= last) {
    return {};
  }
  return make_error(StatusCode::kOutOfRange, "diffulex::advance_decode: requests: expected a slot ",
                    "of 0 to ", last, ", got ", slot, " in request ", r);
}

/// The request is one of the shapes of the call, with pages for all it runs.
Status check_request(const AdvanceArgs& args, int32_t r, int64_t num_entries) {
  const DecodeRequest& request = args.requests[r];
  const BlockRules& rules = request.rules;
  if (!request.is_running) {
    return {};
  }
  const DualCacheStep& dual = request.dual_step;
  const bool is_dual = args.plan.seed_row != nullptr;
  const int32_t first_pos = is_dual ? dual.first_pos : request.forward.first_pos;
  const int32_t store_end =
      is_dual ? first_pos + (dual.is_stored ? dual.num_rows : 0) : request.forward.store_end;
  const bool is_sound = rules.block_size == args.block_size &&
                        rules.buffer_size == args.buffer_size && request.state.num_valid >= 0 &&
                        request.state.num_valid <= rules.buffer_size && dual.sub_idx >= 0 &&
                        dual.sub_idx < rules.buffer_size && first_pos >= 0 &&
                        store_end <= num_entries * args.page_size;
  if (is_sound) {
    return {};
  }
  return make_error(StatusCode::kOutOfRange, "diffulex::advance_decode: requests: expected blocks ",
                    "of ", args.block_size, ", ", args.buffer_size, " of them, stored in ",
                    num_entries, " pages, got blocks of ", rules.block_size, ", ",
                    request.state.num_valid, " of ", rules.buffer_size, ", stored up to position ",
                    store_end, " in request ", r);
}

/// Memory of a row function of one lane.
class Scratch final {
 public:
  explicit Scratch(const AdvanceArgs& args)
      : args_(args),
        num_rows_(args.block_size * args.buffer_size),
        writes_(static_cast<size_t>(num_rows_), -1) {}

  [[nodiscard]] RowScratch of(int32_t r) {
    return RowScratch{args_.requests + r, args_.windows + int64_t{r} * window_len(num_rows_),
                      writes_.data(), &shift_, marks_.data()};
  }

 private:
  const AdvanceArgs& args_;
  int32_t num_rows_;
  std::vector<int32_t> writes_;
  int32_t shift_ = 0;
  std::array<int32_t, kNumMarks> marks_ = {};
};

void advance_packed(const AdvanceArgs& args, int32_t num_reqs) {
  Scratch scratch(args);
  PackedSums sums{};
  for (int32_t r = 0; r < num_reqs; ++r) {
    count_packed_row(args, r, scratch.of(r), SingleLane{});
    sums.num_rows += args.num_rows[r];
    sums.num_logits_rows += args.num_logits_rows[r];
  }
  for (int32_t r = 0; r < num_reqs; ++r) {
    write_packed_row(args, r, scratch.of(r), sums, SingleLane{});
    sums.rows_before += args.num_rows[r];
    sums.logits_rows_before += args.num_logits_rows[r];
  }
}

}  // namespace

Status advance_decode(const AdvanceDecodeParams& params, const ExecContext& /*context*/) {
  const AdvanceArgs args = make_advance_args(params);
  auto advance = advance_row<BufferDecode, SingleLane>;
  if (args.plan.seed_row != nullptr) {
    advance = advance_row<DualCacheDecode, SingleLane>;
  } else if (args.plan.blk_prev_argmax != nullptr) {
    advance = advance_row<CanvasDecode, SingleLane>;
  }
  const int32_t num_reqs = params.num_reqs;
  for (int32_t r = 0; r < num_reqs; ++r) {
    DIFFULEX_RETURN_IF_ERROR(check_request(args, r, args.max_pages_per_req));
    DIFFULEX_RETURN_IF_ERROR(check_slot(args, r));
  }
  if (params.packs_rows) {
    advance_packed(args, num_reqs);
    return {};
  }
  Scratch scratch(args);
  for (int32_t r = 0; r < num_reqs; ++r) {
    advance(args, r, scratch.of(r), SingleLane{});
  }
  return {};
}

}  // namespace diffulex::cpu
