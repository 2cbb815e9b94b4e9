// Joins of unit-size chains: native twins of remat.algorithms.chains.join_tables, which documents
// the recurrences and the order in which ties are broken.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "chains.hpp"
#include "chains_segments.hpp"
#include "checks.hpp"

namespace nb = nanobind;

namespace remat::chains {
namespace {

using Answer = std::tuple<Cost, std::vector<Piece>, std::vector<Run>>;

// W(r, n), one layer per n. Here n counts the inputs of unfinished branches even where
// they are pinned, so that a layer depends on the one before it alone.
class Join {
 public:
  Join(const std::vector<std::vector<Cost>>& costs, const Convention& convention)
      : convention_(convention), branches_(costs, convention) {
    Index total = 0;
    strides_.resize(costs.size());
    for (Index j = branches_.count() - 1; j >= 0; --j) {
      strides_[static_cast<std::size_t>(j)] = states_;
      states_ *= branches_.length(j) + 1;
      total += branches_.length(j);
    }
    most_stored_ = std::min(convention_.units + pinned(branches_.count()), total);
    table_.assign(static_cast<std::size_t>(states_ * (most_stored_ + 1)), infinite);
  }

  std::optional<Answer> answer() {
    table_[0] = 0;
    for (Index stored = 1; stored <= most_stored_; ++stored) {
      fill_layer(stored);
      fill_mirrored(stored);
    }
    Cost best = infinite;
    std::vector<Piece> pieces;
    Left left;
    Index stored = 0;
    for (Index n = 1; n <= most_stored_; ++n) {
      at_turn(n, best, pieces, left, stored);
    }
    if (best >= infinite) {
      return std::nullopt;
    }
    while (unfinished(left) > 0) {
      pieces.push_back(next_piece(left, stored));
    }
    auto order = branches_.expanded(pieces);
    return Answer{best, std::move(pieces), std::move(order)};
  }

 private:
  [[nodiscard]] Index stride(Index j) const {
    return strides_[static_cast<std::size_t>(j)];
  }

  // Units that the inputs of `open` unfinished branches do not take.
  [[nodiscard]] Index pinned(Index open) const {
    return convention_.counts_inputs ? 0 : open;
  }

  [[nodiscard]] Index free_units(Index open, Index stored) const {
    return convention_.units + pinned(open) - stored -
           convention_.gradient_units * open - convention_.transient_units;
  }

  [[nodiscard]] Cost* layer(Index stored) { return table_.data() + stored * states_; }

  [[nodiscard]] Index offset(const Left& left) const {
    Index at = 0;
    for (Index j = 0; j < branches_.count(); ++j) {
      at += left[static_cast<std::size_t>(j)] * stride(j);
    }
    return at;
  }

  [[nodiscard]] Index row_width() const { return branches_.length(branches_.count() - 1) + 1; }

  // The next row: `left` is a counter of all branches but the last.
  void advance(Left& left) const {
    for (Index j = branches_.count() - 2; j >= 0; --j) {
      auto& r = left[static_cast<std::size_t>(j)];
      if (++r <= branches_.length(j)) {
        return;
      }
      r = 0;
    }
  }

  // The branch before j that is equal to it, or -1. Of the states that equal branches
  // have by changing places, the table is computed for the one that does not increase.
  [[nodiscard]] Index equal_before(Index j) const {
    for (Index i = j - 1; i >= 0; --i) {
      if (branches_.kind(i) == branches_.kind(j)) {
        return i;
      }
    }
    return -1;
  }

  [[nodiscard]] bool is_ordered(const Left& left, Index count) const {
    for (Index j = 1; j < count; ++j) {
      const Index i = equal_before(j);
      if (i >= 0 && left[static_cast<std::size_t>(i)] < left[static_cast<std::size_t>(j)]) {
        return false;
      }
    }
    return true;
  }

  void fill_layer(Index stored) {
    const Index last = branches_.count() - 1;
    const Index width = row_width();
    const Index twin = equal_before(last);
    Left left(static_cast<std::size_t>(branches_.count()), 0);
    for (Index start = 0, row = 0; start < states_; start += width, ++row) {
      if (row % 256 == 0) {
        check_signals();
      }
      if (is_ordered(left, last)) {
        const Index until = twin < 0 ? width - 1 : left[static_cast<std::size_t>(twin)];
        const Index open = unfinished(left);
        steps_of_others(left, stored, start, 0, 0, free_units(open, stored));
        const Index free = free_units(open + 1, stored);
        steps_of_others(left, stored, start, 1, until, free);
        steps_of_last(stored, start, until, free);
      }
      advance(left);
    }
  }

