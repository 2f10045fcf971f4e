// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "diffulex/core/strategy.h"
#include "pybind/bind.h"

// Strategies written in Python. A hook sees the request, the plan and the page manager themselves,
// not copies; references to them are valid during the call only.

namespace diffulex::bindings {
namespace {

/// Forwards the seven hooks to another strategy, which outlives it. Not what lets a device run
/// ahead: hooks in Python must see every step.
class ForwardingStrategy : public Strategy {
 public:
  explicit ForwardingStrategy(const Strategy& target) : target_(target) {}

  void init_request(Request& request) const override { target_.init_request(request); }
  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override {
    return target_.pages_needed(request, query);
  }
  void begin_step(Request& request, const StepNeed& need) const override {
    target_.begin_step(request, need);
  }
  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    target_.write_rows(request, kv_cache, plan, req_idx);
  }
  void write_sampler_inputs(const Request& request, StepPlan& plan,
                            int32_t req_idx) const override {
    target_.write_sampler_inputs(request, plan, req_idx);
  }
  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override {
    return target_.finish_step(request, plan, req_idx, output, writes);
  }
  void on_preempt(Request& request) const override { target_.on_preempt(request); }

 private:
  const Strategy& target_;
};

/// A built-in strategy by name; a Python subclass replaces single hooks of it.
class BuiltinStrategy : public ForwardingStrategy {
 public:
  explicit BuiltinStrategy(const EngineOptions& options)
      : BuiltinStrategy(unwrap(make_strategy(checked(options)))) {}

 private:
  explicit BuiltinStrategy(std::unique_ptr<Strategy> inner)
      : ForwardingStrategy(*inner), inner_(std::move(inner)) {}

  [[nodiscard]] static const EngineOptions& checked(const EngineOptions& options) {
    raise_if_error(options.validate());
    return options;
  }

  std::unique_ptr<Strategy> inner_;
};

/// Routes every hook to the Python class where it defines one, else to `Base`.
template <typename Base>
class Trampoline final : public Base {
 public:
  using Base::Base;

  void init_request(Request& request) const override {
    call<void>("init_request", [&] { return Base::init_request(request); }, request);
  }
  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override {
    return call<StepNeed>(
        "pages_needed", [&] { return Base::pages_needed(request, query); }, request, query);
  }
  void begin_step(Request& request, const StepNeed& need) const override {
    call<void>("begin_step", [&] { return Base::begin_step(request, need); }, request, need);
  }
  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    call<void>(
        "write_rows", [&] { return Base::write_rows(request, kv_cache, plan, req_idx); }, request,
        kv_cache, plan, req_idx);
  }
  void write_sampler_inputs(const Request& request, StepPlan& plan,
                            int32_t req_idx) const override {
    call<void>(
        "write_sampler_inputs", [&] { return Base::write_sampler_inputs(request, plan, req_idx); },
        request, plan, req_idx);
  }
  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override {
    return call<StepOutcome>(
        "finish_step", [&] { return Base::finish_step(request, plan, req_idx, output, writes); },
        request, plan, req_idx, output, std::vector<BlockWrite>(writes.begin(), writes.end()));
  }
  void on_preempt(Request& request) const override {
    call<void>("on_preempt", [&] { return Base::on_preempt(request); }, request);
  }

 private:
  /// Objects of the core by reference, values by value.
  template <typename T>
  [[nodiscard]] static py::object argument(const T& value) {
    if constexpr (std::is_same_v<T, Request> || std::is_same_v<T, StepPlan> ||
                  std::is_same_v<T, KVCacheManager> || std::is_same_v<T, SamplerOutput>) {
      return py::cast(const_cast<T*>(&value), py::return_value_policy::reference);
    } else {
      return py::cast(value);
    }
  }

  template <typename R, typename Fallback, typename... Args>
  R call(const char* name, const Fallback& fallback, const Args&... args) const {
    const py::gil_scoped_acquire gil;
    const py::function hook = py::get_override(static_cast<const Base*>(this), name);
    if (!hook) {
      return fallback();
    }
    if constexpr (std::is_void_v<R>) {
      hook(argument(args)...);
    } else {
      return hook(argument(args)...).template cast<R>();
    }
  }
};

/// All hooks pure: a Python subclass of Strategy must define each.
class AbstractHooks : public Strategy {
 public:
  void init_request(Request& /*request*/) const override { missing("init_request"); }
  [[nodiscard]] StepNeed pages_needed(const Request& /*request*/,
                                      const StepQuery& /*query*/) const override {
    missing("pages_needed");
  }
  void begin_step(Request& /*request*/, const StepNeed& /*need*/) const override {
    missing("begin_step");
  }
  void write_rows(Request& /*request*/, const KVCacheManager& /*kv_cache*/, StepPlan& /*plan*/,
                  int32_t /*req_idx*/) const override {
    missing("write_rows");
  }
  void write_sampler_inputs(const Request& /*request*/, StepPlan& /*plan*/,
                            int32_t /*req_idx*/) const override {
    missing("write_sampler_inputs");
  }
  [[nodiscard]] StepOutcome finish_step(Request& /*request*/, StepPlan& /*plan*/,
                                        int32_t /*req_idx*/, const SamplerOutput& /*output*/,
                                        Span<const BlockWrite> /*writes*/) const override {
    missing("finish_step");
  }
  void on_preempt(Request& /*request*/) const override { missing("on_preempt"); }

