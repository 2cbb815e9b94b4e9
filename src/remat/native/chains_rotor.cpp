// The Rotor program: native twin of remat.chains.rotor_tables, which documents the
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

namespace {

using rotor::Answer;
using rotor::Bytes;
using rotor::Chain;
using rotor::Index;
using rotor::Rotor;

std::optional<Answer> rotor_plan(const Chain& chain, Bytes slot_bytes, Index slots,
                                 bool beyond) {
  return Rotor(chain, slot_bytes, beyond).answer(slots);
}

}  // namespace

void bind_rotor(nb::module_& module) {
  module.def("rotor_plan", &rotor_plan, nb::arg("chain"), nb::arg("slot_bytes"),
             nb::arg("slots"), nb::arg("beyond"));
}

}  // namespace remat::chains
