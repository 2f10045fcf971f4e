// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/request.h"
#include "pybind/bind.h"

namespace diffulex::bindings {

void bind_kv_cache(py::module_& module) {
  py::class_<KVCacheManager>(module, "KVCacheManager",
                             "Page allocation and prefix cache; holds no KV data itself.")
      .def(py::init([](const EngineOptions& options) {
             raise_if_error(options.validate());
             return std::make_unique<KVCacheManager>(options);
           }),
           py::arg("options"))
      .def_property_readonly("num_pages", &KVCacheManager::num_pages)
      .def_property_readonly("num_free_pages", &KVCacheManager::num_free_pages)
      .def_property_readonly("num_used_pages", &KVCacheManager::num_used_pages)
      .def_property_readonly("num_cached_units", &KVCacheManager::num_cached_units)
      .def_property_readonly("page_size", &KVCacheManager::page_size)
      .def_property_readonly("prefix_unit_len", &KVCacheManager::prefix_unit_len)
      .def(
          "slots",
          [](const KVCacheManager& self, const Request& request, int32_t begin, int32_t end) {
            const auto covered =
                static_cast<int64_t>(request.page_table.pages.size()) * self.page_size();
            if (begin < 0 || begin > end || end > covered) {
              throw py::index_error("KVCacheManager.slots: expected positions in [0, " +
                                    std::to_string(covered) + "), got [" + std::to_string(begin) +
                                    ", " + std::to_string(end) + ")");
            }
            std::vector<int32_t> slots(static_cast<size_t>(end - begin));
            self.write_slots(request.page_table, begin, end, slots.data());
            return slots;
          },
          py::arg("request"), py::arg("begin"), py::arg("end"),
          "KV slots of positions [begin, end) of a request, which have pages.")
      .def("num_pages_for", &KVCacheManager::num_pages_for, py::arg("length"))
      .def(
          "ref_count",
          [](const KVCacheManager& self, int32_t page) {
            if (page < 0 || page >= self.num_pages()) {
              throw py::index_error("KVCacheManager.ref_count: expected a page below " +
                                    std::to_string(self.num_pages()) + ", got " +
                                    std::to_string(page));
            }
            return self.pool().ref_count(page);
          },
          py::arg("page"), "Requests that own the page now.")
      .def("check_integrity",
           [](const KVCacheManager& self) { raise_if_error(self.check_integrity()); });
}

}  // namespace diffulex::bindings