  // Of the cells first..until of a row, steps that reverse a piece of another branch.
  void steps_of_others(const Left& left, Index stored, Index start, Index first,
                       Index until, Index free) {
    if (free < 0) {
      return;
    }
    Cost* own = layer(stored) + start;
    for (Index j = 0; j < branches_.count() - 1; ++j) {
      const Index r = left[static_cast<std::size_t>(j)];
      for (Index a = r - 1; a >= 0; --a) {
        const Cost here = branches_[j].cost(a, r, free);
        if (here >= infinite) {
          continue;
        }
        const Cost* from = layer(stored - 1) + start - (r - a) * stride(j);
        for (Index p = first; p <= until; ++p) {
          own[p] = std::min(own[p], here + from[p]);
        }
      }
    }
  }

  void steps_of_last(Index stored, Index start, Index until, Index free) {
    if (free < 0) {
      return;
    }
    Cost* own = layer(stored) + start;
    for (Index a = 0; a < until; ++a) {
      const Cost rest = layer(stored - 1)[start + a];
      if (rest >= infinite) {
        continue;
      }
      const Cost* here = branches_[branches_.count() - 1].row(free, a);
      for (Index p = a + 1; p <= until; ++p) {
        own[p] = std::min(own[p], here[p] + rest);
      }
    }
  }

  // Copies to the states in which equal branches have changed places.
  void fill_mirrored(Index stored) {
    const Index count = branches_.count();
    const Index width = row_width();
    bool has_equals = false;
    for (Index j = 1; j < count; ++j) {
      has_equals = has_equals || equal_before(j) >= 0;
    }
    if (!has_equals) {
      return;
    }
    Left left(static_cast<std::size_t>(count), 0);
    Left sorted;
    Cost* cells = layer(stored);
    for (Index start = 0; start < states_; start += width) {
      for (Index p = 0; p < width; ++p) {
        left.back() = p;
        if (!is_ordered(left, count)) {
          sorted = left;
          sort_equals(sorted);
          cells[start + p] = cells[offset(sorted)];
        }
      }
      left.back() = 0;
      advance(left);
    }
  }

  void sort_equals(Left& left) const {
    for (Index j = 1; j < branches_.count(); ++j) {
      Index at = j;
      for (Index i = equal_before(at); i >= 0; i = equal_before(at)) {
        auto& before = left[static_cast<std::size_t>(i)];
        auto& here = left[static_cast<std::size_t>(at)];
        if (before >= here) {
          break;
        }
        std::swap(before, here);
        at = i;
      }
    }
  }

  // The cost of reversing branch j down to stage a first.
  Cost through(const Left& left, Index stored, Index at, Index j, Index a, Index free) {
    const Index r = left[static_cast<std::size_t>(j)];
    const Cost here = branches_[j].cost(a, r, free);
    if (here >= infinite) {
      return infinite;
    }
    return capped(here + layer(stored - 1)[at - (r - a) * stride(j)]);
  }

  // Values stored at the turn: room for them, and for all last values and gradients.
  void at_turn(Index stored, Cost& best, std::vector<Piece>& pieces, Left& left,
               Index& chosen) {
    const Index count = branches_.count();
    const Index room = convention_.units + pinned(count) - stored - count -
                       (convention_.transient_units > 0 ? count : 0);
    if (room < 0) {
      return;
    }
    Left all;
    for (Index j = 0; j < count; ++j) {
      all.push_back(branches_.length(j));
    }
    if (room > 0 || !convention_.move_needs_two) {
      const Cost cost = layer(stored)[offset(all)];
      if (cost < best) {
        best = cost;
        pieces.clear();
        left = all;
        chosen = stored;
      }
      return;
    }
    for (Index j = 0; j < count; ++j) {
      const Index base = branches_.length(j) - 1;
      const Cost cost = layer(stored - 1)[offset(all) - stride(j)];
      if (cost < best) {
        best = cost;
        pieces.assign(1, Piece{j, base, base + 1, free_units(count, stored)});
        left = all;
        left[static_cast<std::size_t>(j)] = base;
        chosen = stored - 1;
      }
    }
  }

  Piece next_piece(Left& left, Index& stored) {
    const Index free = free_units(unfinished(left), stored);
    const Index at = offset(left);
    Cost best = infinite;
    Index branch = 0;
    Index base = 0;
    for (Index j = 0; j < branches_.count(); ++j) {
      for (Index a = left[static_cast<std::size_t>(j)] - 1; a >= 0; --a) {
        const Cost cost = through(left, stored, at, j, a, free);
        if (cost < best) {
          best = cost;
          branch = j;
          base = a;
        }
      }
    }
    const Index end = left[static_cast<std::size_t>(branch)];
    left[static_cast<std::size_t>(branch)] = base;
    --stored;
    return Piece{branch, base, end, free};
  }

