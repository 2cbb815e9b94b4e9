// Joins of chains of unequal stages: native twin of remat.algorithms.chains.stage_join_tables,
// which documents the recurrence and the order in which ties are broken.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>

#include "chains.hpp"
#include "chains_rotor.hpp"
#include "checks.hpp"

namespace nb = nanobind;

namespace remat::chains {
namespace {

using rotor::Bytes;
using rotor::Chain;
using rotor::Index;
using rotor::Rotor;

using Run = std::tuple<Index, Index, Index, Index>;
using Answer = std::tuple<Cost, Cost, std::vector<Run>>;

// All orders of which are tried; as remat.algorithms.chains.stage_join_tables.MAX_BRANCHES.
constexpr std::size_t most_branches = 6;

std::size_t at(Index index) { return static_cast<std::size_t>(index); }

// How far a branch is reversed, and the option that its last stage was run with, or -1.
struct Node {
  Index left;
  Index option;
};

// A way to keep the value of a node: time added before the turn, slots released when
// the stages above are reversed.
struct Keeping {
  Cost added;
  Index released;
};

// One branch: its program, and its nodes by increasing stages left.
class Branch {
 public:
  Branch(const Chain& chain, Bytes slot_bytes, bool beyond, Index slots)
      : rotor_(chain, slot_bytes, beyond) {
    rotor_.prepare(slots + 1, true);
    add({0, -1}, {0, rotor_.value_slots(0)});
    for (Index v = 1; v <= rotor_.length(); ++v) {
      first_.push_back(static_cast<Index>(nodes_.size()));
      add({v, -1}, {0, rotor_.value_slots(v)});
      const auto& savings = rotor_.savings(v - 1);
      for (Index k = 0; k < static_cast<Index>(savings.size()); ++k) {
        const auto& saving = savings[at(k)];
        if (saving.forward >= 0) {
          add({v, k}, {saving.forward - rotor_.forward(v - 1),
                       saving.passed - saving.kept});
        }
      }
    }
    first_.push_back(static_cast<Index>(nodes_.size()));
  }

  [[nodiscard]] Index count() const { return static_cast<Index>(nodes_.size()); }
  [[nodiscard]] const Node& node(Index index) const { return nodes_[at(index)]; }
  [[nodiscard]] const Keeping& keeping(Index index) const { return keepings_[at(index)]; }
  Rotor& rotor() { return rotor_; }

  // Nodes at a value: from first(value) to first(value + 1).
  [[nodiscard]] Index first(Index value) const {
    return value == 0 ? 0 : first_[at(value - 1)];
  }

  [[nodiscard]] Index gradient_slots(Index index) const {
    return rotor_.slots(rotor_.gradient_bytes(node(index).left));
  }

  // Slots of what stays of a node's own stage until it is reversed.
  [[nodiscard]] Index held(Index index) const {
    const Node& here = node(index);
    return here.option < 0 ? 0 : rotor_.savings(here.left - 1)[at(here.option)].kept;
  }

 private:
  void add(const Node& node, const Keeping& keeping) {
    // Infinite costs must not become smaller.
    if (keeping.added < 0) {
      throw nb::value_error("a forward that saves takes less time than one that does not");
    }
    nodes_.push_back(node);
    keepings_.push_back(keeping);
  }

  Rotor rotor_;
  std::vector<Node> nodes_;
  std::vector<Keeping> keepings_;
  std::vector<Index> first_;
};

class StageJoin {
 public:
  StageJoin(const std::vector<Chain>& chains, std::pair<Cost, Bytes> at_turn,
            Bytes slot_bytes, Index slots, bool beyond)
      : turn_(at_turn), slots_(slots), beyond_(beyond) {
    for (const auto& chain : chains) {
      branches_.emplace_back(chain, slot_bytes, beyond, slots);
    }
    strides_.resize(branches_.size());
    for (Index j = count() - 1; j >= 0; --j) {
      strides_[at(j)] = states_;
      states_ *= branches_[at(j)].count();
    }
    table_.assign(at(states_ * (slots_ + 1)), infinite);
  }

  std::optional<Answer> answer() {
    fill();
    auto found = candidates();
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.cost < b.cost; });
    std::vector<Index> order(branches_.size());
    for (const auto& candidate : found) {
      check_signals();
      const auto sections = sections_of(candidate);
      const auto kept = kept_of(candidate, sections);
      std::iota(order.begin(), order.end(), 0);
      do {
        std::vector<Run> run;
        if (forward_pass(kept, order, run)) {
          run.emplace_back(rotor::turn, -1, -1, -1);
          backward_pass(sections, run);
          return Answer{candidate.cost, found.front().cost, std::move(run)};
        }
      } while (std::next_permutation(order.begin(), order.end()));
    }
    return std::nullopt;
  }

 private:
  using Nodes = std::vector<Index>;
  using Kept = std::vector<std::vector<Index>>;  // per value: option, -1, or absent
  static constexpr Index absent = -2;

