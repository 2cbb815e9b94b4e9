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

namespace remat::chains {
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
