// SPDX-License-Identifier: Apache-2.0
// Replays the golden traces of tests/data/traces: the sampler's decisions go in, every other column
// must come out.

#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/json_reader.h"
#include "diffulex/core/engine_core.h"

namespace diffulex {
namespace {

using test::Json;

std::string describe_buffer(const Request& request) {
  const std::map<BlockStatus, char> letters = {{BlockStatus::kDummy, 'D'},
                                               {BlockStatus::kActive, 'A'},
                                               {BlockStatus::kToCache, 'T'},
                                               {BlockStatus::kInCache, 'I'}};
  std::ostringstream text;
  for (int32_t i = 0; i < request.buffer.size(); ++i) {
    const Block& block = request.buffer.block(i);
    text << (i > 0 ? " " : "") << "B" << block.block_id << ":" << letters.at(block.status);
  }
  return text.str();
}

template <typename T>
std::vector<int32_t> ints(Span<T> values, int32_t begin, int32_t end) {
  std::vector<int32_t> result;
  for (int32_t i = begin; i < end; ++i) {
    result.push_back(static_cast<int32_t>(values[static_cast<size_t>(i)]));
  }
  return result;
}

EngineOptions read_options(const Json& json) {
  EngineOptions options;
  options.block_size = json.at("block_size").as_int();
  options.buffer_size = json.at("buffer_size").as_int();
  options.page_size = json.at("page_size").as_int();
  options.num_pages = json.at("num_pages").as_int();
  options.max_num_reqs = json.at("max_num_reqs").as_int();
  options.max_num_batched_tokens = json.at("max_num_batched_tokens").as_int();
  options.max_model_len = json.at("max_model_len").as_int();
  options.mask_token_id = json.at("mask_token_id").as_int();
  options.stop_token_ids = json.at("stop_token_ids").as_ints();
  options.thresholds.add_block = static_cast<float>(json.at("add_block_threshold").as_double());
  options.thresholds.semi_complete =
      static_cast<float>(json.at("semi_complete_threshold").as_double());
  options.enable_prefix_caching = json.at("enable_prefix_caching").as_bool();
  if (json.has("strategy")) {
    options.strategy = json.at("strategy").as_string();
  }
  if (json.has("token_stability_threshold")) {
    options.thresholds.token_stability =
        static_cast<float>(json.at("token_stability_threshold").as_double());
  }
  options.is_editing = json.has("is_editing") && json.at("is_editing").as_bool();
  options.logits_shift = json.has("logits_shift") && json.at("logits_shift").as_bool();
  options.token_merge_top_k =
      json.has("token_merge_top_k") ? json.at("token_merge_top_k").as_int() : 0;
  if (json.has("fdv2_use_block_cache")) {
    options.fdv2_use_block_cache = json.at("fdv2_use_block_cache").as_bool();
  }
  options.d2f_block_grid = json.has("d2f_block_grid") && json.at("d2f_block_grid").as_bool();
  options.vocab_size = json.has("vocab_size") ? json.at("vocab_size").as_int() : 0;
  return options;
}

class TraceReplay {
 public:
  explicit TraceReplay(const std::string& name)
      : trace_(Json::load(std::string(DIFFULEX_TEST_DATA_DIR) + "/traces/" + name)),
        options_(read_options(trace_.at("options"))),
        core_(options_),
        plans_{StepPlan(options_), StepPlan(options_)},
        output_(options_) {}

  void run() {
    for (const Json& step : trace_.at("steps").items()) {
      SCOPED_TRACE("step " + std::to_string(num_steps_));
      add_requests(step);
      preempt_requests(step);
      replay_step(step);
      ASSERT_TRUE(core_.check_integrity().ok()) << core_.check_integrity().message();
      ++num_steps_;
    }
    EXPECT_GT(num_steps_, 0);
    for (const auto& [name, expected] : trace_.at("results").members()) {
      SCOPED_TRACE(name);
      const RequestResult result = core_.take_result(ids_.at(name)).value();
      EXPECT_EQ(result.output_ids, expected.at("output").as_ints());
      EXPECT_EQ(to_string(result.finish_reason), expected.at("finish").as_string());
      EXPECT_EQ(result.nfe, expected.at("nfe").as_int());
    }
  }

 private:
  const Request& request(const std::string& name) {
    const Request* found = core_.scheduler().find_request(ids_.at(name));
    EXPECT_NE(found, nullptr) << name;
    return *found;
  }

