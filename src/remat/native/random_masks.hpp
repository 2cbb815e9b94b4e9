// Random masks of the CPU, drawn as PyTorch draws them.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_random_masks(nanobind::module_& module);

}  // namespace remat
