#include "lower_set_tables.hpp"

#include "checks.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace remat::lower_sets {
namespace {

std::int64_t checked_sum(const std::vector<std::int64_t>& numbers, const char* label) {
  std::int64_t sum = 0;
  for (const std::int64_t number : numbers) {
    if (number < 0 || number > kMostTotal - sum) {
      throw std::invalid_argument(std::string(label) +
                                  " are negative, or add up to more than 2**60");
    }
    sum += number;
  }
  return sum;
}

// Calls f(index) for each bit set.
template <class F>
void for_each_bit(std::span<const Word> set, F&& f) {
  for (std::size_t k = 0; k < set.size(); ++k) {
    for (Word word = set[k]; word != 0; word &= word - 1) {
      f(k * 64 + static_cast<std::size_t>(std::countr_zero(word)));
    }
  }
}

bool has(std::span<const Word> set, std::size_t v) {
  return ((set[v / 64] >> (v % 64)) & 1U) != 0;
}
void add(std::span<Word> set, std::size_t v) { set[v / 64] |= Word{1} << (v % 64); }
void remove(std::span<Word> set, std::size_t v) { set[v / 64] &= ~(Word{1} << (v % 64)); }

std::int64_t total(std::span<const Word> set, const std::vector<std::int64_t>& of) {
  std::int64_t sum = 0;
  for_each_bit(set, [&](std::size_t v) { sum += of[v]; });
  return sum;
}

void check_arrays(const GraphArrays& graph, std::span<const Word> rows, std::size_t words) {
  const auto& [memory, cost, segment, edges, owed] = graph;
  const std::size_t nodes = memory.size();
  if (nodes == 0 || cost.size() != nodes || segment.size() != nodes) {
    throw std::invalid_argument("sizes and costs must have one entry a value");
  }
  const std::int64_t kept = checked_sum(memory, "sizes");
  checked_sum(cost, "costs");
  if (checked_sum(segment, "segment sizes") > kMostTotal - 3 * kept) {
    throw std::invalid_argument("sizes, as charged, add up to more than 2**60");
  }
  for (const auto& [u, v] : edges) {
    const auto count = static_cast<std::int64_t>(nodes);
    if (u < 0 || v < 0 || u >= count || v >= count) {
      throw std::invalid_argument("an edge names a value that does not exist");
    }
  }
  if (owed < 0 || owed > 2) throw std::invalid_argument("owed must be 0, 1 or 2");
  if (words != (nodes + 63) / 64 || rows.size() < 2 * words || rows.size() % words != 0) {
    throw std::invalid_argument("rows must be two or more bit sets of the values");
  }
  if (rows.size() / words > std::numeric_limits<Index>::max() / 2) {
    throw std::invalid_argument("too many lower sets");
  }
  const std::size_t count = rows.size() / words;
  int before = -1;
  for (std::size_t i = 0; i < count; ++i) {
    const auto set = rows.subspan(i * words, words);
    int members = 0;
    for (const Word word : set) members += std::popcount(word);
    const bool is_outside = nodes % 64 != 0 && (set[words - 1] >> (nodes % 64)) != 0;
    if (is_outside || members < before) {
      throw std::invalid_argument("rows must hold values only, smaller sets first");
    }
    if ((i == 0) != (members == 0) ||
        (i == count - 1) != (members == static_cast<int>(nodes))) {
      throw std::invalid_argument("the first row must be empty and the last one full");
    }
    before = members;
  }
}

// Values renumbered by the smallest set that holds them: then the words in which sets
// of similar size differ are few and lie together.
std::vector<std::size_t> positions(std::span<const Word> rows, std::size_t words,
                                   std::size_t nodes) {
  std::vector<std::size_t> position(nodes, nodes);
  std::size_t next = 0;
  for (std::size_t i = 0; i < rows.size() / words; ++i) {
    for_each_bit(rows.subspan(i * words, words), [&](std::size_t v) {
      if (position[v] == nodes) position[v] = next++;
    });
  }
  return position;
}

}  // namespace