  struct Candidate {
    Cost cost;
    Nodes nodes;
    Index stored;
  };

  struct Section {
    Index branch;
    Index room;
    Index before;  // nodes
    Index after;
  };

  [[nodiscard]] Index count() const { return static_cast<Index>(branches_.size()); }

  [[nodiscard]] Index state(const Nodes& nodes) const {
    Index found = 0;
    for (Index j = 0; j < count(); ++j) {
      found += nodes[at(j)] * strides_[at(j)];
    }
    return found;
  }

  Cost* row(Index index) { return table_.data() + index * (slots_ + 1); }

  // Slots for everything stored and for reversing branch j.
  [[nodiscard]] Index room(const Nodes& nodes, Index j) const {
    Index others = 0;
    for (Index i = 0; i < count(); ++i) {
      others += i == j ? 0 : branches_[at(i)].gradient_slots(nodes[at(i)]);
    }
    return slots_ - others;
  }

  void fill() {
    row(0)[0] = 0;
    Nodes nodes(branches_.size(), 0);
    for (Index index = 1; index < states_; ++index) {
      if (index % 64 == 0) {
        check_signals();
      }
      advance(nodes);
      for (Index j = 0; j < count(); ++j) {
        relax(nodes, index, j);
      }
      Cost* own = row(index);
      for (Index s = 0; s <= slots_; ++s) {
        own[s] = capped(own[s]);
      }
    }
  }

  void advance(Nodes& nodes) const {
    for (Index j = count() - 1; j >= 0; --j) {
      if (++nodes[at(j)] < branches_[at(j)].count()) {
        return;
      }
      nodes[at(j)] = 0;
    }
  }

  [[nodiscard]] bool may_drop(const Node& node, Index base) const {
    return node.option < 0 || beyond_ || base == node.left - 1;
  }

  void relax(const Nodes& nodes, Index index, Index j) {
    Branch& branch = branches_[at(j)];
    const Index here = nodes[at(j)];
    const Node node = branch.node(here);
    const Index room_j = room(nodes, j);
    Cost* own = row(index);
    for (Index base = node.left - 1; base >= 0; --base) {
      if (!may_drop(node, base)) {
        continue;
      }
      const Cost* costs = branch.rotor().row(base, node.left - 1, node.option);
      for (Index next = branch.first(base); next < branch.first(base + 1); ++next) {
        const Keeping& keeping = branch.keeping(next);
        const Index less = branch.held(here) + keeping.released;
        const Cost* rest = row(index - (here - next) * strides_[at(j)]);
        for (Index s = less; s <= room_j; ++s) {
          own[s] = std::min(own[s], costs[room_j - s] + keeping.added + rest[s - less]);
        }
      }
    }
  }

  // Candidates in the order of the twin: kinds of last values, then stored slots.
  std::vector<Candidate> candidates() {
    std::vector<Candidate> found;
    Cost forward = turn_.first;
    Bytes gradients = turn_.second;
    Nodes nodes;
    for (auto& branch : branches_) {
      Rotor& rotor = branch.rotor();
      for (Index s = 0; s < rotor.length(); ++s) {
        forward += rotor.forward(s);
      }
      gradients += rotor.gradient_bytes(rotor.length());
      nodes.push_back(branch.first(rotor.length()));
    }
    const Index need = branches_.front().rotor().slots(gradients);
    while (true) {
      Cost added = forward;
      Index passing = need;
      for (Index j = 0; j < count(); ++j) {
        const Keeping& keeping = branches_[at(j)].keeping(nodes[at(j)]);
        added += keeping.added;
        passing += keeping.released;
      }
      const Cost* costs = row(state(nodes));
      for (Index s = 0; s + passing <= slots_; ++s) {
        if (costs[s] < infinite) {
          found.push_back({costs[s] + added, nodes, s});
        }
      }
      Index j = count() - 1;
      for (; j >= 0; --j) {
        Branch& branch = branches_[at(j)];
        if (++nodes[at(j)] < branch.count()) {
          break;
        }
        nodes[at(j)] = branch.first(branch.rotor().length());
      }
      if (j < 0) {
        return found;
      }
    }
  }

  std::vector<Section> sections_of(const Candidate& candidate) {
    std::vector<Section> sections;
    Nodes nodes = candidate.nodes;
    Index stored = candidate.stored;
    while (state(nodes) > 0) {
      Section best{0, 0, 0, 0};
      Cost least = infinite;
      Index released = 0;
      for (Index j = 0; j < count(); ++j) {
        best_section(nodes, stored, j, least, best, released);
      }
      sections.push_back(best);
      nodes[at(best.branch)] = best.after;
      stored -= released;
    }
    return sections;
  }

