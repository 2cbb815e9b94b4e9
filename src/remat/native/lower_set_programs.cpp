// The recurrence is written down plainly in its Python twin
// (remat/lower_sets/recurrences.py). Here most of it is not evaluated at all:
//
// * `reach`, without overheads, finds the least bytes kept with which a set is reached;
//   what no state reaches is left out from then on;
// * `look_back`, from the end, finds for each set the most kept bytes from which the end
//   is in reach, and a lower bound on the overhead still to come;
// * any sequence known to fit bounds the overhead from above, so that only states on the
//   way to something as good are kept. A greedy walk along the bounds finds one, and a
//   search that keeps few states for each set a better one; callers may know others.
//
// All of this is exact: a state is dropped only if no completion of it fits, or none is
// as good as a sequence that is known.

#include "lower_set_programs.hpp"

#include "checks.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <utility>

namespace remat::lower_sets {
namespace {

constexpr std::int64_t kInfinity = std::numeric_limits<std::int64_t>::max() / 2;
constexpr Index kNone = std::numeric_limits<Index>::max();
// States per set in the search that only looks for a good sequence.
constexpr std::size_t kShortFront = 64;
constexpr std::size_t kAllStates = std::numeric_limits<std::size_t>::max();
// Rows of possible overheads up to this length are arrays, longer ones sorted lists.
constexpr std::int64_t kLongestRow = std::int64_t{1} << 20;

std::int64_t signed_overhead(const Tables& tables, const Query& query, Index a, Index b,
                             std::int64_t kept_cost) {
  if (b == tables.full && !query.charge_last) return 0;
  const std::int64_t recomputed = tables.cost[b] - tables.cost[a] - kept_cost;
  return query.goal == Goal::kMostOverhead ? -recomputed : recomputed;
}

// A lower bound on signed_overhead that needs no look at the sets.
std::int64_t least_overhead(const Tables& tables, const Query& query, Index a, Index b) {
  if (b == tables.full && !query.charge_last) return 0;
  const std::int64_t all = tables.cost[b] - tables.cost[a];
  if (query.goal == Goal::kMostOverhead) return -all;
  return std::max<std::int64_t>(0, all - tables.boundary_cost[b]);
}

Sequence measure(const Tables& tables, const Query& query, const std::vector<Index>& slots) {
  Sequence sequence;
  Index a = tables.empty;
  for (const Index b : slots) {
    const Tables::Step kept = tables.kept(a, b);
    sequence.peak = std::max(sequence.peak,
                             sequence.cached + tables.key[b] - tables.segment[a]);
    sequence.cached += kept.bytes;
    sequence.overhead += signed_overhead(tables, query, a, b, kept.cost);
    sequence.rows.push_back(tables.row[b]);
    a = b;
  }
  return sequence;
}

bool is_better(const Sequence& one, const Sequence& other, Goal goal) {
  if (other.rows.empty()) return true;
  if (goal == Goal::kLeastCached) {
    return std::pair(one.cached, one.overhead) < std::pair(other.cached, other.overhead);
  }
  return std::pair(one.overhead, one.cached) < std::pair(other.overhead, other.cached);
}

// The least bytes kept with which each set is reached, then the least overhead.
struct Reached {
  std::vector<std::int64_t> low, overhead;
  std::vector<Index> from;
  // The least budget, above the one asked for, that allows one more segment.
  std::int64_t next_budget = kInfinity;
};

Reached reach(const Tables& tables, const Query& query, Watch& watch) {
  const Index count = tables.size();
  Reached reached{std::vector<std::int64_t>(count, kInfinity),
                  std::vector<std::int64_t>(count, kInfinity),
                  std::vector<Index>(count, kNone), kInfinity};
  auto& low = reached.low;
  low[tables.empty] = 0;
  reached.overhead[tables.empty] = 0;
  // Only then is the overhead of equal bytes of interest.
  const bool is_tied = query.goal == Goal::kLeastCached;
  for (const Index a : tables.by_size) {
    const std::int64_t m = low[a];
    const std::int64_t t = reached.overhead[a];
    if (m == kInfinity || a == tables.full) continue;
    const auto [begin, end] = tables.reach(a, query.budget - m + tables.segment[a]);
    watch.spend(end - begin);
    tables.for_each_superset(a, begin, end, [&](Index b) {
      // What is kept on reaching b holds what was kept before, and b's boundary.
      const std::int64_t least = std::max(m, tables.boundary_bytes[b]);
      if (low[b] < least || (low[b] == least && (!is_tied || reached.overhead[b] <= t))) {
        return;
      }
      const Tables::Step kept = tables.kept(a, b);
      const std::int64_t next_m = m + kept.bytes;
      if (next_m > low[b]) return;
      const std::int64_t next_t = t + signed_overhead(tables, query, a, b, kept.cost);
      if (next_m < low[b] || next_t < reached.overhead[b]) {
        low[b] = next_m;
        reached.overhead[b] = next_t;
        reached.from[b] = a;
      }
    });
    for (Index b = end; b < count; ++b) {
      const std::int64_t needed = m + tables.key[b] - tables.segment[a];
      if (needed >= reached.next_budget) break;
      watch.spend(1);
      if (b != a && tables.contains(b, a)) {
        reached.next_budget = needed;
        break;
      }
    }
  }
  return reached;
}

std::vector<Index> path(const Tables& tables, const std::vector<Index>& from) {
  std::vector<Index> slots;
  for (Index b = tables.full; b != tables.empty; b = from[b]) slots.push_back(b);
  std::reverse(slots.begin(), slots.end());
  return slots;
}

std::vector<Index> slots_of_rows(const Tables& tables, const std::vector<Index>& rows) {
  std::vector<Index> slot_of(tables.size());
  for (Index slot = 0; slot < tables.size(); ++slot) slot_of[tables.row[slot]] = slot;
  std::vector<Index> slots;
  Index a = tables.empty;
  for (const Index row : rows) {
    if (row >= tables.size() || slot_of[row] == a || !tables.contains(slot_of[row], a)) {
      throw std::invalid_argument("a known sequence does not increase");
    }
    a = slot_of[row];
    slots.push_back(a);
  }
  if (a != tables.full) throw std::invalid_argument("a known sequence does not end");
  return slots;
}

class Search {
 public:
  Search(const Query& query, Watch& watch) : query_(query), watch_(watch) {}

