// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/plan_layout.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <sstream>
#include <type_traits>

#include "diffulex/core/decode_rules.h"

namespace diffulex {
namespace {

// What the columns of the lists mean.

/// First dimensions at full capacity.
struct Extents {
  explicit Extents(const PlanLayout& layout)
      : rows(layout.max_num_rows),
        reqs(layout.max_num_reqs),
        request_ends(reqs + 1),
        blocks(layout.max_num_blocks()),
        logits_rows(layout.max_logits_rows()) {}

  int64_t rows;
  int64_t reqs;
  int64_t request_ends;
  int64_t blocks;
  int64_t logits_rows;
};

/// Further dimensions: [cols], or [cols / depth, depth].
struct Width {
  int64_t cols = 1;
  bool is_matrix = true;
  int64_t depth = 0;
};

struct Widths {
  explicit Widths(const PlanLayout& layout)
      : block{layout.block_size},
        candidates{layout.merge_top_k},
        block_candidates{int64_t{layout.block_size} * layout.merge_top_k, true, layout.merge_top_k},
        pages{layout.max_pages_per_req},
        window{window_len(layout.decode_rows())} {}

  Width scalar{1, false};
  Width block;
  Width candidates;
  Width block_candidates;
  Width pages;
  Width window;
  Width request{static_cast<int64_t>(sizeof(DecodeRequest))};
};

struct Uses {
  explicit Uses(const PlanLayout& layout)
      : saved_rows(layout.has_saved_rows),
        edits(layout.has_edits),
        dual_cache(layout.has_dual_cache),
        merge(layout.merge_top_k > 0),
        canvas(layout.has_canvas) {}

  bool always = true;
  bool saved_rows;
  bool edits;
  bool dual_cache;
  bool merge;
  bool canvas;
};

struct Columns {
  explicit Columns(const PlanLayout& layout) : extents(layout), widths(layout), uses(layout) {}

  Extents extents;
  Widths widths;
  Uses uses;
};

template <typename T>
[[nodiscard]] constexpr ArenaDtype dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return ArenaDtype::kUint8;
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return ArenaDtype::kInt32;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return ArenaDtype::kInt64;
  } else if constexpr (std::is_same_v<T, float>) {
    return ArenaDtype::kFloat32;
  } else {
    static_assert(std::is_same_v<T, double>, "arrays have no other element type");
    return ArenaDtype::kFloat64;
  }
}

template <typename T>
[[nodiscard]] ArenaField field(const char* name, const char* extent, int64_t size,
                               const Width& width, bool is_used) {
  const int64_t rows = is_used ? size : 0;
  return ArenaField{name, dtype_of<T>(), 0, rows, width.cols, width.is_matrix, width.depth, extent};
}

[[nodiscard]] std::vector<ArenaField> laid_out(std::vector<ArenaField> fields) {
  Arena::layout(fields);
  return fields;
}

template <typename T>
[[nodiscard]] T* place_of(void* base, const ArenaField& field) {
  auto* bytes = static_cast<unsigned char*>(base);
  return field.rows > 0 ? reinterpret_cast<T*>(bytes + field.offset) : nullptr;
}

/// The text of all rows: what a library and its caller must agree on.
constexpr const char kRows[] =
#define DIFFULEX_ARRAY(...) #__VA_ARGS__ "\n"
#include "diffulex/core/plan_arrays.def"
#define DIFFULEX_ARRAY(...) #__VA_ARGS__ "\n"
#include "diffulex/core/output_arrays.def"
#define DIFFULEX_ARRAY(...) #__VA_ARGS__ "\n"
#define DIFFULEX_FIELD(...) #__VA_ARGS__ "\n"
#include "diffulex/core/batch_arrays.def"
    ;

/// Places and sizes of the fields of DecodeRequest, which those of the structs in it change.
constexpr size_t kPlaces[] = {
#define DIFFULEX_FIELD(type, name, ...) offsetof(DecodeRequest, name), sizeof(type),
#include "diffulex/core/batch_arrays.def"
    sizeof(DecodeRequest)};

/// FNV-1a, without the sign bit.
[[nodiscard]] constexpr int64_t hash_of(const char* text, Span<const size_t> places) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (; *text != '\0'; ++text) {
    hash = (hash ^ static_cast<unsigned char>(*text)) * 0x100000001b3ULL;
  }
  for (const size_t place : places) {
    hash = (hash ^ place) * 0x100000001b3ULL;
  }
  return static_cast<int64_t>(hash >> 1U);
}

/// More than any memory holds, and few enough that sizes and offsets in bytes do not overflow.
constexpr int64_t kMaxEntries = int64_t{1} << 40U;

constexpr int64_t kArenaVersion = hash_of(kRows, {kPlaces, std::size(kPlaces)});

}  // namespace

int64_t arena_version() noexcept {
  return kArenaVersion;
}

PlanLayout PlanLayout::of(const EngineOptions& options) {
  PlanLayout layout;
  layout.block_size = options.block_size;
  layout.buffer_size = options.buffer_size;
  layout.page_size = options.page_size;
  layout.max_pages_per_req = options.max_pages_per_req();
  layout.max_num_reqs = options.max_num_reqs;
  layout.max_num_rows =
      std::max(options.max_num_batched_tokens, options.max_num_reqs * options.decode_rows());
  layout.att_block_size = options.att_block_size();
  layout.merge_top_k = options.token_merge_top_k;
  layout.has_saved_rows = options.logits_shift;
  layout.has_edits = options.has_edits();
  layout.has_dual_cache = options.has_dual_cache();
  layout.has_canvas = options.has_canvas();
  return layout;
}

