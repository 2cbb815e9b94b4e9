"""Everything that this package uses of torch without torch promising it.

One table: where each thing is, from which version of torch on, and what it is needed
for. A new version that moves a name gets another place here; what it lacks is said by
:mod:`remat.torch_compat.self_check`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

TESTED = ("2.11", "2.12", "2.13", "2.15")
"""The versions of torch, without the last number, that the tests have run on."""


@dataclass(frozen=True, slots=True)
class Private:
    """One thing that torch does not promise.

    Parameters
    ----------
    place
        ``"module:attribute.attribute"``; an attribute that ends in ``()`` is called,
        and without a colon the module itself is meant. Where the place depends on the
        version, a mapping from the first version that has it there.
    needed_for
        In words, for the error that says it is missing.
    text
        Words in the source of the module at ``place``, where there is no object: keys,
        messages, and attributes of instances.
    """

    place: str | Mapping[str, str]
    needed_for: str
    text: str | None = None


_TIMEOUT = "planning in several processes at once"
_DIVIDED = "optimizers whose gradients are divided otherwise than parameters"
_MESHES = "meshes of devices in graphs of several processes"
_AOT = "torch._functorch._aot_autograd"
_FAKE = "torch._subclasses.fake_tensor"
_PYTREE = "torch.utils._pytree"

NAMES: dict[str, Private] = {
    # --- fake tensors, on which steps are traced and optimizers are stepped ---
    "FakeTensor": Private(f"{_FAKE}:FakeTensor", "telling fake tensors from real ones"),
    "FakeTensorMode": Private(f"{_FAKE}:FakeTensorMode", "running without memory"),
    "unset_fake_temporarily": Private(
        f"{_FAKE}:unset_fake_temporarily", "measuring operators while a step is traced"
    ),
    "DataDependentOutputException": Private(
        f"{_FAKE}:DataDependentOutputException", "errors about numbers from tensors"
    ),
    "DynamicOutputShapeException": Private(
        f"{_FAKE}:DynamicOutputShapeException", "errors about sizes from values"
    ),
    "UnsupportedFakeTensorException": Private(
        f"{_FAKE}:UnsupportedFakeTensorException", "errors about tensor subclasses"
    ),
    "UnsupportedOperatorException": Private(
        f"{_FAKE}:UnsupportedOperatorException", "errors about unknown operators"
    ),
    "FunctionalTensor": Private(
        "torch._subclasses.functional_tensor:FunctionalTensor",
        "leaving a tracer's tensors out of the live ones",
    ),
    # --- the tracer ---
    "dynamo_config": Private(
        "torch._dynamo.config", "tracing every new shape, and leaving logs out"
    ),
    "inductor_config": Private(
        "torch._inductor.config", "keeping random numbers that nothing uses in a trace"
    ),
    "optimize": Private("torch._dynamo:optimize", "settings that hold in traces only"),
    "comptime": Private("torch._dynamo.comptime:comptime", "noting what is returned"),
    "ComptimeContext": Private(
        "torch._dynamo.comptime:ComptimeContext", "noting what a call returns"
    ),
    "TorchDynamoException": Private(
        "torch._dynamo.exc:TorchDynamoException", "errors of the tracer"
    ),
    "InternalTorchDynamoError": Private(
        "torch._dynamo.exc:InternalTorchDynamoError", "faults of the tracer itself"
    ),
    "OptimizedModule": Private(
        "torch._dynamo.eval_frame:OptimizedModule", "fitting what torch.compile wraps"
    ),
    "preserve_rng_state": Private(
        "torch._dynamo.utils:preserve_rng_state", "tracing without drawing numbers"
    ),
    "CompileContext": Private(
        "torch._guards:CompileContext", "telling that a model is split in graphs"
    ),
    "compile_lock": Private(
        "torch._dynamo.convert_frame:compile_lock", "patching in one thread at a time"
    ),
    "guards": Private("torch._dynamo.guards", "tracing without a timing of guards"),
    "dynamo_utils": Private("torch._dynamo.utils", "tracing without errors in logs"),
    "function_modes_aside": Private(
        "torch._dynamo.variables.torch_function:torch_function_mode_stack_state_mgr",
        "a caller's default device, inside of a trace and after it",
    ),
    "compile_callbacks": Private(
        "torch._dynamo.callback:callback_handler",
        "telling memory of tracing from a step's",
    ),
    # --- the joint graph of forward and backward ---
    "aot_autograd": Private(
        "torch._dynamo.backends.common:aot_autograd", "tracing both passes of a step"
    ),
    "BoxedCodeGen": Private(
        "torch.fx.graph:_BoxedCodeGen", "code that drops its arguments at last use"
    ),
    "MemoryFormatMeta": Private(
        f"{_AOT}.schemas:MemoryFormatMeta", "taking gradients of outputs dense"
    ),
    "TangentAOTInput": Private(
        f"{_AOT}.descriptors:TangentAOTInput", "telling which inputs are gradients"
    ),
    "PlainAOTInput": Private(
        f"{_AOT}.descriptors:PlainAOTInput", "telling which argument an input is"
    ),
    "SubclassGetAttrAOTInput": Private(
        f"{_AOT}.descriptors:SubclassGetAttrAOTInput", "inputs that are DTensors"
    ),
    "SubclassGetAttrAOTOutput": Private(
        f"{_AOT}.descriptors:SubclassGetAttrAOTOutput", "outputs that are DTensors"
    ),
    "GradAOTOutput": Private(
        f"{_AOT}.descriptors:GradAOTOutput", "telling whose gradient an output is"
    ),
    "graph_capture_wrappers": Private(
        f"{_AOT}.graph_capture_wrappers", _DIVIDED, text="unwrap_tensor_subclasses("
    ),
    "no_tracing": Private("torch._guards:tracing", _DIVIDED),
    "PlainAOTOutput": Private(
        f"{_AOT}.descriptors:PlainAOTOutput", "telling whose gradient an input is"
    ),
    "InputMutationAOTOutput": Private(
        f"{_AOT}.descriptors:InputMutationAOTOutput",
        "never recomputing what reads an input that the step changes",
    ),
    "min_cut_rematerialization_partition": Private(
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "finding what fused kernels may compute again",
    ),
    "functorch_config": Private(
        "torch._functorch.config", "compiling kernels without a cache around them"
    ),
    "with_effects": Private(
        "torch._higher_order_ops.effects:with_effects", "refusing ops with effects"
    ),
    "FakeScriptObject": Private(
        "torch._library.fake_class_registry:FakeScriptObject", _MESHES
    ),
    # --- operators and their dispatch ---
    "OpOverload": Private("torch._ops:OpOverload", "telling operators from functions"),
    "DispatchKey": Private("torch._C:DispatchKey", "tracing operators whole"),
    # --- an accelerator that is planned for, and the simulated device of the tests ---
    "DispatchKeySet": Private(
        "torch._C:DispatchKeySet", "autocast of an accelerator, and its views"
    ),
    "exclude_dispatch_keys": Private(
        "torch._C:_ExcludeDispatchKeyGuard", "autocast of an accelerator"
    ),
    "has_kernel_for_key": Private(
        "torch._C:_dispatch_has_kernel_for_dispatch_key", "autocast of an accelerator"
    ),
    "flash_attention": Private(
        "torch:ops.aten._scaled_dot_product_flash_attention.default",
        "attention of an accelerator",
    ),
    "efficient_attention": Private(
        "torch:ops.aten._scaled_dot_product_efficient_attention.default",
        "attention of an accelerator",
    ),
    "efficient_attention_alone": Private(
        "torch:ops.aten._efficient_attention_forward.default",
        "attention of an accelerator",
    ),
    "efficient_attention_backward": Private(
        "torch:ops.aten._scaled_dot_product_efficient_attention_backward.default",
        "measuring attention of an accelerator",
    ),
    "efficient_attention_backward_alone": Private(
        "torch:ops.aten._efficient_attention_backward.default",
        "measuring attention of an accelerator",
    ),
    "attention_of_products": Private(
        "torch:ops.aten._scaled_dot_product_attention_math.default",
        "attention of an accelerator",
    ),
    "setup_python_backend": Private(
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend",
        "letting torch know it",
    ),
    "BelowAutograd": Private(
        "torch._C:_AutoDispatchBelowAutograd", "running the layers of an nn.LSTM"
    ),
    "DispatchModeKey": Private(
        "torch._C:_TorchDispatchModeKey", "telling what records a call"
    ),
    "get_dispatch_mode": Private(
        "torch._C:_get_dispatch_mode", "telling what records a call"
    ),
    "DisableTorchFunction": Private(
        "torch._C:DisableTorchFunction", "measuring operators without the user's modes"
    ),
    "DisablePythonDispatcher": Private(
        "torch._C:_DisablePythonDispatcher", "finding the strides of real views"
    ),
    "no_python_dispatcher": Private(
        "torch._dispatch.python:no_python_dispatcher", "measuring operators as they run"
    ),
    "TorchDispatchMode": Private(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "counting what a step allocates",
    ),
    "disable_current_modes": Private(
        "torch.utils._python_dispatch:_disable_current_modes",
        "measuring operators without the user's modes",
    ),
    "is_in_dispatch_mode": Private(
        "torch.utils._python_dispatch:is_in_any_mode_without_ignore_compile_internals",
        "refusing steps that a TorchDispatchMode keeps from being traced",
    ),
    "is_traceable_wrapper_subclass": Private(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "finding the memory of tensor subclasses",
    ),
    "no_dispatch": Private(
        "torch.utils._mode_utils:no_dispatch", "asking kernels for their layouts"
    ),
    "peek_interpreter_stack": Private(
        "torch._C._functorch:peek_interpreter_stack", "refusing torch.func transforms"
    ),
    "is_functorch_wrapped_tensor": Private(
        "torch._C._functorch:is_functorch_wrapped_tensor", "counting live tensors"
    ),
    "make_contiguous_strides_for": Private(
        "torch._prims_common:make_contiguous_strides_for", "the layouts of kernels"
    ),
    "suggest_memory_format": Private(
        "torch._prims_common:suggest_memory_format", "the layouts of kernels"
    ),
    "neg_view": Private("torch:_neg_view", "copying tensors with a negative bit"),
    # --- operators whose names are private ---
    "unsafe_view": Private("torch:ops.aten._unsafe_view.default", "folding views"),
    "log_softmax_backward": Private(
        "torch:ops.aten._log_softmax_backward_data.default", "its kernel's layout"
    ),
    "batch_norm_legit": Private(
        "torch:ops.aten._native_batch_norm_legit.default", "its kernel's layout"
    ),
    "batch_norm_without_statistics": Private(
        "torch:ops.aten._native_batch_norm_legit.no_stats", "instance normalisation"
    ),
    "functional_batch_norm": Private(
        "torch:ops.aten._native_batch_norm_legit_functional.default",
        "recomputing batch norm without moving its statistics",
    ),
    "functional_batch_norm_with_update": Private(
        "torch:ops.aten._batch_norm_with_update_functional.default",
        "recomputing batch norm without moving its statistics",
    ),
    "batch_norm_with_update": Private(
        "torch:ops.aten._batch_norm_with_update.default", "batch norm by cuDNN"
    ),
    "select_batch_norm_backend": Private(
        "torch._C:_select_batch_norm_backend", "batch norm by cuDNN"
    ),
    "BatchNormBackend": Private("torch._C:_BatchNormBackend", "batch norm by cuDNN"),
    "batch_norm_reserve_bytes": Private(
        "torch._C:_get_cudnn_batch_norm_reserve_space_size", "batch norm by cuDNN"
    ),
    "local_scalar_dense": Private(
        "torch:ops.aten._local_scalar_dense.default", "optimizers that read numbers"
    ),
    "linalg_check_errors": Private(
        "torch:ops.aten._linalg_check_errors.default", "an error's advice"
    ),
    "upsample_nearest_exact1d": Private(
        "torch:ops.aten._upsample_nearest_exact1d", "resampling as eager runs it"
    ),
    "upsample_nearest_exact2d": Private(
        "torch:ops.aten._upsample_nearest_exact2d", "resampling as eager runs it"
    ),
    "upsample_nearest_exact3d": Private(
        "torch:ops.aten._upsample_nearest_exact3d", "resampling as eager runs it"
    ),
    "upsample_bilinear2d_aa": Private(
        "torch:ops.aten._upsample_bilinear2d_aa", "resampling as eager runs it"
    ),
    "upsample_bicubic2d_aa": Private(
        "torch:ops.aten._upsample_bicubic2d_aa", "resampling as eager runs it"
    ),
    "wait_tensor": Private(
        "torch:ops._c10d_functional.wait_tensor.default",
        "waiting for what other processes sent",
    ),
    # --- sizes that vary ---
    "maybe_mark_dynamic": Private(
        "torch._dynamo:maybe_mark_dynamic", "tracing many shapes at once"
    ),
    "sympy_interp": Private(
        "torch.utils._sympy.interp:sympy_interp", "sizes of other shapes"
    ),
    "PythonReferenceAnalysis": Private(
        "torch.utils._sympy.reference:PythonReferenceAnalysis", "sizes of other shapes"
    ),
    # --- hooks ---
    "top_saved_tensors_hooks": Private(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "blocks inside of checkpoints",
    ),
    # --- profiling ---
    "current_backward_number": Private(
        "torch._C:_current_graph_task_id",
        "telling backward passes apart, where gradients leave one early",
    ),
    "keeps_graph_now": Private(
        "torch._C:_autograd._get_current_graph_task_keep_graph",
        "telling that a backward pass retains what was saved",
    ),
    "next_node_number": Private(
        "torch._C:_autograd._get_sequence_nr",
        "telling before which graph an operator ran",
    ),
    "record_memory_history": Private(
        "torch.cuda.memory:_record_memory_history",
        "recording what CUDA's allocator is asked for",
    ),
    "memory_snapshot": Private(
        "torch.cuda.memory:_snapshot", "recording what CUDA's allocator is asked for"
    ),
    "profiler_enabled": Private(
        "torch.autograd:_profiler_enabled", "measuring beside a profiler"
    ),
    "enable_profiler_legacy": Private(
        "torch.autograd:_enable_profiler_legacy", "measuring beside a profiler"
    ),
    "disable_profiler_legacy": Private(
        "torch.autograd:_disable_profiler_legacy", "measuring beside a profiler"
    ),
    "ProfilerConfig": Private(
        "torch._C._profiler:ProfilerConfig", "measuring beside a profiler"
    ),
    "ProfilerState": Private(
        "torch._C._profiler:ProfilerState", "measuring beside a profiler"
    ),
    "ExperimentalConfig": Private(
        "torch._C._profiler:_ExperimentalConfig", "measuring beside a profiler"
    ),
    "foreach_types": Private(
        "torch.optim.optimizer:_foreach_supported_types",
        "stepping copies of optimizers as the originals step",
    ),
    "foreach_devices": Private(
        "torch.optim.optimizer:_get_foreach_kernels_supported_devices",
        "stepping copies of optimizers as an accelerator steps them",
    ),
    # --- nested values ---
    "tree_leaves": Private(f"{_PYTREE}:tree_leaves", "tensors in nested values"),
    "tree_map": Private(f"{_PYTREE}:tree_map", "tensors in nested values"),
    "tree_map_only": Private(f"{_PYTREE}:tree_map_only", "tensors in nested values"),
    "tree_flatten": Private(f"{_PYTREE}:tree_flatten", "tensors in nested values"),
    "tree_unflatten": Private(f"{_PYTREE}:tree_unflatten", "tensors in nested values"),
    "tree_flatten_with_path": Private(
        f"{_PYTREE}:tree_flatten_with_path", "naming tensors in nested values"
    ),
    "keystr": Private(f"{_PYTREE}:keystr", "naming tensors in nested values"),
    # --- kernels that a compiler makes ---
    "compile_fx_inner": Private(
        "torch._inductor.compile_fx:compile_fx_inner", "compiling fused kernels"
    ),
    "standalone_compile": Private(
        "torch._inductor:standalone_compile", "compiling fused kernels"
    ),
    "get_cpp_compiler": Private(
        "torch._inductor.cpp_builder:get_cpp_compiler", "finding a C++ compiler"
    ),
    "InvalidCxxCompiler": Private(
        "torch._inductor.exc:InvalidCxxCompiler", "telling that there is no compiler"
    ),
}
"""Public name in :mod:`remat.torch_compat.names` -> what torch has."""

_NODE = "torch.autograd.graph:Node"
_MODULE = "torch.nn:Module"
_GLOBAL = "torch.nn.modules.module"
_OPERATOR = "torch:ops.aten.add.Tensor"
_HOOKS = "seeing the hooks of a model"

ATTRIBUTES: dict[str, Private] = {
    "_call_impl": Private(f"{_MODULE}._call_impl", "calling a fitted model plainly"),
    "_compiled_call_impl": Private(
        f"{_MODULE}._compiled_call_impl", "installing a plan on a model"
    ),
    "_replicate_for_data_parallel": Private(
        f"{_MODULE}._replicate_for_data_parallel", "replicas of DataParallel"
    ),
    "_parameters": Private(f"{_MODULE}()._parameters", "comparing the model's state"),
    "_buffers": Private(f"{_MODULE}()._buffers", "comparing the model's state"),
    "_modules": Private(f"{_MODULE}()._modules", "comparing the model's state"),
    "_forward_hooks": Private(f"{_MODULE}()._forward_hooks", _HOOKS),
    "_forward_pre_hooks": Private(f"{_MODULE}()._forward_pre_hooks", _HOOKS),
    "_backward_hooks": Private(f"{_MODULE}()._backward_hooks", _HOOKS),
    "_backward_pre_hooks": Private(f"{_MODULE}()._backward_pre_hooks", _HOOKS),
    "_global_forward_hooks": Private(f"{_GLOBAL}:_global_forward_hooks", _HOOKS),
    "_global_forward_pre_hooks": Private(
        f"{_GLOBAL}:_global_forward_pre_hooks", _HOOKS
    ),
    "_global_backward_hooks": Private(f"{_GLOBAL}:_global_backward_hooks", _HOOKS),
    "_global_backward_pre_hooks": Private(
        f"{_GLOBAL}:_global_backward_pre_hooks", _HOOKS
    ),
    "_is_compiling_flag": Private("torch.compiler:_is_compiling_flag", _DIVIDED),
    "_torchdynamo_disable": Private(
        "torch._dynamo.eval_frame", _HOOKS, text="_torchdynamo_disable"
    ),
    "_get_active_ddp_module": Private(
        "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module",
        "counting the gradient buckets of DistributedDataParallel",
    ),
    "_has_rebuilt_buckets": Private(
        "torch.nn.parallel.distributed",
        "laying out the buckets of DistributedDataParallel as without remat",
        text="_has_rebuilt_buckets",
    ),
    "_DEFAULT_FIRST_BUCKET_BYTES": Private(
        "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES",
        "handing gradients to DistributedDataParallel as they are ready",
    ),
    "_get_backend": Private("torch.distributed:ProcessGroup._get_backend", _TIMEOUT),
    "_device_types": Private("torch.distributed:ProcessGroup._device_types", _TIMEOUT),
    "_orig_mod": Private(
        "torch._dynamo.eval_frame", "fitting what torch.compile wraps", text="_orig_mod"
    ),
    "_stance": Private(
        "torch._dynamo.eval_frame:_stance", "keeping plans whatever torch.compile does"
    ),
    "reset_code": Private(
        "torch._dynamo.eval_frame:reset_code", "tracing again after an error"
    ),
    "symbolic_convert": Private(
        "torch._dynamo:symbolic_convert",
        "telling the tracer's failures from the model's",
    ),
    "profile_guard_manager": Private(
        "torch._dynamo.guards:profile_guard_manager",
        "tracing without a timing of guards",
    ),
    "EMPTY_NN_MODULE_HOOKS_DICT": Private(
        "torch._dynamo.guards:GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT",
        "looking for hooks once in a call",
    ),
    "_cdata": Private("torch:UntypedStorage()._cdata", "telling storages apart"),
    "_use_count": Private(
        "torch:Tensor._use_count", "knowing when threads of gloo let go of a tensor"
    ),
    "_new_with_weak_ptr": Private(
        "torch:UntypedStorage._new_with_weak_ptr", "graphs that run again as a whole"
    ),
    "_base": Private("torch:Tensor()._base", "outputs that are views"),
    "_cache": Private(
        "torch.nn.utils.parametrize:_cache", "planning inside of parametrize.cached"
    ),
    "_view_func_unsafe": Private(
        "torch:Tensor()._view_func_unsafe", "outputs that are views"
    ),
    "_sequence_nr": Private(f"{_NODE}._sequence_nr", "the order of autograd's nodes"),
    "_input_metadata": Private(
        f"{_NODE}._input_metadata", "measuring and comparing operators between graphs"
    ),
    "_version": Private(
        "torch:Tensor()._version", "seeing writes to the caller's state"
    ),
    "_indices": Private("torch:Tensor._indices", "counting sparse tensors"),
    "_values": Private("torch:Tensor._values", "counting sparse tensors"),
    "_schema": Private(f"{_OPERATOR}._schema", "seeing views and in-place operators"),
    "_op_dk": Private(f"{_OPERATOR}._op_dk", "tracing dropout as eager runs it"),
    "_dispatch_cache": Private(
        f"{_OPERATOR}._dispatch_cache", "tracing operators whole"
    ),
    "py_kernels": Private(f"{_OPERATOR}.py_kernels", "tracing operators whole"),
    "_root": Private("torch.fx:Graph()._root", "sorting the nodes of a graph"),
    "_dispatch_impl": Private(
        f"{_FAKE}:FakeTensorMode._dispatch_impl", "tracing the layouts of real kernels"
    ),
    "cache": Private(
        f"{_FAKE}:FakeTensorMode.cache", "remembering the layouts of real kernels"
    ),
    "key": Private(
        _FAKE, "remembering the layouts of real kernels", text="self.key = tup"
    ),
    "cache_clear": Private(
        f"{_FAKE}:FakeTensorMode.cache_clear", "tracing the layouts of real kernels"
    ),
    "from_tensor": Private(
        f"{_AOT}.schemas:MemoryFormatMeta.from_tensor",
        "taking gradients of outputs dense",
    ),
    "_boxed_call": Private(
        f"{_AOT}.utils", "code that drops its arguments at last use", text="_boxed_call"
    ),
    "_forward_cls": Private(
        "torch.autograd.function", "finding a compiled step", text="_forward_cls"
    ),
    "_aot_id": Private(
        f"{_AOT}.runtime_wrappers", "finding a compiled step", text="_aot_id"
    ),
    "current_callable": Private(
        "torch._inductor.output_code", "calling fused kernels", text="current_callable"
    ),
    "real_obj": Private("torch._library.fake_class_registry", _MESHES, text="real_obj"),
    "_loss_fn": Private(
        "torch.distributed.pipelining.schedules",
        "planning the last stage of a pipeline",
        text="self._loss_fn",
    ),
}
"""Attribute that :mod:`remat.torch_compat.attributes` and others use -> where it is."""

_TRACER_ERRORS = "errors that a user can act on"
_PASSES = "telling the passes of a step apart"
_LAYERS = "naming the layer of an op"

TEXTS: tuple[Private, ...] = (
    # --- keys of what the graph's nodes know ---
    Private("torch._functorch.partitioners", _PASSES, text="partitioner_tag"),
    Private("torch._functorch.partitioners", _PASSES, text="is_backward"),
    Private("torch._functorch.partitioners", _PASSES, text="is_forward"),
    Private(
        f"{_AOT}.graph_compile",
        "saving inputs that the step changes itself",
        text="saved_tensor_with_no_vc_check",
    ),
    Private(f"{_AOT}.fx_utils", "telling what inputs and outputs are", text="desc"),
    Private(f"{_AOT}.utils", _LAYERS, text="fwd_nn_module_stack"),
    Private("torch.fx.proxy", _LAYERS, text="nn_module_stack"),
    Private("torch._dynamo.utils", "reading what the tracer saw", text="example_value"),
    Private("torch._dynamo.output_graph", "naming a step's inputs", text="grapharg"),
    # --- what the tracer calls inputs and modules ---
    Private(
        "torch._dynamo.variables.nn_module",
        "telling parameters from inputs",
        text="_parameters",
    ),
    Private(
        "torch._dynamo.variables.nn_module",
        "telling buffers from inputs",
        text="_buffers",
    ),
    # --- what its errors say ---
    Private("torch._dynamo.exc", _TRACER_ERRORS, text="Developer debug context"),
    Private("torch._dynamo.exc", _TRACER_ERRORS, text="from user code:"),
    Private("torch._dynamo.exc", _TRACER_ERRORS, text="Explanation:"),
    Private(
        "torch._dynamo.eval_frame",
        _TRACER_ERRORS,
        text="using FX to symbolically trace",
    ),
    Private("torch._dynamo.exc", _TRACER_ERRORS, text="inner_exception"),
    Private(
        "torch._dynamo.variables.builder", _TRACER_ERRORS, text="RNN, GRU, or LSTM"
    ),
    Private("torch._dynamo.utils", _TRACER_ERRORS, text="unsupported operator: "),
    Private(
        "torch._dynamo.variables.distributed",
        _TRACER_ERRORS,
        text="Module-level backwards hooks",
    ),
    Private(
        "torch._dynamo.symbolic_convert",
        _TRACER_ERRORS,
        text="Unsupported context manager",
    ),
    Private("torch._dynamo.symbolic_convert", _TRACER_ERRORS, text="assertion failed"),
    Private("torch._dynamo.utils", _TRACER_ERRORS, text="making fake tensor call"),
    Private(
        "torch.fx.experimental.symbolic_shapes",
        _TRACER_ERRORS,
        text="data-dependent expression",
    ),
)
"""Words by which torch's graphs and messages are read, and the modules with them."""


def everything() -> tuple[Private, ...]:
    """Return the whole table."""
    return (*NAMES.values(), *ATTRIBUTES.values(), *TEXTS)
