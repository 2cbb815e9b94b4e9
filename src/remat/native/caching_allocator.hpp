// Native twin of remat.memory.caching_allocator.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_caching_allocator(nanobind::module_& module);

}  // namespace remat
