// SPDX-License-Identifier: Apache-2.0
#include "core/scheduler/step_writes.h"

#include <limits>

namespace diffulex {
namespace {

[[nodiscard]] const char* describe(WriteCheck check) noexcept {
  switch (check) {
    case WriteCheck::kOk:
      return "an open position";
    case WriteCheck::kNotActive:
      return "a position of a block that is not ACTIVE";
    case WriteCheck::kNotEditable:
      return "a prompt position";
    case WriteCheck::kMaskToken:
      return "the mask token";
    case WriteCheck::kOutOfVocab:
      return "an id outside the vocabulary";
    case WriteCheck::kNotOpen:
      return "a position that holds a token";
  }
  return "unknown";
}

/// Largest probability of a descriptor: 1 with room for rounding.
constexpr float kMaxMergeProb = 1.001F;

/// Positions tested at once when looking for writes.
constexpr int32_t kWriteGroup = 4;

/// Whether any of kWriteGroup entries differs from -1 ("unchanged"). Most positions of a step are
/// unchanged, and -1 has all bits set, so one conjunction skips a group.
[[nodiscard]] bool has_writes(const int64_t* write_ids) noexcept {
  return (write_ids[0] & write_ids[1] & write_ids[2] & write_ids[3]) != -1;
}

/// Whether every descriptor stands at an editable position that holds a token after the writes, and
/// is a part of a distribution over the vocabulary.
[[nodiscard]] Status check_merge(StepPlan& plan, const SamplerOutput& output,
                                 const EngineOptions& options) {
  const auto width = static_cast<size_t>(options.block_size);
  const auto top_k = static_cast<size_t>(options.token_merge_top_k);
  const Span<const uint8_t> is_valid = output.merge_valid();
  for (size_t at = 0; at < static_cast<size_t>(plan.num_blocks()) * width; ++at) {
    if (is_valid[at] == 0) {
      continue;
    }
    const auto rel = static_cast<int32_t>(at % width);
    const bool is_open = plan.blk_tokens()[at] == options.mask_token_id;
    bool is_sound = rel >= plan.blk_editable_start()[at / width] &&
                    (!is_open || output.write_ids()[at] >= 0) &&
                    output.merge_residual()[at] >= 0.0F && output.merge_residual()[at] <= 1.0F;
    for (size_t k = at * top_k; k < (at + 1) * top_k; ++k) {
      const int64_t id = output.merge_topk_ids()[k];
      const float prob = output.merge_topk_probs()[k];
      const int64_t id_end =
          options.vocab_size > 0 ? options.vocab_size : std::numeric_limits<int32_t>::max();
      is_sound = is_sound && id >= 0 && id < id_end && prob >= 0.0F && prob <= kMaxMergeProb;
    }
    if (!is_sound) {
      return make_error(StatusCode::kInvalidArgument, "complete_step: expected a merge descriptor ",
                        "of ids and probabilities at a decided position, got one of id ",
                        output.merge_topk_ids()[at * top_k], " with probability ",
                        output.merge_topk_probs()[at * top_k], ", residual ",
                        output.merge_residual()[at], " at position ", rel, " of block ",
                        plan.blk_id()[at / width]);
    }
  }
  return {};
}

/// The next canvas must be whole: an id at every real position, and in the argmax canvas too. Rows
/// without a finite candidate have none; their request fails.
[[nodiscard]] Status check_canvases(const BlockRules& rules, StepPlan& plan,
                                    const SamplerOutput& output) {
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    const auto index = static_cast<size_t>(blk);
    if ((output.flags()[index] & kSamplerBadLogits) != 0) {
      continue;
    }
    const size_t first = index * static_cast<size_t>(rules.block_size);
    const auto num_valid = static_cast<size_t>(plan.blk_valid_len()[index]);
    for (size_t rel = 0; rel < static_cast<size_t>(rules.block_size); ++rel) {
      const int64_t token = output.write_ids()[first + rel];
      const int64_t argmax = output.canvas_argmax()[first + rel];
      const bool is_legal =
          rel < num_valid ? token >= 0 && argmax >= 0 && argmax < rules.vocab_size : token == -1;
      if (!is_legal) {
        return make_error(StatusCode::kInvalidArgument, "complete_step: expected a canvas of ",
                          num_valid, " ids below ", rules.vocab_size, ", got token ", token,
                          " and argmax ", argmax, " at position ", rel, " of canvas ",
                          plan.blk_id()[index]);
      }
    }
  }
  return {};
}

/// Requests with a seed row have a choice of it, or -1 when it had no finite candidate; the others
/// have none.
[[nodiscard]] Status check_seeds(const BlockRules& rules, StepPlan& plan,
                                 const SamplerOutput& output, size_t num_reqs) {
  for (size_t r = 0; r < num_reqs; ++r) {
    const int64_t token = output.pending_next_token()[r];
    const bool is_token = token >= 0 && token <= 0x7fffffff && token != rules.mask_token_id &&
                          (rules.vocab_size == 0 || token < rules.vocab_size);
    if (token != -1 && !(is_token && plan.seed_row()[r] >= 0)) {
      return make_error(StatusCode::kInvalidArgument, "complete_step: expected ",
                        plan.seed_row()[r] >= 0 ? "the next token" : "no next token (-1)",
                        " of request ", plan.req_ids()[r], ", got ", token);
    }
  }
  return {};
}

}  // namespace

