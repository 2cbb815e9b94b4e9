// The Rotor program: native twin of remat.algorithms.chains.rotor_tables, which documents the
// recurrences and the order in which ties are broken.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "chains.hpp"
#include "chains_rotor.hpp"

namespace nb = nanobind;

// The loop that takes nearly all of the time is compiled twice, and the wider vectors
// are used where the processor has them. Integers: the answers are the same.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define REMAT_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define REMAT_WIDE_VECTORS
#endif

namespace remat::chains {

REMAT_WIDE_VECTORS
void rotor::lower(Cost* __restrict own, Cost cost, const Cost* __restrict first,
                  const Cost* __restrict second, Index count) {
  for (Index m = 0; m < count; ++m) {
    own[m] = std::min(own[m], cost + first[m] + second[m]);
  }
}

rotor::Checked rotor::check_chain(const Chain& chain) {
  const auto& [values, gradients, forward, workspace, options, turn] = chain;
  const std::size_t length = forward.size();
  require(values.size() == length + 1 && gradients.size() == length + 1 &&
              workspace.size() == length && options.size() == length,
          "the lists of a chain differ in length");
  Capped bytes = total(values) + total(gradients) + total(workspace) + Capped(turn.second);
  Cost most_forward = 0;
  Cost most_backward = 0;
  Capped held(0);
  for (const Cost cost : forward) most_forward = std::max(most_forward, Capped(cost).value());
  for (std::size_t s = 0; s < length; ++s) {
    held += Capped::count(s + 1) * Capped::count(options[s].size());
    for (const auto& [ahead, back, saved, needs_output, ahead_bytes, back_bytes] : options[s]) {
      require(ahead >= -1, "a time of an option is less than -1");
      most_forward = std::max(most_forward, ahead);
      most_backward = std::max(most_backward, Capped(back).value());
      bytes += Capped(saved) + Capped(ahead_bytes) + Capped(back_bytes);
    }
  }
  require(bytes.value() <= kMostTotal, "the sizes of a chain add up to more than 2**60");
  const Capped rows = Capped::count(length + 1);
  const Capped worst = rows * (rows * Capped(most_forward) + Capped(most_backward)) +
                       Capped(turn.first);
  require(worst.value() < infinite, "times add up to 2**61 or more at worst");
  return {bytes, worst, Capped((rows * (rows + Capped(1))).value() / 2), held};
}

void rotor::check_slots(Bytes slot_bytes, Index slots) {
  require(slot_bytes >= 1 && slot_bytes <= kMostTotal, "a slot must have 1 to 2**60 bytes");
  require(slots >= 0 && slots <= kMostTotal, "there must be 0 to 2**60 slots");
}

namespace {

using rotor::Answer;
using rotor::Bytes;
using rotor::Chain;
using rotor::Index;
using rotor::Rotor;

std::optional<Answer> rotor_plan(const Chain& chain, Bytes slot_bytes, Index slots,
                                 bool beyond) {
  const rotor::Checked checked = rotor::check_chain(chain);
  rotor::check_slots(slot_bytes, slots);
  const Capped rows = checked.below + (beyond ? checked.held : Capped(0));
  check_table(rows * (Capped(slots) + Capped(1)));
  return Rotor(chain, slot_bytes, beyond).answer(slots);
}

}  // namespace

void bind_rotor(nb::module_& module) {
  module.def("rotor_plan", &rotor_plan, nb::arg("chain"), nb::arg("slot_bytes"),
             nb::arg("slots"), nb::arg("beyond"));
}

}  // namespace remat::chains