  Convention convention_;
  Branches branches_;
  std::vector<Index> strides_;
  Index states_ = 1;
  Index most_stored_ = 0;
  std::vector<Cost> table_;
};

// The backward phase that finishes a branch before it touches the next. Here n counts a
// branch's own values, its input included even where it is pinned.
class ByBranch {
 public:
  ByBranch(const std::vector<std::vector<Cost>>& costs, const Convention& convention)
      : convention_(convention), branches_(costs, convention) {
    Index total = 0;
    for (Index j = 0; j < branches_.count(); ++j) {
      total += branches_.length(j);
    }
    units_ = convention_.units + 1;
    const Index count = branches_.count();
    const Index tops = convention_.transient_units > 0 ? 2 * count : count;
    // Without the pinned inputs.
    most_stored_ = std::min(
        total, convention_.units - tops - static_cast<Index>(convention_.move_needs_two));
    for (Index j = 0; j < count; ++j) {
      alone_.emplace_back();
      if (branches_.kind(j) == j) {
        fill_alone(j);
      }
    }
  }

  std::optional<Answer> answer(const std::vector<std::vector<Index>>& orders) {
    Cost best = infinite;
    std::vector<Index> chosen;
    Index stored = 0;
    for (const auto& order : orders) {
      check_signals();
      const auto rest = in_order(order);
      for (Index n = 0; n <= most_stored_; ++n) {
        const Cost cost = rest[0][static_cast<std::size_t>(n)];
        if (cost < best) {
          best = cost;
          chosen = order;
          stored = n;
        }
      }
    }
    if (best >= infinite) {
      return std::nullopt;
    }
    std::vector<Piece> pieces;
    const auto rest = in_order(chosen);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const Index open = static_cast<Index>(chosen.size() - i);
      Index own = 0;
      Cost least = infinite;
      for (Index n = 0; n <= stored; ++n) {
        const Cost cost = share(chosen[i], open, stored, n, rest[i + 1]);
        if (cost < least) {
          least = cost;
          own = n;
        }
      }
      add_pieces(chosen[i], own, free_units(open, stored), pieces);
      stored -= own;
    }
    auto order = branches_.expanded(pieces);
    return Answer{best, std::move(pieces), std::move(order)};
  }

 private:
  [[nodiscard]] Index free_units(Index open, Index stored) const {
    return convention_.units - stored - convention_.gradient_units * open -
           convention_.transient_units;
  }

  [[nodiscard]] Index width(Index j) const { return branches_.length(j) + 1; }

  // Cost of reversing the last `end` stages of branch j, with `own` values stored
  // besides a pinned input.
  Cost& alone(Index j, Index own, Index free, Index end) {
    auto& table = alone_[static_cast<std::size_t>(branches_.kind(j))];
    return table[static_cast<std::size_t>((own * units_ + free) * width(j) + end)];
  }

  [[nodiscard]] Index below(Index own, Index base) const {
    return base == 0 && !convention_.counts_inputs ? own : own - 1;
  }

  Cost step(Index j, Index end, Index own, Index free, Index base) {
    const Index after = below(own, base);
    if (after < 0 || (base == 0 && after > 0)) {
      return infinite;
    }
    const Cost here = branches_[j].cost(base, end, free);
    if (here >= infinite || base == 0) {
      return here;
    }
    const Index then = free + own - after;
    return then >= units_ ? infinite : capped(here + alone(j, after, then, base));
  }

  void fill_alone(Index j) {
    const Index most = std::min(most_stored_, branches_.length(j));
    if (most < 0) {
      return;
    }
    alone_[static_cast<std::size_t>(j)].assign(
        static_cast<std::size_t>((most + 1) * units_ * width(j)), infinite);
    for (Index own = 0; own <= most; ++own) {
      check_signals();
      for (Index free = 0; free + own < units_; ++free) {
        for (Index end = 1; end < width(j); ++end) {
          Cost best = infinite;
          for (Index base = end - 1; base >= 0; --base) {
            best = std::min(best, step(j, end, own, free, base));
          }
          alone(j, own, free, end) = best;
        }
      }
    }
  }

  Cost share(Index j, Index open, Index stored, Index own, const std::vector<Cost>& rest) {
    const Index free = free_units(open, stored);
    if (free < 0 || own > branches_.length(j)) {
      return infinite;
    }
    return capped(alone(j, own, free, branches_.length(j)) +
                  rest[static_cast<std::size_t>(stored - own)]);
  }