  Answer run(const Tables& family, const Known& known, const Known& weak);

 private:
  struct State {
    std::int64_t s;  // overhead so far, signed
    std::int64_t m;  // bytes kept so far
  };
  // A family, and what is known of each of its sets.
  struct Part {
    Tables tables;
    std::vector<std::int64_t> low;   // least bytes kept on reaching it
    std::vector<std::int64_t> high;  // most bytes kept from which the end is in reach
    std::vector<std::int64_t> rest;  // no completion adds less overhead
    std::vector<std::int64_t> so_far;  // it is not reached with less overhead
  };

  void offer(Sequence sequence) {
    if (sequence.peak <= query_.budget && is_better(sequence, best_, query_.goal)) {
      best_ = std::move(sequence);
    }
  }
  [[nodiscard]] static Part select(const Part& part, const std::vector<Index>& slots);
  void look_back(Part& part);
  void look_ahead(Part& part);
  Part within_bounds(Part& part);
  void walk(const Part& part);
  void search_states(const Part& part, std::size_t longest);
  void trace_back(const Part& part, const std::vector<std::vector<State>>& fronts);

  Query query_;
  Watch& watch_;
  Sequence best_;
};

Search::Part Search::select(const Part& part, const std::vector<Index>& slots) {
  const auto pick = [&](const std::vector<std::int64_t>& values) {
    std::vector<std::int64_t> chosen;
    if (values.empty()) return chosen;
    chosen.reserve(slots.size());
    for (const Index slot : slots) chosen.push_back(values[slot]);
    return chosen;
  };
  return {part.tables.subset(slots), pick(part.low), pick(part.high), pick(part.rest),
          pick(part.so_far)};
}

Answer Search::run(const Tables& family, const Known& known, const Known& weak) {
  try {
    for (const auto& rows : known) {
      offer(measure(family, query_, slots_of_rows(family, rows)));
    }
    const bool is_known = !best_.rows.empty();
    for (const auto& rows : weak) {
      offer(measure(family, query_, slots_of_rows(family, rows)));
    }
    Reached reached = reach(family, query_, watch_);
    if (reached.low[family.full] == kInfinity) return {Found::kInfeasible, {}};
    offer(measure(family, query_, path(family, reached.from)));
    if (query_.goal == Goal::kLeastCached) return {Found::kOptimal, best_};

    std::vector<Index> slots;
    for (Index a = 0; a < family.size(); ++a) {
      if (reached.low[a] < kInfinity) slots.push_back(a);
    }
    Part part = select({family, std::move(reached.low), {}, {}, {}}, slots);
    look_back(part);
    slots.clear();
    for (Index a = 0; a < part.tables.size(); ++a) {
      if (part.low[a] <= part.high[a]) slots.push_back(a);
    }
    part = select(part, slots);
    walk(part);
    part = within_bounds(part);
    if (!is_known) {
      search_states(part, kShortFront);
      part = within_bounds(part);
    }
    search_states(part, kAllStates);
    return {Found::kOptimal, best_};
  } catch (const TimeUp&) {
    if (best_.rows.empty()) return {Found::kStopped, {}};
    return {Found::kStoppedWithAnswer, best_};
  }
}

void Search::look_back(Part& part) {
  const Tables& tables = part.tables;
  part.high.assign(tables.size(), -1);
  part.rest.assign(tables.size(), kInfinity);
  part.high[tables.full] = query_.budget;
  part.rest[tables.full] = 0;
  for (auto at = tables.by_size.rbegin(); at != tables.by_size.rend(); ++at) {
    const Index a = *at;
    if (a == tables.full) continue;
    const std::int64_t m = part.low[a];
    std::int64_t high = -1, rest = kInfinity;
    const auto [begin, end] = tables.reach(a, query_.budget - m + tables.segment[a]);
    watch_.spend(end - begin);
    tables.for_each_superset(a, begin, end, [&](Index b) {
      const std::int64_t room = query_.budget - tables.key[b] + tables.segment[a];
      if (std::min(room, part.high[b]) <= high &&
          (part.high[b] < m ||
           part.rest[b] + least_overhead(tables, query_, a, b) >= rest)) {
        return;
      }
      const Tables::Step kept = tables.kept(a, b);
      const std::int64_t most = std::min(room, part.high[b] - kept.bytes);
      if (most < m) return;
      high = std::max(high, most);
      rest = std::min(rest,
                      part.rest[b] + signed_overhead(tables, query_, a, b, kept.cost));
    });
    part.high[a] = high;
    part.rest[a] = rest;
  }
}

// Go on with what promises the least overhead; the end stays in reach.
void Search::walk(const Part& part) {
  const Tables& tables = part.tables;
  std::vector<Index> slots;
  std::int64_t m = 0;
  for (Index a = tables.empty; a != tables.full;) {
    const auto [begin, end] = tables.reach(a, query_.budget - m + tables.segment[a]);
    Index next = kNone;
    std::int64_t next_m = 0, least = kInfinity;
    tables.for_each_superset(a, begin, end, [&](Index b) {
      const Tables::Step kept = tables.kept(a, b);
      const std::int64_t bound =
          part.rest[b] + signed_overhead(tables, query_, a, b, kept.cost);
      const std::int64_t after = m + kept.bytes;
      if (after > part.high[b]) return;
      if (bound < least || (bound == least && after < next_m)) {
        least = bound;
        next = b;
        next_m = after;
      }
    });
    if (next == kNone) throw std::logic_error("no way to the end, although in reach");
    slots.push_back(next);
    a = next;
    m = next_m;
  }
  offer(measure(tables, query_, slots));
}

Search::Part Search::within_bounds(Part& part) {
  look_ahead(part);
  std::vector<Index> slots;
  for (Index a = 0; a < part.tables.size(); ++a) {
    if (part.so_far[a] < kInfinity && part.so_far[a] + part.rest[a] <= best_.overhead) {
      slots.push_back(a);
    }
  }
  return select(part, slots);
}

void Search::look_ahead(Part& part) {
  const Tables& tables = part.tables;
  part.so_far.assign(tables.size(), kInfinity);
  part.so_far[tables.empty] = 0;
  for (const Index a : tables.by_size) {
    const std::int64_t m = part.low[a];
    const std::int64_t s = part.so_far[a];
    if (a == tables.full || s == kInfinity || s + part.rest[a] > best_.overhead) continue;
    const auto [begin, end] = tables.reach(a, query_.budget - m + tables.segment[a]);
    watch_.spend(end - begin);
    tables.for_each_superset(a, begin, end, [&](Index b) {
      const std::int64_t bound = s + least_overhead(tables, query_, a, b);
      if (bound >= part.so_far[b] || bound + part.rest[b] > best_.overhead) return;
      const Tables::Step kept = tables.kept(a, b);
      if (m + kept.bytes > part.high[b]) return;
      part.so_far[b] = std::min(
          part.so_far[b], s + signed_overhead(tables, query_, a, b, kept.cost));
    });
  }
}

// Keeps, of the states offered, those with less of one than all with less of the other.
class Front {
 public:
  Front(std::int64_t first, std::int64_t last) : first_(first) {
    is_row_ = last - first < kLongestRow;
    if (is_row_) row_.assign(static_cast<std::size_t>(last - first + 1), kInfinity);
  }
  template <class State>
  void offer(const State* from, const State* to, std::int64_t s, std::int64_t m) {
    if (is_row_) {
      const std::int64_t shift = s - first_;
      for (; from != to; ++from) {
        std::int64_t& least = row_[static_cast<std::size_t>(from->s + shift)];
        least = std::min(least, from->m + m);
      }
      return;
    }
    for (; from != to; ++from) list_.emplace_back(from->s + s, from->m + m);
    if (list_.size() > 2 * settled_ + (std::size_t{1} << 16)) settle();
  }
  template <class State>
  void take(std::vector<State>& front) {
    std::int64_t least = kInfinity;
    if (is_row_) {
      for (std::size_t i = 0; i < row_.size(); ++i) {
        if (row_[i] < least) {
          least = row_[i];
          front.push_back({first_ + static_cast<std::int64_t>(i), least});
        }
      }
      return;
    }
    settle();
    for (const auto& [s, m] : list_) front.push_back({s, m});
  }

