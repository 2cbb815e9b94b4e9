// Lower sets of a graph: all of them, and the narrowest ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lower_set_tables.hpp"
#include "watch.hpp"

namespace remat::lower_sets {

using Edges = std::vector<std::pair<std::int64_t, std::int64_t>>;

// All lower sets, one after the other, smaller ones first and then by the bits, of which
// those of the last word count most; nothing if they are more than `cap`. Throws
// std::invalid_argument if an edge names a value that does not exist.
std::optional<std::vector<Word>> enumerate(std::size_t nodes, const Edges& edges,
                                           std::size_t cap, Watch& watch);

// The distinct lower sets with one value more or less than one of `rows`, smaller first.
std::vector<Word> neighbours(std::size_t nodes, const Edges& edges, std::span<const Word> rows,
                             Watch& watch);

// For each value two lower sets, one after the other: the smallest and the largest of
// those with the fewest bytes on their boundary that hold the value and nothing that
// comes right after it. `edges` carry data, `order_edges` do not.
std::vector<Word> narrowest(const std::vector<std::int64_t>& bytes, const Edges& edges,
                            const Edges& order_edges, Watch& watch);

}  // namespace remat::lower_sets