  void add_requests(const Json& step) {
    if (!step.has("add")) {
      return;
    }
    for (const Json& name : step.at("add").items()) {
      const Json& spec = trace_.at("requests").at(name.as_string());
      SamplingParams params;
      params.max_tokens = spec.at("max_tokens").as_int();
      if (spec.has("seed")) {
        params.seed = static_cast<uint64_t>(spec.at("seed").as_int());
      }
      auto req = std::make_unique<Request>(Span<const int32_t>(spec.at("prompt").as_ints()), params,
                                           options_);
      const Request& added = *req;
      ids_[name.as_string()] = core_.scheduler().add_request(std::move(req)).value();
      if (trace_.at("initial").has(name.as_string())) {
        const Json& initial = trace_.at("initial").at(name.as_string());
        EXPECT_EQ(added.limit_end, initial.at("limit_end").as_int());
        EXPECT_EQ(describe_buffer(added), initial.at("buffer").as_string());
      }
    }
  }

  void preempt_requests(const Json& step) {
    if (!step.has("preempt")) {
      return;
    }
    for (const Json& name : step.at("preempt").items()) {
      const Status status = core_.preempt(ids_.at(name.as_string()));
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (const auto& [name, expected] : step.at("preempted").members()) {
      const Request& found = request(name);
      EXPECT_EQ(to_string(found.status), expected.at("status").as_string());
      EXPECT_EQ(found.context_len(), expected.at("context_len").as_int());
      EXPECT_EQ(found.resume_until, expected.at("resume_until").as_int());
      EXPECT_EQ(found.page_table.pages, expected.at("pages").as_ints());
      EXPECT_EQ(describe_buffer(found), expected.at("buffer").as_string());
      EXPECT_EQ(found.buffer.block_status(0), BlockStatus::kToCache);
    }
  }

  void replay_step(const Json& step) {
    StepPlan& plan = plans_[num_steps_ % 2];  // two plans in turn, as double buffering does
    EXPECT_EQ(to_string(core_.schedule(plan)), step.at("kind").as_string());
    const std::vector<Json>& rows = step.at("requests").items();
    ASSERT_EQ(plan.num_reqs(), static_cast<int32_t>(rows.size()));
    output_.clear(plan.num_blocks());
    for (size_t r = 0; r < rows.size(); ++r) {
      SCOPED_TRACE(rows[r].at("request").as_string());
      check_plan(plan, static_cast<int32_t>(r), rows[r]);
      fill_output(plan, static_cast<int32_t>(r), rows[r]);
    }
    if (step.has("ref_counts")) {
      for (const Json& entry : step.at("ref_counts").items()) {
        EXPECT_EQ(core_.kv_cache().pool().ref_count(entry.items()[0].as_int()),
                  entry.items()[1].as_int());
      }
    }
    const Result<const StepEvents*> events = core_.complete_step(plan, output_);
    ASSERT_TRUE(events.ok()) << events.status().message();
    check_events(step, *events.value());
  }

  void check_plan(StepPlan& plan, int32_t r, const Json& row) {
    const auto index = static_cast<size_t>(r);
    const Request& found = request(row.at("request").as_string());
    const int32_t begin = plan.cu_seqlens_q()[index];
    const int32_t end = plan.cu_seqlens_q()[index + 1];
    EXPECT_EQ(to_string(found.status), row.at("status").as_string());
    EXPECT_EQ(plan.context_lens()[index], row.at("context_len").as_int());
    EXPECT_EQ(plan.row_mode()[index], row.at("row_mode").as_int());
    EXPECT_EQ(describe_buffer(found), row.at("buffer_in").as_string());
    EXPECT_EQ(ints(plan.positions(), begin, end), row.at("positions").as_ints());
    EXPECT_EQ(plan.valid_slices()[index] - begin, row.at("num_valid_rows").as_int());
    EXPECT_EQ(ints(plan.input_ids(), begin, end), row.at("input_ids").as_ints());
    EXPECT_EQ(ints(plan.slot_mapping(), begin, end), row.at("slots").as_ints());
    std::vector<int32_t> pages = row.at("pages").as_ints();
    EXPECT_EQ(found.page_table.pages, pages);
    pages.resize(static_cast<size_t>(plan.max_pages_per_req()), -1);
    EXPECT_EQ(
        ints(plan.page_tables(), r * plan.max_pages_per_req(), (r + 1) * plan.max_pages_per_req()),
        pages);
    check_visibility(plan, r, row);
    check_previous_rows(plan, r, row);
    check_counters(plan, r, row);
    check_merge_rows(plan, r, row);
    check_seed_row(plan, r, row);
    check_canvas(plan, r, row);
    if (row.has("num_cached_tokens")) {
      EXPECT_EQ(found.num_cached_tokens, row.at("num_cached_tokens").as_int());
    }
    if (row.has("force_top1")) {
      for (const Json& entry : row.at("force_top1").items()) {
        EXPECT_EQ(plan.blk_force_top1()[find_block(plan, r, entry.items()[0].as_int())] != 0,
                  entry.items()[1].as_bool());
      }
    }
  }

  // Visible keys from the arrays alone: cached positions, and fresh rows of blocks up to the row's;
  // under mode 3 prompt rows see the prompt, the rest of its last block the padded prompt; blocks
  // are counted from the end of the padded prompt. Mode 2 has no fresh keys, mode 4 is causal, mode
  // 5 sees every fresh key.
  void check_visibility(StepPlan& plan, int32_t r, const Json& row) {
    const auto index = static_cast<size_t>(r);
    const int32_t begin = plan.cu_seqlens_q()[index];
    const int32_t valid_end = plan.valid_slices()[index];
    const int32_t context_len = plan.context_lens()[index];
    std::vector<int32_t> ends;
    for (int32_t i = begin; i < valid_end; ++i) {
      int32_t end = context_len;
      for (int32_t k = begin; k < valid_end; ++k) {
        const auto key_pos = static_cast<int32_t>(plan.positions()[static_cast<size_t>(k)]);
        const auto row_pos = static_cast<int32_t>(plan.positions()[static_cast<size_t>(i)]);
        const int32_t mode = plan.row_mode()[index];
        const int32_t size = plan.att_block_size();
        const int32_t first = plan.padded_prefix_lens()[index] % size;
        bool is_visible = (key_pos - first + size) / size <= (row_pos - first + size) / size;
        if (mode == 2 || mode >= 4) {
          is_visible = mode == 5 || (mode == 4 && key_pos <= row_pos);
        }
        if (plan.row_mode()[index] == 3 && row_pos < plan.padded_prefix_lens()[index]) {
          is_visible =
              key_pos < (row_pos < plan.prefix_lens()[index] ? plan.prefix_lens()[index]
                                                             : plan.padded_prefix_lens()[index]);
        }
        if (is_visible) {
          EXPECT_EQ(key_pos, end);
          end = key_pos + 1;
        }
      }
      ends.push_back(end);
    }
    EXPECT_EQ(ends, row.at("visible_end").as_ints());
  }

  // Where the logits for relative position 0 of a block stand.
  void check_previous_rows(StepPlan& plan, int32_t r, const Json& row) {
    const auto index = static_cast<size_t>(r);
    const int32_t last_row = plan.last_row_index()[index];
    if (row.has("saved_row") && !row.at("saved_row").is_null()) {
      ASSERT_GE(last_row, 0);
      EXPECT_EQ(position_of(plan, plan.logits_rows()[static_cast<size_t>(last_row)]),
                row.at("saved_row").as_int());
    } else {
      EXPECT_EQ(last_row, -1);
    }
    const std::vector<int32_t> mask_kinds = {1, 1, 4, 3, 0, 2};  // by row mode
    EXPECT_EQ(plan.mask_kinds()[index], mask_kinds[static_cast<size_t>(plan.row_mode()[index])]);
    const bool is_prefix = plan.row_mode()[index] == 3;
    const auto prompt_len = static_cast<int32_t>(
        trace_.at("requests").at(row.at("request").as_string()).at("prompt").items().size());
    EXPECT_EQ(plan.prefix_lens()[index], is_prefix ? prompt_len : 0);
    const int32_t padded_len =
        (prompt_len + options_.block_size - 1) / options_.block_size * options_.block_size;
    const int32_t grid_end = is_prefix ? padded_len : 0;
    EXPECT_EQ(plan.padded_prefix_lens()[index],
              options_.starts_at_prompt() ? prompt_len : grid_end);
    if (row.has("predicted_by")) {
      check_predictors(plan, r, row.at("predicted_by"));
    }
    const bool is_dual = options_.strategy == "fast_dllm_v2";
    const bool is_canvas = options_.strategy == "diffusion_gemma";
    EXPECT_EQ(plan.att_block_size(), options_.block_size * (is_dual ? options_.buffer_size : 1));
    EXPECT_EQ(plan.buffer_size(), options_.buffer_size);
    EXPECT_EQ(plan.max_seqlen_k(), plan.max_seqlen_q());
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      const int32_t before = plan.blk_start()[static_cast<size_t>(blk)] - 1;
      int32_t expected = before < 0 || is_dual || is_canvas ? -2 : -1;
      for (int32_t i = plan.cu_seqlens_q()[index]; i < plan.valid_slices()[index]; ++i) {
        expected = plan.positions()[static_cast<size_t>(i)] == before ? i : expected;
      }
      EXPECT_EQ(plan.blk_prev_row()[static_cast<size_t>(blk)], expected);
    }
  }

