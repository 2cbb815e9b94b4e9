// Chains and joins: what the files chains_*.cpp bind.

#include "chains.hpp"

void remat::bind_chains(nanobind::module_& module) {
  remat::chains::bind_joins(module);
  remat::chains::bind_levels(module);
  remat::chains::bind_rotor(module);
  remat::chains::bind_stage_joins(module);
}