StepWrites::StepWrites(const EngineOptions& options)
    : options_(options), rules_(make_block_rules(options)), layout_(PlanLayout::of(options)) {
  writes_.reserve(static_cast<size_t>(options.max_num_reqs) *
                  static_cast<size_t>(options.decode_rows()));
}

Status StepWrites::check(StepPlan& plan, const SamplerOutput& output, size_t num_reqs) const {
  if (output.block_size() != rules_.block_size ||
      output.max_num_blocks() != layout_.max_num_blocks() ||
      output.merge_top_k() != layout_.merge_top_k) {
    return make_error(StatusCode::kInvalidArgument, "complete_step: expected an output of ",
                      layout_.max_num_blocks(), " blocks of ", rules_.block_size,
                      " with merge_top_k ", layout_.merge_top_k, ", got ", output.max_num_blocks(),
                      " of ", output.block_size(), " with ", output.merge_top_k());
  }
  if (layout_.merge_top_k > 0) {
    DIFFULEX_RETURN_IF_ERROR(check_merge(plan, output, options_));
  }
  if (rules_.is_canvas) {
    DIFFULEX_RETURN_IF_ERROR(check_canvases(rules_, plan, output));
  }
  if (layout_.has_dual_cache) {
    DIFFULEX_RETURN_IF_ERROR(check_seeds(rules_, plan, output, num_reqs));
  }
  return {};
}

Status StepWrites::collect(StepPlan& plan, const SamplerOutput& output,
                           Span<Request* const> requests) {
  writes_.clear();
  next_ = 0;
  DIFFULEX_RETURN_IF_ERROR(check(plan, output, requests.size()));
  const int64_t* write_ids = output.write_ids().data();
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    const auto index = static_cast<size_t>(blk);
    const Request& request = *requests[static_cast<size_t>(plan.blk_req()[index])];
    DIFFULEX_RETURN_IF_ERROR(collect_block(request, blk, plan.blk_id()[index],
                                           write_ids + int64_t{blk} * rules_.block_size));
  }
  return {};
}

Status StepWrites::collect_block(const Request& request, int32_t blk, int32_t block_id,
                                 const int64_t* block_writes) {
  const bool may_rewrite = rules_.is_editing || rules_.is_canvas;
  const BufferState& state = request.buffer.state();
  const Block& block = state.blocks[block_id - state.blocks[0].block_id];
  const int32_t* tokens = request.buffer.token_data() + block_start(rules_, state, block);
  for (int32_t rel = 0; rel < rules_.block_size; ++rel) {
    // The last group of a canvas may reach into what follows in the arena: it only looks longer.
    if (rel % kWriteGroup == 0 && !has_writes(block_writes + rel)) {
      rel += kWriteGroup - 1;
      continue;
    }
    const int64_t token = block_writes[rel];
    if (token == -1) {
      continue;
    }
    const WriteCheck check = check_write(rules_, block, rel, tokens[rel], token);
    if (check != WriteCheck::kOk) {
      return make_error(StatusCode::kInvalidArgument, "complete_step: expected a token for an ",
                        "open position, got ", describe(check), ": token ", token, " at position ",
                        rel, " of block ", block.block_id, " of request ", request.req_id);
    }
    if (may_rewrite && token == tokens[rel]) {
      continue;  // repeats what stands there
    }
    // Field by field: a copy of a temporary would wait for its stores to become one load.
    BlockWrite& write = writes_.emplace_back();
    write.blk = blk;
    write.rel = rel;
    write.token = static_cast<int32_t>(token);
  }
  return {};
}

Span<const BlockWrite> StepWrites::take_below(int32_t end_blk) {
  const size_t first = next_;
  while (next_ < writes_.size() && writes_[next_].blk < end_blk) {
    ++next_;
  }
  return Span<const BlockWrite>(writes_.data() + first, next_ - first);
}

}  // namespace diffulex
