// SPDX-License-Identifier: Apache-2.0
// Embeds the scheduler and the KV allocator of diffulex in a program of its own: no torch, no
// Python. The "model" fills masks by a fixed rule and keeps a KV cache of tags, so the program can
// check everything it is told: which slot to write, which pages to read, which tokens come out.
//
// It shows a prefix-cache hit, a preemption under page pressure with its resume, several blocks in
// flight, and a stop id; it prints a summary and returns non-zero on any mismatch.

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "diffulex/core/engine_core.h"

namespace {

constexpr int32_t kMask = 0;
constexpr int32_t kStop = 1;

int g_num_errors = 0;

void expect(bool condition, const std::string& what) {
  if (!condition) {
    ++g_num_errors;
    std::fprintf(stderr, "mismatch: %s\n", what.c_str());
  }
}

/// The token the toy model wants at a position: the text counts upwards from its first token.
int32_t wanted_token(int32_t first_token, int32_t position, int32_t stop_position) {
  return position == stop_position ? kStop : first_token + position;
}

/// One request of this program.
struct Job {
  int32_t first_token = 0;
  int32_t prompt_len = 0;
  int32_t max_tokens = 0;
  int32_t stop_position = -1;  // where the model writes the stop id, -1 = nowhere
};

/// Stands where a transformer and its sampler would.
class ToyModel {
 public:
  explicit ToyModel(const diffulex::EngineOptions& options)
      : options_(options), cache_(static_cast<size_t>(options.num_pages * options.page_size), -1) {}

  void forward(diffulex::StepPlan& plan, const std::map<int64_t, Job>& jobs,
               diffulex::SamplerOutput& output) {
    // Keys and values are stored before attention reads them; a tag is the token of the position.
    for (size_t row = 0; row < static_cast<size_t>(plan.num_rows()); ++row) {
      if (plan.slot_mapping()[row] >= 0) {
        cache_[static_cast<size_t>(plan.slot_mapping()[row])] = plan.input_ids()[row];
      }
    }
    for (size_t r = 0; r < static_cast<size_t>(plan.num_reqs()); ++r) {
      read_context(plan, r, jobs.at(plan.req_ids()[r]));
    }
    output.clear(plan.num_blocks());
    for (size_t blk = 0; blk < static_cast<size_t>(plan.num_blocks()); ++blk) {
      const auto r = static_cast<size_t>(plan.blk_req()[blk]);
      fill_block(plan, blk, jobs.at(plan.req_ids()[r]), output);
    }
  }

 private:
  void read_context(diffulex::StepPlan& plan, size_t r, const Job& job) {
    const auto width = static_cast<size_t>(plan.max_pages_per_req());
    for (int32_t position = 0; position < plan.context_lens()[r]; ++position) {
      const int32_t page =
          plan.page_tables()[r * width + static_cast<size_t>(position / options_.page_size)];
      expect(page >= 0, "a page for every cached position");
      const int32_t slot = page * options_.page_size + position % options_.page_size;
      expect(cache_[static_cast<size_t>(slot)] ==
                 wanted_token(job.first_token, position, job.stop_position),
             "cached position " + std::to_string(position) + " holds its own token");
    }
  }

  /// Accepts two open positions of a block, from the left.
  void fill_block(diffulex::StepPlan& plan, size_t blk, const Job& job,
                  diffulex::SamplerOutput& output) {
    const auto width = static_cast<size_t>(options_.block_size);
    int32_t num_open = 0;
    int32_t num_accepted = 0;
    for (size_t rel = 0; rel < width; ++rel) {
      if (plan.blk_row_index()[blk * width + rel] < 0) {
        continue;
      }
      ++num_open;
      if (num_accepted < 2) {
        output.write_ids()[blk * width + rel] = wanted_token(
            job.first_token, plan.blk_start()[blk] + static_cast<int32_t>(rel), job.stop_position);
        ++num_accepted;
      }
    }
    output.masks_left()[blk] = num_open - num_accepted;
    output.flags()[blk] = num_open == num_accepted ? diffulex::kSamplerCommittable : 0;
  }