 private:
  void settle() {
    std::sort(list_.begin(), list_.end());
    std::int64_t least = kInfinity;
    std::size_t kept = 0;
    for (const auto& state : list_) {
      if (state.second >= least) continue;
      least = state.second;
      list_[kept++] = state;
    }
    list_.resize(kept);
    settled_ = kept;
  }

  std::int64_t first_;
  bool is_row_ = true;
  std::vector<std::int64_t> row_;
  std::vector<std::pair<std::int64_t, std::int64_t>> list_;
  std::size_t settled_ = 0;
};

// Leaves at most `longest` states, the first and the last among them.
template <class State>
void thin(std::vector<State>& front, std::size_t longest) {
  if (front.size() <= longest) return;
  for (std::size_t i = 0; i < longest; ++i) {
    front[i] = front[i * (front.size() - 1) / (longest - 1)];
  }
  front.resize(longest);
}

void Search::search_states(const Part& part, std::size_t longest) {
  const Tables& tables = part.tables;
  const Index count = tables.size();
  std::vector<std::vector<State>> fronts(count);
  fronts[tables.empty] = {{0, 0}};
  for (const Index b : tables.by_size) {
    if (b == tables.empty) continue;
    const std::int64_t last_s = best_.overhead - part.rest[b];
    if (last_s < part.so_far[b]) continue;
    Front front(part.so_far[b], last_s);
    std::int64_t offered = 0;
    tables.for_each_subset(b, [&](Index a) {
      const std::vector<State>& states = fronts[a];
      if (states.empty()) return;
      if (part.low[a] + tables.key[b] - tables.segment[a] > query_.budget) return;
      if (states.front().s + least_overhead(tables, query_, a, b) > last_s) return;
      const Tables::Step kept = tables.kept(a, b);
      const std::int64_t most_m =
          std::min(query_.budget - tables.key[b] + tables.segment[a],
                   part.high[b] - kept.bytes);
      const std::int64_t more = signed_overhead(tables, query_, a, b, kept.cost);
      const auto first = std::partition_point(
          states.begin(), states.end(), [&](const State& state) { return state.m > most_m; });
      const auto last = std::partition_point(
          first, states.end(), [&](const State& state) { return state.s + more <= last_s; });
      front.offer(states.data() + (first - states.begin()),
                  states.data() + (last - states.begin()), more, kept.bytes);
      offered += last - first;
    });
    watch_.spend(count + offered);
    front.take(fronts[b]);
    thin(fronts[b], longest);
    fronts[b].shrink_to_fit();
  }
  if (!fronts[tables.full].empty()) trace_back(part, fronts);
}

void Search::trace_back(const Part& part, const std::vector<std::vector<State>>& fronts) {
  const Tables& tables = part.tables;
  std::vector<Index> slots;
  Index b = tables.full;
  State state = fronts[b].front();
  while (b != tables.empty) {
    slots.push_back(b);
    bool is_found = false;
    for (Index a = 0; a < tables.size() && !is_found; ++a) {
      if (a == b || fronts[a].empty() || !tables.contains(b, a)) continue;
      const Tables::Step kept = tables.kept(a, b);
      const State before{state.s - signed_overhead(tables, query_, a, b, kept.cost),
                         state.m - kept.bytes};
      if (before.m + tables.key[b] - tables.segment[a] > query_.budget) continue;
      const auto at = std::lower_bound(
          fronts[a].begin(), fronts[a].end(), before.s,
          [](const State& one, std::int64_t s) { return one.s < s; });
      if (at == fronts[a].end() || at->s != before.s || at->m != before.m) continue;
      b = a;
      state = before;
      is_found = true;
    }
    if (!is_found) throw std::logic_error("a state without a state before it");
  }
  std::reverse(slots.begin(), slots.end());
  offer(measure(tables, query_, slots));
}

}  // namespace

void check_query(std::int64_t budget, std::int64_t goal) {
  require(budget >= -1 && budget <= kMostTotal, "a budget must be -1 to 2**60 bytes");
  require(goal >= 0 && goal <= 2, "a goal must be 0, 1 or 2");
}

void check_sequence(const Tables& tables, const std::vector<Index>& rows) {
  slots_of_rows(tables, rows);
}

Answer solve(const Tables& tables, const Query& query, const Known& known, const Known& weak,
             Watch& watch) {
  return Search(query, watch).run(tables, known, weak);
}

Answer smallest_budget(const Tables& tables, const Known& known,
                       Watch& watch) {
  Query query{0, Goal::kLeastCached, false};
  Answer answer{Found::kStoppedWithAnswer, measure(tables, query, {tables.full})};
  try {
    for (const auto& rows : known) {
      Sequence sequence = measure(tables, query, slots_of_rows(tables, rows));
      if (sequence.peak < answer.sequence.peak) answer.sequence = std::move(sequence);
    }
    std::int64_t infeasible = -1;
    bool is_first = !known.empty();
    while (infeasible + 1 < answer.sequence.peak) {
      const std::int64_t most = answer.sequence.peak - 1;
      query.budget = is_first ? most : infeasible + 1 + (most - infeasible - 1) / 2;
      is_first = false;
      const Reached reached = reach(tables, query, watch);
      if (reached.low[tables.full] < kInfinity) {
        answer.sequence = measure(tables, query, path(tables, reached.from));
      } else {
        infeasible = std::min(most, std::max(query.budget, reached.next_budget - 1));
      }
    }
    answer.found = Found::kOptimal;
  } catch (const TimeUp&) {
    return answer;
  }
  return answer;
}

}  // namespace remat::lower_sets
