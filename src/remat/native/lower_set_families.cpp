#include "lower_set_families.hpp"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "checks.hpp"

namespace remat::lower_sets {
namespace {

// As remat.algorithms.lower_sets.families.check_edges.
void check_edges(std::initializer_list<const Edges*> lists, std::size_t nodes) {
  std::vector<std::vector<std::size_t>> later(nodes);
  std::vector<std::size_t> waiting(nodes);
  for (const Edges* const edges : lists) {
    for (const auto& [u, v] : *edges) {
      require(is_index(u, nodes) && is_index(v, nodes),
              "an edge names a value that does not exist");
      later[static_cast<std::size_t>(u)].push_back(static_cast<std::size_t>(v));
      ++waiting[static_cast<std::size_t>(v)];
    }
  }
  std::vector<std::size_t> ready;
  for (std::size_t v = 0; v < nodes; ++v) {
    if (waiting[v] == 0) ready.push_back(v);
  }
  for (std::size_t next = 0; next < ready.size(); ++next) {
    for (const std::size_t v : later[ready[next]]) {
      if (--waiting[v] == 0) ready.push_back(v);
    }
  }
  require(ready.size() == nodes, "the edges close a cycle");
}

// Some sets.
class Layer {
 public:
  explicit Layer(std::size_t width) : width_(width) {}

  [[nodiscard]] std::size_t size() const { return words_.size() / width_; }
  [[nodiscard]] const Word* set(std::size_t i) const { return words_.data() + i * width_; }
  [[nodiscard]] const std::vector<Word>& words() const { return words_; }

  void add(const Word* set) { words_.insert(words_.end(), set, set + width_); }
  void add_changed(const Word* set, std::size_t v) {
    add(set);
    words_[words_.size() - width_ + v / 64] ^= Word{1} << (v % 64);
  }

  void sort_and_drop_duplicates() {
    std::vector<std::size_t> order(size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::vector<int> sizes(size());
    for (std::size_t i = 0; i < size(); ++i) {
      for (std::size_t k = 0; k < width_; ++k) sizes[i] += std::popcount(set(i)[k]);
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      if (sizes[a] != sizes[b]) return sizes[a] < sizes[b];
      return std::lexicographical_compare(
          std::make_reverse_iterator(set(a) + width_), std::make_reverse_iterator(set(a)),
          std::make_reverse_iterator(set(b) + width_), std::make_reverse_iterator(set(b)));
    });
    Layer sorted(width_);
    sorted.words_.reserve(words_.size());
    for (const std::size_t i : order) {
      const std::size_t kept = sorted.size();
      if (kept == 0 || !std::equal(set(i), set(i) + width_, sorted.set(kept - 1))) {
        sorted.add(set(i));
      }
    }
    words_ = std::move(sorted.words_);
  }

 private:
  std::size_t width_;
  std::vector<Word> words_;
};

// A flow network in which the same arcs are used again with other ends.
class Network {
 public:
  static constexpr std::int64_t kUnlimited = std::int64_t{1} << 61;

  explicit Network(std::size_t points) : out_(points), seen_(points), arc_to_(points) {}

  void add_arc(Index from, Index to, std::int64_t capacity) {
    out_[from].push_back(static_cast<Index>(arcs_.size()));
    arcs_.push_back({to, capacity});
    out_[to].push_back(static_cast<Index>(arcs_.size()));
    arcs_.push_back({from, 0});
    capacity_.push_back(capacity);
    capacity_.push_back(0);
  }

  // Sends all that can flow from one point to some others.
  void fill(Index from, const std::vector<Index>& to, Watch& watch) {
    for (std::size_t i = 0; i < arcs_.size(); ++i) arcs_[i].left = capacity_[i];
    is_target_.assign(out_.size(), 0);
    for (const Index point : to) is_target_[point] = 1;
    while (true) {
      const Index end = search(from);
      watch.spend(static_cast<std::int64_t>(arcs_.size()));
      if (end == kNone) return;
      std::int64_t amount = kUnlimited;
      for (Index at = end; at != from; at = arcs_[arc_to_[at] ^ 1U].to) {
        amount = std::min(amount, arcs_[arc_to_[at]].left);
      }
      for (Index at = end; at != from; at = arcs_[arc_to_[at] ^ 1U].to) {
        arcs_[arc_to_[at]].left -= amount;
        arcs_[arc_to_[at] ^ 1U].left += amount;
      }
    }
  }

  // After `fill`: the points to which more could flow, if the others took it.
  const std::vector<char>& fed(Index from) {
    search(from);
    return seen_;
  }

  // After `fill`: the points from which more could flow to the targets.
  const std::vector<char>& feeding(const std::vector<Index>& to) {
    std::fill(seen_.begin(), seen_.end(), 0);
    queue_.clear();
    for (const Index point : to) {
      seen_[point] = 1;
      queue_.push_back(point);
    }
    for (std::size_t head = 0; head < queue_.size(); ++head) {
      for (const Index arc : out_[queue_[head]]) {
        const Index other = arcs_[arc].to;
        if (seen_[other] || arcs_[arc ^ 1U].left == 0) continue;
        seen_[other] = 1;
        queue_.push_back(other);
      }
    }
    return seen_;
  }

 private:
  struct Arc {
    Index to;
    std::int64_t left;
  };
  static constexpr Index kNone = std::numeric_limits<Index>::max();

  // Breadth first along arcs with capacity left, up to the first target.
  Index search(Index from) {
    std::fill(seen_.begin(), seen_.end(), 0);
    queue_.assign(1, from);
    seen_[from] = 1;
    for (std::size_t head = 0; head < queue_.size(); ++head) {
      for (const Index arc : out_[queue_[head]]) {
        const Index other = arcs_[arc].to;
        if (seen_[other] || arcs_[arc].left == 0) continue;
        seen_[other] = 1;
        arc_to_[other] = arc;
        if (is_target_[other]) return other;
        queue_.push_back(other);
      }
    }
    return kNone;
  }

