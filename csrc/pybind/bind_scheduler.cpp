// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "diffulex/core/engine_core.h"
#include "diffulex/core/scheduler.h"
#include "diffulex/core/step_events.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

/// A RequestEvent together with its newly settled ids.
struct EventRecord {
  RequestEvent event;
  std::vector<int32_t> appended;
};

/// StepEvents copied out of the scheduler, so that it outlives the next step.
struct EventsRecord {
  int64_t step_id = 0;
  PlanKind kind = PlanKind::kIdle;
  py::list requests;
  py::list committed;
  py::list finished;
  py::list preempted;
};

[[nodiscard]] EventsRecord copy_events(const StepEvents& events) {
  EventsRecord record;
  record.step_id = events.step_id;
  record.kind = events.kind;
  for (const RequestEvent& event : events.requests) {
    const Span<const int32_t> appended = events.appended(event);
    record.requests.append(
        EventRecord{event, std::vector<int32_t>(appended.begin(), appended.end())});
  }
  for (const CommittedBlock& block : events.committed) {
    record.committed.append(block);
  }
  for (const FinishedRequest& request : events.finished) {
    record.finished.append(request);
  }
  for (const PreemptedRequest& request : events.preempted) {
    record.preempted.append(request);
  }
  return record;
}

void bind_events(py::module_& module) {
  py::class_<EventRecord>(module, "RequestEvent", "What a step did to one request of its plan.")
      .def_property_readonly("req_id", [](const EventRecord& self) { return self.event.req_id; })
      .def_property_readonly("request_slot",
                             [](const EventRecord& self) { return self.event.request_slot; })
      .def_readonly("appended", &EventRecord::appended)
      .def_property_readonly("new_tokens",
                             [](const EventRecord& self) { return self.event.new_tokens; })
      .def_property_readonly("nfe", [](const EventRecord& self) { return self.event.nfe; })
      .def_property_readonly("num_preemptions",
                             [](const EventRecord& self) { return self.event.num_preemptions; })
      .def_property_readonly("is_prefill",
                             [](const EventRecord& self) { return self.event.is_prefill; })
      .def_property_readonly("is_finished",
                             [](const EventRecord& self) { return self.event.is_finished; })
      .def_property_readonly("finish_reason",
                             [](const EventRecord& self) { return self.event.finish_reason; });
  py::class_<CommittedBlock>(module, "CommittedBlock", "A block whose KV entered the cache.")
      .def_readonly("req_id", &CommittedBlock::req_id)
      .def_readonly("block_id", &CommittedBlock::block_id);
  py::class_<FinishedRequest>(module, "FinishedRequest", "A request that ended.")
      .def_readonly("req_id", &FinishedRequest::req_id)
      .def_readonly("finish_reason", &FinishedRequest::finish_reason)
      .def_readonly("request_slot", &FinishedRequest::request_slot);
  py::class_<PreemptedRequest>(module, "PreemptedRequest", "A request that lost its pages.")
      .def_readonly("req_id", &PreemptedRequest::req_id)
      .def_readonly("request_slot", &PreemptedRequest::request_slot);
  py::class_<EventsRecord>(module, "StepEvents", "Outcome of a step and of the boundary before it.")
      .def_readonly("step_id", &EventsRecord::step_id)
      .def_readonly("kind", &EventsRecord::kind)
      .def_readonly("requests", &EventsRecord::requests)
      .def_readonly("committed", &EventsRecord::committed)
      .def_readonly("finished", &EventsRecord::finished)
      .def_readonly("preempted", &EventsRecord::preempted);
}

