// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/arena.h"

#include <cstring>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {
namespace {

[[nodiscard]] size_t align_up(size_t value) noexcept {
  return (value + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

}  // namespace

void Arena::layout(std::vector<ArenaField>& fields) {
  size_t offset = 0;
  for (ArenaField& field : fields) {
    field.offset = offset;
    offset += align_up(field.bytes());
  }
}

size_t Arena::arena_bytes(const std::vector<ArenaField>& fields) {
  return fields.empty() ? 0 : fields.back().offset + align_up(fields.back().bytes());
}

Arena::Arena(std::vector<ArenaField> fields)
    : fields_(std::move(fields)), bytes_(arena_bytes(fields_)) {
  owned_ = std::make_unique<unsigned char[]>(bytes_ + kArenaAlignment);
  const auto address = reinterpret_cast<uintptr_t>(owned_.get());
  base_ = owned_.get() + (align_up(address) - address);
}

Arena::Arena(std::vector<ArenaField> fields, void* memory, size_t bytes)
    : fields_(std::move(fields)),
      base_(static_cast<unsigned char*>(memory)),
      bytes_(arena_bytes(fields_)) {
  DIFFULEX_CHECK(memory != nullptr && reinterpret_cast<uintptr_t>(memory) % kArenaAlignment == 0,
                 "Arena: expected memory aligned to ", kArenaAlignment, " bytes, got ", memory);
  DIFFULEX_CHECK(bytes >= bytes_, "Arena: expected >= ", bytes_, " bytes, got ", bytes);
  std::memset(base_, 0, bytes_);
}

}  // namespace diffulex
