"""Public names of what torch keeps private, each found when it is first asked for.

Looked up in :mod:`remat.torch_compat.table`, which says what each is needed for. The
imports below are for type checkers, which know one version of torch.
"""

from typing import TYPE_CHECKING, Any

from remat.torch_compat.self_check import name_of_torch

if TYPE_CHECKING:
    import torch
    import torch._dynamo.config
    import torch._dynamo.guards
    import torch._dynamo.utils
    import torch._functorch.config
    import torch._inductor.config
    from torch import _neg_view
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._C import (
        _AutoDispatchBelowAutograd,
        _current_graph_task_id,
        _DisablePythonDispatcher,
        _dispatch_has_kernel_for_dispatch_key,
        _ExcludeDispatchKeyGuard,
        _get_dispatch_mode,
        _TorchDispatchModeKey,
    )
    from torch._C._autograd import (
        _get_current_graph_task_keep_graph,
        _get_sequence_nr,
        _top_saved_tensors_default_hooks,
    )
    from torch._C._functorch import (
        is_functorch_wrapped_tensor as is_functorch_wrapped_tensor,
    )
    from torch._C._functorch import peek_interpreter_stack as peek_interpreter_stack
    from torch._C._profiler import ProfilerConfig as ProfilerConfig
    from torch._C._profiler import ProfilerState as ProfilerState
    from torch._C._profiler import _ExperimentalConfig
    from torch._dispatch.python import no_python_dispatcher as no_python_dispatcher
    from torch._dynamo.backends.common import aot_autograd as aot_autograd
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.comptime import ComptimeContext as ComptimeContext
    from torch._dynamo.comptime import comptime as comptime
    from torch._dynamo.convert_frame import compile_lock as compile_lock
    from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
    from torch._dynamo.exc import InternalTorchDynamoError as InternalTorchDynamoError
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._dynamo.utils import preserve_rng_state as preserve_rng_state
    from torch._dynamo.variables.torch_function import (
        torch_function_mode_stack_state_mgr,
    )
    from torch._functorch._aot_autograd import (
        graph_capture_wrappers as graph_capture_wrappers,
    )
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput as GradAOTOutput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        InputMutationAOTOutput as InputMutationAOTOutput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        PlainAOTInput as PlainAOTInput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        PlainAOTOutput as PlainAOTOutput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        SubclassGetAttrAOTInput as SubclassGetAttrAOTInput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        SubclassGetAttrAOTOutput as SubclassGetAttrAOTOutput,
    )
    from torch._functorch._aot_autograd.descriptors import (
        TangentAOTInput as TangentAOTInput,
    )
    from torch._functorch._aot_autograd.schemas import (
        MemoryFormatMeta as MemoryFormatMeta,
    )
    from torch._functorch.partitioners import (
        min_cut_rematerialization_partition as min_cut_rematerialization_partition,
    )
    from torch._guards import CompileContext as CompileContext
    from torch._guards import tracing
    from torch._higher_order_ops.effects import with_effects as with_effects
    from torch._inductor import standalone_compile as standalone_compile
    from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler as get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler as InvalidCxxCompiler
    from torch._library.fake_class_registry import FakeScriptObject as FakeScriptObject
    from torch._ops import OpOverload as OpOverload
    from torch._prims_common import (
        make_contiguous_strides_for as make_contiguous_strides_for,
    )
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
    )
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException as DynamicOutputShapeException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import (
        UnsupportedFakeTensorException as UnsupportedFakeTensorException,
    )
    from torch._subclasses.fake_tensor import (
        UnsupportedOperatorException as UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import (
        unset_fake_temporarily as unset_fake_temporarily,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch.autograd import (
        _disable_profiler_legacy,
        _enable_profiler_legacy,
        _profiler_enabled,
    )
    from torch.cuda.memory import _record_memory_history, _snapshot
    from torch.fx.graph import _BoxedCodeGen
    from torch.optim.optimizer import (
        _foreach_supported_types,
        _get_foreach_kernels_supported_devices,
    )
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        is_in_any_mode_without_ignore_compile_internals,
    )
    from torch.utils._python_dispatch import (
        is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import keystr as keystr
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
    from torch.utils._sympy.interp import sympy_interp as sympy_interp
    from torch.utils._sympy.reference import (
        PythonReferenceAnalysis as PythonReferenceAnalysis,
    )
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    dynamo_config = torch._dynamo.config
    inductor_config = torch._inductor.config
    optimize = torch._dynamo.optimize
    guards = torch._dynamo.guards
    dynamo_utils = torch._dynamo.utils
    function_modes_aside = torch_function_mode_stack_state_mgr
    maybe_mark_dynamic = torch._dynamo.maybe_mark_dynamic
    no_tracing = tracing
    BoxedCodeGen = _BoxedCodeGen
    functorch_config = torch._functorch.config
    BelowAutograd = _AutoDispatchBelowAutograd
    DispatchModeKey = _TorchDispatchModeKey
    has_kernel_for_key = _dispatch_has_kernel_for_dispatch_key
    get_dispatch_mode = _get_dispatch_mode
    DisablePythonDispatcher = _DisablePythonDispatcher
    exclude_dispatch_keys = _ExcludeDispatchKeyGuard
    setup_python_backend = _setup_privateuseone_for_python_backend
    disable_current_modes = _disable_current_modes
    is_in_dispatch_mode = is_in_any_mode_without_ignore_compile_internals
    neg_view = _neg_view
    top_saved_tensors_hooks = _top_saved_tensors_default_hooks
    current_backward_number = _current_graph_task_id
    keeps_graph_now = _get_current_graph_task_keep_graph
    next_node_number = _get_sequence_nr
    record_memory_history = _record_memory_history
    memory_snapshot = _snapshot
    compile_callbacks = callback_handler
    profiler_enabled = _profiler_enabled
    enable_profiler_legacy = _enable_profiler_legacy
    disable_profiler_legacy = _disable_profiler_legacy
    ExperimentalConfig = _ExperimentalConfig
    foreach_types = _foreach_supported_types
    foreach_devices = _get_foreach_kernels_supported_devices
    unsafe_view: Any = torch.ops.aten._unsafe_view.default
    log_softmax_backward: Any = torch.ops.aten._log_softmax_backward_data.default
    batch_norm_legit: Any = torch.ops.aten._native_batch_norm_legit.default
    batch_norm_without_statistics: Any = (
        torch.ops.aten._native_batch_norm_legit.no_stats
    )
    functional_batch_norm: Any = (
        torch.ops.aten._native_batch_norm_legit_functional.default
    )
    functional_batch_norm_with_update: Any = (
        torch.ops.aten._batch_norm_with_update_functional.default
    )
    batch_norm_with_update: Any = torch.ops.aten._batch_norm_with_update.default
    select_batch_norm_backend: Any = torch._C._select_batch_norm_backend
    BatchNormBackend: Any = torch._C._BatchNormBackend  # pyright: ignore[reportAttributeAccessIssue]
    batch_norm_reserve_bytes: Any = torch._C._get_cudnn_batch_norm_reserve_space_size  # pyright: ignore[reportAttributeAccessIssue]
    local_scalar_dense: Any = torch.ops.aten._local_scalar_dense.default
    linalg_check_errors: Any = torch.ops.aten._linalg_check_errors.default
    flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient_attention: Any = (
        torch.ops.aten._scaled_dot_product_efficient_attention.default
    )
    efficient_attention_alone: Any = torch.ops.aten._efficient_attention_forward.default
    efficient_attention_backward: Any = (
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    )
    efficient_attention_backward_alone: Any = (
        torch.ops.aten._efficient_attention_backward.default
    )
    attention_of_products: Any = (
        torch.ops.aten._scaled_dot_product_attention_math.default
    )
    upsample_nearest_exact1d: Any = torch.ops.aten._upsample_nearest_exact1d
    upsample_nearest_exact2d: Any = torch.ops.aten._upsample_nearest_exact2d
    upsample_nearest_exact3d: Any = torch.ops.aten._upsample_nearest_exact3d
    upsample_bilinear2d_aa: Any = torch.ops.aten._upsample_bilinear2d_aa
    upsample_bicubic2d_aa: Any = torch.ops.aten._upsample_bicubic2d_aa
    wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default

else:

    def __getattr__(name: str) -> Any:
        value = name_of_torch(name)
        globals()[name] = value
        return value