  std::vector<std::vector<Index>> out_;
  std::vector<Arc> arcs_;  // each followed by its reverse
  std::vector<std::int64_t> capacity_;
  std::vector<char> seen_, is_target_;
  std::vector<Index> arc_to_, queue_;
};

}  // namespace

std::optional<std::vector<Word>> enumerate(std::size_t nodes, const Edges& edges,
                                           std::size_t cap, Watch& watch) {
  check_edges({&edges}, nodes);
  const std::size_t width = (nodes + 63) / 64;
  std::vector<Word> needs(nodes * width);
  for (const auto& [u, v] : edges) {
    const auto from = static_cast<std::size_t>(u);
    needs[static_cast<std::size_t>(v) * width + from / 64] |= Word{1} << (from % 64);
  }
  std::vector<Word> found(width);
  std::size_t count = 1;
  Layer layer(width);
  layer.add(found.data());
  while (layer.size() > 0) {
    if (count > cap) return std::nullopt;
    Layer larger(width);
    for (std::size_t i = 0; i < layer.size(); ++i) {
      const Word* const set = layer.set(i);
      watch.spend(static_cast<std::int64_t>(nodes));
      for (std::size_t v = 0; v < nodes; ++v) {
        if (((set[v / 64] >> (v % 64)) & 1U) != 0) continue;
        bool is_ready = true;
        for (std::size_t k = 0; k < width && is_ready; ++k) {
          is_ready = (needs[v * width + k] & ~set[k]) == 0;
        }
        if (is_ready) larger.add_changed(set, v);
      }
      // Duplicates go now and then, so that the cap bounds the memory as well.
      if (larger.size() / 4 > cap + 1'000) {
        larger.sort_and_drop_duplicates();
        if (larger.size() > cap) return std::nullopt;
      }
    }
    larger.sort_and_drop_duplicates();
    count += larger.size();
    found.insert(found.end(), larger.words().begin(), larger.words().end());
    layer = std::move(larger);
  }
  return found;
}

std::vector<Word> neighbours(std::size_t nodes, const Edges& edges, std::span<const Word> rows,
                             Watch& watch) {
  check_edges({&edges}, nodes);
  const std::size_t width = (nodes + 63) / 64;
  if (rows.size() % width != 0) throw std::invalid_argument("rows of another width");
  std::vector<Word> before(nodes * width), after(nodes * width);
  for (const auto& [a, b] : edges) {
    const auto u = static_cast<std::size_t>(a);
    const auto v = static_cast<std::size_t>(b);
    before[v * width + u / 64] |= Word{1} << (u % 64);
    after[u * width + v / 64] |= Word{1} << (v % 64);
  }
  Layer found(width);
  for (std::size_t i = 0; i < rows.size() / width; ++i) {
    const Word* const set = &rows[i * width];
    watch.spend(static_cast<std::int64_t>(nodes));
    for (std::size_t v = 0; v < nodes; ++v) {
      const bool is_inside = ((set[v / 64] >> (v % 64)) & 1U) != 0;
      bool may_change = true;
      for (std::size_t k = 0; k < width && may_change; ++k) {
        may_change = is_inside ? (after[v * width + k] & set[k]) == 0
                               : (before[v * width + k] & ~set[k]) == 0;
      }
      if (may_change) found.add_changed(set, v);
    }
  }
  found.sort_and_drop_duplicates();
  return found.words();
}

// A least cut. Point v of the network is on the source's side when v is in the set;
// point nodes + v, when all that read v are in the set as well. The arc from the one to
// the other is cut, at the cost of v's bytes, exactly when v is on the boundary.
std::vector<Word> narrowest(const std::vector<std::int64_t>& bytes, const Edges& edges,
                            const Edges& order_edges, Watch& watch) {
  const std::size_t nodes = bytes.size();
  check_edges({&edges, &order_edges}, nodes);
  require(total(bytes).value() <= kMostTotal, "sizes add up to more than 2**60");
  const std::size_t width = (nodes + 63) / 64;
  Network network(2 * nodes);
  std::vector<std::vector<Index>> next(nodes);
  for (std::size_t v = 0; v < nodes; ++v) {
    network.add_arc(static_cast<Index>(v), static_cast<Index>(nodes + v), bytes[v]);
  }
  for (const auto& [u, v] : edges) {
    network.add_arc(static_cast<Index>(nodes + static_cast<std::size_t>(u)),
                    static_cast<Index>(v), Network::kUnlimited);
  }
  for (const Edges* const some : {&edges, &order_edges}) {
    for (const auto& [u, v] : *some) {
      network.add_arc(static_cast<Index>(v), static_cast<Index>(u), Network::kUnlimited);
      next[static_cast<std::size_t>(u)].push_back(static_cast<Index>(v));
    }
  }
  std::vector<Word> sets(2 * nodes * width);
  for (std::size_t v = 0; v < nodes; ++v) {
    network.fill(static_cast<Index>(v), next[v], watch);
    Word* const smallest = &sets[2 * v * width];
    const std::vector<char>& fed = network.fed(static_cast<Index>(v));
    for (std::size_t u = 0; u < nodes; ++u) {
      if (fed[u]) smallest[u / 64] |= Word{1} << (u % 64);
    }
    Word* const largest = smallest + width;
    const std::vector<char>& feeding = network.feeding(next[v]);
    for (std::size_t u = 0; u < nodes; ++u) {
      if (!feeding[u]) largest[u / 64] |= Word{1} << (u % 64);
    }
  }
  return sets;
}

}  // namespace remat::lower_sets