  diffulex::EngineOptions options_;
  std::vector<int64_t> cache_;  // tag by slot
};

/// Adds a job; its prompt is what the model itself would have written.
void submit(diffulex::EngineCore& core, std::map<int64_t, Job>& jobs, const Job& job) {
  std::vector<int32_t> prompt;
  for (int32_t position = 0; position < job.prompt_len; ++position) {
    prompt.push_back(job.first_token + position);
  }
  diffulex::SamplingParams params;
  params.max_tokens = job.max_tokens;
  const diffulex::Result<int64_t> id =
      core.add_request(diffulex::Span<const int32_t>(prompt), params);
  expect(id.ok(), "add_request: " + id.status().message());
  if (id.ok()) {
    jobs.emplace(id.value(), job);
  }
}

/// Runs until nothing is left; false when the core reports an error.
bool run(diffulex::EngineCore& core, ToyModel& model, const std::map<int64_t, Job>& jobs) {
  diffulex::StepPlan plan(core.options());
  diffulex::SamplerOutput output(core.options());
  while (core.has_unfinished()) {
    if (core.schedule(plan) == diffulex::PlanKind::kIdle) {
      break;
    }
    model.forward(plan, jobs, output);
    const diffulex::Result<const diffulex::StepEvents*> events = core.complete_step(plan, output);
    if (!events.ok()) {
      expect(false, events.status().message());
      return false;
    }
    const diffulex::Status integrity = core.check_integrity();
    expect(integrity.ok(), integrity.message());
  }
  return true;
}

void check_job(diffulex::EngineCore& core, int64_t req_id, const Job& job) {
  const diffulex::Result<diffulex::RequestResult> taken = core.take_result(req_id);
  if (!taken.ok()) {
    expect(false, taken.status().message());
    return;
  }
  const diffulex::RequestResult& result = taken.value();
  const int32_t limit = job.prompt_len + job.max_tokens;
  const int32_t end = job.stop_position >= 0 ? job.stop_position : limit;
  std::vector<int32_t> expected;
  for (int32_t position = job.prompt_len; position < end; ++position) {
    expected.push_back(job.first_token + position);
  }
  expect(result.output_ids == expected, "output of request " + std::to_string(req_id));
  const auto reason = job.stop_position >= 0 ? diffulex::FinishReason::kEosTokenGenerated
                                             : diffulex::FinishReason::kMaxNewTokensReached;
  expect(result.finish_reason == reason, "finish reason of request " + std::to_string(req_id));
  std::printf(
      "request %lld: %2d prompt tokens (%2d cached), %2zu tokens in %2d forwards, "
      "%d preemptions, %s\n",
      static_cast<long long>(req_id), result.prompt_len, result.num_cached_tokens,
      result.output_ids.size(), result.nfe, result.num_preemptions,
      diffulex::to_string(result.finish_reason));
}

}  // namespace

int main() {
  diffulex::EngineOptions options;
  options.block_size = 4;
  options.buffer_size = 2;
  options.page_size = 4;
  options.num_pages = 16;
  options.max_num_reqs = 3;
  options.max_model_len = 64;
  options.max_num_batched_tokens = 128;
  options.mask_token_id = kMask;
  options.stop_token_ids = {kStop};
  options.decode_headroom = false;  // admit eagerly, so that page pressure leads to preemption
  diffulex::Result<std::unique_ptr<diffulex::EngineCore>> created =
      diffulex::EngineCore::create(options);
  if (!created.ok()) {
    std::fprintf(stderr, "%s\n", created.status().message().c_str());
    return 1;
  }
  diffulex::EngineCore& core = *created.value();
  ToyModel model(options);
  std::map<int64_t, Job> jobs;

  // Alone: fills the prefix cache.
  submit(core, jobs, Job{100, 16, 12, -1});
  bool ok = run(core, model, jobs);
  // Together: two share that prefix, one stops early, and the pool is too small for all at once.
  submit(core, jobs, Job{100, 18, 30, -1});
  submit(core, jobs, Job{100, 16, 40, 31});
  submit(core, jobs, Job{300, 9, 40, -1});
  ok = ok && run(core, model, jobs);

  for (const auto& [req_id, job] : jobs) {
    check_job(core, req_id, job);
  }
  const diffulex::SchedulerStats stats = core.stats();
  expect(ok, "a run without errors");
  expect(stats.num_prefix_hit_tokens >= 32, "prefix hits of two requests");
  expect(stats.num_preemptions > 0, "a preemption");
  expect(stats.num_finished == 4, "four finished requests");
  expect(core.kv_cache().num_free_pages() == options.num_pages, "every page returned");
  std::printf(
      "%lld prefill, %lld mixed and %lld decode steps, %lld rows, %lld prefix tokens hit, "
      "%lld preemptions, %d of %d pages free\n",
      static_cast<long long>(stats.num_prefill_steps),
      static_cast<long long>(stats.num_mixed_steps), static_cast<long long>(stats.num_decode_steps),
      static_cast<long long>(stats.num_rows), static_cast<long long>(stats.num_prefix_hit_tokens),
      static_cast<long long>(stats.num_preemptions), stats.num_free_pages, stats.num_pages);
  std::printf("%s\n", g_num_errors == 0 ? "ok" : "FAILED");
  return g_num_errors == 0 ? 0 : 1;
}
