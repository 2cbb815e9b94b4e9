// What the recurrences over lower sets need to know of each set, laid out for scanning.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace remat::lower_sets {

using Word = std::uint64_t;
using Index = std::uint32_t;

// The arrays of a forward graph as they come from Python: bytes, costs and bytes while
// in a segment of each value, data edges, and what is owed (0, 1 or 2).
using GraphArrays =
    std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>,
               std::vector<std::pair<std::int64_t, std::int64_t>>, std::int64_t>;

// A value on the boundary of a set: later segments read it.
struct Kept {
  Index word;
  Index bit;
  std::int64_t bytes;
  std::int64_t cost;
};

// Slots are the sets of a family, sorted by `key`, the bytes of one segment up to the
// set: W(L) + owed(L). From set a to a larger set b a segment takes key[b] - segment[a]
// bytes besides the kept ones, so the sets within reach of a are a range of slots.
class Tables {
 public:
  // `rows` holds `words` words for each set. Throws std::invalid_argument if arrays do
  // not fit together or sums do not fit in 64 bits.
  Tables(const GraphArrays& graph, std::span<const Word> rows, std::size_t words);

  // The tables of some of the slots, ascending.
  [[nodiscard]] Tables subset(const std::vector<Index>& slots) const;

  [[nodiscard]] Index size() const { return static_cast<Index>(key.size()); }

  // Whether set b contains set a.
  [[nodiscard]] bool contains(Index b, Index a) const {
    const Word* const bits_a = &bits[static_cast<std::size_t>(a) * words];
    const Word* const bits_b = &bits[static_cast<std::size_t>(b) * words];
    for (std::size_t k = 0; k < words; ++k) {
      if ((bits_a[k] & ~bits_b[k]) != 0) return false;
    }
    return true;
  }

  // Calls f(b) for the sets among slots begin..end-1 that contain set a, and are not a,
  // ascending. Sets are looked at 64 at a time: few contain another, and to ask each
  // would take most of the time.
  template <class F>
  void for_each_superset(Index a, Index begin, Index end, F&& f) const {
    for_each_match<false>(maximal, maximal_start, a, begin, end, f);
  }

  // Calls f(a) for the sets that set b contains, and that are not b, ascending.
  template <class F>
  void for_each_subset(Index b, F&& f) const {
    for_each_match<true>(outside, outside_start, b, 0, size(), f);
  }

  struct Step {
    std::int64_t bytes;  // kept of the segment, for later segments
    std::int64_t cost;   // of computing these
  };

  // What a segment from a to b keeps.
  [[nodiscard]] Step kept(Index a, Index b) const {
    const Word* const bits_a = &bits[static_cast<std::size_t>(a) * words];
    Step sum{0, 0};
    for (Index i = boundary_start[b]; i < boundary_start[b + 1]; ++i) {
      const Kept& value = boundary[i];
      const std::int64_t is_new =
          1 - static_cast<std::int64_t>((bits_a[value.word] >> value.bit) & 1U);
      sum.bytes += is_new * value.bytes;
      sum.cost += is_new * value.cost;
    }
    return sum;
  }

  // The slots of sets that may contain a and cost at most `most` bytes up to them.
  [[nodiscard]] std::pair<Index, Index> reach(Index a, std::int64_t most) const;

  std::size_t words = 0;
  std::vector<Word> bits;                   // by slot
  std::vector<std::int64_t> key, segment;   // W(L) + owed(L), W(L)
  std::vector<std::int64_t> cost;           // T(L)
  std::vector<std::int64_t> boundary_bytes, boundary_cost;
  std::vector<Index> boundary_start, maximal_start, outside_start;
  std::vector<Kept> boundary;
  std::vector<Index> maximal;  // values that no other value of the set needs
  std::vector<Index> outside;  // values not in the set that need none but the set's
  std::vector<Index> by_size;  // slots, smaller sets first
  std::vector<Index> row;      // of the family, by slot
  Index empty = 0, full = 0;   // slots

 private:
  Tables() = default;

  void fill_columns();

  // Those of the slots whose sets hold all of the slot's values, or none of them.
  template <bool holds_none, class F>
  void for_each_match(const std::vector<Index>& values, const std::vector<Index>& start,
                      Index slot, Index begin, Index end, F& f) const {
    const Index* const first = values.data() + start[slot];
    const Index* const last = values.data() + start[slot + 1];
    for (Index block = begin / 64; block * 64 < end; ++block) {
      Word matches = ~Word{0};
      if (block * 64 < begin) matches <<= begin % 64;
      if (end - block * 64 < 64) matches &= (Word{1} << (end % 64)) - 1;
      if (block == slot / 64) matches &= ~(Word{1} << (slot % 64));
      const Word* const column = &columns_[static_cast<std::size_t>(block) * words * 64];
      for (const Index* v = first; v != last; ++v) {
        matches &= holds_none ? ~column[*v] : column[*v];
      }
      for (; matches != 0; matches &= matches - 1) {
        f(block * 64 + static_cast<Index>(std::countr_zero(matches)));
      }
    }
  }

  // By block of 64 slots, then by value: which of these sets hold it.
  std::vector<Word> columns_;
};

}  // namespace remat::lower_sets
