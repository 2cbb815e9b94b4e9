// Segments of unit-size chains: what reversing them costs, for the branches of a join.
#pragma once

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include "chains.hpp"

namespace remat::chains {

using Index = std::ptrdiff_t;
using Piece = std::tuple<Index, Index, Index, Index>;
using Run = std::tuple<bool, Index, Index>;

struct Convention {
  Index units;
  Index gradient_units;
  Index transient_units;
  bool counts_inputs;
  bool move_needs_two;
};

// R(a, p, f) of one branch. Rows of p for each (f, a); where all stages cost the same
// only the length p - a matters, and one row per f is kept.
class Segments {
 public:
  Segments(const std::vector<Cost>& costs, Index units, bool move_needs_two)
      : length_(static_cast<Index>(costs.size())),
        units_(std::min(units, length_ + 1)),
        move_needs_two_(move_needs_two),
        is_uniform_(std::all_of(costs.begin(), costs.end(),
                                [&](Cost c) { return c == costs.front(); })),
        until_(costs.size() + 1, 0) {
    std::partial_sum(costs.begin(), costs.end(), until_.begin() + 1);
    fill();
  }

  // Pointer to which p may be added: row(f, a)[p] is R(a, p, f).
  [[nodiscard]] const Cost* row(Index free, Index base) const {
    const Index f = std::min(free, units_);
    const Index width = length_ + 1;
    return is_uniform_ ? table_.data() + f * width - base
                       : table_.data() + (f * width + base) * width;
  }

  [[nodiscard]] Cost cost(Index base, Index end, Index free) const {
    return free < 0 ? infinite : row(free, base)[end];
  }

  void reverse(Index branch, Index base, Index end, Index free,
               std::vector<Run>& order) const {
    std::vector<std::tuple<Index, Index, Index>> pending{{base, end, free}};
    while (!pending.empty()) {
      const auto [a, p, f] = pending.back();
      pending.pop_back();
      if (p - a == 1) {
        order.emplace_back(false, branch, a);
        continue;
      }
      Cost best = infinite;
      Index split = a + 1;
      for (Index s = a + 1; s < p; ++s) {
        const Cost here = split_cost(a, s, p, f);
        if (here < best) {
          best = here;
          split = s;
        }
      }
      for (Index stage = a; stage < split; ++stage) {
        order.emplace_back(true, branch, stage);
      }
      pending.emplace_back(a, split, f);
      pending.emplace_back(split, p, f - 1);
    }
  }

 private:
  [[nodiscard]] Cost split_cost(Index a, Index s, Index p, Index f) const {
    if (f < 1 + static_cast<Index>(move_needs_two_ && s - a >= 2)) {
      return infinite;
    }
    return capped(until_[static_cast<std::size_t>(s)] -
                  until_[static_cast<std::size_t>(a)] + cost(s, p, f - 1) +
                  cost(a, s, f));
  }

  void fill() {
    const Index width = length_ + 1;
    const Index bases = is_uniform_ ? 1 : width;
    table_.assign(static_cast<std::size_t>((units_ + 1) * bases * width), infinite);
    for (Index f = 0; f <= units_; ++f) {
      check_signals();
      for (Index a = is_uniform_ ? 0 : length_ - 1; a >= 0; --a) {
        Cost* own = table_.data() + (is_uniform_ ? f * width : (f * width + a) * width);
        if (a + 1 <= length_) {
          own[a + 1] = 0;
        }
        const Index reach = move_needs_two_ && f < 2 ? a + 1 : length_;
        if (f == 0) {
          continue;
        }
        for (Index s = a + 1; s <= std::min(reach, length_ - 1); ++s) {
          // R(a, s, f) is final: the smaller splits of the larger ends were tried.
          const Cost sweep = until_[static_cast<std::size_t>(s)] -
                             until_[static_cast<std::size_t>(a)] + own[s];
          if (sweep >= infinite) {
            continue;
          }
          const Cost* upper = row(f - 1, s);
          for (Index p = s + 1; p <= length_; ++p) {
            own[p] = std::min(own[p], sweep + upper[p]);
          }
        }
      }
    }
  }

  Index length_;
  Index units_;
  bool move_needs_two_;
  bool is_uniform_;
  std::vector<Cost> until_;
  std::vector<Cost> table_;
};

// Branches of equal costs share one table.
class Branches {
 public:
  Branches(const std::vector<std::vector<Cost>>& costs, const Convention& convention) {
    for (std::size_t j = 0; j < costs.size(); ++j) {
      const auto first = std::find(costs.begin(), costs.end(), costs[j]) - costs.begin();
      kinds_.push_back(first);
      lengths_.push_back(static_cast<Index>(costs[j].size()));
      if (first == static_cast<Index>(j)) {
        tables_.emplace_back(costs[j], convention.units, convention.move_needs_two);
        table_of_.push_back(tables_.size() - 1);
      } else {
        table_of_.push_back(table_of_[static_cast<std::size_t>(first)]);
      }
    }
  }

  [[nodiscard]] Index count() const { return static_cast<Index>(lengths_.size()); }
  [[nodiscard]] Index length(Index j) const {
    return lengths_[static_cast<std::size_t>(j)];
  }
  [[nodiscard]] Index kind(Index j) const { return kinds_[static_cast<std::size_t>(j)]; }
  [[nodiscard]] const Segments& operator[](Index j) const {
    return tables_[table_of_[static_cast<std::size_t>(j)]];
  }

  [[nodiscard]] std::vector<Run> expanded(const std::vector<Piece>& pieces) const {
    std::vector<Run> order;
    for (const auto& [branch, base, end, free] : pieces) {
      (*this)[branch].reverse(branch, base, end, free, order);
    }
    return order;
  }

 private:
  std::vector<Index> lengths_;
  std::vector<Index> kinds_;
  std::vector<std::size_t> table_of_;
  std::vector<Segments> tables_;
};

using Left = std::vector<Index>;

inline Index unfinished(const Left& left) {
  return std::count_if(left.begin(), left.end(), [](Index r) { return r > 0; });
}

}  // namespace remat::chains
