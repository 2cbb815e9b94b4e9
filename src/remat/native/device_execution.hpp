// Native twin of remat.multidevice.execution_run.
#pragma once

#include <nanobind/nanobind.h>

namespace remat {

void bind_device_execution(nanobind::module_& module);

}  // namespace remat