  static int32_t position_of(StepPlan& plan, int32_t plan_row) {
    return static_cast<int32_t>(plan.positions()[static_cast<size_t>(plan_row)]);
  }

  // Exactly the listed positions have a row: that of the position named, or the saved one.
  void check_predictors(StepPlan& plan, int32_t r, const Json& expected) {
    const auto width = static_cast<size_t>(options_.block_size);
    size_t num_found = 0;
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      for (size_t rel = 0; rel < width; ++rel) {
        const int32_t row_index = plan.blk_row_index()[static_cast<size_t>(blk) * width + rel];
        if (row_index < 0) {
          continue;
        }
        ASSERT_LT(num_found, expected.items().size());
        const Json& entry = expected.items()[num_found++];
        EXPECT_EQ(plan.blk_start()[static_cast<size_t>(blk)] + static_cast<int32_t>(rel),
                  entry.items()[0].as_int());
        if (entry.items()[1].is_string()) {
          EXPECT_EQ(row_index,
                    plan.max_logits_rows() + plan.request_slots()[static_cast<size_t>(r)]);
        } else {
          EXPECT_EQ(position_of(plan, plan.logits_rows()[static_cast<size_t>(row_index)]),
                    entry.items()[1].as_int());
        }
      }
    }
    EXPECT_EQ(num_found, expected.items().size());
  }

