// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/prefix_cache.h"

#include <algorithm>

namespace diffulex {
namespace {

/// Bijective mixing of 64 bits: two multiply-and-fold rounds by odd constants.
[[nodiscard]] uint64_t mix(uint64_t value) noexcept {
  value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93ULL;
  value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93ULL;
  return value ^ (value >> 32);
}

}  // namespace

PrefixCache::PrefixCache(int32_t num_pages, int32_t page_size, int32_t pages_per_unit,
                         uint64_t salt)
    : page_size_(page_size), pages_per_unit_(pages_per_unit), root_hash_(mix(salt + 1)) {
  DIFFULEX_CHECK(num_pages >= 1 && page_size >= 1 && pages_per_unit >= 1,
                 "PrefixCache: expected positive sizes, got ", num_pages, " pages of ", page_size,
                 ", ", pages_per_unit, " per unit");
  const auto count = static_cast<size_t>(num_pages);
  size_t size = 8;
  // At most half full, so that probes stay short.
  while (size < 2 * (count / static_cast<size_t>(pages_per_unit) + 1)) {
    size *= 2;
  }
  mask_ = size - 1;
  table_.assign(size, -1);
  units_.resize(count);
  lead_.assign(count, -1);
  unit_pages_.assign(count * static_cast<size_t>(pages_per_unit), -1);
  unit_tokens_.assign(count * static_cast<size_t>(page_size), -1);
}

uint64_t PrefixCache::chain_hash(uint64_t parent, Span<const int32_t> tokens) const {
  uint64_t hash = mix(parent ^ 0x9E3779B97F4A7C15ULL);
  size_t i = 0;
  // Two tokens per round: the chain of multiplications is what a hash costs.
  for (; i + 1 < tokens.size(); i += 2) {
    const uint64_t low = static_cast<uint32_t>(tokens[i]);
    const uint64_t high = static_cast<uint32_t>(tokens[i + 1]);
    hash = mix(hash + (low | (high << 32)));
  }
  return i < tokens.size() ? mix(hash + static_cast<uint32_t>(tokens[i])) : hash;
}

size_t PrefixCache::find_cell(uint64_t hash) const {
  size_t cell = home(hash);
  while (table_[cell] >= 0 && units_[static_cast<size_t>(table_[cell])].hash != hash) {
    cell = (cell + 1) & mask_;
  }
  return cell;
}

Span<const int32_t> PrefixCache::find(uint64_t hash, uint64_t parent,
                                      Span<const int32_t> tokens) const {
  const int32_t lead = table_[find_cell(hash)];
  if (lead < 0 || units_[static_cast<size_t>(lead)].parent != parent) {
    return {};
  }
  const auto per_unit = static_cast<size_t>(pages_per_unit_);
  const auto page_len = static_cast<size_t>(page_size_);
  const int32_t* pages = unit_pages_.data() + static_cast<size_t>(lead) * per_unit;
  for (size_t i = 0; i < per_unit; ++i) {
    const int32_t* stored = unit_tokens_.data() + static_cast<size_t>(pages[i]) * page_len;
    if (!std::equal(stored, stored + page_len, tokens.begin() + i * page_len)) {
      return {};
    }
  }
  return Span<const int32_t>(pages, per_unit);
}

bool PrefixCache::insert(uint64_t hash, uint64_t parent, Span<const int32_t> tokens,
                         Span<const int32_t> pages) {
  DIFFULEX_CHECK(tokens.size() == static_cast<size_t>(unit_len()) &&
                     pages.size() == static_cast<size_t>(pages_per_unit_),
                 "PrefixCache::insert: expected one unit of ", unit_len(), " tokens, got ",
                 tokens.size(), " tokens on ", pages.size(), " pages");
  const size_t cell = find_cell(hash);
  if (table_[cell] >= 0) {
    return false;
  }
  const int32_t lead = pages[0];
  const auto per_unit = static_cast<size_t>(pages_per_unit_);
  const auto page_len = static_cast<size_t>(page_size_);
  for (size_t i = 0; i < per_unit; ++i) {
    const auto page = static_cast<size_t>(pages[i]);
    DIFFULEX_CHECK(lead_[page] < 0, "PrefixCache::insert: expected an unindexed page, got ",
                   pages[i]);
    lead_[page] = lead;
    unit_pages_[static_cast<size_t>(lead) * per_unit + i] = pages[i];
    std::copy_n(tokens.begin() + i * page_len, page_len,
                unit_tokens_.begin() + static_cast<std::ptrdiff_t>(page * page_len));
  }
  units_[static_cast<size_t>(lead)] = Unit{hash, parent};
  table_[cell] = lead;
  ++num_units_;
  return true;
}

void PrefixCache::erase_page(int32_t page) {
  const int32_t lead = lead_[static_cast<size_t>(page)];
  if (lead < 0) {
    return;
  }
  const auto per_unit = static_cast<size_t>(pages_per_unit_);
  for (size_t i = 0; i < per_unit; ++i) {
    const int32_t member = unit_pages_[static_cast<size_t>(lead) * per_unit + i];
    lead_[static_cast<size_t>(member)] = -1;
  }
  // Backward-shift deletion: entries after the hole move up unless they are already at home.
  size_t hole = find_cell(units_[static_cast<size_t>(lead)].hash);
  size_t cell = hole;
  for (;;) {
    cell = (cell + 1) & mask_;
    if (table_[cell] < 0) {
      break;
    }
    const size_t from_home = (cell - home(units_[static_cast<size_t>(table_[cell])].hash)) & mask_;
    const size_t from_hole = (cell - hole) & mask_;
    if (from_home >= from_hole) {
      table_[hole] = table_[cell];
      hole = cell;
    }
  }
  table_[hole] = -1;
  --num_units_;
}

bool PrefixCache::has_page(int32_t page) const {
  return lead_[static_cast<size_t>(page)] >= 0;
}

Status PrefixCache::check_integrity() const {
  int32_t entries = 0;
  for (const int32_t lead : table_) {
    if (lead < 0) {
      continue;
    }
    ++entries;
    const Unit& unit = units_[static_cast<size_t>(lead)];
    if (table_[find_cell(unit.hash)] != lead) {
      return make_error(StatusCode::kInternal, "PrefixCache: expected unit ", lead,
                        " to be reachable, got ", table_[find_cell(unit.hash)]);
    }
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < pages_per_unit_; ++i) {
      const int32_t page = unit_pages_[static_cast<size_t>(lead * pages_per_unit_ + i)];
      if (lead_[static_cast<size_t>(page)] != lead) {
        return make_error(StatusCode::kInternal, "PrefixCache: expected page ", page, " in unit ",
                          lead, ", got ", lead_[static_cast<size_t>(page)]);
      }
      const auto first = unit_tokens_.begin() + int64_t{page} * page_size_;
      tokens.insert(tokens.end(), first, first + page_size_);
    }
    const uint64_t hash = chain_hash(unit.parent, Span<const int32_t>(tokens));
    if (hash != unit.hash) {
      return make_error(StatusCode::kInternal, "PrefixCache: expected hash ", hash, " of unit ",
                        lead, ", got ", unit.hash);
    }
  }
  const auto indexed = std::count_if(lead_.begin(), lead_.end(), [](int32_t l) { return l >= 0; });
  if (entries != num_units_ || indexed != int64_t{entries} * pages_per_unit_) {
    return make_error(StatusCode::kInternal, "PrefixCache: expected ", num_units_, " units, got ",
                      entries, " entries over ", indexed, " pages");
  }
  return {};
}

}  // namespace diffulex
