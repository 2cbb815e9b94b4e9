#include "lower_set_tables.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace remat::lower_sets {
namespace {

// Four such sums can be added without overflow.
constexpr std::int64_t kMostTotal = std::int64_t{1} << 60;

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

void check_arrays(const GraphArrays& graph, std::span<const Word> rows, std::size_t words) {
  const auto& [memory, cost, segment, edges, owed] = graph;
  const std::size_t nodes = memory.size();
  if (nodes == 0 || cost.size() != nodes || segment.size() != nodes) {
    throw std::invalid_argument("sizes and costs must have one entry a value");
  }
  const std::int64_t total = checked_sum(memory, "sizes");
  checked_sum(cost, "costs");
  if (checked_sum(segment, "segment sizes") > kMostTotal - 3 * std::min(total, kMostTotal / 3)) {
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

  // The bit sets of readers and of what is read, in the new numbers.
  std::vector<Word> readers(nodes * words), reads(nodes * words);
  std::vector<std::int64_t> bytes(nodes), cost_of(nodes), segment_of(nodes);
  for (std::size_t v = 0; v < nodes; ++v) {
    bytes[position[v]] = memory[v];
    cost_of[position[v]] = costs[v];
    segment_of[position[v]] = segments[v];
  }
  for (const auto& [u, v] : edges) {
    const std::size_t from = position[static_cast<std::size_t>(u)];
    const std::size_t to = position[static_cast<std::size_t>(v)];
    readers[from * words + to / 64] |= Word{1} << (to % 64);
    reads[to * words + from / 64] |= Word{1} << (from % 64);
  }

  struct Sums {
    std::int64_t key, segment, cost;
  };
  std::vector<Word> sets(count * words);
  std::vector<Sums> sums(count);
  std::vector<Word> consumers(words), beside(words);
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<Word> set(&sets[i * words], words);
    for_each_bit(rows.subspan(i * words, words), [&](std::size_t v) {
      const std::size_t p = position[v];
      set[p / 64] |= Word{1} << (p % 64);
    });
    std::fill(consumers.begin(), consumers.end(), 0);
    std::fill(beside.begin(), beside.end(), 0);
    Sums sum{0, 0, 0};
    std::int64_t boundary_sum = 0;
    for_each_bit(std::span<const Word>(set), [&](std::size_t v) {
      sum.segment += segment_of[v];
      sum.cost += cost_of[v];
      bool is_read = false;
      for (std::size_t k = 0; k < words; ++k) {
        if ((reads[v * words + k] & ~set[k]) != 0) {
          throw std::invalid_argument("a row holds a value without what it reads");
        }
        const Word outside = readers[v * words + k] & ~set[k];
        consumers[k] |= outside;
        is_read = is_read || outside != 0;
      }
      if (is_read) boundary_sum += bytes[v];
    });
    std::int64_t owed_sum = owed == 1 ? boundary_sum : 0;
    if (owed == 0) {
      for_each_bit(std::span<const Word>(consumers), [&](std::size_t w) {
        owed_sum += bytes[w];
        for (std::size_t k = 0; k < words; ++k) {
          beside[k] |= reads[w * words + k] & ~set[k];
        }
      });
      for_each_bit(std::span<const Word>(beside),
                   [&](std::size_t x) { owed_sum += bytes[x]; });
    }
    sum.key = sum.segment + owed_sum;
    sums[i] = sum;
  }

  row.resize(count);
  std::iota(row.begin(), row.end(), Index{0});
  std::stable_sort(row.begin(), row.end(),
                   [&](Index a, Index b) { return sums[a].key < sums[b].key; });
  by_size.resize(count);
  bits.resize(count * words);
  boundary_start.push_back(0);
  maximal_start.push_back(0);
  for (std::size_t slot = 0; slot < count; ++slot) {
    const std::size_t i = row[slot];
    by_size[i] = static_cast<Index>(slot);
    key.push_back(sums[i].key);
    segment.push_back(sums[i].segment);
    cost.push_back(sums[i].cost);
    const std::span<const Word> set(&sets[i * words], words);
    std::copy(set.begin(), set.end(), &bits[slot * words]);
    std::int64_t kept_bytes = 0, kept_cost = 0;
    std::vector<Word> tops(words);
    for_each_bit(set, [&](std::size_t v) {
      bool is_read = false, is_needed = false;
      for (std::size_t k = 0; k < words; ++k) {
        is_read = is_read || (readers[v * words + k] & ~set[k]) != 0;
        is_needed = is_needed || (readers[v * words + k] & set[k]) != 0;
      }
      if (is_read) {
        boundary.push_back({static_cast<Index>(v / 64), static_cast<Index>(v % 64), bytes[v],
                            cost_of[v]});
        kept_bytes += bytes[v];
        kept_cost += cost_of[v];
      }
      if (!is_needed) tops[v / 64] |= Word{1} << (v % 64);
    });
    for (std::size_t k = words; k-- > 0;) {
      if (tops[k] != 0) maximal.push_back({static_cast<Index>(k), tops[k]});
    }
    boundary_bytes.push_back(kept_bytes);
    boundary_cost.push_back(kept_cost);
    boundary_start.push_back(static_cast<Index>(boundary.size()));
    maximal_start.push_back(static_cast<Index>(maximal.size()));
  }
  empty = by_size.front();
  full = by_size.back();
}

Tables Tables::subset(const std::vector<Index>& slots) const {
  Tables part;
  part.words = words;
  part.boundary_start.push_back(0);
  part.maximal_start.push_back(0);
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
    part.boundary_start.push_back(static_cast<Index>(part.boundary.size()));
    part.maximal_start.push_back(static_cast<Index>(part.maximal.size()));
  }
  for (const Index slot : by_size) {
    if (new_slot[slot] < size()) part.by_size.push_back(new_slot[slot]);
  }
  part.empty = new_slot[empty];
  part.full = new_slot[full];
  return part;
}

std::pair<Index, Index> Tables::reach(Index a, std::int64_t most) const {
  const auto from = std::lower_bound(key.begin(), key.end(), segment[a]);
  const auto to = std::upper_bound(from, key.end(), most);
  return {static_cast<Index>(from - key.begin()), static_cast<Index>(to - key.begin())};
}

}  // namespace remat::lower_sets
