// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/advance/row.h"

// advance_decode with packed rows, in two passes: where the rows of a request are depends on what
// all requests before it run. The first pass applies the rules and counts; the second one writes.

namespace diffulex {

/// Sums over the requests of what the first pass has counted.
struct PackedSums {
  int32_t rows_before;  // of request r, in those before it
  int32_t num_rows;     // in all
  int32_t logits_rows_before;
  int32_t num_logits_rows;
};

/// The first pass for request r, whose state and window `scratch` holds.
template <typename Team>
DIFFULEX_HOST_DEVICE inline void count_packed_row(const AdvanceArgs& args, int32_t r,
                                                  const RowScratch& scratch, const Team& team) {
  apply_rules<BufferDecode>(args, r, scratch, team);
  const int32_t num_positions = args.block_size * args.buffer_size;
  int32_t num_read = 0;
  for (int32_t first = 0; first < num_positions; first += team.size()) {
    const int32_t i = first + team.lane();
    num_read += team.count(i < num_positions && sampled_position(args, i, scratch).is_read);
  }
  if (team.lane() == 0) {
    args.num_rows[r] = num_valid_rows(*scratch.request);
    args.num_logits_rows[r] = num_read;
    args.shifts[r] = *scratch.shift;
  }
}

/// Puts the ranks of PackedRows into the memory of the writes, which are applied by now.
template <typename Team>
DIFFULEX_HOST_DEVICE inline void rank_rows(const AdvanceArgs& args, const RowScratch& scratch,
                                           const Team& team) {
  const int32_t num_positions = args.block_size * args.buffer_size;
  for (int32_t i = team.lane(); i < num_positions; i += team.size()) {
    const SampledPosition sampled = sampled_position(args, i, scratch);
    scratch.writes[sampled.source] = sampled.is_read ? 1 : 0;
  }
  team.sync();
  int32_t num_before = 0;
  for (int32_t first = 0; first < num_positions; first += team.size()) {
    const int32_t i = first + team.lane();
    const int32_t end = i < num_positions ? i : num_positions;
    int32_t rank = num_before;
    for (int32_t earlier = first; earlier < end; ++earlier) {
      rank += scratch.writes[earlier];
    }
    const bool is_read = i < num_positions && scratch.writes[i] != 0;
    num_before += team.count(is_read);  // nobody reads these flags afterwards
    if (i < num_positions) {
      scratch.writes[i] = is_read ? rank : -1 - (i - rank);
    }
  }
  team.sync();
}

/// The second pass.
template <typename Team>
DIFFULEX_HOST_DEVICE inline void write_packed_row(const AdvanceArgs& args, int32_t r,
                                                  const RowScratch& scratch, const PackedSums& sums,
                                                  const Team& team) {
  const DecodeRequest& request = *scratch.request;
  const int32_t num_positions = args.block_size * args.buffer_size;
  if (team.lane() == 0) {
    *scratch.shift = args.shifts[r];
  }
  rank_rows(args, scratch, team);
  PackedRows places{};
  places.first = sums.rows_before;
  places.num_valid = num_valid_rows(request);
  places.first_void = sums.num_rows + r * num_positions - sums.rows_before;
  places.first_entry = sums.logits_rows_before;
  places.first_void_entry = sums.num_logits_rows + r * num_positions - sums.logits_rows_before;
  places.ranks = scratch.writes;
  for (int32_t i = team.lane(); i < num_positions; i += team.size()) {
    BufferDecode::write_at(args, r, i, scratch, places);
  }
  for (int32_t i = team.lane(); i < args.buffer_size; i += team.size()) {
    BufferDecode::write_block(args, r, i, request);
  }
  if (team.lane() == 0) {
    BufferDecode::write_request_at(args, r, request, places);
    args.plan.cu_seqlens_q[r] = places.first;
    args.plan.cu_seqlens_q[r + 1] = places.first + places.num_valid;
  }
}

}  // namespace diffulex
