// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/request.h"

#include <utility>

namespace diffulex {

Request::Request(Span<const int32_t> token_ids, SamplingParams sampling_params,
                 const EngineOptions& options)
    : prompt_len(static_cast<int32_t>(token_ids.size())),
      params(std::move(sampling_params)),
      accept_threshold(params.accept_threshold.value_or(options.thresholds.accept)),
      edit_threshold(params.edit_threshold.value_or(options.thresholds.edit)),
      max_post_edit_steps(params.max_post_edit_steps.value_or(options.max_post_edit_steps)),
      penalty(options.has_edits() ? params.penalty_lambda.value_or(options.penalty_lambda) : 0.0F),
      prompt_ids(token_ids.begin(), token_ids.end()),
      buffer(make_block_rules(options, params)),
      max_nfe(params.max_nfe) {}

Span<const int32_t> Request::tokens() const noexcept {
  return limit_end > 0 ? buffer.tokens() : prompt();
}

Span<const int32_t> Request::output() const noexcept {
  if (limit_end == 0) {
    return {};
  }
  const int32_t end = output_end(buffer.state());
  return Span<const int32_t>(buffer.token_data() + prompt_len,
                             static_cast<size_t>(end - prompt_len));
}

RequestResult make_result(const Request& request) {
  RequestResult result;
  const Span<const int32_t> output = request.output();
  result.req_id = request.req_id;
  result.finish_reason = request.finish_reason;
  result.is_auto_nfe_cap =
      request.is_auto_nfe_cap && request.finish_reason == FinishReason::kMaxNfeReached;
  result.output_ids.assign(output.begin(), output.end());
  result.prompt_len = request.prompt_len;
  result.num_cached_tokens = request.num_cached_tokens;
  result.nfe = request.nfe;
  result.num_preemptions = request.num_preemptions;
  result.decided_tokens = request.decided_tokens;
  result.new_tokens_per_step = request.new_tokens_per_step;
  result.prefill_per_step = request.prefill_per_step;
  return result;
}

RequestSnapshot make_snapshot(const Request& request) {
  RequestSnapshot snapshot;
  const Span<const int32_t> output = request.output();
  snapshot.req_id = request.req_id;
  snapshot.status = request.status;
  snapshot.finish_reason = request.finish_reason;
  snapshot.nfe = request.nfe;
  snapshot.output_ids.assign(output.begin(), output.end());
  if (request.limit_end == 0) {
    return snapshot;
  }
  snapshot.context_len = request.context_len();
  const BlockRules& rules = request.buffer.rules();
  const int32_t block_size = rules.block_size;
  for (int32_t i = 0; i < request.buffer.num_valid(); ++i) {
    const Block& block = request.buffer.block(i);
    BlockSnapshot entry;
    entry.block_id = block.block_id;
    entry.start = block_start(rules, request.buffer.state(), block);
    entry.status = block.status;
    const Span<const int32_t> tokens = request.buffer.block_tokens(i);
    entry.tokens.assign(tokens.begin(), tokens.end());
    const auto first = request.confidences.begin() + entry.start;
    entry.confidences.assign(first, first + block_size);
    for (const TokenWrite& write : request.last_writes) {
      if (write.position >= entry.start && write.position < entry.start + block_size) {
        entry.newly_written.push_back(write.position - entry.start);
      }
    }
    snapshot.blocks.push_back(std::move(entry));
  }
  return snapshot;
}

}  // namespace diffulex
