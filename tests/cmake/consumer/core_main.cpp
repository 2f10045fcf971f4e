// SPDX-License-Identifier: Apache-2.0
//
// Uses diffulex::core alone: the program cannot link a kernel.
#include <cstdio>

#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/options.h"
#include "diffulex/version.h"

int main() {
  diffulex::EngineOptions options;
  options.num_pages = 4;
  options.max_model_len = 64;
  const diffulex::Status status = options.validate();
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  diffulex::KVCacheManager manager(options);
  diffulex::PageTable table;
  if (!manager.try_grow(table, 2 * options.page_size) || manager.num_free_pages() != 2) {
    std::fprintf(stderr, "expected 2 free pages, got %d\n", manager.num_free_pages());
    return 1;
  }
  std::printf("diffulex %s core\n", DIFFULEX_VERSION_STRING);
  return 0;
}
