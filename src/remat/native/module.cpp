// The extension module remat.native._core: what each file binds, listed once.

#include <nanobind/nanobind.h>

#include "caching_allocator.hpp"
#include "chains.hpp"
#include "device_execution.hpp"
#include "eviction.hpp"
#include "local_search.hpp"
#include "lower_sets.hpp"
#include "plain_lower_sets.hpp"
#include "random_masks.hpp"
#include "retention.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  module.doc() = "Hot loops of the planning algorithms; each has a twin in Python.";
  remat::bind_caching_allocator(module);
  remat::bind_chains(module);
  remat::bind_device_execution(module);
  remat::bind_eviction(module);
  remat::bind_local_search(module);
  remat::bind_lower_sets(module);
  remat::bind_plain_lower_sets(module);
  remat::bind_random_masks(module);
  remat::bind_retention(module);
}