  void best_section(const Nodes& nodes, Index stored, Index j, Cost& least, Section& best,
                    Index& released) {
    Branch& branch = branches_[at(j)];
    const Index here = nodes[at(j)];
    const Node node = branch.node(here);
    const Index memory = room(nodes, j) - stored;
    if (memory < 0) {
      return;
    }
    for (Index base = node.left - 1; base >= 0; --base) {
      if (!may_drop(node, base)) {
        continue;
      }
      const Cost cost = branch.rotor().row(base, node.left - 1, node.option)[memory];
      for (Index next = branch.first(base); next < branch.first(base + 1); ++next) {
        const Keeping& keeping = branch.keeping(next);
        const Index less = branch.held(here) + keeping.released;
        if (less > stored) {
          continue;
        }
        const Index rest = state(nodes) - (here - next) * strides_[at(j)];
        const Cost total = cost + keeping.added + row(rest)[stored - less];
        if (cost < infinite && total < least) {
          least = total;
          best = {j, memory, here, next};
          released = less;
        }
      }
    }
  }

  Kept kept_of(const Candidate& candidate, const std::vector<Section>& sections) {
    Kept kept;
    for (Index j = 0; j < count(); ++j) {
      Branch& branch = branches_[at(j)];
      kept.emplace_back(at(branch.rotor().length() + 1), absent);
      const Node& top = branch.node(candidate.nodes[at(j)]);
      if (top.option >= 0) {
        kept.back()[at(top.left)] = top.option;
      }
    }
    for (const auto& section : sections) {
      const Node& node = branches_[at(section.branch)].node(section.after);
      kept[at(section.branch)][at(node.left)] = node.option;
    }
    return kept;
  }

  bool forward_pass(const Kept& kept, const std::vector<Index>& order,
                    std::vector<Run>& run) {
    Index stored = 0;
    for (auto& branch : branches_) {
      stored += branch.rotor().value_slots(0);
    }
    for (const Index j : order) {
      Rotor& rotor = branches_[at(j)].rotor();
      const auto& own = kept[at(j)];
      for (Index s = 0; s < rotor.length(); ++s) {
        const Index option = own[at(s + 1)];
        Bytes most = rotor.workspace_bytes(s);
        if (option >= 0) {
          const auto& saving = rotor.savings(s)[at(option)];
          most = std::max(most, saving.saved + saving.workspace);
        }
        const Bytes source = own[at(s)] == absent ? rotor.value_bytes(s) : 0;
        if (stored + rotor.slots(source + rotor.value_bytes(s + 1) + most) > slots_) {
          return false;
        }
        if (option >= 0) {
          run.emplace_back(rotor::save, j, s, option);
          stored += rotor.savings(s)[at(option)].passed;
        } else {
          run.emplace_back(rotor::advance, j, s, -1);
          const bool stays = option != absent || s + 1 == rotor.length();
          stored += stays ? rotor.value_slots(s + 1) : 0;
        }
      }
    }
    return true;
  }

  void backward_pass(const std::vector<Section>& sections, std::vector<Run>& run) {
    std::vector<rotor::Run> order;
    for (const auto& section : sections) {
      Branch& branch = branches_[at(section.branch)];
      const Node& before = branch.node(section.before);
      const Index base = branch.node(section.after).left;
      order.clear();
      branch.rotor().expand(base, before.left - 1, before.option, section.room, order);
      for (const auto& [kind, stage, option] : order) {
        run.emplace_back(kind, section.branch, stage, option);
      }
    }
  }

  std::vector<Branch> branches_;
  std::pair<Cost, Bytes> turn_;
  Index slots_;
  bool beyond_;
  std::vector<Index> strides_;
  Index states_ = 1;
  std::vector<Cost> table_;
};

std::optional<Answer> stage_join_plan(const std::vector<Chain>& chains,
                                      std::pair<Cost, Bytes> at_turn, Bytes slot_bytes,
                                      Index slots, bool beyond) {
  require(!chains.empty() && chains.size() <= most_branches,
          "a join has 1 to 6 branches");
  rotor::check_slots(slot_bytes, slots);
  Capped bytes(at_turn.second);
  Capped worst(at_turn.first);
  Capped rows(0);
  Capped states(1);
  for (const auto& chain : chains) {
    const rotor::Checked checked = rotor::check_chain(chain);
    bytes += checked.bytes;
    worst += checked.worst;
    rows += checked.below + checked.held;
    Capped nodes(1);
    for (const auto& options : std::get<4>(chain)) {
      nodes += Capped::count(1 + options.size());
    }
    states *= nodes;
  }
  require(bytes.value() <= kMostTotal, "the sizes of a join add up to more than 2**60");
  require(worst.value() < infinite, "times add up to 2**61 or more at worst");
  check_table((rows + states) * (Capped(slots) + Capped(1)));
  return StageJoin(chains, at_turn, slot_bytes, slots, beyond).answer();
}

}  // namespace

void bind_stage_joins(nb::module_& module) {
  module.def("stage_join_plan", &stage_join_plan, nb::arg("chains"), nb::arg("turn"),
             nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("beyond"));
}

}  // namespace remat::chains