 private:
  [[noreturn]] static void missing(const char* name) {
    const std::string message =
        std::string("Strategy.") + name + ": expected a definition, got none";
    PyErr_SetString(PyExc_NotImplementedError, message.c_str());
    throw py::error_already_set();
  }
};

/// A strategy that a Python object owns.
class BorrowedStrategy final : public ForwardingStrategy {
 public:
  explicit BorrowedStrategy(const py::object& owner)
      : ForwardingStrategy(owner.cast<const Strategy&>()), owner_(owner) {}
  ~BorrowedStrategy() override {
    const py::gil_scoped_acquire gil;
    owner_ = py::object();
  }
  BorrowedStrategy(const BorrowedStrategy&) = delete;
  BorrowedStrategy& operator=(const BorrowedStrategy&) = delete;

 private:
  py::object owner_;
};

void bind_values(py::module_& module) {
  py::class_<StepQuery>(module, "StepQuery",
                        "Circumstances under which a request would run its next forward.")
      .def(keyword_init<StepQuery>())
      .def_readwrite("context_len", &StepQuery::context_len)
      .def_readwrite("row_budget", &StepQuery::row_budget);
  py::class_<StepNeed>(module, "StepNeed", "What the next forward of a request takes.")
      .def(keyword_init<StepNeed>())
      .def_readwrite("is_prefill", &StepNeed::is_prefill)
      .def_readwrite("is_final", &StepNeed::is_final)
      .def_readwrite("num_rows", &StepNeed::num_rows)
      .def_readwrite("page_len", &StepNeed::page_len);
  py::class_<BlockWrite>(module, "BlockWrite", "A checked write of the sampler.")
      .def_readonly("blk", &BlockWrite::blk)
      .def_readonly("rel", &BlockWrite::rel)
      .def_readonly("token", &BlockWrite::token);
  py::class_<StepOutcome>(module, "StepOutcome", "Outcome of finish_step.")
      .def(keyword_init<StepOutcome>())
      .def_readwrite("new_tokens", &StepOutcome::new_tokens)
      .def_readwrite("finish_reason", &StepOutcome::finish_reason);
}

/// The seven hooks as methods that call `Base` itself: what super() reaches.
template <typename Base, typename Class>
void def_hooks(Class& type) {
  type.def(
          "init_request",
          [](const Base& self, Request& request) { self.Base::init_request(request); },
          py::arg("request"), "Builds blocks and limits of a validated request.")
      .def(
          "pages_needed",
          [](const Base& self, const Request& request, const StepQuery& query) {
            return self.Base::pages_needed(request, query);
          },
          py::arg("request"), py::arg("query"), "What the next forward takes; no side effect.")
      .def(
          "begin_step",
          [](const Base& self, Request& request, const StepNeed& need) {
            self.Base::begin_step(request, need);
          },
          py::arg("request"), py::arg("need"), "Enters the forward that `need` describes.")
      .def(
          "write_rows",
          [](const Base& self, Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
             int32_t req_idx) { self.Base::write_rows(request, kv_cache, plan, req_idx); },
          py::arg("request"), py::arg("kv_cache"), py::arg("plan"), py::arg("req_idx"),
          "Fills rows, slots and per-request arrays.")
      .def(
          "write_sampler_inputs",
          [](const Base& self, const Request& request, StepPlan& plan, int32_t req_idx) {
            self.Base::write_sampler_inputs(request, plan, req_idx);
          },
          py::arg("request"), py::arg("plan"), py::arg("req_idx"),
          "Appends the ACTIVE blocks and their logits rows.")
      .def(
          "finish_step",
          [](const Base& self, Request& request, StepPlan& plan, int32_t req_idx,
             const SamplerOutput& output, const std::vector<BlockWrite>& writes) {
            return self.Base::finish_step(request, plan, req_idx, output,
                                          Span<const BlockWrite>(writes));
          },
          py::arg("request"), py::arg("plan"), py::arg("req_idx"), py::arg("output"),
          py::arg("writes"), "Applies writes and verdicts; gives new tokens and the finish reason.")
      .def(
          "on_preempt", [](const Base& self, Request& request) { self.Base::on_preempt(request); },
          py::arg("request"), "Reverts a step in flight, then forgets all KV.");
}

}  // namespace

std::unique_ptr<Strategy> borrow_strategy(const py::object& strategy) {
  return std::make_unique<BorrowedStrategy>(strategy);
}

void bind_strategy(py::module_& module) {
  bind_values(module);
  // The interface itself, so that both kinds below convert to it.
  py::class_<Strategy>(module, "AnyStrategy", "Base of Strategy and BuiltinStrategy.");
  py::class_<AbstractHooks, Strategy, Trampoline<AbstractHooks>> abstract(
      module, "Strategy",
      "A decoding strategy written in Python: a subclass defines all seven hooks. Requests, plans "
      "and page managers it is given are valid during the call only. A scheduler whose strategy "
      "raised must be dropped.");
  abstract.def(py::init<>());
  def_hooks<AbstractHooks>(abstract);
  py::class_<BuiltinStrategy, Strategy, Trampoline<BuiltinStrategy>> builtin(
      module, "BuiltinStrategy",
      "The strategy that `options` names; a subclass may replace single hooks and reach the others "
      "by super().");
  builtin.def(py::init<const EngineOptions&>(), py::arg("options"));
  def_hooks<BuiltinStrategy>(builtin);
}

}  // namespace diffulex::bindings