  void check_counters(StepPlan& plan, int32_t r, const Json& row) {
    if (row.has("open_steps")) {
      for (const Json& entry : row.at("open_steps").items()) {
        const size_t blk = find_block(plan, r, entry.items()[0].as_int());
        EXPECT_EQ(plan.blk_open_steps()[blk], entry.items()[1].as_int());
      }
    }
    if (row.has("post_edit_steps")) {
      for (const Json& entry : row.at("post_edit_steps").items()) {
        const size_t blk = find_block(plan, r, entry.items()[0].as_int());
        EXPECT_EQ(plan.blk_post_edit_steps()[blk], entry.items()[1].as_int());
      }
    }
  }

  // Exactly the listed rows are soft: [position, id, probability, residual].
  void check_merge_rows(StepPlan& plan, int32_t r, const Json& row) {
    if (!row.has("merge_rows")) {
      return;
    }
    const std::vector<Json>& expected = row.at("merge_rows").items();
    size_t num_found = 0;
    for (int32_t i = plan.cu_seqlens_q()[static_cast<size_t>(r)];
         i < plan.cu_seqlens_q()[static_cast<size_t>(r) + 1]; ++i) {
      const auto at = static_cast<size_t>(i);
      if (plan.merge_mask()[at] == 0) {
        EXPECT_EQ(plan.merge_topk_ids()[at], options_.mask_token_id);
        EXPECT_EQ(plan.merge_topk_probs()[at], 0.0F);
        EXPECT_EQ(plan.merge_residual()[at], 0.0F);
        continue;
      }
      ASSERT_LT(num_found, expected.size());
      const std::vector<Json>& entry = expected[num_found++].items();
      EXPECT_EQ(position_of(plan, i), entry[0].as_int());
      EXPECT_EQ(plan.merge_topk_ids()[at], entry[1].as_int());
      EXPECT_FLOAT_EQ(plan.merge_topk_probs()[at], static_cast<float>(entry[2].as_double()));
      EXPECT_FLOAT_EQ(plan.merge_residual()[at], static_cast<float>(entry[3].as_double()));
    }
    EXPECT_EQ(num_found, expected.size());
  }

  // "seed": [position whose row predicts the token, token].
  void check_seed_row(StepPlan& plan, int32_t r, const Json& row) {
    if (options_.strategy != "fast_dllm_v2") {
      return;
    }
    const int32_t seed_row = plan.seed_row()[static_cast<size_t>(r)];
    ASSERT_EQ(seed_row >= 0, row.has("seed"));
    if (seed_row >= 0) {
      EXPECT_EQ(position_of(plan, plan.logits_rows()[static_cast<size_t>(seed_row)]),
                row.at("seed").items()[0].as_int());
      output_.pending_next_token()[static_cast<size_t>(r)] = row.at("seed").items()[1].as_int();
    }
  }