Tables::Tables(const GraphArrays& graph, std::span<const Word> rows, std::size_t words_)
    : words(words_) {
  check_arrays(graph, rows, words_);
  const auto& [memory, costs, segments, edges, owed] = graph;
  const std::size_t nodes = memory.size();
  const std::size_t count = rows.size() / words;
  const std::vector<std::size_t> position = positions(rows, words, nodes);

  // In the new numbers.
  std::vector<std::int64_t> bytes(nodes), cost_of(nodes);
  for (std::size_t v = 0; v < nodes; ++v) {
    bytes[position[v]] = memory[v];
    cost_of[position[v]] = costs[v];
  }
  std::vector<std::pair<std::size_t, std::size_t>> reads;
  for (const auto& [u, v] : edges) {
    reads.emplace_back(position[static_cast<std::size_t>(u)],
                       position[static_cast<std::size_t>(v)]);
  }

  struct Facts {
    std::int64_t key = 0, segment = 0, cost = 0;
    std::vector<Word> set, boundary, tops, next;
  };
  std::vector<Facts> facts(count);
  for (std::size_t i = 0; i < count; ++i) {
    Facts& fact = facts[i];
    fact.set.resize(words);
    fact.boundary.resize(words);
    for_each_bit(rows.subspan(i * words, words), [&](std::size_t v) {
      add(fact.set, position[v]);
      fact.segment += segments[v];
      fact.cost += costs[v];
    });
    fact.tops = fact.set;
    fact.next.resize(words);
    for (std::size_t v = 0; v < nodes; ++v) {
      if (!has(fact.set, v)) add(fact.next, v);
    }
    std::vector<Word> consumers(words), beside(words);
    for (const auto& [u, v] : reads) {
      const bool has_u = has(fact.set, u), has_v = has(fact.set, v);
      if (has_v && !has_u) {
        throw std::invalid_argument("a row holds a value without what it reads");
      }
      if (has_v) remove(fact.tops, u);
      if (!has_u) remove(fact.next, v);
      if (has_u && !has_v) {
        add(fact.boundary, u);
        add(consumers, v);
      }
    }
    for (const auto& [u, v] : reads) {
      if (has(consumers, v) && !has(fact.set, u)) add(beside, u);
    }
    const std::int64_t held[] = {total(consumers, bytes) + total(beside, bytes),
                                 total(fact.boundary, bytes), 0};
    fact.key = fact.segment + held[owed];
  }

  row.resize(count);
  std::iota(row.begin(), row.end(), Index{0});
  std::stable_sort(row.begin(), row.end(),
                   [&](Index a, Index b) { return facts[a].key < facts[b].key; });
  by_size.resize(count);
  boundary_start.push_back(0);
  maximal_start.push_back(0);
  outside_start.push_back(0);
  for (std::size_t slot = 0; slot < count; ++slot) {
    by_size[row[slot]] = static_cast<Index>(slot);
    const Facts& fact = facts[row[slot]];
    key.push_back(fact.key);
    segment.push_back(fact.segment);
    cost.push_back(fact.cost);
    bits.insert(bits.end(), fact.set.begin(), fact.set.end());
    for_each_bit(fact.boundary, [&](std::size_t v) {
      boundary.push_back(
          {static_cast<Index>(v / 64), static_cast<Index>(v % 64), bytes[v], cost_of[v]});
    });
    for_each_bit(fact.tops, [&](std::size_t v) { maximal.push_back(static_cast<Index>(v)); });
    for_each_bit(fact.next, [&](std::size_t v) { outside.push_back(static_cast<Index>(v)); });
    boundary_bytes.push_back(total(fact.boundary, bytes));
    boundary_cost.push_back(total(fact.boundary, cost_of));
    boundary_start.push_back(static_cast<Index>(boundary.size()));
    maximal_start.push_back(static_cast<Index>(maximal.size()));
    outside_start.push_back(static_cast<Index>(outside.size()));
  }
  empty = by_size.front();
  full = by_size.back();
  fill_columns();
}

void Tables::fill_columns() {
  columns_.assign((size() + 63) / 64 * words * 64, 0);
  for (std::size_t slot = 0; slot < size(); ++slot) {
    Word* const column = &columns_[slot / 64 * words * 64];
    for_each_bit({&bits[slot * words], words},
                 [&](std::size_t v) { column[v] |= Word{1} << (slot % 64); });
  }
}

Tables Tables::subset(const std::vector<Index>& slots) const {
  Tables part;
  part.words = words;
  part.boundary_start.push_back(0);
  part.maximal_start.push_back(0);
  part.outside_start.push_back(0);
  std::vector<Index> new_slot(size(), size());
  for (const Index slot : slots) {
    new_slot[slot] = part.size();
    part.key.push_back(key[slot]);
    part.segment.push_back(segment[slot]);
    part.cost.push_back(cost[slot]);
    part.boundary_bytes.push_back(boundary_bytes[slot]);
    part.boundary_cost.push_back(boundary_cost[slot]);
    part.row.push_back(row[slot]);
    const auto at = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(slot) * words);
    part.bits.insert(part.bits.end(), bits.begin() + at,
                     bits.begin() + at + static_cast<std::ptrdiff_t>(words));
    part.boundary.insert(part.boundary.end(), boundary.begin() + boundary_start[slot],
                         boundary.begin() + boundary_start[slot + 1]);
    part.maximal.insert(part.maximal.end(), maximal.begin() + maximal_start[slot],
                        maximal.begin() + maximal_start[slot + 1]);
    part.outside.insert(part.outside.end(), outside.begin() + outside_start[slot],
                        outside.begin() + outside_start[slot + 1]);
    part.boundary_start.push_back(static_cast<Index>(part.boundary.size()));
    part.maximal_start.push_back(static_cast<Index>(part.maximal.size()));
    part.outside_start.push_back(static_cast<Index>(part.outside.size()));
  }
  for (const Index slot : by_size) {
    if (new_slot[slot] < size()) part.by_size.push_back(new_slot[slot]);
  }
  part.empty = new_slot[empty];
  part.full = new_slot[full];
  part.fill_columns();
  return part;
}

std::pair<Index, Index> Tables::reach(Index a, std::int64_t most) const {
  const auto from = std::lower_bound(key.begin(), key.end(), segment[a]);
  const auto to = std::upper_bound(from, key.end(), most);
  return {static_cast<Index>(from - key.begin()), static_cast<Index>(to - key.begin())};
}

}  // namespace remat::lower_sets
