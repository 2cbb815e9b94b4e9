"""What the tracer says only in words: errors, and names of inputs and modules."""

import re

NOISY_LOGS = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.exc",
)
"""The logs in which the tracer prints tracebacks of errors that it raises anyway,
advises settings for ``.item()`` that do not help here, and takes graphs that cannot be
compiled for bugs of a backend."""

FAILED_BACKWARD = "Error detected in "
"""How autograd begins its warning about where the op of a failed backward was made."""

IGNORED_LOGS = "torch._dynamo.config.ignore_logging_functions"
"""The setting with the methods of loggers that the tracer leaves out."""

# --- errors --------------------------------------------------------------------------

RAISED = re.compile(r"Developer debug context: raised exception (.+)")
CONTEXT = re.compile(r"Developer debug context: (.+)")
FALSE_ASSERTION = re.compile(r"Developer debug context: .*False")
FAILED_CALL = re.compile(
    r"call_\w+ (?:<[^>]*?(?P<function>\w+)(?: at \w+)?>|(?P<operator>[\w.]+)\()"
    r".*: got (?P<error>\w+)\((?P<words>.+)\)$",
    re.MULTILINE,
)
NESTED_TRACE = "using FX to symbolically trace"
AT_A_LOCK = re.compile(
    r"Unsupported context manager[^$]*`(?:\w+\.)?r?lock`", re.IGNORECASE
)
ASSERTION = "assertion failed"
GRADIENT_INSIDE = re.compile(r"torch\.autograd\.grad|Tensor\.backward|trace_autograd")
FAKE_CALL = "making fake tensor call"
RECURRENT = re.compile(
    r"RNN, GRU, or LSTM|unsupported operator: aten\.(?:lstm|gru|rnn_tanh|rnn_relu)\."
)
NEEDS_GRADIENT = "requires_grad_()"
BACKWARD_HOOKS = "Module-level backwards hooks"
LOGGED = "logging.Logger"
NO_SAVED_TENSOR_HOOKS = "don't yet support saved tensor hooks"
BY_VALUE = "data-dependent expression"
EXPLANATION = "Explanation:"
USER_CODE = "from user code:"


def wrapped_error(error: Exception) -> Exception | None:
    """Return the error that an error of the tracer is about, if there is one."""
    return getattr(error, "inner_exception", None)


# --- names of inputs and modules -----------------------------------------------------

PARAMETER = "._parameters["
"""In the name of an input that is a parameter."""

BUFFER = "._buffers["
"""In the name of an input that is a buffer."""

ITEM = re.compile(r"\['([^']*)'\]")
"""One step on the way to an input."""

ROOT_MODULE = re.compile(r"\AL\['\w+'\](?:\.__self__)?")
"""The model itself, at the start of a module's path."""

CHILD_MODULE = re.compile(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]")
"""One step on the way from there to a module."""