  // "canvas": what the plan tells the sampler of a denoising step, and what the sampler answers.
  void check_canvas(StepPlan& plan, int32_t r, const Json& row) {
    if (options_.strategy != "diffusion_gemma") {
      return;
    }
    const bool is_denoising = row.has("canvas");
    const int32_t begin = plan.cu_seqlens_q()[static_cast<size_t>(r)];
    const int32_t end = plan.cu_seqlens_q()[static_cast<size_t>(r) + 1];
    EXPECT_EQ(ints(plan.row_pass_kind(), begin, end),
              std::vector<int32_t>(static_cast<size_t>(end - begin), is_denoising ? 1 : 0));
    ASSERT_EQ(plan.first_block(r + 1) - plan.first_block(r), is_denoising ? 1 : 0);
    if (!is_denoising) {
      EXPECT_EQ(ints(plan.row_self_cond(), begin, end),
                std::vector<int32_t>(static_cast<size_t>(end - begin), -1));
      return;
    }
    const Json& canvas = row.at("canvas");
    const int32_t blk = plan.first_block(r);
    const auto index = static_cast<size_t>(blk);
    const int32_t width = options_.block_size;
    EXPECT_EQ(ints(plan.row_self_cond(), begin, end), canvas.at("self_cond").as_ints());
    EXPECT_EQ(plan.blk_steps_left()[index], canvas.at("steps_left").as_int());
    EXPECT_EQ(plan.blk_stable_run()[index], canvas.at("stable_run").as_int());
    EXPECT_EQ(plan.blk_valid_len()[index], width);
    EXPECT_EQ(ints(plan.blk_renoise(), blk * width, (blk + 1) * width),
              canvas.at("renoise").as_ints());
    if (canvas.has("prev_argmax")) {
      EXPECT_EQ(ints(plan.blk_prev_argmax(), blk * width, (blk + 1) * width),
                canvas.at("prev_argmax").as_ints());
    }
    for (size_t rel = 0; rel < static_cast<size_t>(width); ++rel) {
      const size_t at = index * static_cast<size_t>(width) + rel;
      output_.write_ids()[at] = canvas.at("next").as_ints()[rel];
      output_.canvas_argmax()[at] = canvas.at("argmax").as_ints()[rel];
    }
    output_.flags()[index] = canvas.at("converged").as_bool() ? kSamplerConverged : 0;
  }

  size_t find_block(StepPlan& plan, int32_t r, int32_t block_id) {
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      if (plan.blk_id()[static_cast<size_t>(blk)] == block_id) {
        return static_cast<size_t>(blk);
      }
    }
    throw std::runtime_error("block " + std::to_string(block_id) + " is not in the plan");
  }

  void fill_output(StepPlan& plan, int32_t r, const Json& row) {
    if (options_.strategy == "diffusion_gemma") {
      return;  // see check_canvas
    }
    const auto width = static_cast<size_t>(options_.block_size);
    for (const Json& write : row.at("writes").items()) {
      const size_t blk = find_block(plan, r, write.items()[0].as_int());
      const auto rel = static_cast<size_t>(write.items()[1].as_int());
      ASSERT_GE(plan.blk_row_index()[blk * width + rel], 0);
      output_.write_ids()[blk * width + rel] = write.items()[2].as_int();
    }
    for (int32_t i = plan.first_block(r); i < plan.first_block(r + 1); ++i) {
      const auto blk = static_cast<size_t>(i);
      int32_t masks_left = 0;
      for (size_t rel = static_cast<size_t>(plan.blk_editable_start()[blk]); rel < width; ++rel) {
        const bool is_open = plan.blk_tokens()[blk * width + rel] == options_.mask_token_id;
        masks_left += is_open && output_.write_ids()[blk * width + rel] < 0 ? 1 : 0;
      }
      output_.masks_left()[blk] = masks_left;
      output_.flags()[blk] = masks_left == 0 ? kSamplerCommittable : 0;
    }
    fill_verdicts(plan, r, row);
  }

