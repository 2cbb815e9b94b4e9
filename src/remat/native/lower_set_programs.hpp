// The dynamic programs over increasing sequences of lower sets.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lower_set_tables.hpp"
#include "watch.hpp"

namespace remat::lower_sets {

enum class Goal : int { kLeastOverhead = 0, kMostOverhead = 1, kLeastCached = 2 };

struct Query {
  std::int64_t budget;
  Goal goal;
  bool charge_last;
};

enum class Found : int { kInfeasible = 0, kOptimal = 1, kStoppedWithAnswer = 2, kStopped = 3 };

// An increasing sequence as rows of the family, the empty set left out. `overhead` is
// signed so that less is better: negated when the most is looked for.
struct Sequence {
  std::int64_t overhead = 0;
  std::int64_t cached = 0;
  std::int64_t peak = 0;
  std::vector<Index> rows;
};

struct Answer {
  Found found = Found::kInfeasible;
  Sequence sequence;
};

// Increasing sequences of the family that are known beforehand, as rows; those that fit
// bound the search.
using Known = std::vector<std::vector<Index>>;

// Throws std::invalid_argument for a budget or goal that cannot be.
void check_query(std::int64_t budget, std::int64_t goal);

// Throws std::invalid_argument unless the rows are an increasing sequence that ends with
// everything.
void check_sequence(const Tables& tables, const std::vector<Index>& rows);

// The least peak of any sequence.
Answer smallest_budget(const Tables& tables, const Known& known, Watch& watch);

// The best sequence within the budget. `known` are expected to be good for this query,
// `weak` merely to fit it.
Answer solve(const Tables& tables, const Query& query, const Known& known, const Known& weak,
             Watch& watch);

}  // namespace remat::lower_sets