void bind_stats(py::module_& module) {
  py::class_<SchedulerStats>(module, "SchedulerStats", "Counters and gauges of a scheduler.")
      .def_readonly("num_waiting", &SchedulerStats::num_waiting)
      .def_readonly("num_running", &SchedulerStats::num_running)
      .def_readonly("num_pages", &SchedulerStats::num_pages)
      .def_readonly("num_free_pages", &SchedulerStats::num_free_pages)
      .def_readonly("num_cached_units", &SchedulerStats::num_cached_units)
      .def_readonly("num_requests", &SchedulerStats::num_requests)
      .def_readonly("num_rejected", &SchedulerStats::num_rejected)
      .def_readonly("num_finished", &SchedulerStats::num_finished)
      .def_readonly("num_aborted", &SchedulerStats::num_aborted)
      .def_readonly("num_failed", &SchedulerStats::num_failed)
      .def_readonly("num_prefill_steps", &SchedulerStats::num_prefill_steps)
      .def_readonly("num_mixed_steps", &SchedulerStats::num_mixed_steps)
      .def_readonly("num_decode_steps", &SchedulerStats::num_decode_steps)
      .def_readonly("num_rows", &SchedulerStats::num_rows)
      .def_readonly("num_new_tokens", &SchedulerStats::num_new_tokens)
      .def_readonly("num_preemptions", &SchedulerStats::num_preemptions)
      .def_readonly("num_cancelled_steps", &SchedulerStats::num_cancelled_steps)
      .def_readonly("num_prefix_query_tokens", &SchedulerStats::num_prefix_query_tokens)
      .def_readonly("num_prefix_hit_tokens", &SchedulerStats::num_prefix_hit_tokens);
}

/// A Scheduler or EngineCore together with the plan in flight: the caller may drop its reference to
/// the plan between schedule() and complete_step().
template <typename T>
struct WithPlan {
  std::unique_ptr<T> core;
  py::object plan;  // None or the StepPlan in flight
};

/// Wraps a call whose contract is that of the C++ method.
template <typename T, typename R, typename... Args>
[[nodiscard]] auto forward_call(R (T::*method)(Args...)) {
  return [method](WithPlan<T>& self, Args... args) { return ((*self.core).*method)(args...); };
}

template <typename T, typename R, typename... Args>
[[nodiscard]] auto forward_call(R (T::*method)(Args...) const) {
  return
      [method](const WithPlan<T>& self, Args... args) { return ((*self.core).*method)(args...); };
}

template <typename T>
[[nodiscard]] PlanKind schedule_plan(WithPlan<T>& self, const py::object& plan) {
  const PlanKind kind = self.core->schedule(plan.cast<StepPlan&>());
  if (kind != PlanKind::kIdle) {
    self.plan = plan;
  }
  return kind;
}

/// A copy of the request, or None.
template <typename T>
[[nodiscard]] std::optional<Request> copy_request(const WithPlan<T>& self, int64_t req_id) {
  const Request* request = self.core->find_request(req_id);
  return request == nullptr ? std::nullopt : std::optional<Request>(*request);
}

[[nodiscard]] std::vector<int64_t> running_ids(const WithPlan<Scheduler>& self) {
  std::vector<int64_t> ids;
  for (const Request* request : self.core->running()) {
    ids.push_back(request->req_id);
  }
  return ids;
}

/// The calls Scheduler and EngineCore share.
template <typename T, typename Class>
void def_step_calls(Class& type) {
  using Bound = WithPlan<T>;
  type.def("abort", forward_call(&T::abort), py::arg("req_id"))
      .def("stats", forward_call(&T::stats))
      .def("schedule", &schedule_plan<T>, py::arg("plan"))
      .def(
          "complete_step",
          [](Bound& self, StepPlan& plan, const SamplerOutput& output) {
            EventsRecord events = copy_events(*unwrap(self.core->complete_step(plan, output)));
            self.plan = py::none();
            return events;
          },
          py::arg("plan"), py::arg("output"))
      .def(
          "cancel_step",
          [](Bound& self, StepPlan& plan) {
            raise_if_error(self.core->cancel_step(plan));
            self.plan = py::none();
          },
          py::arg("plan"))
      .def("has_unfinished", forward_call(&T::has_unfinished))
      .def(
          "snapshot",
          [](const Bound& self, int64_t req_id) { return unwrap(self.core->snapshot(req_id)); },
          py::arg("req_id"))
      .def(
          "take_result",
          [](Bound& self, int64_t req_id) { return unwrap(self.core->take_result(req_id)); },
          py::arg("req_id"))
      .def("find_request", &copy_request<T>, py::arg("req_id"),
           "A copy of a request that waits, runs or whose result was not taken; else None.")
      .def(
          "preempt",
          [](Bound& self, int64_t req_id) { raise_if_error(self.core->preempt(req_id)); },
          py::arg("req_id"))
      .def("release_all",
           [](Bound& self) {
             self.core->release_all();
             self.plan = py::none();
           })
      .def("check_integrity",
           [](const Bound& self) { raise_if_error(self.core->check_integrity()); })
      .def_property_readonly("options", [](const Bound& self) { return self.core->options(); });
}