  void fill_verdicts(StepPlan& plan, int32_t r, const Json& row) {
    if (row.has("verdicts")) {
      ASSERT_EQ(row.at("verdicts").items().size(),
                static_cast<size_t>(plan.first_block(r + 1) - plan.first_block(r)));
      for (const Json& entry : row.at("verdicts").items()) {
        const size_t blk = find_block(plan, r, entry.items()[0].as_int());
        output_.same_token_ratio()[blk] = static_cast<float>(entry.items()[1].as_double());
        output_.flags()[blk] = entry.items()[2].as_bool() ? kSamplerCommittable : 0;
      }
    }
    if (row.has("descriptors")) {
      for (const Json& entry : row.at("descriptors").items()) {
        const size_t blk = find_block(plan, r, entry.items()[0].as_int());
        const size_t at = blk * static_cast<size_t>(options_.block_size) +
                          static_cast<size_t>(entry.items()[1].as_int());
        output_.merge_valid()[at] = 1;
        output_.merge_topk_ids()[at] = entry.items()[2].as_int();
        output_.merge_topk_probs()[at] = static_cast<float>(entry.items()[3].as_double());
        output_.merge_residual()[at] = static_cast<float>(entry.items()[4].as_double());
      }
    }
  }

  void check_events(const Json& step, const StepEvents& events) {
    const std::vector<Json>& rows = step.at("requests").items();
    ASSERT_EQ(events.requests.size(), rows.size());
    for (size_t r = 0; r < rows.size(); ++r) {
      const Json& row = rows[r];
      const std::string name = row.at("request").as_string();
      SCOPED_TRACE(name);
      const RequestEvent& event = events.requests[r];
      const Request& found = request(name);
      EXPECT_EQ(event.req_id, ids_.at(name));
      EXPECT_EQ(event.nfe, row.at("nfe").as_int());
      EXPECT_EQ(event.new_tokens, row.at("new_tokens").as_int());
      EXPECT_EQ(event.is_finished, !row.at("finish").is_null());
      EXPECT_EQ(to_string(event.finish_reason),
                row.at("finish").is_null() ? "none" : row.at("finish").as_string());
      for (const int32_t token : events.appended(event)) {
        settled_[name].push_back(token);
      }
      EXPECT_EQ(settled_[name], row.at("settled").as_ints());
      const Span<const int32_t> output = found.output();
      EXPECT_EQ(std::vector<int32_t>(output.begin(), output.end()), row.at("settled").as_ints());
      if (!event.is_finished) {
        EXPECT_EQ(describe_buffer(found), row.at("buffer_out").as_string());
        EXPECT_EQ(found.context_len(), row.at("context_len_after").as_int());
      }
    }
    std::vector<std::pair<int64_t, int32_t>> committed;
    for (const CommittedBlock& block : events.committed) {
      committed.emplace_back(block.req_id, block.block_id);
    }
    std::vector<std::pair<int64_t, int32_t>> expected;
    if (step.has("committed")) {
      for (const Json& entry : step.at("committed").items()) {
        expected.emplace_back(ids_.at(entry.items()[0].as_string()), entry.items()[1].as_int());
      }
    }
    EXPECT_EQ(committed, expected);
  }

  Json trace_;
  EngineOptions options_;
  EngineCore core_;
  StepPlan plans_[2];
  SamplerOutput output_;
  std::map<std::string, int64_t> ids_;
  std::map<std::string, std::vector<int32_t>> settled_;
  size_t num_steps_ = 0;
};

class TraceTest : public testing::TestWithParam<const char*> {};

TEST_P(TraceTest, ReplaysFieldByField) {
  TraceReplay(GetParam()).run();
}

INSTANTIATE_TEST_SUITE_P(
    Golden, TraceTest,
    testing::Values(
        "single_block_padded_prompt.json", "single_block_aligned_prompt.json",
        "aligned_prompt_fully_cached.json", "d2f_from_prompt.json", "d2f_from_prompt_shifted.json",
        "d2f_shifted_single_block.json", "d2f_shifted_stop_id.json", "d2f_stop_id.json",
        "dmax_single_block.json", "diffusion_gemma_max_tokens.json", "diffusion_gemma_stop_id.json",
        "dmax_two_blocks.json", "fast_dllm_v2_aligned_block_cache.json",
        "fast_dllm_v2_aligned_no_block_cache.json", "fast_dllm_v2_padded_block_cache.json",
        "fast_dllm_v2_padded_no_block_cache.json", "edit_single_block.json",
        "multi_block_stop_id.json", "multi_block_limit.json", "preempt_resume_uncached.json",
        "preempt_resume_cached.json", "prefix_cache_partial_page.json"));

}  // namespace
}  // namespace diffulex