  // Per position in the order and values stored, the cost of that branch and the rest.
  std::vector<std::vector<Cost>> in_order(const std::vector<Index>& order) {
    const auto size = static_cast<std::size_t>(std::max<Index>(most_stored_, 0) + 1);
    std::vector<std::vector<Cost>> rest(order.size() + 1,
                                        std::vector<Cost>(size, infinite));
    rest.back()[0] = 0;
    for (std::size_t i = order.size(); i-- > 0;) {
      const Index open = static_cast<Index>(order.size() - i);
      for (Index stored = 0; stored <= most_stored_; ++stored) {
        Cost& best = rest[i][static_cast<std::size_t>(stored)];
        for (Index own = 0; own <= stored; ++own) {
          best = std::min(best, share(order[i], open, stored, own, rest[i + 1]));
        }
      }
    }
    return rest;
  }

  void add_pieces(Index j, Index own, Index free, std::vector<Piece>& pieces) {
    Index end = branches_.length(j);
    while (end > 0) {
      Cost best = infinite;
      Index base = end - 1;
      for (Index a = end - 1; a >= 0; --a) {
        const Cost cost = step(j, end, own, free, a);
        if (cost < best) {
          best = cost;
          base = a;
        }
      }
      pieces.emplace_back(j, base, end, free);
      const Index after = below(own, base);
      free += own - after;
      own = after;
      end = base;
    }
  }

  Convention convention_;
  Branches branches_;
  Index units_ = 0;
  Index most_stored_ = 0;
  std::vector<std::vector<Cost>> alone_;
};

using Numbers = std::tuple<Index, Index, bool, bool>;

Convention convention_of(Index memory_units, const Numbers& numbers) {
  const auto& [gradient_units, transient_units, counts_inputs, move_needs_two] = numbers;
  return {memory_units, gradient_units, transient_units, counts_inputs, move_needs_two};
}

// As remat.algorithms.chains.join_tables.check_join.
void check_join(const std::vector<std::vector<Cost>>& costs, Index memory_units,
                const Numbers& convention) {
  require(memory_units >= 0 && memory_units <= kMostTotal,
          "memory must be 0 to 2**60 units");
  for (const Index units : {std::get<0>(convention), std::get<1>(convention)}) {
    require(units == 0 || units == 1, "a gradient and what is transient take 0 or 1");
  }
  require(!costs.empty(), "a join has at least one branch");
  Capped worst(0);
  for (const auto& branch : costs) {
    require(!branch.empty(), "a branch has at least one stage");
    worst += total(branch) * Capped::count(branch.size() + 1);
  }
  require(worst.value() < infinite, "costs add up to 2**61 or more at worst");
}

// Numbers of the tables that both programs have, R(a, p, f).
Capped segment_numbers(const std::vector<std::vector<Cost>>& costs, Index memory_units) {
  Capped numbers(0);
  for (const auto& branch : costs) {
    const Capped width = Capped::count(branch.size() + 1);
    numbers += width * width * (Capped(std::min(memory_units, width.value())) + Capped(1));
  }
  return numbers;
}

std::optional<Answer> join_plan(const std::vector<std::vector<Cost>>& costs,
                                Index memory_units, const Numbers& convention) {
  check_join(costs, memory_units, convention);
  Capped states(1);
  Capped stages(0);
  for (const auto& branch : costs) {
    states *= Capped::count(branch.size() + 1);
    stages += Capped::count(branch.size());
  }
  const Capped layers(std::min(memory_units, stages.value()));
  check_table(segment_numbers(costs, memory_units) + states * (layers + Capped(1)));
  return Join(costs, convention_of(memory_units, convention)).answer();
}

std::optional<Answer> join_plan_by_branch(const std::vector<std::vector<Cost>>& costs,
                                          Index memory_units, const Numbers& convention,
                                          const std::vector<std::vector<Index>>& orders) {
  check_join(costs, memory_units, convention);
  Capped numbers = segment_numbers(costs, memory_units);
  const Capped units(memory_units + 1);
  for (const auto& branch : costs) {
    const Capped width = Capped::count(branch.size() + 1);
    numbers += width * units * Capped(std::min(units.value(), width.value()));
  }
  check_table(numbers);
  for (const auto& order : orders) {
    std::vector<Index> sorted(order);
    std::sort(sorted.begin(), sorted.end());
    bool is_order = sorted.size() == costs.size();
    for (std::size_t j = 0; is_order && j < sorted.size(); ++j) {
      is_order = sorted[j] == static_cast<Index>(j);
    }
    require(is_order, "an order must hold each branch once");
  }
  return ByBranch(costs, convention_of(memory_units, convention)).answer(orders);
}

}  // namespace

void bind_joins(nb::module_& module) {
  module.def("join_plan", &join_plan, nb::arg("costs"), nb::arg("memory_units"),
             nb::arg("convention"));
  module.def("join_plan_by_branch", &join_plan_by_branch, nb::arg("costs"),
             nb::arg("memory_units"), nb::arg("convention"), nb::arg("orders"));
}

}  // namespace remat::chains