/// Calls of a loop whose device runs ahead of the host.
template <typename Class>
void def_run_ahead(Class& type) {
  using Bound = WithPlan<Scheduler>;
  type.def("can_run_ahead", forward_call(&Scheduler::can_run_ahead), py::arg("plan"))
      .def(
          "start_run_ahead",
          [](Bound& self, const StepPlan& plan, DecodeBatch& batch) {
            raise_if_error(self.core->start_run_ahead(plan, batch));
          },
          py::arg("plan"), py::arg("batch"))
      .def(
          "reserve_ahead",
          [](Bound& self, DecodeBatch& batch) { return self.core->reserve_ahead(batch); },
          py::arg("batch"))
      .def("context_len_ahead", [](const Bound& self) { return self.core->context_len_ahead(); })
      .def(
          "schedule_ahead",
          [](Bound& self, const py::object& plan) {
            const PlanKind kind = self.core->schedule_ahead(plan.cast<StepPlan&>());
            if (kind != PlanKind::kIdle) {
              self.plan = plan;
            }
            return kind;
          },
          py::arg("plan"))
      .def(
          "collect_output",
          [](const Bound& self, StepPlan& plan, const SamplerOutput& by_row,
             SamplerOutput& output) { self.core->collect_output(plan, by_row, output); },
          py::arg("plan"), py::arg("by_row"), py::arg("output"));
}

}  // namespace

void bind_scheduler(py::module_& module) {
  bind_events(module);
  bind_stats(module);
  py::enum_<RunAhead>(module, "RunAhead", "Answer of Scheduler.reserve_ahead.")
      .value("STOP", RunAhead::kStop)
      .value("GO", RunAhead::kGo)
      .value("GO_NEW_PAGES", RunAhead::kGoNewPages);
  using BoundScheduler = WithPlan<Scheduler>;
  py::class_<BoundScheduler> scheduler(
      module, "Scheduler",
      "Queues, budgets, preemption, abort. add_request, abort, stats and has_unfinished may be "
      "called from any thread. The plan in flight is kept alive.");
  scheduler
      .def(py::init([](const EngineOptions& options, KVCacheManager& kv_cache,
                       const py::object& strategy) {
             raise_if_error(options.validate());
             auto core = strategy.is_none() ? std::make_unique<Scheduler>(options, kv_cache)
                                            : std::make_unique<Scheduler>(
                                                  options, kv_cache, borrow_strategy(strategy));
             return BoundScheduler{std::move(core), py::none()};
           }),
           py::arg("options"), py::arg("kv_cache_manager"), py::arg("strategy") = py::none(),
           py::keep_alive<1, 3>())
      .def(
          "add_request",
          [](BoundScheduler& self, const Request& request) {
            return unwrap(self.core->add_request(std::make_unique<Request>(request)));
          },
          py::arg("request"))
      .def("flush_prefix_cache", forward_call(&Scheduler::flush_prefix_cache))
      .def("running_ids", &running_ids, "Requests that hold pages, oldest admission first.");
  def_step_calls<Scheduler>(scheduler);
  def_run_ahead(scheduler);

  using BoundCore = WithPlan<EngineCore>;
  py::class_<BoundCore> core(
      module, "EngineCore",
      "A page manager and a scheduler in one. The plan in flight is kept alive.");
  core.def(py::init([](const EngineOptions& options) {
             return BoundCore{unwrap(EngineCore::create(options)), py::none()};
           }),
           py::arg("options"))
      .def(
          "add_request",
          [](BoundCore& self, const std::vector<int32_t>& token_ids, const SamplingParams& params) {
            return unwrap(self.core->add_request(Span<const int32_t>(token_ids), params));
          },
          py::arg("token_ids"), py::arg("sampling_params"))
      .def_property_readonly(
          "kv_cache_manager",
          [](const BoundCore& self) -> const KVCacheManager& { return self.core->kv_cache(); },
          py::return_value_policy::reference_internal);
  def_step_calls<EngineCore>(core);
}

}  // namespace diffulex::bindings