std::array<int64_t, PlanLayout::kNumInts> PlanLayout::to_ints() const noexcept {
  return {arena_version(),   block_size,
          buffer_size,       page_size,
          max_pages_per_req, max_num_reqs,
          max_num_rows,      att_block_size,
          merge_top_k,       has_saved_rows ? 1 : 0,
          has_edits ? 1 : 0, has_dual_cache ? 1 : 0,
          has_canvas ? 1 : 0};
}

Result<PlanLayout> PlanLayout::from_ints(Span<const int64_t> ints) {
  if (ints.size() != kNumInts || ints[0] != arena_version()) {
    return make_error(StatusCode::kInvalidArgument, "layout: expected ", kNumInts,
                      " numbers of version ", arena_version(), ", got ", ints.size(),
                      " of version ", ints.empty() ? 0 : ints[0]);
  }
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  for (size_t i = 1; i < kNumInts; ++i) {
    if (ints[i] < 0 || ints[i] > kMax) {
      return make_error(StatusCode::kInvalidArgument, "layout: expected numbers of 0 to ", kMax,
                        ", got ", ints[i]);
    }
  }
  const auto number = [&ints](size_t i) { return static_cast<int32_t>(ints[i]); };
  PlanLayout layout;
  layout.block_size = number(1);
  layout.buffer_size = number(2);
  layout.page_size = number(3);
  layout.max_pages_per_req = number(4);
  layout.max_num_reqs = number(5);
  layout.max_num_rows = number(6);
  layout.att_block_size = number(7);
  layout.merge_top_k = number(8);
  layout.has_saved_rows = number(9) != 0;
  layout.has_edits = number(10) != 0;
  layout.has_dual_cache = number(11) != 0;
  layout.has_canvas = number(12) != 0;
  if (layout.block_size < 1 || layout.buffer_size < 1) {
    return make_error(StatusCode::kInvalidArgument,
                      "layout: expected block_size and buffer_size of at least 1, got ",
                      layout.describe());
  }
  // Logits rows, and the records of slots that follow them, have int32 indices.
  const int64_t width = ints[1] <= kMax / ints[2] ? ints[1] * ints[2] : kMax;
  if (std::max<int64_t>(ints[5], 1) > kMax / (width + 2)) {
    return make_error(StatusCode::kInvalidArgument, "layout: expected at most ", kMax,
                      " rows and records, got ", layout.describe());
  }
  const int64_t num_rows = std::max<int64_t>(layout.max_num_rows, ints[5] * width);
  if (std::max(ints[5] * ints[4], num_rows * ints[8]) > kMaxEntries) {
    return make_error(StatusCode::kInvalidArgument, "layout: expected arrays of at most ",
                      kMaxEntries, " entries, got ", layout.describe());
  }
  return layout;
}

std::string PlanLayout::describe() const {
  std::ostringstream text;
  text << "block_size " << block_size << ", buffer_size " << buffer_size << ", page_size "
       << page_size << ", max_pages_per_req " << max_pages_per_req << ", max_num_reqs "
       << max_num_reqs << ", max_num_rows " << max_num_rows << ", att_block_size " << att_block_size
       << ", merge_top_k " << merge_top_k << (has_saved_rows ? ", saved rows" : "")
       << (has_edits ? ", edits" : "") << (has_dual_cache ? ", dual cache" : "")
       << (has_canvas ? ", canvas" : "");
  return text.str();
}

bool PlanLayout::operator==(const PlanLayout& other) const noexcept {
  return to_ints() == other.to_ints();
}

std::vector<ArenaField> PlanArrays::fields(const PlanLayout& layout) {
  const Columns columns(layout);
  return laid_out({
#define DIFFULEX_ARRAY(name, type, extent, width, use) \
  field<type>(#name, #extent, columns.extents.extent, columns.widths.width, columns.uses.use),
#include "diffulex/core/plan_arrays.def"
  });
}

std::vector<ArenaField> OutputArrays::fields(const PlanLayout& layout) {
  const Columns columns(layout);
  return laid_out({
#define DIFFULEX_ARRAY(name, type, extent, width, use, cleared) \
  field<type>(#name, #extent, columns.extents.extent, columns.widths.width, columns.uses.use),
#include "diffulex/core/output_arrays.def"
  });
}

std::vector<ArenaField> BatchArrays::fields(const PlanLayout& layout) {
  const Columns columns(layout);
  return laid_out({
#define DIFFULEX_ARRAY(name, type, extent, width, use) \
  field<type>(#name, #extent, columns.extents.extent, columns.widths.width, columns.uses.use),
#include "diffulex/core/batch_arrays.def"
  });
}

// Braces evaluate in the order of the list.

PlanArrays PlanArrays::at(void* base, const std::vector<ArenaField>& fields) {
  const ArenaField* next = fields.data();
  return PlanArrays{
#define DIFFULEX_ARRAY(name, type, ...) place_of<type>(base, *next++),
#include "diffulex/core/plan_arrays.def"
  };
}

OutputArrays OutputArrays::at(void* base, const std::vector<ArenaField>& fields) {
  const ArenaField* next = fields.data();
  return OutputArrays{
#define DIFFULEX_ARRAY(name, type, ...) place_of<type>(base, *next++),
#include "diffulex/core/output_arrays.def"
  };
}

BatchArrays BatchArrays::at(void* base, const std::vector<ArenaField>& fields) {
  const ArenaField* next = fields.data();
  return BatchArrays{
#define DIFFULEX_ARRAY(name, type, ...) place_of<type>(base, *next++),
#include "diffulex/core/batch_arrays.def"
  };
}

}  // namespace diffulex
